"""Error rates against counting, closed forms and replicated trials."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import norm

from wespeaker_qmargin import metrics


def draw(seed, num=60, levels=8, shift=2):
    """Scores on a few levels (so with many ties) and labels of both classes."""
    rng = np.random.default_rng(seed)
    is_target = np.arange(num) < rng.integers(1, num)
    rng.shuffle(is_target)
    return rng.integers(0, levels, num) + shift * is_target, is_target


def counted_roc(scores, is_target):
    """FNR and FPR by counting, as exact fractions, threshold by threshold."""
    thresholds = [*sorted(set(scores.tolist())), float("inf")]
    targets, others = scores[is_target].tolist(), scores[~is_target].tolist()
    fnr = [Fraction(sum(s < t for s in targets), len(targets)) for t in thresholds]
    fpr = [Fraction(sum(s >= t for s in others), len(others)) for t in thresholds]
    return fnr, fpr, thresholds


def counted_eer(scores, is_target):
    fnr, fpr, _ = counted_roc(scores, is_target)
    for (m0, f0), (m1, f1) in pairwise(zip(fnr, fpr)):
        if m0 <= f0 and m1 >= f1:
            # m0 + t (m1 - m0) = f0 + t (f1 - f0)
            return m0 + (f0 - m0) / ((m1 - m0) - (f1 - f0)) * (m1 - m0)
    raise AssertionError("no crossing")


@pytest.mark.parametrize("seed", range(20))
def test_rates_equal_counting(seed):
    scores, is_target = draw(seed)
    fnr, fpr, thresholds = counted_roc(scores, is_target)
    curve = metrics.roc(scores, is_target)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    np.testing.assert_array_equal(curve.fnr, [float(x) for x in fnr])
    np.testing.assert_array_equal(curve.fpr, [float(x) for x in fpr])
    expected = float(counted_eer(scores, is_target))
    assert metrics.eer(scores, is_target) == pytest.approx(expected, abs=1e-15)
    for t in (-1.0, 0.0, 2.5, 3.0, 99.0):
        expected = (scores[is_target] < t).mean(), (scores[~is_target] >= t).mean()
        assert curve.at(t) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("seed", range(10))
def test_order_scale_and_swap_change_nothing(seed):
    scores, is_target = draw(seed)
    mixed = np.random.default_rng(seed).permutation(len(scores))
    for rate in (metrics.eer, metrics.min_dcf, lambda s, t: metrics.fnr_at_fpr(s, t, 0.1)):
        value = rate(scores, is_target)
        assert rate(scores[mixed], is_target[mixed]) == value
        assert rate(np.exp(0.3 * scores), is_target.astype(int)) == value
    swapped = metrics.eer(-scores, ~is_target)
    assert swapped == pytest.approx(metrics.eer(scores, is_target), abs=1e-15)


@pytest.mark.parametrize("distance", [1.0, 2.0, 4.0])
def test_gaussian_classes_have_closed_forms(distance):
    grid = norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    scores = np.concatenate([grid + distance, grid])
    is_target = np.repeat([True, False], len(grid))
    assert metrics.eer(scores, is_target) == pytest.approx(norm.cdf(-distance / 2), abs=1e-5)
    for p, miss, fa in ((0.01, 1.0, 1.0), (0.3, 2.0, 5.0)):
        best = distance / 2 + np.log(fa * (1 - p) / (miss * p)) / distance
        cost = miss * p * norm.cdf(best - distance) + fa * (1 - p) * norm.sf(best)
        value = metrics.min_dcf(scores, is_target, p_target=p, c_miss=miss, c_fa=fa)
        # half a step of the grid is an FPR of 2.5e-6, and costs 99 times as much at p = 0.01
        assert value == pytest.approx(cost / min(miss * p, fa * (1 - p)), abs=2.6e-4)
    for fpr in (1e-3, 1e-2):
        expected = norm.cdf(norm.isf(fpr) - distance)
        assert metrics.fnr_at_fpr(scores, is_target, fpr) == pytest.approx(expected, abs=2e-4)


def test_extremes(caplog):
    is_target = np.array([True, True, False, False, False])
    assert metrics.eer(np.full(5, 0.3), is_target) == 0.5
    assert metrics.eer([3, 4, 0, 1, 2], is_target) == 0
    assert metrics.min_dcf([3, 4, 0, 1, 2], is_target) == 0
    assert metrics.min_dcf(np.full(5, 0.3), is_target) == 1
    assert not caplog.records
    assert metrics.eer([0, 1, 2, 3, 4], is_target) == 1
    assert "look inverted" in caplog.text
    assert metrics.min_dcf([0, 1, 2, 3, 4], is_target) == 1


@pytest.mark.parametrize("order", ["targets first", "targets last", "shuffled"])
@pytest.mark.parametrize("num_target", [1, 7, 19])
def test_equal_scores_are_a_coin_in_every_order(order, num_target):
    is_target = np.arange(20) < num_target
    if order == "targets last":
        is_target = is_target[::-1]
    elif order == "shuffled":
        is_target = np.random.default_rng(num_target).permutation(is_target)
    scores = np.full(20, 0.1) * 3
    assert metrics.eer(scores, is_target) == 0.5
    assert metrics.min_dcf(scores, is_target) == 1
    assert metrics.fnr_at_fpr(scores, is_target, 0.5) == 1


def test_five_decimals_cost_no_more_than_their_ties():
    rng = np.random.default_rng(0)
    is_target = rng.random(4000) < 0.3
    exact = 0.2 + 1e-4 * rng.standard_normal(4000) + 1e-4 * is_target  # some 60 values remain
    rounded = np.array([float(f"{x:.5f}") for x in exact])
    assert len(set(rounded)) < 100
    assert metrics.eer(rounded, is_target) == pytest.approx(
        float(counted_eer(rounded, is_target)), abs=1e-15
    )
    assert metrics.eer(rounded, is_target) == pytest.approx(metrics.eer(exact, is_target), abs=0.01)
    values = set()
    for seed in range(5):
        mixed = np.random.default_rng(seed).permutation(4000)
        part = rounded[mixed], is_target[mixed]
        values.add((metrics.eer(*part), metrics.min_dcf(*part)))
    assert len(values) == 1


@pytest.mark.parametrize("seed", range(5))
def test_act_dcf_is_the_cost_at_the_threshold_of_bayes(seed):
    scores, is_target = draw(seed, num=200)
    llr = scores - 5.0
    for p, miss, fa in ((0.01, 1, 1), (0.5, 1, 1), (0.5, 3, 1), (0.2, 1, 30)):
        costs = {"p_target": p, "c_miss": miss, "c_fa": fa}
        # accept where the expected cost of accepting is no more than that of rejecting
        accept = miss * p * np.exp(llr) >= fa * (1 - p)
        cost = miss * p * np.mean(~accept[is_target]) + fa * (1 - p) * np.mean(accept[~is_target])
        value = metrics.act_dcf(llr, is_target, **costs)
        assert value == pytest.approx(cost / min(miss * p, fa * (1 - p)), abs=1e-12)
        assert value >= metrics.min_dcf(llr, is_target, **costs) - 1e-15
    assert metrics.act_dcf([9.0, 9.0], [True, False]) == pytest.approx(99)  # worse than nothing


@pytest.mark.parametrize("seed", range(10))
def test_min_dcf_is_the_least_cost(seed):
    scores, is_target = draw(seed, shift=4)
    fnr, fpr, _ = counted_roc(scores, is_target)
    for p, miss, fa in ((0.01, 1, 1), (0.5, 1, 1), (0.5, 3, 1), (0.5, 1, 3)):
        cost = min(miss * p * m + fa * (1 - p) * f for m, f in zip(fnr, fpr))
        value = metrics.min_dcf(scores, is_target, p_target=p, c_miss=miss, c_fa=fa)
        assert value == pytest.approx(float(cost / min(miss * p, fa * (1 - p))), abs=1e-12)


def test_fnr_at_fpr_is_a_real_threshold(caplog):
    # ten non-targets 0..9; targets 0.5, 6.5, 7.5, 8.5
    scores = np.array([0.5, 6.5, 7.5, 8.5, *range(10)])
    is_target = np.arange(14) < 4
    assert metrics.fnr_at_fpr(scores, is_target, 0.3) == 0.25  # threshold 6.5 accepts 7, 8, 9
    assert metrics.fnr_at_fpr(scores, is_target, 0.29) == 0.5
    assert metrics.fnr_at_fpr(scores, is_target, 0.1) == 0.75
    assert not caplog.records
    assert metrics.fnr_at_fpr(scores, is_target, 0.01) == 1.0  # not even one of ten
    assert "less than one" in caplog.text


@pytest.mark.parametrize("allowed", [1, 3, 7, 29])
def test_fnr_at_fpr_counts_exactly(allowed):
    scores = np.append(np.arange(1000.0), 1000.0 - allowed)
    is_target = np.append(np.zeros(1000, bool), True)
    assert metrics.fnr_at_fpr(scores, is_target, allowed / 1000) == 0
    assert metrics.fnr_at_fpr(scores, is_target, (allowed - 0.5) / 1000) == 1


@pytest.mark.parametrize("seed", range(10))
def test_eer_threshold_is_the_nearest_point(seed):
    curve = metrics.roc(*draw(seed))
    chosen = np.subtract(*curve.at(curve.eer_threshold()))
    assert np.isfinite(curve.eer_threshold())
    assert abs(chosen) == np.abs(curve.fnr - curve.fpr).min()
    assert np.isfinite(metrics.roc([1, 1], [True, False]).eer_threshold())


def test_upstream_eer_is_that_of_single_trials():
    scores, is_target = draw(3, num=200, levels=1000, shift=300)
    scores = scores + np.random.default_rng(0).random(200)  # no ties
    assert metrics.eer_upstream(scores, is_target) == pytest.approx(metrics.eer(scores, is_target))
    tied, labels = np.zeros(4), np.array([True, False, True, False])
    by_hand = {  # after each trial: (FNR, FPR)
        (0, 1, 2, 3): 0.5,  # (.5, 1) (.5, .5)
        (0, 2, 1, 3): 1.0,  # (.5, 1) (1, 1)
        (1, 3, 0, 2): 0.0,  # (0, .5) (0, 0)
    }
    for order, expected in by_hand.items():
        assert metrics.eer_upstream(tied, labels[list(order)]) == expected
    assert metrics.eer_upstream([0.0, 1.0], [False, True]) is None


@pytest.mark.parametrize(
    "scores, is_target, words",
    [
        ([], [], "0 target and 0 non-target"),
        ([1, 2, 3], [True] * 3, "3 target and 0 non-target"),
        ([1, 2], [False] * 2, "0 target and 2 non-target"),
        ([1, np.nan, 2], [True, False, True], "1 scores are not finite"),
        ([1, 2, np.inf], [True, False, True], "inf, at 2"),
        ([1, 2, 3], [True, False], r"\(3,\), \(2,\)"),
        ([1, 2], [0, 2], "only True and False"),
    ],
)
def test_bad_trials_are_refused(scores, is_target, words):
    calls = [metrics.roc, metrics.eer, metrics.min_dcf, metrics.eer_upstream, metrics.act_dcf]
    for rate in [*calls, lambda s, t: metrics.fnr_at_fpr(s, t, 0.1)]:
        with pytest.raises(ValueError, match=words) as caught:
            rate(np.array(scores, dtype=float), np.array(is_target))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("p, miss, fa", [(0, 1, 1), (1, 1, 1), (0.1, 0, 1), (0.1, 1, np.inf)])
def test_bad_costs_are_refused(p, miss, fa):
    for cost in (metrics.min_dcf, metrics.act_dcf):
        with pytest.raises(ValueError, match="must"):
            cost([1, 2], [False, True], p_target=p, c_miss=miss, c_fa=fa)


@pytest.mark.parametrize("fpr", [0, 1, -0.1, np.nan])
def test_bad_fpr_is_refused(fpr):
    with pytest.raises(ValueError, match="between 0 and 1"):
        metrics.fnr_at_fpr([1, 2], [False, True], fpr)


def speaker_trials(num_speaker=12, num=150, seed=0, digits=1):
    rng = np.random.default_rng(seed)
    enroll = rng.integers(0, num_speaker, num)
    same = rng.random(num) < 0.4
    test = np.where(same, enroll, (enroll + rng.integers(1, num_speaker, num)) % num_speaker)
    easy = rng.standard_normal(num_speaker)
    scores = (rng.standard_normal(num) + 2 * same + easy[enroll]).round(digits)
    return scores, same, [f"s{i:02d}" for i in enroll], [f"s{i:02d}" for i in test]


def statistics(curve):
    return curve.eer(), curve.min_dcf(p_target=0.2), curve.fnr_at_fpr(0.1), *curve.at(1.0)


def test_bootstrap_equals_repeating_the_trials():
    scores, is_target, enroll, test = speaker_trials()
    names = sorted({*enroll, *test})
    values = []
    drawn = np.random.default_rng(5).multinomial(len(names), [1 / len(names)] * len(names), 50)
    for counts in drawn:
        times = dict(zip(names, counts))
        weight = [times[a] if a == b else times[a] * times[b] for a, b in zip(enroll, test)]
        repeated = np.repeat(scores, weight), np.repeat(is_target, weight)
        values.append(statistics(metrics.roc(*repeated)))
    got = metrics.bootstrap(scores, is_target, enroll, test, statistics, replicates=50, seed=5)
    np.testing.assert_allclose(got, np.percentile(values, [2.5, 97.5], axis=0).T, atol=1e-14)


def test_bootstrap_depends_on_seed_and_replicates_not_on_order():
    scores, is_target, enroll, test = speaker_trials()
    first = metrics.bootstrap(scores, is_target, enroll, test, statistics, replicates=60)
    mixed = np.random.default_rng(1).permutation(len(scores))
    sides = [[side[i] for i in mixed] for side in (enroll, test)]
    again = metrics.bootstrap(scores[mixed], is_target[mixed], *sides, statistics, replicates=60)
    np.testing.assert_array_equal(first, again)
    for other in ({"seed": 1, "replicates": 60}, {"replicates": 61}):
        changed = metrics.bootstrap(scores, is_target, enroll, test, statistics, **other)
        assert not np.array_equal(first, changed)


def test_interval_covers_the_truth_and_narrows():
    widths = []
    for num_speaker in (20, 80):
        values = speaker_trials(num_speaker, 200 * num_speaker, digits=9)
        low, high = metrics.bootstrap(*values, lambda x: [x.eer()], replicates=200)[0]
        # target and non-target scores are N(2, 2) and N(0, 2)
        assert low < norm.cdf(-1 / np.sqrt(2)) < high
        widths.append(high - low)
    assert widths[1] < widths[0]


def test_bootstrap_refuses_what_it_cannot_resample():
    scores, is_target, enroll, test = speaker_trials(num_speaker=9)
    with pytest.raises(metrics.TooFewSpeakers, match="9 speakers are too few"):
        metrics.bootstrap(scores, is_target, enroll, test, statistics)
    scores, is_target, enroll, test = speaker_trials()
    with pytest.raises(
        ValueError, match=r"1 trials' labels contradict.* s0. against s.."
    ) as caught:
        wrong = is_target.copy()
        wrong[7] = not wrong[7]
        metrics.bootstrap(scores, wrong, enroll, test, statistics)
    assert not isinstance(caught.value, metrics.TooFewSpeakers)
    only = np.flatnonzero(~is_target | (np.array(enroll) == "s00"))
    sides = [[side[i] for i in only] for side in (enroll, test)]
    with pytest.raises(metrics.TooFewSpeakers, match="replicates drew no target"):
        metrics.bootstrap(scores[only], is_target[only], *sides, statistics, replicates=100)
