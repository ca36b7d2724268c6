"""The ranks of the tests in test_parallel.py, and what they do there.

    python parallel_worker.py WHAT SIZE FOLDER

WHAT is "cases", every case under 2, 3 and 4 ranks, or a way to fail. What a rank found, a dict, is
written to FOLDER/<rank>.json. Every rank holds what one process gives too, and compares its own
part. A difference is noted and nothing is raised: the ranks stay in step.
"""

import copy
import datetime
import json
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from wespeaker_qmargin import parallel, sharded
from wespeaker_qmargin.functional import q_margin_per_sample
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.parallel import (
    ClassParallelQMargin,
    full_weight,
    keep_from_ddp,
    total_norm,
)
from wespeaker_qmargin.ranks import Ranks
from wespeaker_qmargin.sparse import sparse_q_margin

SIZES = {2: [0, 1], 3: [1, 2, 3], 4: [0, 1, 2, 3]}  # ranks of the group, of 4
ALPHAS = [1.0, 1.05, 1.25, 1.5, 2.0]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
NUM_CLASS, DIM, CLIP = 37, 6, 10.0
TIMEOUT_S = 3  # of a group that loses a rank
FOLDER, FAULTS = None, []


class Problem:
    """Prototypes, and the embeddings and labels of every rank."""

    def __init__(self, counts, *, kind="random", dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        size, options = sum(counts), {"generator": generator, "dtype": torch.float64}
        prototypes = torch.randn(NUM_CLASS, DIM, **options)
        prototypes *= 0.1 + torch.rand(NUM_CLASS, 1, **options)
        labels = torch.randint(NUM_CLASS, (size,), generator=generator)
        embeddings = 3 * torch.randn(size, DIM, **options)
        if kind == "trained":
            embeddings += 20 * F.normalize(prototypes[labels])
        elif kind == "tied":
            prototypes = prototypes[torch.arange(NUM_CLASS) % 5]
        elif kind == "all equal":
            prototypes = prototypes[:1].expand(NUM_CLASS, -1).clone()
        elif kind == "one label":
            labels[:] = NUM_CLASS - 1
        elif kind == "zero prototypes":
            prototypes[::4] = 0
            prototypes[labels[:1]] = 0
        elif kind == "zero embeddings":
            embeddings[::3] = 0
        elif kind == "under the eps":
            prototypes[::4] *= 1e-14
            embeddings[::3] *= 1e-14
        elif kind == "bad embedding":
            embeddings[1, 2], embeddings[-1, 0] = math.nan, math.inf
        elif kind == "bad prototype":
            prototypes[NUM_CLASS - 2, 1] = math.nan
        self.embeddings, self.prototypes = embeddings.to(dtype), prototypes.to(dtype)
        self.labels, self.counts = labels, counts

    def own(self, rank):
        start = sum(self.counts[:rank])
        part = slice(start, start + self.counts[rank])
        return self.embeddings[part].clone().requires_grad_(), self.labels[part]


KINDS = [
    *("random", "trained", "tied", "all equal", "one label"),
    *("zero prototypes", "zero embeddings", "under the eps", "bad embedding", "bad prototype"),
]


@torch.autocast("cpu", enabled=False)
def expected(problem, rank, factors, *, alpha, scale, margin=0.2):
    """Return the one-process (loss, embeddings' gradient, prototypes' gradient), statistics.

    Of this rank's samples; the gradient of all prototypes. By the dense head; where there is NaN by
    the streaming one, which keeps it to fewer prototypes.
    """
    inputs = [x.clone().requires_grad_() for x in (problem.embeddings, problem.prototypes)]
    options = {"alpha": alpha, "scale": scale, "margin": margin}
    if all(x.isfinite().all() for x in inputs):
        scores = scale * F.linear(*(F.normalize(x) for x in inputs))
        each, support, active = q_margin_per_sample(
            scores, problem.labels, alpha=alpha, log_q_target=-scale * margin
        )
        correct = scores.argmax(1) == problem.labels
    else:
        each, (support, active, correct, _) = sparse_q_margin(*inputs, problem.labels, **options)
    losses = [part.sum() / max(len(part), 1) for part in each.split(problem.counts)]
    total = sum(factor * loss for factor, loss in zip(factors, losses))
    grad, full = torch.autograd.grad(total, inputs)
    parts = [x.split(problem.counts)[rank] for x in (grad, support, active, correct)]
    return (losses[rank].detach(), parts[0], full / len(problem.counts)), parts[1:]


def build(problem, group, *, alpha, shares=None, **options):
    head = ClassParallelQMargin(
        DIM, NUM_CLASS, alpha=alpha, group=group, shares=shares, **options
    ).to(problem.prototypes.dtype)
    head.load_state_dict({"weight": problem.prototypes})
    return head


def check(
    group, *, alpha, counts=None, kind="random", dtype=torch.float32, factors=None, **options
):
    """Compare a step with one process; return the head's (statistics, head)."""
    ranks = Ranks(group)
    problem = Problem(counts or [3] * ranks.size, kind=kind, dtype=dtype)
    factors = factors or [1.0] * ranks.size
    head = build(problem, group, alpha=alpha, **options)
    input, label = problem.own(ranks.rank)
    loss, statistics = head.loss(input, label)
    (factors[ranks.rank] * loss).backward()
    wanted, facts = expected(problem, ranks.rank, factors, alpha=alpha, scale=head.scale)
    wanted = *wanted[:2], head.own_rows(wanted[2])
    found = loss.detach(), input.grad, head.weight.grad.to_dense()
    text = f"{alpha} {kind} {dtype} {counts} {options}"
    for name, x, y in zip(("loss", "embeddings", "prototypes"), found, wanted):
        expect_close(x, y, TOLERANCE[dtype], f"{name}: {text}")
    if kind in ("random", "trained", "one label", "bad embedding", "bad prototype"):
        for fact, other in zip(statistics, facts):
            expect(torch.equal(fact, other), text, fact, other)
    return statistics, head


def expect(condition, *what):
    if not condition:
        line = sys._getframe(1).f_lineno
        FAULTS.append(" ".join(map(str, (f"line {line}:", *what))))


def expect_close(found, wanted, tolerance, text):
    """Relative to the largest value; NaN where the other has it."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return expect(False, text, found.dtype, found.shape)
    expect(torch.equal(found.isfinite(), wanted.isfinite()), text, "is finite elsewhere")
    found, wanted = (x.double().nan_to_num(0, 0, 0) for x in (found, wanted))
    worst = (found - wanted).abs().max().item() if found.numel() else 0.0
    size = max(1.0, wanted.abs().max().item()) if found.numel() else 1.0
    expect(worst <= tolerance * size, f"{text}: {worst:.2e} of {size:.2e}")


# ---- cases: each is called with the group, on the ranks of the group


def kinds(group):
    for dtype, alphas in ((torch.float32, [1.5]), (torch.float64, [1.0, 2.0])):
        for kind in KINDS:
            for alpha in ALPHAS if kind == "random" else alphas:
                check(group, alpha=alpha, kind=kind, dtype=dtype)


def uneven_shares(group):
    size = Ranks(group).size
    for shares in (
        [1] * (size - 1) + [NUM_CLASS + 1 - size],
        [NUM_CLASS + 1 - size] + [1] * (size - 1),
    ):
        for alpha in ALPHAS:
            check(group, alpha=alpha, kind="trained", shares=shares, dtype=torch.float64)
            check(group, alpha=alpha, kind="one label", shares=shares)


def uneven_batches(group):
    size = Ranks(group).size
    for counts in ([5, 0, 2, 1], [0, 0, 0, 3], [0, 1, 0, 0], [0, 0, 0, 0]):
        for alpha in ALPHAS:
            check(group, alpha=alpha, counts=counts[-size:], dtype=torch.float64)


def top_k(group):
    for kind in ("random", "all equal", "trained"):
        doublings = set()
        for k in (1, 3, 40):
            statistics, _ = check(group, alpha=1.25, kind=kind, impl="top_k", top_k=k)
            found = [None] * Ranks(group).size
            dist.all_gather_object(found, statistics.doublings, group)
            expect(len(set(found)) == 1)
            doublings |= set(found)
        expect(0 in doublings and (kind != "all equal" or len(doublings) == 3))


def top_k_of_all_but_one(group):
    """A share with one class more than is kept, and targets elsewhere."""
    size = Ranks(group).size
    for shares in ([5] * (size - 1) + [NUM_CLASS - 5 * (size - 1)], None):
        for k in (4, 2, 8):
            check(group, alpha=1.25, kind="all equal", impl="top_k", top_k=k, shares=shares)


def chunks(group):
    original = parallel.default_chunk
    try:
        for chunk in (1, 5, 7, 100):
            parallel.default_chunk = lambda *_, chunk=chunk: chunk
            for alpha in ALPHAS:
                check(group, alpha=alpha, kind="trained")
    finally:
        parallel.default_chunk = original


def mixed_precision(group):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for alpha in (1.25, 1.5, 2.0):
            _, head = check(group, alpha=alpha, kind="trained", mixed_precision=True)
            expect(head._plan(6, torch.float32).compute_dtype == torch.bfloat16)
            check(group, alpha=alpha, impl="top_k", top_k=3, mixed_precision=True)
        check(group, alpha=1.0)


def half_precision_embeddings(group):
    ranks = Ranks(group)
    problem = Problem([4] * ranks.size, kind="trained")
    problem.embeddings = problem.embeddings.bfloat16().float()
    head = build(problem, group, alpha=1.5)
    input, label = problem.own(ranks.rank)
    low = input.detach().bfloat16().requires_grad_(ranks.rank > 0)  # float32 on rank 0
    loss, _ = head.loss(input if ranks.rank == 0 else low, label)
    loss.backward()
    wanted, _ = expected(problem, ranks.rank, [1] * ranks.size, alpha=1.5, scale=head.scale)
    expect_close(loss.detach(), wanted[0], 1e-5, "loss")
    expect_close(head.weight.grad, head.own_rows(wanted[2]), 1e-5, "prototypes")
    if ranks.rank > 0:
        expect(low.grad.dtype == torch.bfloat16)
        expect_close(low.grad.float(), wanted[1], 1e-2, "embeddings")


def row_sparse_gradient(group):
    for counts in (None, [0, 0, 1, 2]):
        counts = counts and counts[-Ranks(group).size :]
        for kind in ("trained", "random", "bad embedding"):
            if counts and kind == "bad embedding":
                continue
            _, head = check(group, alpha=1.5, kind=kind, counts=counts, sparse_grad=True)
            grad = head.weight.grad
            expect(grad.layout == torch.sparse_coo and grad.sparse_dim() == 1)
            expect((grad._indices()[0].diff() > 0).all() and (grad._values() != 0).any(1).all())


def factors_of_the_losses(group):
    size = Ranks(group).size
    for alpha in ALPHAS:
        check(group, alpha=alpha, factors=[0.25, 3.0, 1024.0, 0.0][:size], dtype=torch.float64)


def accumulation(group):
    """Two halves, each with half the loss, are the whole."""
    ranks = Ranks(group)
    whole = Problem([4] * ranks.size, dtype=torch.float64)
    for alpha, sparse in ((1.0, False), (1.5, False), (1.5, True)):
        head = build(whole, group, alpha=alpha, sparse_grad=sparse)
        input, label = whole.own(ranks.rank)
        for half in (slice(0, 2), slice(2, 4)):
            loss, _ = head.loss(input[half], label[half])
            (loss / 2).backward()
        wanted, _ = expected(whole, ranks.rank, [1] * ranks.size, alpha=alpha, scale=head.scale)
        expect_close(input.grad, wanted[1], 1e-10, "embeddings")
        expect_close(head.weight.grad.to_dense(), head.own_rows(wanted[2]), 1e-10, "prototypes")


def statistics_and_modes(group):
    ranks = Ranks(group)
    problem = Problem([2 + rank for rank in range(ranks.size)], kind="trained")
    head = build(problem, group, alpha=1.5)
    input, label = problem.own(ranks.rank)
    _, first = head.loss(input, label)
    kept = head.statistics()
    head.eval()
    with torch.no_grad():
        loss, second = head.loss(input, label)
    expect(kept == head.statistics())
    expect(kept["samples"] == len(label) and kept["support"] == first.support.double().mean())
    expect(not loss.requires_grad and torch.equal(first.support, second.support))
    scores = F.normalize(input) @ F.normalize(problem.prototypes).t()
    expect(torch.equal(second.correct, scores.argmax(1) == label))
    expect("loss" in message(NotImplementedError, lambda: head(input, label)))
    copied = copy.deepcopy(head)
    expect(torch.equal(copied.loss(input, label)[0].detach(), loss))
    place = f"classes={head.classes[0]}..{head.classes[-1]}, rank={ranks.rank} of {ranks.size}"
    expect(place in repr(head))


def only_one_of_both_learns(group):
    ranks = Ranks(group)
    problem, factors = Problem([3] * ranks.size), [1] * ranks.size
    for alpha in (1.0, 1.5):
        head = build(problem, group, alpha=alpha)
        wanted, _ = expected(problem, ranks.rank, factors, alpha=alpha, scale=head.scale)
        input, label = problem.own(ranks.rank)
        head.loss(input.detach(), label)[0].backward()
        head.weight.requires_grad_(False)
        head.loss(input, label)[0].backward()
        expect_close(head.weight.grad, head.own_rows(wanted[2]), 1e-5, "prototypes")
        expect_close(input.grad, wanted[1], 1e-5, "embeddings")


def initial_prototypes(group):
    """Those of one process, bit for bit, and the generator is left as it leaves it."""
    ranks = Ranks(group)
    original = parallel._DRAWN
    try:
        for drawn, num_class, dim in ((6, 37, 6), (70, 37, 6), (2**22, 37, 6), (1000, 41, 7)):
            torch.manual_seed(3)
            whole, state = QMarginProduct(dim, num_class).weight.data, torch.get_rng_state()
            parallel._DRAWN = drawn
            for shares in (None, [1] * (ranks.size - 1) + [num_class + 1 - ranks.size]):
                torch.manual_seed(3)
                head = ClassParallelQMargin(dim, num_class, group=group, shares=shares)
                expect(torch.equal(head.weight.data, head.own_rows(whole)))
                expect(torch.equal(torch.get_rng_state(), state))
    finally:
        parallel._DRAWN = original


class Largest(TorchFunctionMode):
    """Notes the bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.layout == torch.strided:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def memory(group):
    """No rank makes a tensor of the size of all prototypes, nor of all scores."""
    ranks, dim, num_class = Ranks(group), 16, 4000
    drawn, chunk = parallel._DRAWN, parallel.default_chunk
    parallel._DRAWN, parallel.default_chunk = 2**10, lambda *_: 64
    try:
        for alpha, options in ((1.0, {}), (1.5, {}), (1.5, {"sparse_grad": True})):
            with Largest() as largest:
                head = ClassParallelQMargin(dim, num_class, alpha=alpha, group=group, **options)
                label = torch.arange(16) * 200 + ranks.rank
                loss, _ = head.loss(torch.randn(16, dim, requires_grad=True), label)
                loss.backward()
            share = 4 * len(head.classes) * dim
            expect(share <= largest.bytes < 1.1 * share, alpha, options, share, largest.bytes)
    finally:
        parallel._DRAWN, parallel.default_chunk = drawn, chunk


def collectives(group):
    """8 a step, 5 for alpha = 1."""
    ranks, originals, calls = Ranks(group), [dist.all_gather, dist.all_reduce], []
    problem = Problem([3] * ranks.size)

    def counted(original):
        def function(*args, **kwargs):
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return function

    for alpha, number in ((1.0, 5), (1.5, 8)):
        head = build(problem, group, alpha=alpha)
        calls.clear()
        dist.all_gather, dist.all_reduce = map(counted, originals)
        head.loss(*problem.own(ranks.rank))[0].backward()
        dist.all_gather, dist.all_reduce = originals
        expect(len(calls) == number, alpha, calls)


def bad_input(group):
    """The same ValueError on every rank, and the group goes on."""
    ranks, problem = Ranks(group), Problem([3] * Ranks(group).size)
    head, bad_rank = build(problem, group, alpha=1.5), ranks.size - 1
    input, label = (x.detach() for x in problem.own(ranks.rank))
    found = []
    for words, bad in {
        "label 37 is outside [0, C) with C = 37": (input, label.clone().fill_(NUM_CLASS)),
        "label -5 is outside": (input, label.clone().fill_(-5)),
        "(3,) torch.float32": (input, label.float()),
        "floating-point embeddings (B, d), got torch.float32 (6,)": (input[0], label),
        "must have the same d, got (3, 7) and (37, 6)": (torch.zeros(3, 7), label),
        "labels (2,)": (input, label[:2]),
        "got torch.int64 (3, 6)": (input.long(), label),
    }.items():
        given = bad if ranks.rank == bad_rank else (input, label)
        found.append(message(ValueError, lambda given=given: head.loss(*given)))
        expect(found[-1].startswith(f"rank {bad_rank}: ") and words in found[-1], words, found[-1])
    found.append(message(ValueError, lambda: head.loss(input[0], label)))
    expect(all(f"rank {rank}: " in found[-1] for rank in range(ranks.size)), found[-1])
    same_on_every_rank(found, group)
    check(group, alpha=1.5)


def disagreement(group):
    """Rank 0 has something else than the others."""
    ranks = Ranks(group)
    problem, other = Problem([3] * ranks.size), ranks.rank == 0
    input, label = problem.own(ranks.rank)
    shares = [NUM_CLASS - 2 * ranks.size + 2] + [2] * (ranks.size - 1)

    def head(dim=DIM, num_class=NUM_CLASS, **options):
        return ClassParallelQMargin(dim, num_class, group=group, **options)

    heads = {
        "alpha": head(alpha=1.75 if other else 1.5, scale=10),
        "scale": head(scale=9 if other else 10),
        "margin": head(margin=0.1 if other else 0.2),
        "in_features": head(DIM + other),
        "out_features": head(num_class=NUM_CLASS + other),
        "bytes of a score": head().double() if other else head(),
        "shares": head(shares=shares[:: -1 if other else 1]),
        "requires_grad": head().requires_grad_(not other),
    }
    found = []
    for word, one in heads.items():
        given = input.detach() if one.in_features == DIM else torch.zeros(3, DIM + 1)
        found.append(message(ValueError, lambda one=one, given=given: one.loss(given, label)))
        expect(found[-1] and found[-1].startswith(word), word, found[-1])
    expect("1.75 on rank 0, 1.5 on rank 1" in found[0], found[0])
    same_on_every_rank(found, group)
    check(group, alpha=1.5)


def same_on_every_rank(found, group):
    everyones = [None] * Ranks(group).size
    dist.all_gather_object(everyones, found, group)
    expect(all(others == found for others in everyones), everyones)


def message(kind, function):
    try:
        function()
    except kind as error:
        return str(error)
    return None


class Net(nn.Module):
    """A backbone and a head, as SpeakerNet has them."""

    def __init__(self, head, dtype):
        super().__init__()
        torch.manual_seed(7)
        self.backbone = nn.Linear(9, DIM)
        self.projection = head
        self.to(dtype)

    def forward(self, frames, labels):
        return self.projection.loss(self.backbone(frames), labels)


def steps(net, model, batches, norm_of):
    """Return gradient norm, backbone and prototypes after each of 20 steps, of many backwards."""
    decay = 0.0 if net.projection.sparse_grad else 1e-2  # torch's SGD: not with sparse gradients
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
    path = []
    for step in range(20):
        for loss in batches(step, model):
            loss.backward()
        norm = norm_of(net.parameters())
        nn.utils.clip_grads_with_norm_(net.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        path.append([x.detach().clone() for x in (norm, *net.parameters())])
    return path


def train_one_process(size, dtype, **options):
    torch.manual_seed(2)
    net = Net(QMarginProduct(DIM, NUM_CLASS, **options), dtype)
    return steps(
        net,
        net,
        lambda step, model: [model(*batch(step, size, dtype))[0]],
        lambda parameters: nn.utils.get_total_norm([x.grad.to_dense() for x in parameters]),
    )


def train_in_parallel(group, dtype, **options):
    ranks = Ranks(group)
    torch.manual_seed(2)
    shares = [NUM_CLASS - 3 * ranks.size + 3] + [3] * (ranks.size - 1)
    head = ClassParallelQMargin(DIM, NUM_CLASS, group=group, shares=shares, **options)
    net = Net(head, dtype)
    keep_from_ddp(net)

    def halves(step, model):
        frames, labels = (x[4 * ranks.rank :][:4] for x in batch(step, ranks.size, dtype))
        with model.no_sync():
            yield model(frames[:2], labels[:2])[0] / 2
        yield model(frames[2:], labels[2:])[0] / 2

    model = DistributedDataParallel(net, process_group=group)
    return head, steps(net, model, halves, lambda x: total_norm(x, [head.weight], group=group))


def batch(step, size, dtype):
    generator = torch.Generator().manual_seed(step)
    frames = torch.randn(4 * size, 9, generator=generator, dtype=torch.float64)
    return frames.to(dtype), torch.randint(NUM_CLASS, (4 * size,), generator=generator)


def ddp(group):
    """Under DDP, with accumulation and clipping, the trajectory is that of one process."""
    size = Ranks(group).size
    forms = [
        (torch.float32, {"alpha": 1.5}),
        (torch.float64, {"alpha": 1.25, "sparse_grad": True}),
        (torch.float64, {"alpha": 1.0}),
    ]
    for dtype, options in forms if size == 2 else forms[1:2]:
        head, found = train_in_parallel(group, dtype, **options)
        wanted = train_one_process(size, dtype, **options)
        for step, (values, others) in enumerate(zip(found, wanted, strict=True)):
            others[-1] = head.own_rows(others[-1])
            for value, other in zip(values, others, strict=True):
                expect_close(value, other, TOLERANCE[dtype], f"{options}, step {step}")
        clipped = {norm.item() > CLIP for norm, *_ in wanted}
        expect(clipped == {True, False}, [norm for norm, *_ in wanted])
        expect((found[-1][-1] - found[0][-1]).abs().mean() > 0.05, "the prototypes hardly move")


def checkpoints(_):
    """Saved under 3 ranks, loaded under 2 and 4 and in one process; the momentum as well."""
    three, two, four = GROUPS[3], GROUPS[2], GROUPS[4]
    path = FOLDER / "checkpoint.pt"
    rank = dist.get_rank()
    if rank in SIZES[3]:
        torch.manual_seed(rank)  # no two ranks alike
        head = ClassParallelQMargin(DIM, NUM_CLASS, group=three)
        momentum = torch.randn_like(head.weight)
        both = full_weight(head), head.gather_rows(momentum)
        expect(all((x is not None) == (Ranks(three).rank == 0) for x in both))
        if Ranks(three).rank == 0:
            expect(all(x.shape == (NUM_CLASS, DIM) for x in both))
            expect(torch.equal(head.own_rows(both[0]), head.weight))
            torch.save({"projection.weight": both[0], "momentum": both[1]}, path)
        bad = momentum[1:] if rank == 2 else momentum
        text = message(ValueError, lambda: head.gather_rows(bad))
        dist.barrier(three)
        expect(text.startswith("rank 1: expected (1"), text)
    dist.barrier()
    saved = torch.load(path)
    momentum = saved.pop("momentum")
    for group, members in ((two, SIZES[2]), (four, SIZES[4]), (None, None)):
        if members is not None and rank not in members:
            continue
        kind = ClassParallelQMargin if members else QMarginProduct
        net = nn.ModuleDict(
            {"projection": kind(DIM, NUM_CLASS, **({"group": group} if members else {}))}
        )
        expect(list(net.load_state_dict(saved)) == [[], []])
        if not members:
            expect(torch.equal(net["projection"].weight, saved["projection.weight"]))
            continue
        head = net["projection"]
        expect(torch.equal(head.weight, head.own_rows(saved["projection.weight"])))
        again = full_weight(head), head.gather_rows(head.own_rows(momentum))
        if again[0] is not None:
            expect(torch.equal(again[0], saved["projection.weight"]))
            expect(torch.equal(again[1], momentum))
        net.load_state_dict(net.state_dict())  # the own rows alone load as well
    expect(len(saved["projection.weight"]) == NUM_CLASS)  # loading left it as it was


CASES = {
    f.__name__: f
    for f in (
        *(kinds, uneven_shares, uneven_batches, top_k, top_k_of_all_but_one, chunks),
        *(mixed_precision, half_precision_embeddings, row_sparse_gradient),
        *(factors_of_the_losses, accumulation, statistics_and_modes, only_one_of_both_learns),
        *(initial_prototypes, memory, collectives, bad_input, disagreement, ddp),
    )
}
GROUPS = {}


def run_cases():
    """Return case-size -> its faults, or the seconds that it took."""
    rank, answers = dist.get_rank(), {}
    GROUPS.update({size: dist.new_group(members) for size, members in SIZES.items()})
    GROUPS[4] = None  # the default group
    jobs = [(f"{name}-{size}", case, size) for size in SIZES for name, case in CASES.items()]
    for name, case, size in [*jobs, ("checkpoints-4", checkpoints, 4)]:
        if rank not in SIZES[size]:
            continue
        start = time.monotonic()
        FAULTS.clear()
        try:
            case(GROUPS[size])
        except Exception:  # the ranks are out of step now
            answers[name] = [*FAULTS, traceback.format_exc()]
            break
        answers[name] = FAULTS.copy() or time.monotonic() - start
    return answers


def run_failure(what, rank):
    """Steps until rank 1 is lost in the fourth; return what the others were told, and when."""
    how, where = what.split("-")
    place = {
        "before": (Ranks, "agree"),
        "forward": (sharded, "solve_pairs"),
        "backward": (sharded, "_own_gradient"),
    }[where]
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    head = ClassParallelQMargin(DIM, NUM_CLASS, alpha=1.5, group=group)
    dist.barrier()
    for number in range(100):
        if number == 3 and rank == 1:
            setattr(*place, kill if how == "killed" else hang)
        start = time.monotonic()
        try:
            loss, _ = head.loss(torch.randn(3, DIM, requires_grad=True), torch.arange(3))
            loss.backward()
        except RuntimeError as error:
            return {"error": str(error), "seconds": time.monotonic() - start, "step": number}
    return {}


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*_):
    time.sleep(60)


def work(what, rank, size):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{FOLDER}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    answer = run_cases() if what == "cases" else run_failure(what, rank)
    (FOLDER / f"{rank}.json").write_text(json.dumps(answer))


def main(what, size, folder):
    """Fork the ranks, so that torch is imported once, and wait for those that are not lost."""
    global FOLDER
    FOLDER = Path(folder)
    torch.set_num_threads(1)
    ranks = []
    for rank in range(int(size)):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                work(what, rank, int(size))
            except BaseException:
                traceback.print_exc()
            os._exit(0)  # a group that lost a rank does not end well
    for rank, process in enumerate(ranks):
        if what == "cases" or rank != 1:
            os.waitpid(process, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
