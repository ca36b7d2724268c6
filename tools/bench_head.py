"""Time and memory of the heads that people train with, beside ours, against the number of classes.

    python tools/bench_head.py --csv head.csv --plot head.png
    python tools/bench_head.py --csv head.csv --classes 1000000 --rows 128 --dims 256

One row a (contender, batch, dimension, classes, state): median seconds of forward, backward and the
optimiser's step, peak memory of forward and backward above weights and inputs, and for our forms
the largest difference of loss and gradients to the dense one, over the largest gradient. Each row
is measured in a process of its own; rows that the CSV holds already are not measured again, so that
a long run can be continued. Run it on a quiet machine: the numbers are ratios only to each other.

States: "random", as at initialisation; "trained", target cosines near 0.7, speakers in clusters
of ten whose cosine is near 0.4. Contenders: `CONTENDERS`. cut_cross_entropy (pip install --no-deps
cut-cross-entropy triton; its torch path, which needs a C++ compiler) has no margin; the sampled
head scores a tenth of the classes, and is the only one here that is not exact.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from wespeaker_qmargin.adapter import wespeaker_module
from wespeaker_qmargin.files import atomic_path
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.lazy_sgd import LazySGD
from wespeaker_qmargin.provenance import provenance

ALPHA, SCALE, MARGIN, SAMPLED = 1.5, 10.0, 0.2, 0.1
STEP = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
CLUSTER = 10  # speakers that are alike
_LAZY_STEPS = 200  # until as many rows leave LazySGD's care as enter it
KEY = ("contender", "rows", "dim", "classes", "state")
COLUMNS = [*KEY, "forward_s", "backward_s", "step_s", "lazy_step_s", "peak_mb", "active_rows"]
COLUMNS += ["difference", "error", "threads", "device", "machine", "torch", "commit"]
# name -> how the figure and the README call it
CONTENDERS = {
    "add_margin": "AddMargin + CE",
    "arc_margin": "ArcMargin + CE",
    "lean": "lean cosine + CE",
    "cce": "cut_cross_entropy",
    "entmax15": "entmax-1.5",
    "sampled": "10 % sampled CE",
    "auto": "Q-Margin auto",
    "dense": "Q-Margin dense",
    "streaming": "Q-Margin streaming",
    "top_k": "Q-Margin top-K",
    "sparse": "Q-Margin, sparse gradient",
}
OURS = {
    "auto": {"impl": "auto"},
    "dense": {"impl": "dense"},
    "streaming": {"impl": "streaming"},
    "top_k": {"impl": "top_k"},
    "sparse": {"impl": "streaming", "sparse_grad": True},
}


def make_problem(case):
    """Return (embeddings (B, d), weight (C, d), labels (B,)) of a case."""
    torch.manual_seed(case["classes"] + case["rows"])
    shape = case["classes"], case["dim"]
    labels = torch.randint(case["classes"], (case["rows"],))
    embeddings = F.normalize(torch.randn(case["rows"], case["dim"]))
    weight = torch.randn(shape)
    if case["state"] == "trained":
        number = -(-case["classes"] // CLUSTER)
        weight.mul_(0.6**0.5)
        for start in range(0, case["classes"], number):  # in place: no second copy of the weight
            torch.manual_seed(1)
            part = weight[start : start + number]
            part.add_(torch.randn(number, case["dim"])[: len(part)], alpha=0.4**0.5)
        embeddings = 0.7 * F.normalize(weight[labels]) + 0.51**0.5 * embeddings
    device = case["device"]
    return embeddings.to(device), weight.to(device), labels.to(device)


def make_loss(name, weight, margin=MARGIN):
    """Return (function of embeddings and labels to a scalar, the parameter that trains)."""
    parameter = torch.nn.Parameter(weight)
    if name in OURS:
        head = _with_weight(QMarginProduct, parameter, alpha=ALPHA, margin=margin, **OURS[name])
        return lambda x, y: head.loss(x, y)[0], parameter
    if name in ("add_margin", "arc_margin"):
        heads = wespeaker_module("models.projections")
        kind = {"add_margin": "AddMarginProduct", "arc_margin": "ArcMarginProduct"}[name]
        head = _with_weight(getattr(heads, kind), parameter, scale=SCALE, margin=margin)
        return lambda x, y: F.cross_entropy(head(x, y), y), parameter
    if name == "sampled":
        return _sampled_loss(parameter, margin), parameter
    if name == "cce":
        from cut_cross_entropy import linear_cross_entropy

        def cce(x, y):
            unit = F.normalize(parameter)
            return linear_cross_entropy(SCALE * F.normalize(x), unit, y, impl="torch_compile")

        return cce, parameter
    if name == "entmax15":
        from entmax import entmax15_loss

        return lambda x, y: entmax15_loss(_scores(x, parameter), y).mean(), parameter
    return lambda x, y: _cross_entropy(_scores(x, parameter), y, margin), parameter


def _with_weight(kind, parameter, **options):
    """Build a head around ``parameter``, without drawing another weight of that size."""
    num_class, dim = parameter.shape
    head = kind(dim, 2, **options)
    head.weight = parameter
    head.out_features = num_class
    return head


def _scores(x, weight):
    return SCALE * F.linear(F.normalize(x), F.normalize(weight))


def _cross_entropy(scores, labels, margin):
    penalty = torch.full_like(labels, -SCALE * margin, dtype=scores.dtype)
    return F.cross_entropy(scores.scatter_add(1, labels[:, None], penalty[:, None]), labels)


def _sampled_loss(parameter, margin):
    """A tenth of the classes, the batch's own among them (An et al., Partial FC, CVPR 2022)."""
    num_class = len(parameter)

    def loss(x, y):
        positive = y.unique()
        order = torch.rand(num_class, device=y.device)
        order[positive] = 2.0
        index = order.topk(max(int(SAMPLED * num_class), len(positive))).indices.sort().values
        rows = F.embedding(index, parameter, sparse=True)
        return _cross_entropy(_scores(x, rows), torch.searchsorted(index, y), margin)

    return loss


