"""functional.py against 60-digit reference values, a naive bisection, closed forms and entmax."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from entmax import entmax15_loss, entmax_bisect_loss, sparsemax_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, one_hot

from wespeaker_qmargin import functional
from wespeaker_qmargin.functional import (
    alpha_softargmax,
    q_margin_loss,
    q_margin_per_sample,
    zero_loss_gap,
)

CASES = json.loads((Path(__file__).parent / "reference" / "qmargin_cases.json").read_text())[
    "cases"
]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
ALPHAS = [1.0, 1 + 1e-7, 1 + 1e-4, 1.001, 1.1, 1.25, 4 / 3, 1.5, 1.8, 2.0]


def naive(scores, labels, alpha, log_q_target):
    """(p, loss) in float64 from the definition: bisection on tau, every sum written out."""
    theta, h = scores.double(), alpha - 1
    log_q = one_hot(labels, theta.shape[1]).double() * log_q_target
    if alpha == 1:
        p = (theta + log_q).softmax(1)
        return p, -(theta + log_q).log_softmax(1).gather(1, labels[:, None])[:, 0]

    def mass(tau):
        return (log_q + ((theta - tau) * h).clamp(min=-1).log1p() / h).exp()

    low = (theta - torch.expm1(-h * log_q) / h).amax(1, keepdim=True)
    high = low + min(1 / h, 2 * math.log(theta.shape[1]) + 1) + 1
    for _ in range(70):
        middle = (low + high) / 2
        heavy = mass(middle).sum(1, keepdim=True) >= 1
        low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    p = mass(low)

    def divergence(p):
        u = p / log_q.exp()
        return (log_q.exp() * (u**alpha - 1 - alpha * (u - 1))).sum(1) / (alpha * h)

    target = one_hot(labels, theta.shape[1]).double()
    loss = ((p - target) * theta.nan_to_num(neginf=0)).sum(1) - divergence(p) + divergence(target)
    return p, loss


def problem(rows, num_class, *, scale, seed, dtype=torch.float32, won=False):
    generator = torch.Generator().manual_seed(seed)
    cos = (torch.randn(rows, num_class, generator=generator) * 0.3).clamp(-1, 1)
    labels = torch.randint(num_class, (rows,), generator=generator)
    if won:
        cos[torch.arange(rows), labels] = 0.95
    return (scale * cos).to(dtype).requires_grad_(), labels


def loss_and_grad(scores, labels, **options):
    scores = scores.detach().requires_grad_()
    loss = q_margin_loss(scores, labels, reduction="none", **options)
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    return loss.detach(), grad


def assert_close(found, expected, tolerance, name=""):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    error = (found.detach().double() - expected).abs() / expected.abs().clamp(min=1)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= tolerance, f"{name}: {worst:.2e} at {error.argmax().item()}"


# ---- values


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_reference_case(case, dtype):
    cos = torch.tensor(case["cos"], dtype=torch.float64)
    scores = (cos * case["scale"]).to(dtype)[None].requires_grad_()
    labels = torch.tensor([case["label"]])
    log_q = -case["scale"] * case["margin"]
    loss, support, _ = q_margin_per_sample(scores, labels, alpha=case["alpha"], log_q_target=log_q)
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    p = alpha_softargmax(
        scores, alpha=case["alpha"], log_q=one_hot(labels, len(cos)).to(dtype) * log_q
    )
    assert loss.dtype == p.dtype == dtype
    for name, found in (("loss", loss[0]), ("p", p[0]), ("grad_scores", grad[0])):
        assert_close(found, case[name], TOLERANCE[dtype], name)
    assert support.item() == case["support"]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_the_naive_definition(alpha, dtype):
    # the sizes straddle the blocks of columns that the solver looks at first
    sizes = (1, 2, 31, 32, 33, 64, 100, 700)
    settings_ = itertools.product(sizes, ((5, 0.0), (10, 0.2), (32, 0.1), (2, 0.9)), (False, True))
    for seed, (num_class, (scale, margin), won) in enumerate(settings_):
        scores, labels = problem(8, num_class, scale=scale, seed=seed, dtype=dtype, won=won)
        log_q = -scale * margin
        p, loss = naive(scores.detach(), labels, alpha, log_q)
        found, support, active = q_margin_per_sample(
            scores, labels, alpha=alpha, log_q_target=log_q
        )
        (grad,) = torch.autograd.grad(found.sum(), scores)
        # the definition divides by alpha - 1 twice what cancels: it is itself off near 1
        noise = 1e-15 * num_class / (alpha - 1) if alpha > 1 else 0
        assert_close(found, loss, TOLERANCE[dtype] + noise, f"loss of C {num_class}, s {scale}")
        assert_close(grad, p - one_hot(labels, num_class), TOLERANCE[dtype], f"C {num_class}")
        assert (found >= 0).all()
        sure = (p > 1e-4).sum(1)
        assert (support >= sure).all() and (support <= (p > 0).sum(1) + 1).all()
        assert active[(1 - p.gather(1, labels[:, None]))[:, 0] > 1e-4].all()


def test_alpha_to_one_is_cosface():
    scores, labels = problem(16, 50, scale=32, seed=1, dtype=torch.float64)
    expected, expected_grad = loss_and_grad(scores, labels, alpha=1, log_q_target=-6.4)
    shifted = scores.detach() - 6.4 * one_hot(labels, 50).double()
    assert_close(expected, cross_entropy(shifted, labels, reduction="none"), 1e-12)
    for h in (1e-3, 1e-4, 1e-5, 1e-7):
        loss, grad = loss_and_grad(scores, labels, alpha=1 + h, log_q_target=-6.4)
        assert_close(loss, expected, 1000 * h)  # O(h scores^2)
        assert_close(grad, expected_grad, 1000 * h)
        single, single_grad = loss_and_grad(scores.float(), labels, alpha=1 + h, log_q_target=-6.4)
        assert_close(single, loss, 1e-5)
        assert_close(single_grad, grad, 1e-5)


def test_sparsemax_of_two_classes_in_closed_form():
    lead = torch.linspace(-3, 3, 25, dtype=torch.float64)
    scores = torch.stack([lead, torch.zeros_like(lead)], 1)
    p = alpha_softargmax(scores, alpha=2)
    assert_close(p[:, 0], ((1 + lead) / 2).clamp(0, 1), 1e-14)
    loss = q_margin_loss(scores, torch.zeros(25, dtype=torch.long), alpha=2, reduction="none")
    hinge = torch.where(lead.abs() < 1, (1 - lead) ** 2 / 4, (-lead).clamp(min=0))
    assert_close(loss, hinge, 1e-14)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.7, 2.0])
@pytest.mark.parametrize("margin", [0.0, 0.1, 0.2])
def test_zero_loss_exactly_beyond_the_gap(alpha, margin):
    scale = 5 / (alpha - 1)
    gap = zero_loss_gap(alpha=alpha, scale=scale, margin=margin)
    assert gap == pytest.approx(math.exp(5 * margin) / 5)
    rival = torch.tensor([0.9 - gap - 1e-3, 0.9 - gap + 1e-3])
    scores = scale * torch.stack([torch.full((2,), 0.9), rival, torch.full((2,), -0.8)], 1)
    options = {"alpha": alpha, "log_q_target": -scale * margin}
    labels = torch.zeros(2, dtype=torch.long)
    loss, grad = loss_and_grad(scores.float(), labels, **options)
    assert loss[0] == 0 and (grad[0] == 0).all()
    assert grad[1, 0] < 0 < grad[1, 1] and grad[1, 2] == 0
    assert (
        loss_and_grad(scores.double(), labels, **options)[0][1] > 0
    )  # 1e-3 to the power alpha / h
    _, support, active = q_margin_per_sample(scores, labels, **options)
    assert support.tolist() == [1, 2] and active.tolist() == [False, True]


def test_zero_loss_gap_limits():
    assert zero_loss_gap(alpha=1, scale=32, margin=0.2) == math.inf
    assert zero_loss_gap(alpha=2, scale=1e4, margin=1.0) == math.inf
    assert zero_loss_gap(alpha=1.5, scale=10, margin=0.2) == pytest.approx(0.5436564)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.9, 2.0])
def test_entmax_is_the_case_without_margin(alpha):
    scores, labels = problem(32, 300, scale=6, seed=3, dtype=torch.float64)
    oracle = {1.5: entmax15_loss, 2.0: sparsemax_loss}.get(alpha)
    expected = oracle(scores, labels) if oracle else entmax_bisect_loss(scores, labels, alpha)
    (expected_grad,) = torch.autograd.grad(expected.sum(), scores)
    loss, grad = loss_and_grad(scores, labels, alpha=alpha)
    assert_close(loss, expected, 1e-9)
    assert_close(grad, expected_grad, 1e-9)


# ---- properties of the loss


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_against_finite_differences(alpha):
    scores, labels = problem(5, 6, scale=3, seed=4, dtype=torch.float64)
    log_q = torch.linspace(-1, 0.5, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: alpha_softargmax(x, alpha=alpha), scores)
    assert torch.autograd.gradcheck(
        lambda x, q: alpha_softargmax(x, alpha=alpha, log_q=q), (scores, log_q)
    )
    for reduction in ("mean", "sum", "none"):
        assert torch.autograd.gradcheck(
            lambda x, r=reduction: q_margin_loss(
                x, labels, alpha=alpha, log_q_target=-0.6, reduction=r
            ),
            scores,
        )


@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.6, 2.0])
@pytest.mark.parametrize("num_class", [7, 200])
def test_a_score_of_minus_infinity_removes_its_class(alpha, num_class):
    scores, labels = problem(8, num_class, scale=8, seed=5, dtype=torch.float64)
    labels = labels % (num_class - 3)
    cut = scores.detach().clone()
    cut[:, num_class - 3 :] = -math.inf
    options = {"alpha": alpha, "log_q_target": -1.6}
    loss, grad = loss_and_grad(cut, labels, **options)
    kept, kept_grad = loss_and_grad(cut[:, : num_class - 3], labels, **options)
    assert_close(loss, kept, 1e-12)
    assert_close(grad[:, : num_class - 3], kept_grad, 1e-12)
    assert (grad[:, num_class - 3 :] == 0).all()
    p = alpha_softargmax(cut, alpha=alpha)
    assert_close(p[:, :-3], alpha_softargmax(cut[:, :-3], alpha=alpha), 1e-12)
    support = q_margin_per_sample(cut, labels, **options)[1]
    assert torch.equal(support, q_margin_per_sample(cut[:, :-3], labels, **options)[1])


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.5, 2.0])
@pytest.mark.parametrize("num_class", [3, 33, 100])
def test_a_bad_row_harms_only_itself(alpha, num_class):
    bad_values = (math.nan, math.inf, -math.inf)
    scores, labels = problem(40, num_class, scale=10, seed=6)
    options = {"alpha": alpha, "log_q_target": -2.0}
    good, good_grad = loss_and_grad(scores, labels, **options)
    near_label = {
        int(labels[3]),
        max(int(labels[3]) - 1, 0),
        num_class - 1,
        *range(0, num_class, 9),
    }
    for value, column in itertools.product(bad_values, near_label):
        broken = scores.detach().clone()
        broken[3, column] = value
        loss, grad = loss_and_grad(broken, labels, **options)
        others = torch.arange(40) != 3
        assert_close(loss[others], good[others], 1e-6)
        assert_close(grad[others], good_grad[others], 1e-6)
        is_bad = value != -math.inf or column == labels[3]
        assert loss[3].isnan() == is_bad and grad[3].isnan().all() == is_bad
        assert grad[3].isnan().any() == is_bad
        p = alpha_softargmax(broken, alpha=alpha)
        assert p[3].isnan().all() == (value != -math.inf) and p[others].isfinite().all()
        _, support, active = q_margin_per_sample(broken, labels, **options)
        assert (support[3] == 0) == is_bad and (not is_bad or not active[3])
    removed = torch.full((2, num_class), -math.inf)
    assert alpha_softargmax(removed, alpha=alpha).isnan().all()
    assert loss_and_grad(removed, labels[:2], **options)[0].isnan().all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_extreme_scores(alpha):
    scores, labels = problem(16, 60, scale=1, seed=7)
    scores = scores.detach().sign() * 1e4 + (torch.arange(60) % 3) * 0.5
    # with a margin the target's score takes one rounding, as CosFace's does: half of 1e-3 at 1e4
    for dtype, log_q, tolerance in (
        (torch.float64, -2.0, 1e-9),
        (torch.float32, 0.0, 1e-5),
        (torch.float32, -2.0, 5e-4),
    ):
        p, _ = naive(scores, labels, alpha, log_q)
        options = {"alpha": alpha, "log_q_target": log_q}
        loss, grad = loss_and_grad(scores.to(dtype), labels, **options)
        assert_close(grad, p - one_hot(labels, 60), tolerance)
        near, near_grad = loss_and_grad(scores.to(dtype) - 1e4, labels, **options)
        assert_close(loss, near, tolerance)
        assert_close(grad, near_grad, tolerance)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ties(alpha):
    for num_class in (2, 5, 5000):
        p = alpha_softargmax(torch.full((3, num_class), 0.25), alpha=alpha)
        assert_close(p * num_class, torch.ones(3, num_class), 1e-5)
        scores = torch.zeros(2, num_class)
        expected = naive(scores, torch.tensor([0, 1]), alpha, -1.0)[0][0]
        _, grad = loss_and_grad(scores, torch.tensor([0, 1]), alpha=alpha, log_q_target=-1.0)
        assert_close(grad[0], expected - one_hot(torch.tensor(0), num_class), 1e-6)
        assert_close(grad[1], grad[0].roll(1).double(), 1e-7)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 2.0])
def test_one_class_and_no_sample(alpha):
    one = torch.tensor([[3.0], [-7.0]])
    loss, grad = loss_and_grad(one, torch.tensor([0, 0]), alpha=alpha, log_q_target=-5.0)
    assert (loss == 0).all() and (grad == 0).all()
    none, none_grad = loss_and_grad(
        torch.zeros(0, 70), torch.zeros(0, dtype=torch.long), alpha=alpha
    )
    assert none.shape == (0,) and none_grad.shape == (0, 70)


def test_the_solver_ends_on_scores_that_peel_off_one_by_one():
    # each class falls out of the sparsemax support only after all below it have
    scores = torch.tensor([[1 - 0.7**k for k in range(90)]], dtype=torch.float64)
    labels = torch.tensor([0])
    for alpha in (1.5, 2.0):
        p, _ = naive(scores, labels, alpha, -0.5)
        _, grad = loss_and_grad(scores, labels, alpha=alpha, log_q_target=-0.5)
        assert_close(grad, p - one_hot(labels, 90), 1e-10)


@given(
    data=st.data(),
    alpha=st.floats(1, 2),
    log_q=st.floats(-8, 0),
    values=st.lists(
        st.one_of(st.floats(-40, 40, width=32), st.just(-math.inf)), min_size=1, max_size=80
    ),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_row(data, alpha, log_q, values):
    label = data.draw(st.integers(0, len(values) - 1))
    if values[label] == -math.inf:
        values[label] = 0.0
    scores = torch.tensor([values], dtype=torch.float64)
    labels = torch.tensor([label])
    p, _ = naive(scores, labels, alpha, log_q)
    loss, grad = loss_and_grad(scores, labels, alpha=alpha, log_q_target=log_q)
    assert_close(grad, p - one_hot(labels, len(values)), 1e-9)
    assert loss.item() >= 0 and loss.isfinite().all()
    single, single_grad = loss_and_grad(scores.float(), labels, alpha=alpha, log_q_target=log_q)
    assert_close(single, loss, 2e-5)
    assert_close(single_grad, grad, 2e-5)


# ---- the interface


def test_reduction_and_a_margin_for_each_sample():
    scores, labels = problem(6, 40, scale=10, seed=8)
    log_q = torch.tensor([-2.0, -1.0, 0.0, -3.0, -0.5, -2.0])
    for alpha in (1.0, 1.5, 1.7):
        rows = torch.stack(
            [
                q_margin_loss(scores[i : i + 1], labels[i : i + 1], alpha=alpha, log_q_target=q)
                for i, q in enumerate(log_q.tolist())
            ]
        )
        options = {"alpha": alpha, "log_q_target": log_q}
        assert_close(q_margin_loss(scores, labels, reduction="none", **options), rows, 1e-6)
        assert_close(q_margin_loss(scores, labels, reduction="sum", **options), rows.sum(), 1e-6)
        assert_close(q_margin_loss(scores, labels, **options), rows.mean(), 1e-6)
        scalar = q_margin_loss(scores, labels, alpha=alpha, log_q_target=torch.tensor(-2.0))
        number = q_margin_loss(scores, labels, alpha=alpha, log_q_target=-2.0)
        assert_close(scalar, number.double(), 1e-6)
        assert not torch.isclose(number, q_margin_loss(scores, labels, alpha=alpha))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 1.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_computed_in_float32(alpha, dtype):
    scores, labels = problem(8, 500, scale=10, seed=9, dtype=dtype)
    options = {"alpha": alpha, "log_q_target": -2.0}
    expected, expected_grad = loss_and_grad(scores.float(), labels, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, grad = loss_and_grad(scores, labels, **options)
        under, under_grad = loss_and_grad(scores.float(), labels, **options)
        p = alpha_softargmax(scores, alpha=alpha)
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    assert torch.equal(under, expected) and torch.equal(under_grad, expected_grad)
    assert grad.dtype == p.dtype == dtype and torch.equal(grad, expected_grad.to(dtype))
    assert torch.equal(p, alpha_softargmax(scores.float(), alpha=alpha).to(dtype))


def test_leading_dimensions_and_strides():
    scores, labels = problem(6, 40, scale=10, seed=10)
    p = alpha_softargmax(scores, alpha=1.5)
    assert torch.equal(alpha_softargmax(scores.view(2, 3, 40), alpha=1.5), p.view(2, 3, 40))
    assert torch.equal(alpha_softargmax(scores[0], alpha=1.5), p[0])
    options = {"alpha": 1.5, "log_q_target": -2.0}
    strided = scores.detach().t().contiguous().t()
    assert not strided.is_contiguous()
    for found, expected in zip(
        loss_and_grad(strided, labels.int(), **options), loss_and_grad(scores, labels, **options)
    ):
        assert torch.equal(found, expected)


def test_memory_kept_for_backward_is_the_support():
    scores, labels = problem(64, 2000, scale=10, seed=11)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _, support, _ = q_margin_per_sample(scores, labels, alpha=1.5, log_q_target=-2.0)
    size = sum(x.untyped_storage().nbytes() for x in kept)
    assert size < 64 * 40 + 20 * support.sum().item() < scores.numel()  # bytes


def test_second_derivative_is_refused():
    scores, labels = problem(4, 9, scale=5, seed=12)
    for value in (
        q_margin_loss(scores, labels, alpha=1.5),
        alpha_softargmax(scores, alpha=2)[0, 0],
    ):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(value, scores, create_graph=True)


@pytest.mark.parametrize("alpha", [0.999, 2.001, 0, -1, math.nan, math.inf])
def test_alpha_outside_its_range(alpha):
    scores, labels = problem(2, 3, scale=5, seed=13)
    for call in (
        lambda: q_margin_loss(scores, labels, alpha=alpha),
        lambda: alpha_softargmax(scores, alpha=alpha),
        lambda: zero_loss_gap(alpha=alpha, scale=10, margin=0.2),
    ):
        with pytest.raises(ValueError, match=r"alpha must be in \[1, 2\]"):
            call()


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_bad_arguments(alpha):
    scores, labels = problem(4, 9, scale=5, seed=14)

    def loss(scores=scores, labels=labels, **options):
        return q_margin_loss(scores, labels, alpha=alpha, **options)

    for label in (9, 12, -1):
        with pytest.raises(ValueError, match=rf"label {label} .* C = 9"):
            loss(labels=torch.tensor([0, label, 2, 3]))
    for bad in (labels[:3], labels[:, None], labels.float(), labels > 2):
        with pytest.raises(ValueError, match="integer labels"):
            loss(labels=bad)
    for bad in (scores[0], scores[None]):
        with pytest.raises(ValueError, match=r"scores \(B, C\)"):
            loss(scores=bad)
    for bad in (labels[:, None], scores[:, :0]):
        with pytest.raises(ValueError, match="floating point"):
            loss(scores=bad)
    with pytest.raises(ValueError, match="reduction"):
        loss(reduction="average")
    for bad in (torch.zeros(3), torch.zeros(4, 1), torch.zeros(4, requires_grad=True)):
        with pytest.raises(ValueError, match="log_q_target"):
            loss(log_q_target=bad)
    for bad in (math.nan, -math.inf, -1e5):
        with pytest.raises(ValueError, match="log_q_target"):
            loss(log_q_target=bad)
    with pytest.raises(ValueError, match="floating point"):
        alpha_softargmax(labels, alpha=alpha)
    for bad in ({"scale": 0}, {"scale": -1}, {"scale": math.inf}, {"margin": math.nan}):
        with pytest.raises(ValueError, match="scale must be > 0 and margin finite"):
            zero_loss_gap(**{"alpha": alpha, "scale": 10, "margin": 0.2} | bad)


def test_few_steps_are_taken(monkeypatch):
    calls = []
    mass = functional._mass
    monkeypatch.setattr(functional, "_mass", lambda *args: calls.append(1) or mass(*args))
    for alpha, won in itertools.product((1.01, 1.25, 1.5, 2.0), (False, True)):
        scores, labels = problem(64, 3000, scale=5 / (alpha - 1), seed=15, won=won)
        calls.clear()
        q_margin_loss(scores, labels, alpha=alpha, log_q_target=-1.0 / (alpha - 1))
        assert len(calls) <= 12, f"alpha {alpha}, won {won}: {len(calls)}"


@pytest.mark.gpu
def test_gpu_equals_cpu():
    scores, labels = problem(64, 3000, scale=10, seed=16)
    for alpha in (1.0, 1.25, 1.4, 1.5, 2.0):
        expected = loss_and_grad(scores, labels, alpha=alpha, log_q_target=-2.0)
        found = loss_and_grad(scores.cuda(), labels.cuda(), alpha=alpha, log_q_target=-2.0)
        for gpu, cpu in zip(found, expected):
            assert_close(gpu.cpu(), cpu, 1e-5)
