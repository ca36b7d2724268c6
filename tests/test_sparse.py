"""sparse.py and screen.py against the dense head: F.linear of unit vectors, q_margin_per_sample."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wespeaker_qmargin import screen as screening
from wespeaker_qmargin.functional import q_margin_per_sample, zero_loss_gap
from wespeaker_qmargin.screen import (
    Pairs,
    Plan,
    by_length,
    default_chunk,
    score_pairs,
    screen,
    screen_top_k,
)
from wespeaker_qmargin.sparse import solve_pairs, sparse_q_margin

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
ALPHAS = [1.0, 1.05, 1.25, 1.5, 1.7, 2.0]
NUM_CLASS = 37


def scale_of(alpha):
    return 32.0 if alpha == 1 else min(32.0, 5 / (alpha - 1))


def dense(embeddings, prototypes, labels, *, alpha, scale, margin=0.2):
    scores = scale * F.linear(F.normalize(embeddings), F.normalize(prototypes))
    return q_margin_per_sample(scores, labels, alpha=alpha, log_q_target=-scale * margin)


def with_gradients(function, embeddings, prototypes, labels, **options):
    """Return (loss, embeddings' gradient, prototypes' gradient), statistics; uneven weights."""
    inputs = embeddings.detach().requires_grad_(), prototypes.detach().requires_grad_()
    loss, *statistics = function(*inputs, labels, **options)
    weight = torch.linspace(0.5, 1.5, len(labels), dtype=loss.dtype)
    gradients = torch.autograd.grad((loss * weight).sum(), inputs)
    return (loss.detach(), *(grad.to_dense() for grad in gradients)), statistics


def assert_close(found, expected, tolerance, name=""):
    """Relative to the largest value: that of a zero row is 1e12."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    error = (found.double() - expected.double()).abs()
    worst = error.max().item() if error.numel() else 0.0
    size = max(1.0, expected.abs().max().item()) if error.numel() else 1.0
    assert worst <= tolerance * size, f"{name}: {worst:.2e} of {size:.2e}, {error.argmax().item()}"


def assert_same(found, expected, tolerance, name=""):
    for part, x, y in zip(("loss", "embeddings", "prototypes"), found, expected):
        assert_close(x, y, tolerance, f"{name} {part}")


