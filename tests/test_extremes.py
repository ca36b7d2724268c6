"""The head where numbers get extreme: loss and gradients stay finite, types stay what they are."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from wespeaker_qmargin.head import QMarginProduct

DIM = 16


def head(num_class=4, **options):
    torch.manual_seed(0)
    return QMarginProduct(DIM, num_class, **{"alpha": 1.5, "scale": 10.0, **options})


def check(module, embeddings, labels) -> torch.Tensor:
    """Return the loss; it and all gradients are finite."""
    embeddings = embeddings.clone().requires_grad_()
    loss = module.loss(embeddings, labels)[0]
    gradients = torch.autograd.grad(loss, [embeddings, module.weight])
    assert loss.isfinite() and all(x.isfinite().all() for x in gradients)
    assert loss >= 0
    return loss.detach()


PROTOTYPES = {
    "its prototype": lambda w: w[:3],
    "the negative": lambda w: -w[:3],
    "zeros": lambda w: torch.zeros(3, DIM),
    "norm 1e-20": lambda w: 1e-20 * F.normalize(w[:3]),
    "norm 1e20": lambda w: 1e20 * F.normalize(w[[1, 2, 0]]),
}


@pytest.mark.parametrize("where", PROTOTYPES)
@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0])
@pytest.mark.parametrize("impl", ["dense", "streaming"])
def test_embeddings(where, alpha, impl):
    module = head(alpha=alpha, scale=5 / max(alpha - 1, 0.2), impl=impl)
    check(module, PROTOTYPES[where](module.weight.detach()), torch.arange(3))


@pytest.mark.parametrize("norm", [0.0, 1e-20, 1e20])
def test_prototypes(norm):
    module = head()
    module.weight.data[0] *= norm / module.weight[0].norm().item()
    check(module, torch.randn(3, DIM), torch.tensor([0, 0, 1]))


def test_the_norm_of_an_embedding_is_nothing():
    module, embeddings = head(), torch.randn(3, DIM)
    losses = [check(module, size * embeddings, torch.arange(3)) for size in (1e-10, 1.0, 1e10)]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[2], losses[1])


@pytest.mark.parametrize(("rows", "classes"), itertools.product((1, 3), (1, 2, 20_000)))
@pytest.mark.parametrize("impl", ["dense", "streaming", "auto"])
def test_sizes(rows, classes, impl):
    module = head(classes, impl=impl)
    loss = check(module, torch.randn(rows, DIM), torch.zeros(rows, dtype=torch.long))
    assert (loss == 0) == (classes == 1)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0])
def test_a_margin_larger_than_any_gap(alpha):
    """Two cosines differ by 2 at most."""
    module = head(alpha=alpha, margin=3.0)
    own = module.weight.detach()[:3]
    check(module, own, torch.arange(3))
    assert module.loss(own, torch.arange(3))[1].support.min() >= 2, "no sample is won"


def test_a_margin_beyond_what_floats_can_tell_is_refused():
    with pytest.raises(ValueError, match="must be under 80, got -500.0"):
        head(margin=50.0).loss(torch.randn(2, DIM), torch.tensor([0, 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cosine", [0.99, 0.999, 0.9999])
@pytest.mark.parametrize("impl", ["dense", "streaming"])
def test_autocast_near_the_prototype(dtype, cosine, impl):
    module = head(50, impl=impl)
    own = F.normalize(module.weight.detach()[:8])
    other = F.normalize(torch.randn(8, DIM))
    other = F.normalize(other - (other * own).sum(1, keepdim=True) * own)
    embeddings = cosine * own + (1 - cosine**2) ** 0.5 * other
    labels, expected = torch.arange(8), check(module, embeddings, torch.arange(8))
    with torch.autocast("cpu", dtype=dtype):
        found = check(module, embeddings.to(dtype).float(), labels)
        scores, forward = module(embeddings, labels)
    assert found.dtype == scores.dtype == forward.dtype == torch.float32
    assert module.weight.dtype == torch.float32
    torch.testing.assert_close(forward.detach(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("label", [-1, 4, 70_000])
def test_labels_of_nobody(label):
    with pytest.raises((ValueError, IndexError), match="label"):
        head().loss(torch.randn(2, DIM), torch.tensor([0, label]))


@pytest.mark.parametrize(
    "labels", [torch.tensor([0.0, 1.5]), torch.zeros(3), torch.zeros(2, 1).long()]
)
def test_labels_that_are_none(labels):
    with pytest.raises(ValueError, match="label"):
        head().loss(torch.randn(2, DIM), labels)


def test_no_label_is_rounded_in_half_precision():
    """70,000 classes: float16 ends at 65,504 and bfloat16 counts in steps of 256 there."""
    module = QMarginProduct(4, 70_000, alpha=1.5, scale=10.0)
    labels = torch.tensor([65_505, 65_537, 69_999])
    embeddings = F.normalize(module.weight.detach()[labels])
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            statistics = module.loss(embeddings, labels)[1]
        assert statistics.correct.all()
