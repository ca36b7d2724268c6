"""The streaming head against the dense one: loss, gradients, statistics, and what it allocates."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from wespeaker_qmargin.functional import q_margin_per_sample
from wespeaker_qmargin.sparse import sparse_q_margin

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
PAIRS = [(1.0, 32.0), (1.25, 20.0), (1.5, 10.0), (2.0, 5.0)]


def problem(num_class, *, dtype=torch.float32, kind="random", rows=9, dim=16):
    generator = torch.Generator().manual_seed(num_class)
    embeddings = torch.randn(rows, dim, generator=generator, dtype=dtype)
    prototypes = torch.randn(num_class, dim, generator=generator, dtype=dtype)
    labels = torch.randint(num_class, (rows,), generator=generator)
    labels[-1] = labels[0]
    if kind == "won":
        embeddings += 20 * prototypes[labels]
    elif kind == "tied":
        prototypes = prototypes[torch.arange(num_class) % 3]
    elif kind == "all equal":
        prototypes = prototypes[:1].repeat(num_class, 1)
    return embeddings, prototypes, labels


def dense(embeddings, prototypes, labels, *, alpha, scale, margin):
    scores = scale * F.linear(F.normalize(embeddings), F.normalize(prototypes))
    return q_margin_per_sample(scores, labels, alpha=alpha, log_q_target=-scale * margin)


def with_gradients(function, embeddings, prototypes, labels, **options):
    embeddings, prototypes = (x.clone().requires_grad_() for x in (embeddings, prototypes))
    loss, *rest = function(embeddings, prototypes, labels, **options)
    (loss * torch.arange(1, len(loss) + 1) / len(loss)).sum().backward()
    return (loss.detach(), embeddings.grad, prototypes.grad.to_dense()), rest


def assert_close(found, expected, tolerance):
    for a, b in zip(found, expected):
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max()), (a - b).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha, scale", PAIRS)
@pytest.mark.parametrize("kind", ["random", "won", "tied", "all equal"])
def test_equals_the_dense_head_at_every_chunk_size(dtype, alpha, scale, kind):
    for num_class in (1, 2, 61):
        inputs = problem(num_class, dtype=dtype, kind=kind)
        options = {"alpha": alpha, "scale": scale, "margin": 0.2}
        expected, _ = with_gradients(dense, *inputs, **options)
        for chunk_size in (1, 7, max(1, num_class - 1), num_class, num_class + 1, None):
            found, _ = with_gradients(sparse_q_margin, *inputs, chunk_size=chunk_size, **options)
            assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("alpha, scale", PAIRS[1:])
@pytest.mark.parametrize("form", [{"top_k": 1}, {"top_k": 5}, {"top_k": 61}, {"sparse_grad": True}])
def test_other_forms_are_exact_too(alpha, scale, form):
    inputs = problem(61)
    options = {"alpha": alpha, "scale": scale, "margin": 0.2}
    expected, (support, active) = with_gradients(dense, *inputs, **options)
    found, (statistics,) = with_gradients(sparse_q_margin, *inputs, **form, **options)
    assert_close(found, expected, 1e-5)
    assert torch.equal(statistics.support, support) and torch.equal(statistics.active, active)
    if form == {"top_k": 1}:
        assert statistics.doublings > 0, "one rival is not enough here"


@pytest.mark.parametrize("alpha, scale", PAIRS)
def test_gradcheck(alpha, scale):
    embeddings, prototypes, labels = problem(7, dtype=torch.float64, rows=3, dim=5)

    def loss(a, b):
        return sparse_q_margin(a, b, labels, alpha=alpha, scale=scale, margin=0.1)[0]

    torch.autograd.gradcheck(loss, (embeddings.requires_grad_(), prototypes.requires_grad_()))


def test_sparse_gradient_holds_active_rows_only():
    embeddings, prototypes, labels = problem(2000, dim=64)
    prototypes.requires_grad_()
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2, "sparse_grad": True}
    sparse_q_margin(embeddings, prototypes, labels, **options)[0].sum().backward()
    assert prototypes.grad.is_sparse
    assert prototypes.grad._nnz() == prototypes.grad.coalesce()._nnz() < 1000


class Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("alpha, scale", PAIRS)
def test_nothing_of_size_rows_x_classes_is_allocated(alpha, scale):
    inputs = problem(20_000, rows=64, dim=8)
    options = {"alpha": alpha, "scale": scale, "margin": 0.2, "chunk_size": 500}
    with Largest() as streaming:
        with_gradients(sparse_q_margin, *inputs, **options)
    assert streaming.numbers < 64 * 20_000 / 4


@pytest.mark.parametrize("alpha, scale", PAIRS)
def test_a_bad_row_harms_only_itself(alpha, scale):
    embeddings, prototypes, labels = problem(61)
    embeddings[4, 2] = float("nan")
    options = {"alpha": alpha, "scale": scale, "margin": 0.2}
    found, _ = with_gradients(sparse_q_margin, embeddings, prototypes, labels, **options)
    finite = found[0].isfinite()
    assert not finite[4] and finite.sum() == len(labels) - 1
    assert found[1].isfinite().all(dim=1).tolist() == finite.tolist()


def test_rows_of_zeros_are_finite():
    embeddings, prototypes, labels = problem(61)
    embeddings[0], prototypes[5] = 0, 0
    options = {"alpha": 1.5, "scale": 10.0, "margin": 0.2}
    expected, _ = with_gradients(dense, embeddings, prototypes, labels, **options)
    found, _ = with_gradients(sparse_q_margin, embeddings, prototypes, labels, **options)
    torch.testing.assert_close(found[0], expected[0])
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize(
    "change",
    [{"alpha": 3.0}, {"scale": 0.0}, {"top_k": 0}, {"chunk_size": 0}, {"alpha": 1.0, "top_k": 3}],
)
def test_arguments_out_of_range(change):
    with pytest.raises(ValueError):
        sparse_q_margin(*problem(7), **{"alpha": 1.5, "scale": 10.0, "margin": 0.2, **change})


def test_label_out_of_range_is_named():
    embeddings, prototypes, labels = problem(7)
    labels[1] = 7
    with pytest.raises(ValueError, match="7"):
        sparse_q_margin(embeddings, prototypes, labels, alpha=1.5, scale=10.0, margin=0.2)
