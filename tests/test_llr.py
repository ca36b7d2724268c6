"""Calibration and its costs against closed forms, loops and an independent optimiser."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from wespeaker_qmargin.llr import Calibration, cllr, fit_calibration, min_cllr
from wespeaker_qmargin.roc import act_dcf, min_dcf


def gaussian_classes(distance, num=20_000):
    grid = norm.ppf((np.arange(num) + 0.5) / num)
    return np.concatenate([grid + distance, grid]), np.repeat([True, False], num)


def draw(seed=0, num=400, num_feature=3):
    rng = np.random.default_rng(seed)
    is_target = rng.random(num) < 0.2
    features = rng.standard_normal((num, num_feature)) + is_target[:, None]
    return features * [1, 30, 0.01][:num_feature] + 5, is_target


def fit(features, is_target, **options):
    return fit_calibration(features, is_target, names=list("abc")[: features.shape[1]], **options)


@pytest.mark.parametrize("distance", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("p_target", [0.01, 0.5])
def test_gaussian_classes_have_a_closed_form(distance, p_target):
    scores, is_target = gaussian_classes(distance)
    found = fit_calibration(scores[:, None], is_target, p_target=p_target)
    assert found.weights[0] == pytest.approx(distance, rel=2e-3)
    assert found.bias == pytest.approx(-(distance**2) / 2, rel=4e-3)
    llr = found.llr(scores[:, None])
    floor = min_cllr(scores, is_target)
    assert floor <= cllr(llr, is_target) < floor + 6e-4
    assert act_dcf(llr, is_target) < 1.01 * min_dcf(scores, is_target)


@pytest.mark.parametrize("options", [{}, {"p_target": 0.3}, {"l2": 0.1}])
def test_the_fit_is_the_optimum_of_the_stated_loss(options):
    features, is_target = draw()
    found = fit(features, is_target, **options)
    p, l2 = options.get("p_target", 0.01), options.get("l2", 1e-6)
    x = torch.tensor(features, dtype=torch.float64)
    target, other = x[is_target], x[~is_target]
    mean = (target.mean(0) + other.mean(0)) / 2
    spread = (((target - mean) ** 2).mean(0) / 2 + ((other - mean) ** 2).mean(0) / 2).sqrt()
    w = torch.tensor(found.weights, requires_grad=True)
    b = torch.tensor(found.bias, dtype=torch.float64, requires_grad=True)
    o = np.log(p / (1 - p))
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    miss = torch.log1p(torch.exp(-(target @ w + b + o))).mean()
    false = torch.log1p(torch.exp(other @ w + b + o)).mean()
    # w of the standardised features is w * spread
    loss = (p * miss + (1 - p) * false) / entropy + l2 / 2 * ((w * spread) ** 2).sum()
    loss.backward()
    for slope in (w.grad / spread - mean / spread * b.grad, b.grad):
        assert slope.abs().max() < 1e-8


def test_each_option_changes_the_fit():
    features, is_target = draw()
    usual = fit(features, is_target)
    for options in ({"p_target": 0.5}, {"l2": 0.1}):
        assert np.abs(fit(features, is_target, **options).weights / usual.weights - 1).max() > 0.01


def test_order_scale_and_proportions_change_nothing():
    features, is_target = draw()
    usual = fit(features, is_target).llr(features)
    mixed = np.random.default_rng(1).permutation(len(features))
    again = fit(features[mixed], is_target[mixed]).llr(features)
    np.testing.assert_allclose(again, usual, atol=1e-6)
    for scale, shift in ((7.0, -3.0), (1e20, 0.0), (1e-20, 0.0)):
        moved = scale * features + shift
        np.testing.assert_allclose(fit(moved, is_target).llr(moved), usual, atol=1e-6)
    more = np.concatenate([np.flatnonzero(is_target), *3 * [np.flatnonzero(~is_target)]])
    repeated = fit(features[more], is_target[more]).llr(features)
    np.testing.assert_allclose(repeated, usual, atol=1e-6)


def test_separable_scores_stay_finite():
    scores = np.array([[-1.0], [-0.9], [-0.8], [0.9], [1.0]])
    is_target = np.array([False, False, False, True, True])
    found = fit_calibration(scores, is_target)
    llr = found.llr(scores)
    assert np.isfinite(llr).all() and (np.diff(llr) > 0).all() and np.abs(llr).max() < 100
    assert cllr(llr, is_target) < 1e-3
    assert act_dcf(llr, is_target) == min_cllr(llr, is_target) == 0


def test_a_constant_measure_weighs_nothing():
    features, is_target = draw()
    features[:, 1] = 20.0
    found = fit(features, is_target)
    assert abs(found.weights[1]) < 1e-9
    alone = fit(features[:, [0, 2]], is_target).llr(features[:, [0, 2]])
    np.testing.assert_allclose(found.llr(features), alone, atol=1e-6)


def test_inverted_scores_get_a_negative_weight():
    features, is_target = draw(num_feature=1)
    assert fit(-features, is_target).weights[0] == pytest.approx(-fit(features, is_target).weights)


def test_costs_by_hand():
    is_target = np.array([True, True, False])
    llr = np.array([2.0, -1.0, 0.5])
    by_hand = (np.log2(1 + np.exp(-2)) + np.log2(1 + np.exp(1))) / 2 + np.log2(1 + np.exp(0.5))
    assert cllr(llr, is_target) == pytest.approx(by_hand / 2, rel=1e-14)
    assert cllr(np.zeros(3), is_target) == 1
    assert cllr([1e6, 1e6, -1e6], is_target) == 0
    assert cllr([-1e6, 1e6, -1e6], is_target) == pytest.approx(1e6 / 4 / np.log(2))


def test_least_cost_by_hand():
    is_target = np.array([True, True, False, False])
    assert min_cllr([3, 2, 1, 0], is_target) == 0
    assert min_cllr([0, 1, 2, 3], is_target) == pytest.approx(1)  # nothing that rises helps
    assert min_cllr([5, 5, 5, 5], is_target) == pytest.approx(1)
    assert min_cllr([5, 5, 5, 5], [True, False, False, False]) == pytest.approx(1)
    # two levels, after merging 1 and 2 in the second: shares 2/3 and 0, LLRs log(2) and -inf
    for scores in ([1, 1, 1, 0], [1, 1, 2, 0]):
        expected = (np.log2(1.5) + np.log2(3) / 2) / 2
        assert min_cllr(scores, is_target) == pytest.approx(expected, rel=1e-12)
    scores, labels = draw(num_feature=1)
    rising = min_cllr(np.exp(scores[:, 0] - 5).round(1), labels)
    mixed = np.random.default_rng(0).permutation(len(labels))
    shuffled = min_cllr(np.exp(scores[mixed, 0] - 5).round(1), labels[mixed])
    assert shuffled == pytest.approx(rising, rel=1e-12)


@pytest.mark.parametrize(
    "features, is_target, words",
    [
        (np.zeros((0, 1)), [], "score: 0 target and 0 non-target"),
        ([[1.0], [2.0]], [True, True], "score: 2 target and 0 non-target"),
        ([[1.0], [2.0]], [False, False], "score: 0 target and 2 non-target"),
        ([[1.0], [np.nan]], [True, False], "score: 1 scores are not finite"),
        ([[0.3], [0.3], [0.3]], [True, False, False], "all 3 scores are 0.3: they tell no target"),
        ([1.0, 2.0], [True, False], r"expected features \(N, 1\), got shape \(2,\)"),
        ([[1e200], [-1e200]], [True, False], "more than 1e150"),
        ([[1e-200], [-1e-200]], [True, False], "less than 1e-150"),
    ],
)
def test_what_cannot_be_fitted_is_named(features, is_target, words):
    with pytest.raises(ValueError, match=words):
        fit_calibration(np.array(features), np.array(is_target, dtype=bool))


@pytest.mark.parametrize("options", [{"p_target": 0}, {"p_target": 1}, {"l2": 0}, {"l2": np.inf}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="expected 0 < p_target < 1 and l2 > 0"):
        fit(*draw(), **options)


def test_a_map_is_affine():
    found = Calibration(("a", "b"), np.array([2.0, -1.0]), 0.5)
    np.testing.assert_array_equal(found.llr([[1, 1], [0, 3]]), [1.5, -2.5])