def measure(case):
    """Return the measured columns of one case, in this process."""
    torch.set_num_threads(case["threads"])
    embeddings, weight, labels = make_problem(case)
    loss, parameter = make_loss(case["contender"], weight)
    embeddings.requires_grad_()
    memory = _Memory(case["device"])
    times = {"forward_s": [], "backward_s": []}
    deadline = time.perf_counter() + case["seconds"]
    while len(times["forward_s"]) < 4 or time.perf_counter() < deadline:
        parameter.grad = embeddings.grad = None
        marks = [_now(case["device"])]
        value = loss(embeddings, labels)
        marks.append(_now(case["device"]))
        value.backward()
        marks.append(_now(case["device"]))
        times["forward_s"].append(marks[1] - marks[0])
        times["backward_s"].append(marks[2] - marks[1])
    found = {"peak_mb": memory.peak_mb()}
    # the first run warms up
    found |= {name: statistics.median(taken[1:]) for name, taken in times.items()}
    if case["contender"] in OURS and case["contender"] != "dense":
        found["difference"] = difference(parameter, embeddings, labels, value.item())
    found["active_rows"] = len(_active_rows(parameter.grad))
    return found | step_times(parameter, case)


def step_times(parameter, case):
    """Time of SGD on the gradient that is there; for a sparse one, of LazySGD in its steady state.

    The gradients of that are as large, on other rows at every step.
    """
    sparse = parameter.grad.is_sparse
    optimizer = (LazySGD if sparse else torch.optim.SGD)([parameter], **STEP)
    values, taken = parameter.grad.coalesce().values() if sparse else None, []
    for _ in range(_LAZY_STEPS if sparse else 4):
        if sparse:
            rows = torch.randint(len(parameter), (len(values),), device=parameter.device)
            rows = rows.unique()
            unit = F.normalize(parameter.detach()[rows])
            part = values[: len(rows)]
            part = part - unit * (unit * part).sum(1, keepdim=True)  # as a cosine's gradient is
            parameter.grad = torch.sparse_coo_tensor(rows[None], part, parameter.shape)
        start = _now(case["device"])
        optimizer.step()
        taken.append(_now(case["device"]) - start)
    return {"lazy_step_s" if sparse else "step_s": statistics.median(taken[-3:])}


def difference(parameter, embeddings, labels, found):
    """Return the largest difference of loss (``found``) and gradients to the dense form, relative.

    The dense form runs on a few rows at a time: its memory is not what is asked here.
    """
    loss, other = make_loss("dense", parameter.detach())
    total, parts = 0.0, []
    for rows in torch.arange(len(labels), device=labels.device).split(16):
        part = embeddings.detach()[rows].requires_grad_()
        value = loss(part, labels[rows]) * len(rows) / len(labels)
        value.backward()
        total, parts = total + value.item(), [*parts, part.grad]
    errors = [abs(found - total) / max(total, 1.0)]
    for mine, dense in ((embeddings.grad, torch.cat(parts)), (parameter.grad, other.grad)):
        mine = mine.to_dense() if mine.is_sparse else mine
        errors.append(((mine - dense).abs().max() / dense.abs().max()).item())
    return max(errors)


def _active_rows(grad):
    if grad.is_sparse:
        return grad.coalesce().indices()[0]
    return (grad != 0).any(1).nonzero()


def _now(device):
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


class _Memory:
    """Peak memory above what is held when this is made."""

    def __init__(self, device):
        self._device = device
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
            return
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._base = self._read("VmRSS")

    def peak_mb(self):
        if self._device != "cpu":
            return (torch.cuda.max_memory_allocated() - self._base) / 2**20
        return (self._read("VmHWM") - self._base) / 2**20

    @staticmethod
    def _read(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith(key)).split()[1])


