"""Time of q_margin_loss, forward and backward, beside cross_entropy and the losses of entmax.

    python tools/bench_loss.py [--threads 1] [--classes 1211 5994] [--alphas 1.5] [--csv FILE]

Scores are scale * cosine of random unit vectors, scale = min(32, 5 / (alpha - 1)): "random" as they
are, "trained" with target cosines of N(0.7, 0.1) and ten hard rivals of U(0.2, 0.5). One process,
one table: in every round each loss runs once, in turn; a loss that has used up --seconds sits out.
A cell is the median in ms, "x" the ratio to q_margin_loss, except cross_entropy's: q_margin_loss
over cross_entropy. Before the clock starts, values and gradients are compared: without margin with
entmax, at alpha 1 with cross_entropy, with the margin in float64 with itself.
"""

import argparse
import csv
import platform
import statistics
import time
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from entmax import entmax15_loss, entmax_bisect_loss, sparsemax_loss

from wespeaker_qmargin.files import atomic_path
from wespeaker_qmargin.functional import q_margin_loss
from wespeaker_qmargin.provenance import provenance

MARGIN = 0.2
NAMES = ("q_margin", "cross_entropy", "entmax_bisect", "entmax15", "sparsemax")


def make_scores(rows, num_class, alpha, kind, device):
    """Return (scores (B, C) float32, labels (B,), scale)."""
    generator = torch.Generator().manual_seed(rows + num_class)
    weight = F.normalize(torch.randn(num_class, 192, generator=generator), dim=1)
    cos = F.normalize(torch.randn(rows, 192, generator=generator), dim=1) @ weight.t()
    labels = torch.randint(num_class, (rows,), generator=generator)
    if kind == "trained":
        hard = torch.randint(num_class, (rows, 10), generator=generator)
        cos.scatter_(1, hard, 0.2 + 0.3 * torch.rand(rows, 10, generator=generator))
        target = (0.7 + 0.1 * torch.randn(rows, 1, generator=generator)).clamp(max=1)
        cos.scatter_(1, labels.unsqueeze(1), target)
    scale = min(32.0, 5 / (alpha - 1))
    return (scale * cos).to(device), labels.to(device), scale


def make_losses(labels, alpha, log_q):
    """Return name -> function of scores; all give the mean over the batch."""
    return {
        "q_margin": lambda x: q_margin_loss(x, labels, alpha=alpha, log_q_target=log_q),
        "cross_entropy": lambda x: F.cross_entropy(x, labels),
        "entmax_bisect": lambda x: entmax_bisect_loss(x, labels, alpha).mean(),
        "entmax15": lambda x: entmax15_loss(x, labels).mean(),
        "sparsemax": lambda x: sparsemax_loss(x, labels).mean(),
    }


def run_once(loss, scores):
    """Return (seconds, loss, gradient) of one forward and backward."""
    scores = scores.detach().requires_grad_()
    synchronise(scores)
    start = time.perf_counter()
    value = loss(scores)
    value.backward()
    synchronise(scores)
    return time.perf_counter() - start, value.detach(), scores.grad


def synchronise(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def check_agreement(scores, labels, alpha, log_q):
    """Raise ValueError unless the losses that should be equal are, on the first rows."""
    scores, labels = scores[:16], labels[:16]
    losses = make_losses(labels, alpha, log_q)
    free, single = make_losses(labels, alpha, 0.0), make_losses(labels, 1, 0.0)
    exact = {1.5: "entmax15", 2.0: "sparsemax"}.get(alpha, "entmax_bisect")
    pairs = (
        (free["q_margin"], losses["entmax_bisect"], scores),
        (free["q_margin"], losses[exact], scores),
        (single["q_margin"], losses["cross_entropy"], scores),
        (losses["q_margin"], losses["q_margin"], scores.double()),
    )
    for first, second, other_scores in pairs:
        _, value, grad = run_once(first, scores)
        _, expected, expected_grad = run_once(second, other_scores)
        error = max((value - expected).abs().item(), 16 * (grad - expected_grad).abs().max().item())
        if not error < 2e-5 * max(1.0, expected.abs().item()):
            raise ValueError(f"alpha {alpha}: two losses that should be equal differ by {error}")


def median_times(losses, scores, rounds, seconds):
    """Return name -> median seconds over interleaved rounds, after one run to warm up."""
    times = {name: [] for name in losses}
    for name in ("q_margin", "cross_entropy"):
        run_once(losses[name], scores)
    for _ in range(rounds):
        for name, loss in losses.items():
            if sum(times[name]) < seconds:
                times[name].append(run_once(loss, scores)[0])
    return {name: statistics.median(taken) for name, taken in times.items()}


def bench(args):
    """Yield one dict a table row."""
    settings = product(args.classes, args.rows, args.alphas, ("random", "trained"))
    for num_class, rows, alpha, kind in settings:
        scores, labels, scale = make_scores(rows, num_class, alpha, kind, args.device)
        log_q = -scale * MARGIN
        check_agreement(scores, labels, alpha, log_q)
        times = median_times(make_losses(labels, alpha, log_q), scores, args.rounds, args.seconds)
        row = {"rows": rows, "classes": num_class, "alpha": alpha, "scores": kind}
        row |= {f"{name}_ms": 1000 * times[name] for name in NAMES}
        row["q_margin/cross_entropy"] = times["q_margin"] / times["cross_entropy"]
        row |= {f"{name}/q_margin": times[name] / times["q_margin"] for name in NAMES[2:]}
        yield row


def header(device) -> str:
    facts = provenance(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    versions = {name: v for name, v in facts["versions"].items() if v}
    return (
        f"cpu: {model}, {facts['machine']}\n"
        f"threads: {facts['threads']}; device: {facts['device']}\n"
        f"versions: {versions}\ncommit: {facts['git_commit']}\ncommand: {facts['command']}"
    )


def format_row(row) -> str:
    cells = [f"{row['rows']:4d} {row['classes']:6d} {row['alpha']:5.2f} {row['scores']:8s}"]
    cells.append(f"{row['q_margin_ms']:9.2f}")
    cells.append(f"{row['cross_entropy_ms']:9.2f} {row['q_margin/cross_entropy']:6.2f}x")
    for name in NAMES[2:]:
        cells.append(f"{row[name + '_ms']:9.1f} {row[name + '/q_margin']:6.1f}x")
    return " | ".join(cells)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512], help="batch sizes")
    parser.add_argument("--classes", type=int, nargs="+", default=[1211, 5994, 17982])
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.25, 1.5, 2.0], help="> 1")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each loss, at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each loss and setting")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--csv", type=Path, help="write the table there too")
    args = parser.parse_args()
    if min(args.alphas) <= 1:
        parser.error("--alphas must be above 1: the scale of the bench is 5 / (alpha - 1)")
    torch.set_num_threads(args.threads)
    print(header(args.device))
    titles = ("   B      C alpha scores  ", " q_margin", "    cross_entropy")
    print(" | ".join(titles + tuple(f"{name:>17s}" for name in NAMES[2:])), flush=True)
    rows = []
    for row in bench(args):
        rows.append(row)
        print(format_row(row), flush=True)
    if args.csv:
        with atomic_path(args.csv) as path, open(path, "w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
