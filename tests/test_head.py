"""The head against WeSpeaker's own, its statistics, its contract."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from wespeaker_qmargin import QMarginProduct, adapter, q_margin_loss
from wespeaker_qmargin.head import auto_scale


def batch(num_class=20, dim=16, size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(size, dim, generator=generator),
        torch.randint(num_class, (size,), generator=generator),
    )


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5])
def test_alpha_1_is_wespeakers_cosface(margin):
    torch.manual_seed(0)
    theirs = adapter.wespeaker_module("models.projections").AddMarginProduct(
        16, 20, scale=32.0, margin=margin
    )
    ours = QMarginProduct(16, 20, alpha=1, scale=32.0, margin=margin)
    ours.load_state_dict(theirs.state_dict())
    input, label = batch()
    inputs = [input.clone().requires_grad_() for _ in range(2)]
    expected = F.cross_entropy(theirs(inputs[0], label), label)
    _, loss = ours(inputs[1], label)
    expected.backward()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, atol=1e-6, rtol=1e-5)


def test_scores_are_scaled_cosines_without_margin():
    head = QMarginProduct(16, 20, alpha=1.5, margin=0.4)
    input, label = batch()
    scores, loss = head(input, label)
    cosines = F.cosine_similarity(input[:, None], head.weight[None], dim=2)
    torch.testing.assert_close(scores, 10 * cosines)
    expected = q_margin_loss(10 * cosines, label, alpha=1.5, log_q_target=-10 * 0.4)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    "alpha, scale", [(1, 32), (1.1, 32), (1.15625, 32), (1.25, 20), (1.5, 10), (2, 5)]
)
def test_auto_scale(alpha, scale):
    assert auto_scale(alpha) == pytest.approx(scale)
    assert QMarginProduct(4, 5, alpha=alpha).scale == pytest.approx(scale)


def test_every_argument_changes_the_loss():
    input, label = batch()
    torch.manual_seed(0)
    base = QMarginProduct(16, 20)
    losses = {base(input, label)[1].item()}
    for change in ({"alpha": 1.75}, {"scale": 12.0}, {"margin": 0.3}):
        head = QMarginProduct(16, 20, **change)
        head.load_state_dict(base.state_dict())
        losses.add(head(input, label)[1].item())
    base.update(margin=0.1)
    assert base.margin == 0.1
    losses.add(base(input, label)[1].item())
    assert len(losses) == 5


@pytest.mark.parametrize(
    "bad",
    [
        {"alpha": 0.9},
        {"alpha": 2.1},
        {"alpha": float("nan")},
        {"scale": 0},
        {"scale": -1.0},
        {"scale": "big"},
        {"scale": float("inf")},
        {"margin": -0.1},
        {"margin": float("nan")},
    ],
)
def test_arguments_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        QMarginProduct(4, 5, **bad)


def test_state_dict_is_weight_only():
    head = QMarginProduct(16, 20)
    head(*batch())
    assert {k: tuple(v.shape) for k, v in head.state_dict().items()} == {"weight": (20, 16)}
    copy.deepcopy(head), pickle.loads(pickle.dumps(head))


def test_repr_tells_everything():
    text = repr(QMarginProduct(16, 20, alpha=1.25, margin=0.2))
    for part in ("16", "20", "alpha=1.25", "scale=20", "margin=0.2", "zero_loss_gap=0.544"):
        assert part in text


def test_statistics():
    head = QMarginProduct(3, 3, alpha=1.5, margin=0.0)
    with torch.no_grad():
        head.weight.copy_(torch.eye(3))
    nan = head.statistics()["accuracy"]
    assert nan != nan and head.statistics()["samples"] == 0
    # one won (rivals at cosine 0, gap 1 > 0.2), one lost, one a tie of all three
    input = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    label = torch.tensor([0, 0, 2])
    head(input, label)
    expected = {"active": 2 / 3, "support": (1 + 1 + 3) / 3, "samples": 3}
    found = head.statistics()
    assert {k: found[k] for k in expected} == pytest.approx(expected)
    assert found["accuracy"] in (pytest.approx(1 / 3), pytest.approx(2 / 3))  # the tie
    head(input[:1], label[:1])
    assert head.statistics()["samples"] == 4
    head.eval()
    head(input, label)
    assert head.statistics()["samples"] == 4, "evaluation is not counted"
    head.reset_statistics()
    assert head.statistics()["samples"] == 0


def test_alpha_1_counts_everything_as_active():
    head = QMarginProduct(16, 20, alpha=1)
    head(*batch())
    assert head.statistics()["active"] == 1 and head.statistics()["support"] == 20


def test_float32_under_autocast():
    head = QMarginProduct(16, 20)
    input, label = batch()
    _, expected = head(input.bfloat16().float(), label)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, loss = head(input.bfloat16(), label)
    assert scores.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_float64():
    head = QMarginProduct(16, 20).double()
    input, label = batch()
    scores, loss = head(input.double(), label)
    assert scores.dtype == loss.dtype == torch.float64


def test_label_out_of_range_is_named():
    head = QMarginProduct(16, 20)
    input, label = batch()
    label[3] = 20
    with pytest.raises(ValueError, match=r"20"):
        head(input, label)


def test_zero_embedding_and_prototype_are_finite():
    head = QMarginProduct(16, 20)
    with torch.no_grad():
        head.weight[4] = 0
    input, label = batch()
    input[0] = 0
    input.requires_grad_()
    _, loss = head(input, label)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(input.grad).all() and torch.isfinite(head.weight.grad).all()