def run_case(case):
    """Measure ``case`` in a process of its own; a failure is a row too."""
    words = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    killed = "killed (out of memory?)" if done.returncode < 0 else None
    return {"error": killed or (done.stderr.strip().splitlines() or ["failed"])[-1][:200]}


def bench(args, done):
    """Yield the rows that ``done`` does not hold."""
    facts = provenance(torch.device(args.device))
    shared = {
        "threads": args.threads,
        "device": facts["device"],
        "machine": f"{_cpu()}, {facts['machine']}",
        "torch": facts["versions"]["torch"],
        "commit": facts["git_commit"],
    }
    shapes = product(args.classes, args.dims, args.rows, args.states, args.contenders)
    for num_class, dim, rows, state, contender in shapes:
        case = dict(zip(KEY, (contender, rows, dim, num_class, state)))
        if tuple(str(case[k]) for k in KEY) in done:
            continue
        options = {"threads": args.threads, "device": args.device, "seconds": args.seconds}
        yield case | run_case(case | options) | shared


def _cpu():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    return next(names, "unknown CPU")


def read_rows(path):
    if path is None or not path.exists():
        return []
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def write_rows(rows, path):
    with atomic_path(path) as temporary, open(temporary, "w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def format_row(row, rows):
    """Return a row as text, with its ratios to AddMargin + CE of the same shape."""
    text = f"{row['classes']:>8} x {row['dim']} {row['rows']:>4} {row['state']:7} "
    text += f"{row['contender']:10} "
    if row.get("error"):
        return text + row["error"]
    base = [x for x in rows if _shape(x) == _shape(row) and x["contender"] == "add_margin"]
    forward, backward, peak = (float(row[k]) for k in ("forward_s", "backward_s", "peak_mb"))
    text += f"forward {1000 * forward:9.1f} ms backward {1000 * backward:9.1f} ms "
    text += f"peak {peak:7.0f} MB"
    if base and not base[0].get("error"):
        seconds = float(base[0]["forward_s"]) + float(base[0]["backward_s"])
        text += f" | time x {(forward + backward) / seconds:.2f}"
        text += f" memory x {peak / float(base[0]['peak_mb']):.2f}"
    for key in ("step_s", "lazy_step_s"):
        if row.get(key):
            text += f" | {key[:-2]} {1000 * float(row[key]):.1f} ms"
    return text + (f" | difference {float(row['difference']):.1e}" if row.get("difference") else "")


def _shape(row):
    return tuple(str(row[k]) for k in KEY[1:])


def plot(rows, path, *, num_rows, dim, state):
    """Draw time and peak memory against C, log-log, for one batch, dimension and state."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [x for x in rows if not x.get("error") and _shape(x)[:2] == (str(num_rows), str(dim))]
    chosen = [x for x in chosen if x["state"] == state]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), constrained_layout=True)
    for name, label in CONTENDERS.items():
        mine = sorted(
            (x for x in chosen if x["contender"] == name), key=lambda x: int(x["classes"])
        )
        if not mine:
            continue
        classes = [int(x["classes"]) for x in mine]
        seconds = [float(x["forward_s"]) + float(x["backward_s"]) for x in mine]
        style = {"marker": "o", "markersize": 3, "linewidth": 2 if name in OURS else 1}
        style["linestyle"] = "-" if name in OURS else "--"
        axes[0].loglog(classes, seconds, label=label, **style)
        axes[1].loglog(classes, [float(x["peak_mb"]) for x in mine], **style)
    for axis, title in zip(axes, ("forward + backward, seconds", "peak above the weights, MB")):
        axis.set(xlabel="classes", title=title)
        axis.grid(True, which="both", alpha=0.2)
    figure.legend(loc="outside right center", fontsize=8)
    note = f"{num_rows} x {dim} embeddings, {state}; {chosen[0]['machine']}"
    figure.suptitle(f"{note}, {chosen[0]['threads']} threads", fontsize=9)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 512], help="batch sizes")
    parser.add_argument("--dims", type=int, nargs="+", default=[192, 256])
    parser.add_argument("--classes", type=int, nargs="+", default=[5994, 17982, 100000, 1000000])
    parser.add_argument("--states", nargs="+", default=["random", "trained"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row, 4 runs at least")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--csv", type=Path, help="read and extended")
    parser.add_argument("--plot", type=Path, help="PNG of the first --rows, --dims, --states")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case)))
        return
    rows = read_rows(args.csv)
    for row in bench(args, {tuple(x[k] for k in KEY) for x in rows}):
        rows.append(row)
        print(format_row(row, rows), flush=True)
        if args.csv:
            write_rows(rows, args.csv)
    if args.plot:
        options = {"num_rows": args.rows[0], "dim": args.dims[0], "state": args.states[0]}
        plot(rows, args.plot, **options)


if __name__ == "__main__":
    main()
