"""The head against WeSpeaker's own, its statistics, its contract."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from wespeaker_qmargin import QMarginProduct, adapter, choice, q_margin_loss
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
        {"impl": "fast"},
        {"impl": "top_k", "alpha": 1},
        {"top_k": 0},
        {"top_k": 2.0},
        {"sparse_grad": True, "alpha": 1},
        {"sparse_grad": True, "impl": "dense"},
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
    expected = {"active": 2 / 3, "support": (1 + 1 + 3) / 3, "samples": 3, "doublings": 0}
    expected["accuracy"] = 1 / 3  # a tie is an error
    assert head.statistics() == pytest.approx(expected)
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


# ---- the forms of the loss


FORMS = [{"impl": "streaming"}, {"impl": "top_k", "top_k": 3}, {"impl": "auto"}]
FORMS += [{"impl": "streaming", "sparse_grad": True}, {"impl": "streaming", "alpha": 1}]
FORMS += [{"impl": "top_k", "sparse_grad": True}, {"impl": "auto", "sparse_grad": True}]


def run(head, method, input, label):
    """Return (loss, both gradients, the other result) of ``forward`` or ``loss``."""
    input = input.clone().requires_grad_()
    result = getattr(head, method)(input, label)
    loss, other = result if method == "loss" else result[::-1]
    grads = torch.autograd.grad(loss, [input, head.weight])
    return loss.detach(), [grad.to_dense() for grad in grads], other


@pytest.mark.parametrize("method", ["loss", "forward"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_forms_are_the_dense_one(form, method):
    input, label = batch(num_class=3000, size=16)
    dense = QMarginProduct(16, 3000, **{"alpha": form.get("alpha", 1.5), "impl": "dense"})
    head = QMarginProduct(16, 3000, **form)
    head.load_state_dict(dense.state_dict())
    expected, expected_grads, expected_other = run(dense, method, input, label)
    loss, grads, other = run(head, method, input, label)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads):
        torch.testing.assert_close(grad, expected_grad, atol=1e-6, rtol=1e-5)
    if method == "loss":
        for one, another in zip(other[:3], expected_other[:3]):
            assert torch.equal(one, another)
    else:
        assert not other.requires_grad and not expected_other.requires_grad
        torch.testing.assert_close(other, expected_other)
    found, wanted = head.statistics(), dense.statistics()
    assert {**found, "doublings": 0} == pytest.approx(wanted)
    assert (found["doublings"] > 0) == (form.get("top_k") == 3)


def test_sparse_grad_is_sparse():
    input, label = batch(num_class=3000)
    head = QMarginProduct(16, 3000, sparse_grad=True)
    head.loss(input, label)[0].backward()
    assert head.weight.grad.is_sparse and 0 < head.weight.grad._nnz() < 3000


def test_mixed_precision_products_are_of_the_autocast_dtype(monkeypatch):
    seen = []
    import wespeaker_qmargin.head as module

    original = module.sparse_q_margin

    def spy(*args, compute_dtype, **options):
        seen.append(compute_dtype)
        return original(*args, compute_dtype=compute_dtype, **options)

    monkeypatch.setattr(module, "sparse_q_margin", spy)
    input, label = batch(num_class=300)
    losses = []
    for mixed_precision in (False, True):
        torch.manual_seed(0)
        head = QMarginProduct(16, 300, impl="streaming", mixed_precision=mixed_precision)
        for enabled in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                losses.append(head.loss(input, label)[0].item())
    assert seen == [None, None, None, torch.bfloat16]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-6)


# ---- which form is chosen


@pytest.mark.parametrize("num_class", [500, 5994])
@pytest.mark.parametrize("alpha, scale", [(1.25, 20), (1.5, 10), (2, 5)])
def test_expected_support(num_class, alpha, scale):
    torch.manual_seed(0)
    head = QMarginProduct(64, num_class, alpha=alpha, margin=0.0, impl="dense")
    with torch.no_grad():
        head.weight.normal_()
        head.loss(torch.randn(64, 64), torch.randint(num_class, (64,)))
    found = choice.expected_support(num_class=num_class, dim=64, alpha=alpha, scale=scale)
    assert found == pytest.approx(head.statistics()["support"], rel=0.3)


def test_the_rule_on_a_cpu():
    def chosen(num_class, alpha):
        head = QMarginProduct(192, num_class, alpha=alpha)
        return head._impl(torch.zeros(2, 192), torch.zeros(2, dtype=torch.long))

    assert [chosen(1211, a) for a in (1, 1.25, 1.5, 2)] == ["dense"] * 4
    assert [chosen(5994, a) for a in (1, 1.25, 1.5, 2)] == ["streaming", "dense"] + [
        "streaming"
    ] * 2
    assert chosen(17982, 1.25) == "streaming" and chosen(17982, 1.1) == "dense"


def test_elsewhere_the_fastest_is_chosen_once(caplog):
    import time

    caplog.set_level("INFO", logger="wespeaker_qmargin")
    cost = {"dense": 0.02, "streaming": 0.002, "top_k": 0.01}

    def trial(impl):
        if impl == "top_k":
            raise torch.OutOfMemoryError("too large")
        time.sleep(cost[impl])

    size = {"rows": 4, "num_class": 10, "device": torch.device("cpu")}
    assert choice.fastest(trial, cost, **size) == "streaming"
    assert "top_k does not fit" in caplog.text and "impl streaming for 4 samples" in caplog.text


def test_a_dense_form_that_does_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(choice, "_free_memory", lambda device: 1000.0)
    size = {"rows": 4, "num_class": 10, "device": torch.device("cpu")}
    tried = []
    assert choice.fastest(tried.append, ["dense", "streaming"], **size) == "streaming"
    assert set(tried) == {"streaming"}


def test_trials_leave_no_trace(monkeypatch):
    torch.manual_seed(0)
    head = QMarginProduct(16, 300)
    monkeypatch.setattr(choice, "rule", None)
    input, label = batch(num_class=300)
    input.requires_grad_()
    with torch.no_grad():  # as the first forward of an evaluation may be
        assert head._time_impls(input, label) in ("dense", "streaming", "top_k")
    assert head.weight.grad is None and input.grad is None
    assert head.statistics()["samples"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_on_a_gpu(alpha):
    input, label = batch(num_class=20000, size=64)
    dense = QMarginProduct(16, 20000, alpha=alpha, impl="dense")
    expected, expected_grads, _ = run(dense, "loss", input, label)
    for impl in ("auto", "dense", "streaming"):
        head = QMarginProduct(16, 20000, alpha=alpha, impl=impl)
        head.load_state_dict(dense.state_dict())
        loss, grads, _ = run(head.cuda(), "loss", input.cuda(), label.cuda())
        torch.testing.assert_close(loss.cpu(), expected, atol=1e-5, rtol=1e-5)
        for grad, expected_grad in zip(grads, expected_grads):
            torch.testing.assert_close(grad.cpu(), expected_grad, atol=1e-5, rtol=1e-4)