def problem(rows, num_class, dim=6, *, seed=0, dtype=torch.float32, near=0.0):
    """Return (embeddings, prototypes, labels); ``near`` pulls embeddings to their prototypes."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(num_class, dim, generator=generator, dtype=torch.float64)
    prototypes *= 0.1 + torch.rand(num_class, 1, generator=generator)
    labels = torch.randint(num_class, (rows,), generator=generator)
    embeddings = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    embeddings = 3 * embeddings + near * F.normalize(prototypes[labels])
    return embeddings.to(dtype), prototypes.to(dtype), labels


def special(kind, alpha, dtype):
    """Return a problem of 9 rows whose labels repeat, and NUM_CLASS classes."""
    embeddings, prototypes, labels = problem(9, NUM_CLASS, seed=1, near=20.0 * (kind == "trained"))
    labels[4:] = labels[:5].clone()
    if kind == "tied":
        prototypes = prototypes[torch.arange(NUM_CLASS) % 5]
    elif kind == "all equal":
        prototypes = prototypes[:1].expand(NUM_CLASS, -1).clone()
    elif kind == "zero prototypes":
        prototypes[::4] = 0
        prototypes[int(labels[2])] = 0
    elif kind == "zero embeddings":
        embeddings[::3] = 0
    elif kind == "under the eps":
        prototypes[::4] *= 1e-14
        embeddings[::3] *= 1e-14
    elif kind in ("just won", "just not won"):
        gap = zero_loss_gap(alpha=alpha, scale=scale_of(alpha), margin=0.2)
        rival = 0.9 - min(gap, 1.5) - (1e-3 if kind == "just won" else -1e-3)
        cos = torch.full((NUM_CLASS,), -0.8)
        cos[3], cos[20], labels[:7], labels[7:] = 0.9, rival, 3, 20
        prototypes = torch.zeros(NUM_CLASS, 6)
        prototypes[:, 0], prototypes[:, 1] = cos, (1 - cos**2).sqrt()
        embeddings = torch.eye(6)[:1] * torch.linspace(1, 3, 9).unsqueeze(1)
    return embeddings.to(dtype), prototypes.to(dtype), labels


KINDS = [
    *("random", "trained", "tied", "all equal", "just won", "just not won"),
    *("zero prototypes", "zero embeddings", "under the eps"),
]


class Recorder(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made, and the dtypes of products."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in self.tensors((args, kwargs))}
        for x in self.tensors(result):
            if x.untyped_storage().data_ptr() not in given:  # no view, not in place
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.itemsize)
            if str(func).startswith("aten.mm"):  # bmm: the gradient's dot products, row by row
                self.products.add(x.dtype)
        return result

    @staticmethod
    def tensors(tree):
        leaves = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
        return [x for x in leaves if x.layout == torch.strided]


# ---- equality with the dense head


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dense_head(kind, dtype, alpha):
    inputs = special(kind, alpha, dtype)
    options = {"alpha": alpha, "scale": scale_of(alpha), "margin": 0.2}
    expected, (support, active) = with_gradients(dense, *inputs, **options)
    if kind.startswith("just") and alpha > 1.2:
        assert active[:7].tolist() == [kind == "just not won"] * 7
        assert (expected[0][:7] == 0).all() or kind == "just not won"
    chunks = [{"chunk_size": n} for n in (1, 7, NUM_CLASS - 1, NUM_CLASS, NUM_CLASS + 1, None)]
    others = [{"sparse_grad": True, "chunk_size": 7}, {"compute_dtype": torch.bfloat16}]
    others += [{"top_k": k, "chunk_size": n} for k in (1, 3, 40) for n in (7, None)]
    for form in chunks + others * (alpha > 1):
        found, (statistics,) = with_gradients(sparse_q_margin, *inputs, **options, **form)
        assert_same(found, expected, TOLERANCE[dtype], form)
        if kind in ("random", "trained", "just won", "just not won"):
            assert torch.equal(statistics.support, support), form
            assert torch.equal(statistics.active, active), form


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("rows, num_class", [(1, 1), (1, 2), (4, 1), (4, 2), (1, 40), (0, 5)])
def test_few_rows_and_few_classes(rows, num_class, alpha):
    for dtype, form in itertools.product(TOLERANCE, ({}, {"chunk_size": 1}, {"top_k": 1})):
        inputs = problem(rows, num_class, seed=2, dtype=dtype)
        options = {"alpha": alpha, "scale": scale_of(alpha), "margin": 0.2}
        expected, (support, active) = with_gradients(dense, *inputs, **options)
        if alpha == 1 and "top_k" in form:
            continue
        found, (statistics,) = with_gradients(sparse_q_margin, *inputs, **options, **form)
        assert_same(found, expected, TOLERANCE[dtype], form)
        assert torch.equal(statistics.support, support)
        assert torch.equal(statistics.active, active)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_against_finite_differences(alpha):
    embeddings, prototypes, labels = problem(5, 9, 4, seed=3, dtype=torch.float64)
    labels[4] = labels[0]
    inputs = embeddings.requires_grad_(), prototypes.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: sparse_q_margin(x, w, labels, alpha=alpha, scale=6, margin=0.1, chunk_size=4)[
            0
        ],
        inputs,
    )


@given(
    rows=st.integers(1, 8),
    num_class=st.integers(1, 90),
    alpha=st.one_of(st.just(1.0), st.floats(1.01, 2)),
    scale=st.floats(0.5, 40),
    margin=st.floats(-0.2, 0.5),
    chunk=st.integers(1, 95),
    top_k=st.one_of(st.none(), st.integers(1, 95)),
    low=st.booleans(),
    near=st.sampled_from([0.0, 8.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_any_problem(rows, num_class, alpha, scale, margin, chunk, top_k, low, near, seed):
    inputs = problem(rows, num_class, 5, seed=seed, dtype=torch.float64, near=near)
    inputs[1][num_class // 2] = inputs[1][0]  # a tie
    options = {"alpha": alpha, "scale": scale, "margin": margin}
    expected, (support, _) = with_gradients(dense, *inputs, **options)
    form = {"top_k": top_k, "compute_dtype": torch.bfloat16 if low else None} if alpha > 1 else {}
    found, (statistics,) = with_gradients(
        sparse_q_margin, *inputs, **options, chunk_size=chunk, **form
    )
    assert_same(found, expected, 1e-9)
    assert (statistics.support - support).abs().max() <= 1 + (alpha < 1.1)  # dust of a tie


@pytest.mark.parametrize("order", ["rising", "falling"])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_classes_in_order_of_their_scores(alpha, order, monkeypatch):
    # every chunk beats all before it, or none does; the threshold is raised at every chunk
    monkeypatch.setattr(screening, "_ROOM", 1)
    embeddings, prototypes, labels = problem(12, 2000, 4, seed=4)
    embeddings[:] = embeddings[:1]
    best = (F.normalize(prototypes) @ embeddings[0]).argsort(descending=order == "falling")
    options = {"alpha": alpha, "scale": scale_of(alpha), "margin": 0.2}
    inputs = embeddings, prototypes[best].contiguous(), labels
    expected, _ = with_gradients(dense, *inputs, **options)
    with Recorder() as recorder:
        found, _ = with_gradients(sparse_q_margin, *inputs, **options, chunk_size=32)
    assert_same(found, expected, 1e-5)
    assert recorder.largest <= prototypes.numel()  # pairs that fell out are not collected


# ---- what is kept, what is held


def plan_of(alpha, **options):
    scale = scale_of(alpha)
    options = {"chunk_size": 64, "compute_dtype": torch.float32} | options
    return Plan(alpha=alpha, scale=scale, log_q=-0.2 * scale, **options)


def screened(alpha=1.5, function=screen, seed=5, **options):
    """Return the inputs of a screen and what it returns."""
    embeddings, prototypes, labels = problem(16, 3000, 16, seed=seed)
    plan = plan_of(alpha, **options)
    queries = plan.scale * F.normalize(embeddings)
    target = score_pairs(queries, prototypes, torch.arange(16), labels)
    inputs = queries, prototypes, labels, target, plan
    return inputs, *function(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_screen_keeps_little_more_than_the_support(dtype):
    (queries, prototypes, labels, _, plan), pairs, floor, _ = screened(compute_dtype=dtype)
    scores = queries @ F.normalize(prototypes).t()
    _, support, _ = q_margin_per_sample(scores, labels, alpha=1.5, log_q_target=plan.log_q)
    limit = 1.2 if dtype == torch.float32 else 4
    assert support.sum() <= len(pairs.rows) + 16 <= limit * support.sum() + 16
    assert_close(pairs.scores, scores[pairs.rows, pairs.classes], 1e-6)
    assert (pairs.classes != labels[pairs.rows]).all()
    bound = scores.scatter(1, labels[:, None], -math.inf)
    bound[pairs.rows, pairs.classes] = -math.inf
    assert (bound <= floor[:, None] + 1e-4).all()  # none that was dropped may be active


def test_shards_of_the_classes_keep_what_the_whole_keeps():
    (queries, prototypes, labels, target, plan), pairs, *_ = screened()
    parts, edges = [], (0, 1, 700, 2999, 3000)
    for start, end in itertools.pairwise(edges):
        shard, *_ = screen(queries, prototypes[start:end], labels - start, target, plan)
        parts.append(shard._replace(classes=shard.classes + start))
    loss, (support, _, _), _ = solve_pairs(target, Pairs.join(parts), plan)
    expected, (expected_support, _, _), _ = solve_pairs(target, pairs, plan)
    assert_close(loss, expected, 1e-6)
    assert torch.equal(support, expected_support)


def test_neither_forward_nor_backward_makes_a_tensor_of_all_scores():
    embeddings, prototypes, labels = problem(64, 5000, 8, seed=6)
    inputs = embeddings.requires_grad_(), prototypes.requires_grad_(), labels
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2}
    forms = ({}, {"sparse_grad": True}, {"top_k": 256}, {"compute_dtype": torch.bfloat16})
    for form in (*forms, {"alpha": 1.0}):
        with Recorder() as recorder:
            sparse_q_margin(*inputs, chunk_size=128, **(options | form))[0].sum().backward()
        assert recorder.largest <= max(64 * 512, prototypes.numel()) < 64 * 5000 / 7, form
    with Recorder() as recorder:  # able to notice
        dense(*inputs, **options)[0].sum().backward()
    assert recorder.largest >= 64 * 5000


def test_a_sparse_gradient_holds_nothing_of_the_size_of_the_prototypes():
    embeddings, prototypes, labels = problem(4, 5000, 64, seed=7, near=30.0)
    inputs = embeddings.requires_grad_(), prototypes.requires_grad_(), labels
    with Recorder() as recorder:
        loss, _ = sparse_q_margin(
            *inputs, alpha=1.5, scale=10, margin=0.2, chunk_size=128, sparse_grad=True
        )
        loss.sum().backward()
    assert recorder.largest < prototypes.numel() / 20


def test_a_row_of_zeros_makes_no_tensor_of_all_scores():
    embeddings, prototypes, labels = problem(64, 5000, 4, seed=8)
    embeddings[3] = 0  # all classes tie
    inputs = embeddings.requires_grad_(), prototypes.requires_grad_(), labels
    with Recorder() as recorder:
        loss, statistics = sparse_q_margin(*inputs, alpha=1.5, scale=10, margin=0.2, chunk_size=128)
        loss.sum().backward()
    assert statistics.support[3] == 5000
    assert recorder.largest < 64 * 5000 / 4


def test_memory_kept_for_backward_is_the_support():
    embeddings, prototypes, labels = problem(32, 3000, 16, seed=9)
    inputs = embeddings.requires_grad_(), prototypes.requires_grad_(), labels
    loss, statistics = sparse_q_margin(*inputs, alpha=1.5, scale=10, margin=0.2)
    saved = loss.grad_fn.saved_tensors
    assert saved[0] is embeddings and saved[1] is prototypes
    size = sum(x.untyped_storage().nbytes() for x in saved[2:])
    assert size <= 20 * (statistics.support.sum().item() + 32)


def test_rows_of_like_length_share_a_table():
    counts = torch.tensor([0, 3, 5000, 40, 0, 130])
    rows = torch.arange(6).repeat_interleave(counts)[torch.randperm(5173)]
    seen = torch.zeros(len(rows), dtype=torch.long)
    members, cells = [], 0
    for group, index, valid in by_length(rows, 6):
        members += group.tolist()
        cells += index.numel()
        seen.index_add_(0, index[valid], torch.ones(len(index[valid]), dtype=torch.long))
        assert (rows[index] == group[:, None])[valid].all()
        assert torch.equal(valid.sum(1), counts[group])
    assert sorted(members) == list(range(6)) and (seen == 1).all()
    assert cells <= 5000 + 6 * 130


def test_default_chunk_fits_its_work_space():
    cpu = torch.device("cpu")
    for rows, dim in ((64, 192), (512, 256), (4096, 1024)):
        classes = default_chunk(rows, dim, torch.float32, cpu)
        assert 2**22 < 4 * classes * (rows + 2 * dim) <= 2**23
        assert default_chunk(rows, dim, torch.float64, cpu) in (classes // 2, classes // 2 - 1)
    assert default_chunk(10**7, 1024, torch.float32, cpu) == 32


# ---- top_k


def test_top_k_keeps_k_rivals_of_a_row():
    (_, _, labels, _, _), pairs, _, doublings = screened(
        alpha=2.0, function=screen_top_k, top_k=128, chunk_size=100
    )
    assert doublings == 0
    assert (pairs.rows.bincount(minlength=16) == 128).all()
    (queries, prototypes, *_), *_ = screened(alpha=2.0)
    scores = (queries @ F.normalize(prototypes).t()).scatter(1, labels[:, None], -math.inf)
    expected = scores.topk(128).indices.sort().values
    found = pairs.classes.view(16, 128) if torch.equal(pairs.rows, pairs.rows.sort()[0]) else None
    assert found is not None and torch.equal(found.sort().values, expected)


def test_top_k_is_doubled_until_the_last_kept_is_inactive():
    inputs = problem(8, 400, 8, seed=10, dtype=torch.float64)
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2}
    expected, _ = with_gradients(dense, *inputs, **options)
    scores = 10 * F.linear(F.normalize(inputs[0]), F.normalize(inputs[1])).requires_grad_()
    loss, *_ = q_margin_per_sample(scores, inputs[2], alpha=1.5, log_q_target=-2.0)
    (slope,) = torch.autograd.grad(loss.sum(), scores)
    rivals = int((slope > 0).sum(1).max())
    for k, doublings in ((rivals + 1, 0), (rivals, 1), (rivals // 2, 2), (400, 0), (1000, 0)):
        found, (statistics,) = with_gradients(sparse_q_margin, *inputs, **options, top_k=k)
        assert statistics.doublings == doublings, k
        assert_same(found, expected, 1e-10)
    assert sparse_q_margin(*inputs, **options)[1].doublings == 0
    equal = torch.ones(400, 8, dtype=torch.float64)
    for k, doublings in ((100, 2), (398, 1), (399, 0)):
        _, statistics = sparse_q_margin(inputs[0], equal, inputs[2], **options, top_k=k)
        assert statistics.doublings == doublings and (statistics.support == 400).all()


# ---- statistics, gradients, dtypes


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("near", [0.0, 4.0, 20.0])
def test_correct_is_the_accuracy_without_margin(alpha, near):
    embeddings, prototypes, labels = problem(64, 200, 8, seed=11, near=near)
    expected = F.linear(F.normalize(embeddings), F.normalize(prototypes)).argmax(1) == labels
    for margin in (0.0, 0.2, 0.5, -0.3):
        _, statistics = sparse_q_margin(
            embeddings, prototypes, labels, alpha=alpha, scale=5.0, margin=margin
        )
        assert torch.equal(statistics.correct, expected)
    assert expected.any() == (near > 0)
    _, tie = sparse_q_margin(embeddings * 0, prototypes, labels, alpha=alpha, scale=5, margin=0)
    assert not tie.correct.any()


def test_sparse_gradient_is_for_optimisers_of_rows():
    embeddings, prototypes, labels = problem(6, 300, 8, seed=12, near=8.0)
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2}
    for make in (
        lambda x: torch.optim.SGD([x], lr=0.5),
        lambda x: torch.optim.SparseAdam([x], lr=0.5),
    ):
        weight = prototypes.clone().requires_grad_()
        loss, statistics = sparse_q_margin(embeddings, weight, labels, **options, sparse_grad=True)
        (grad,) = torch.autograd.grad(loss.sum(), weight, retain_graph=True)
        assert grad.layout == torch.sparse_coo and grad.is_coalesced()
        rows = grad.indices()[0]
        assert (rows.diff() > 0).all()
        assert len(rows) <= statistics.support.sum() + 6
        loss.sum().backward()
        assert weight.grad.layout == torch.sparse_coo
        make(weight).step()
        moved = (weight != prototypes).any(1)
        assert torch.equal(moved.nonzero().squeeze(1), rows) and 0 < len(rows) < 300
    dense_weight = prototypes.clone().requires_grad_()
    sparse_q_margin(embeddings, dense_weight, labels, **options)[0].sum().backward()
    assert torch.equal(dense_weight.grad, grad.to_dense())


@pytest.mark.parametrize("sparse_grad", [False, True])
def test_no_active_sample_gives_no_gradient(sparse_grad):
    embeddings, prototypes, labels = special("just won", 1.5, torch.float32)
    weight = prototypes.clone().requires_grad_()
    inputs = embeddings[:7].requires_grad_(), weight, labels[:7]
    loss, statistics = sparse_q_margin(
        *inputs, alpha=1.5, scale=10, margin=0.2, sparse_grad=sparse_grad
    )
    loss.sum().backward()
    assert (loss == 0).all() and not statistics.active.any() and statistics.correct.all()
    assert (inputs[0].grad == 0).all() and (weight.grad.to_dense() == 0).all()


def test_frozen_inputs_and_no_grad():
    embeddings, prototypes, labels = problem(6, 50, seed=13)
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2}
    (_, grad, full), _ = with_gradients(sparse_q_margin, embeddings, prototypes, labels, **options)
    weight = torch.linspace(0.5, 1.5, 6)
    for i, expected in enumerate((grad, full)):
        inputs = [embeddings.clone(), prototypes.clone()]
        inputs[i].requires_grad_()
        (sparse_q_margin(*inputs, labels, **options)[0] * weight).sum().backward()
        assert torch.equal(inputs[i].grad, expected) and inputs[1 - i].grad is None
    with torch.no_grad():
        loss, _ = sparse_q_margin(embeddings, prototypes, labels, **options)
    assert not loss.requires_grad


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_half_precision_inputs_and_autocast(alpha):
    options = {"alpha": alpha, "scale": 10.0, "margin": 0.2}
    embeddings, prototypes, labels = problem(8, 300, 16, seed=14)
    for kinds in ((torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float16,) * 2):
        inputs = embeddings.to(kinds[0]), prototypes.to(kinds[1]), labels
        wide = inputs[0].float(), inputs[1].float(), labels
        expected, _ = with_gradients(sparse_q_margin, *wide, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, _ = with_gradients(sparse_q_margin, *inputs, **options)
        assert found[0].dtype == torch.float32
        assert_close(found[0], expected[0], 1e-6)
        for x, y, dtype in zip(found[1:], expected[1:], kinds):
            assert_close(x, y.to(dtype), 1e-2)


def test_backward_under_autocast_is_in_full_precision():
    inputs = problem(16, 300, 16, seed=15)
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2}
    expected, _ = with_gradients(sparse_q_margin, *inputs, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = with_gradients(sparse_q_margin, *inputs, **options)
    for one, another in zip(found, expected):
        assert torch.equal(one, another)


def test_the_precision_of_products_does_not_reach_the_result():
    inputs = problem(16, 3000, 16, seed=15)
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2}
    expected, _ = with_gradients(dense, *inputs, **options)
    for dtype, form in itertools.product((torch.bfloat16, torch.float16), ({}, {"top_k": 40})):
        with Recorder() as recorder:
            found, _ = with_gradients(
                sparse_q_margin, *inputs, **options, **form, compute_dtype=dtype
            )
        assert_same(found, expected, 1e-5)
        assert recorder.products == {dtype}
    before = torch.get_float32_matmul_precision()
    for leave in ("high", "medium"):
        torch.set_float32_matmul_precision(leave)
        try:
            found, _ = with_gradients(sparse_q_margin, *inputs, **options)
        finally:
            torch.set_float32_matmul_precision(before)
        assert_same(found, expected, 1e-5)
    low, _ = with_gradients(sparse_q_margin, *inputs, **options | {"alpha": 1}, compute_dtype=dtype)
    full, _ = with_gradients(sparse_q_margin, *inputs, **options | {"alpha": 1})
    assert_close(low[0], full[0], 1e-2)
    assert not torch.equal(low[0], full[0])


def test_leave_to_round_products_is_allowed_for():
    queries = torch.zeros(2, 8)
    before = torch.get_float32_matmul_precision()
    errors = []
    for leave in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(leave)
        try:
            errors.append(screening._product_error(queries, plan_of(1.5)))
        finally:
            torch.set_float32_matmul_precision(before)
    assert errors[0] == 0 < errors[1] < errors[2]
    wide = plan_of(1.5, compute_dtype=torch.float64)
    assert screening._product_error(queries.double(), wide) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_allowed_for_is_not_exceeded(dtype):
    queries, prototypes, _ = problem(64, 4000, 192, seed=16, dtype=torch.float64)
    prototypes[:64] = queries  # cosines of 1, with all terms of one sign
    plan = plan_of(1.5, compute_dtype=dtype)
    queries = plan.scale * F.normalize(queries)
    labels = torch.full((64,), -1)
    error = screening._product_error(queries, plan)
    exact = queries @ F.normalize(prototypes).t()
    for start, scores in screening.score_chunks(queries, prototypes, labels, plan):
        part = exact[:, start : start + 64].t()
        worst = (scores.flatten(0, 1)[: len(part)] - part).abs().max()
        assert error / 1000 < worst <= error


def test_a_rival_at_the_threshold_is_not_lost_to_rounding():
    # each row has one rival, whose cosine is so little above the threshold that half of the
    # rounded ones are below
    generator = torch.Generator().manual_seed(22)
    unit, side = torch.linalg.qr(torch.randn(64, 32, 2, generator=generator))[0].unbind(2)
    options = {"alpha": 2.0, "scale": 5.0, "margin": 0.2}
    cos = 0.9 - zero_loss_gap(**options) + 1e-4
    prototypes = torch.cat([0.9 * unit + 0.19**0.5 * side, cos * unit + (1 - cos**2) ** 0.5 * side])
    for row in range(64):
        pair = prototypes[row::64]
        inputs = unit[row : row + 1], pair, torch.tensor([0])
        expected, _ = with_gradients(dense, *inputs, **options)
        for dtype in (torch.bfloat16, torch.float16, None):
            found, (statistics,) = with_gradients(
                sparse_q_margin, *inputs, **options, compute_dtype=dtype
            )
            assert statistics.active.all() and statistics.support == 2
            assert_same(found, expected, 1e-5)


def test_the_bound_allows_for_the_error_of_every_score():
    (_, _, _, target, plan), pairs, *_ = screened()
    none = torch.full_like(target, -math.inf)
    lowest = pairs._replace(scores=pairs.scores - 0.1)
    bound = screening._raise(none, pairs, target, 0.1, plan)
    assert_close(bound, screening._raise(none, lowest, target, 0.0, plan), 1e-6)
    assert (bound < screening._raise(none, pairs, target, 0.0, plan) - 0.05).any()


# ---- bad input


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [{}, {"chunk_size": 7}, {"top_k": 4}, {"sparse_grad": True}])
def test_a_bad_embedding_harms_only_itself(form, value):
    embeddings, prototypes, labels = problem(8, 60, seed=17)
    labels = torch.arange(8)
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2} | form
    (good, good_grad, _), _ = with_gradients(
        sparse_q_margin, embeddings, prototypes, labels, **options
    )
    embeddings[3, 2] = value
    (loss, grad, full), (statistics,) = with_gradients(
        sparse_q_margin, embeddings, prototypes, labels, **options
    )
    others = torch.arange(8) != 3
    assert loss[3].isnan() and grad[3].isnan().all()
    assert not statistics.active[3] and statistics.support[3] == 0 and not statistics.correct[3]
    assert_close(loss[others], good[others], 1e-6)
    assert_close(grad[others], good_grad[others], 1e-6)
    assert full.isnan().any(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_prototype_is_never_silent(value, alpha):
    embeddings, prototypes, labels = problem(8, 60, seed=18)
    for column, form in itertools.product(
        (0, 31, 59, int(labels[2])), ({}, {"chunk_size": 7}, {"top_k": 4})
    ):
        broken = prototypes.clone()
        broken[column, 1] = value
        if alpha == 1 and "top_k" in form:
            continue
        (loss, grad, _), (statistics,) = with_gradients(
            sparse_q_margin, embeddings, broken, labels, alpha=alpha, scale=10, margin=0.2, **form
        )
        assert loss.isnan().all() and grad.isnan().all()
        assert not statistics.active.any() and not statistics.correct.any()
    broken[:] = value
    assert (
        sparse_q_margin(embeddings, broken, labels, alpha=alpha, scale=10, margin=0)[0]
        .isnan()
        .all()
    )


def test_second_derivative_is_refused():
    embeddings, prototypes, labels = problem(4, 9, seed=19)
    for alpha in (1.0, 1.5):
        loss, _ = sparse_q_margin(
            embeddings.requires_grad_(), prototypes, labels, alpha=alpha, scale=5, margin=0
        )
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(loss.sum(), embeddings, create_graph=True)


def test_bad_arguments():
    embeddings, prototypes, labels = problem(4, 9, seed=20)

    def call(x=embeddings, w=prototypes, y=labels, **options):
        return sparse_q_margin(x, w, y, **{"alpha": 1.5, "scale": 10, "margin": 0.2} | options)

    call()
    for label in (9, 12, -1):
        with pytest.raises(ValueError, match=rf"label {label} .* C = 9"):
            call(y=torch.tensor([0, label, 2, 3]))
    for bad in (labels[:3], labels[:, None], labels.float()):
        with pytest.raises(ValueError, match="integer labels"):
            call(y=bad)
    for bad in (embeddings[0], embeddings[None], embeddings.long(), embeddings[:, :0]):
        with pytest.raises(ValueError, match=r"embeddings \(B, d\)"):
            call(x=bad)
    for bad in (prototypes[0], prototypes.long(), prototypes[:0]):
        with pytest.raises(ValueError, match=r"prototypes \(C, d\)"):
            call(w=bad)
    with pytest.raises(ValueError, match="same d"):
        call(w=prototypes[:, :5])
    for name, values in {
        "alpha": (0.9, 2.1, math.nan),
        "scale": (0, -1, math.inf, math.nan),
        "top_k": (0, -1, 1.5, True),
        "chunk_size": (0, -1, 1.5, True),
        "compute_dtype": (torch.int8, "bfloat16"),
    }.items():
        for bad in values:
            with pytest.raises(ValueError, match=name):
                call(**{name: bad})
    for bad in (math.nan, math.inf, 1e4):
        with pytest.raises(ValueError, match="log_q_target"):
            call(margin=bad)
    for form in ({"top_k": 3}, {"sparse_grad": True}):
        with pytest.raises(ValueError, match="alpha > 1"):
            call(alpha=1, **form)


@pytest.mark.gpu
def test_gpu_equals_cpu():
    inputs = problem(64, 20000, 64, seed=21)
    for alpha, form in itertools.product((1.0, 1.5, 2.0), ({}, {"chunk_size": 1000})):
        options = {"alpha": alpha, "scale": scale_of(alpha), "margin": 0.2} | form
        embeddings, prototypes = (x.cuda().requires_grad_() for x in inputs[:2])
        loss, _ = sparse_q_margin(embeddings, prototypes, inputs[2].cuda(), **options)
        weight = torch.linspace(0.5, 1.5, 64, device="cuda")
        (loss * weight).sum().backward()
        expected, _ = with_gradients(sparse_q_margin, *inputs, **options)
        found = loss.detach(), embeddings.grad, prototypes.grad
        assert_same([x.cpu() for x in found], expected, 1e-5)
