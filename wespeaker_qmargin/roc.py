"""The ROC of scores with labels, the error rates read off it, and intervals by speaker bootstrap.

All rates are fractions. A trial is accepted where ``score >= threshold``; FNR is the share of
target trials that are rejected, FPR the share of non-target trials that are accepted.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

MIN_SPEAKERS = 10
INTERVAL = 0.95


class TooFewSpeakers(ValueError):
    """The trials hold too few speakers for a bootstrap interval; the message says how few."""


class Roc(NamedTuple):
    """Error rates at every distinct threshold, from accept-all to reject-all.

    ``thresholds`` (K + 1,) ascends over the K distinct scores and ends with +inf; ``fnr`` never
    falls (0 to 1), ``fpr`` never rises (1 to 0).
    """

    fnr: np.ndarray
    fpr: np.ndarray
    thresholds: np.ndarray

    def eer(self) -> float:
        """Return where FNR = FPR, on the straight line between the two points around it."""
        return _crossing(self.fnr, self.fpr)

    def eer_threshold(self) -> float:
        """Return the threshold whose FNR and FPR are closest: finite, the lower one of two."""
        difference = self.fnr - self.fpr
        after = int(np.searchsorted(difference, 0.0))
        before = max(after - 1, 0)
        nearest = before if -difference[before] <= difference[after] else after
        return float(self.thresholds[nearest])

    def min_dcf(self, *, p_target: float = 0.01, c_miss: float = 1.0, c_fa: float = 1.0) -> float:
        """Return min over thresholds of ``c_miss p fnr + c_fa (1 - p) fpr``, normalised.

        Divided by ``min(c_miss p, c_fa (1 - p))``, the cost of the better of accept-all and
        reject-all, so in [0, 1].  Reference: NIST SRE 2016 evaluation plan.
        """
        miss, false_accept = _costs(p_target, c_miss, c_fa)
        cost = np.min(miss * self.fnr + false_accept * self.fpr)
        return float(cost / min(miss, false_accept))

    def act_dcf(self, *, p_target: float = 0.01, c_miss: float = 1.0, c_fa: float = 1.0) -> float:
        """Return the normalised cost of ``min_dcf`` at the threshold that Bayes' rule gives.

        ``log(c_fa (1 - p) / (c_miss p))``, for scores that are natural log-likelihood ratios.
        At least ``min_dcf``; above 1 it is worse than accepting all or rejecting all.
        """
        miss, false_accept = _costs(p_target, c_miss, c_fa)
        fnr, fpr = self.at(np.log(false_accept / miss))
        return (miss * fnr + false_accept * fpr) / min(miss, false_accept)

    def fnr_at_fpr(self, fpr: float) -> float:
        """Return the smallest FNR among the thresholds whose FPR is at most ``fpr``.

        No interpolation: the rate that a real threshold reaches. Reject-all always qualifies.
        """
        if not 0 < fpr < 1:
            raise ValueError(f"an FPR must lie between 0 and 1, got {fpr}")
        qualifying = np.searchsorted(self.fpr[::-1], fpr, side="right")
        return float(self.fnr[len(self.fnr) - qualifying])

    def at(self, threshold: float) -> tuple[float, float]:
        """Return (FNR, FPR) at any ``threshold``."""
        point = np.searchsorted(self.thresholds, threshold)
        return float(self.fnr[point]), float(self.fpr[point])


def roc(scores, is_target) -> Roc:
    """Return the ROC of ``scores`` (N,) whose target trials are marked in ``is_target`` (N,) bool.

    Naively ``fnr = mean(scores[is_target] < t)``, ``fpr = mean(scores[~is_target] >= t)`` for each
    threshold t. Depends on the set of trials, never on their order.

    Raises:
        ValueError: no target or no non-target trial (with the counts), a non-finite score.
    """
    scores, is_target = check_trials(scores, is_target)
    order, last, thresholds = _ranking(scores)
    is_target = is_target[order]
    return _weighted_roc(is_target, ~is_target, last, thresholds)


def eer(scores, is_target) -> float:
    """Return the equal error rate: FNR = FPR, linear between the points of ``roc``.

    0 for separated classes, 0.5 where all scores are equal, 1 for reversed ones; above 0.5 a
    warning is logged.  Raises as ``roc``.
    """
    value = roc(scores, is_target).eer()
    warn_if_inverted(value)
    return value


def warn_if_inverted(rate: float, where: str = "") -> None:
    """Log a warning where an EER, a fraction, is above 0.5."""
    if rate > 0.5:
        logger.warning(
            "%sEER %.2f %%: the scores look inverted (targets below others)", where, 100 * rate
        )


def min_dcf(scores, is_target, *, p_target=0.01, c_miss=1.0, c_fa=1.0) -> float:
    """Return the normalised minimum detection cost, see ``Roc.min_dcf``.  Raises as ``roc``."""
    return roc(scores, is_target).min_dcf(p_target=p_target, c_miss=c_miss, c_fa=c_fa)


def act_dcf(llr, is_target, *, p_target=0.01, c_miss=1.0, c_fa=1.0) -> float:
    """Return the cost at Bayes' threshold of log-likelihood ratios, see ``Roc.act_dcf``."""
    return roc(llr, is_target).act_dcf(p_target=p_target, c_miss=c_miss, c_fa=c_fa)


def fnr_at_fpr(scores, is_target, fpr: float) -> float:
    """Return the smallest FNR among thresholds with FPR <= ``fpr``, see ``Roc.fnr_at_fpr``.

    A ``fpr`` below 1 / number of non-target trials allows no false accept: a warning is logged.
    """
    value = roc(scores, is_target).fnr_at_fpr(fpr)
    num_nontarget = int(np.sum(~np.asarray(is_target, dtype=bool)))
    if fpr * num_nontarget < 1:
        logger.warning("FPR %g of %d non-target trials is less than one", fpr, num_nontarget)
    return value


def eer_upstream(scores, is_target) -> float | None:
    """Return the EER as WeSpeaker's ``compute_metrics.py`` computes it, or None where it fails.

    Interpolated like ``eer``, but with a point after each single trial (so tied scores count in
    file order, taken as stable here) and without the accept-all point. Raises as ``roc``.
    """
    scores, is_target = check_trials(scores, is_target)
    is_target = is_target[np.argsort(scores, kind="stable")]
    fnr = np.cumsum(is_target) / np.sum(is_target)
    fpr = 1 - np.cumsum(~is_target) / np.sum(~is_target)
    return _crossing(fnr, fpr) if fnr[0] < fpr[0] else None


def bootstrap(
    scores,
    is_target,
    enroll_speaker: Sequence[str],
    test_speaker: Sequence[str],
    statistics: Callable[[Roc], Sequence[float]],
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> np.ndarray:
    """Return 95 % percentile intervals (K, 2) of the K numbers ``statistics(roc)``.

    Arguments and errors are those of ``replicate``.
    """
    values = replicate(
        *(scores, is_target, enroll_speaker, test_speaker, statistics),
        replicates=replicates,
        seed=seed,
    )
    return interval(values).T


def interval(values) -> np.ndarray:
    """Return the ends (2, ...) of the 95 % percentile interval of replicates (R, ...)."""
    tail = 50 * (1 - INTERVAL)
    return np.percentile(values, [tail, 100 - tail], axis=0)


def replicate(
    scores,
    is_target,
    enroll_speaker: Sequence[str],
    test_speaker: Sequence[str],
    statistics: Callable[[Roc], Sequence[float]],
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> np.ndarray:
    """Return the K numbers ``statistics(roc)`` of each bootstrap replicate, (R, K).

    In each replicate the S speakers are drawn S times with replacement. With n_i the times that
    speaker i came, a target trial of i weighs n_i and a non-target trial of i and j n_i n_j. The
    draws depend on ``seed`` and S alone, so those of two systems on the same trials are paired.

    Raises:
        ValueError: as ``roc``; a label that the speakers contradict.
        TooFewSpeakers: fewer than 10; more than one replicate in 20 without target or non-target
            trials (fewer are left out).
    """
    scores, is_target = check_trials(scores, is_target)
    enroll, test, num_speaker = _speaker_index(enroll_speaker, test_speaker, is_target)
    order, last, thresholds = _ranking(scores)
    enroll, test, is_target = enroll[order], test[order], is_target[order]
    uniform = np.full(num_speaker, 1 / num_speaker)
    values = []
    for times in np.random.default_rng(seed).multinomial(num_speaker, uniform, size=replicates):
        weight = times[enroll]
        target = weight * is_target
        nontarget = (weight - target) * times[test]
        if target.any() and nontarget.any():
            values.append(statistics(_weighted_roc(target, nontarget, last, thresholds)))
    if len(values) < 0.95 * replicates:
        raise TooFewSpeakers(
            f"{replicates - len(values)} of {replicates} bootstrap replicates drew no target or no "
            "non-target trial: too few speakers have them for an interval"
        )
    return np.array(values)


def _costs(p_target: float, c_miss: float, c_fa: float) -> tuple[float, float]:
    """Return the costs of rejecting all targets and of accepting all non-targets."""
    if not 0 < p_target < 1:
        raise ValueError(f"p_target must lie between 0 and 1, got {p_target}")
    if not (0 < c_miss < np.inf and 0 < c_fa < np.inf):
        raise ValueError(f"c_miss and c_fa must be positive, got {c_miss} and {c_fa}")
    return c_miss * p_target, c_fa * (1 - p_target)


def check_trials(scores, is_target) -> tuple[np.ndarray, np.ndarray]:
    """Return ``scores`` as float64 (N,) and ``is_target`` as bool (N,), or raise as ``roc``."""
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(is_target)
    if scores.ndim != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"expected scores and labels of one length, got shapes {scores.shape}, {labels.shape}"
        )
    is_target = labels.astype(bool)
    if not np.array_equal(is_target, labels):
        raise ValueError("is_target must hold only True and False (or 1 and 0)")
    num_target = int(is_target.sum())
    if num_target in (0, len(scores)):
        raise ValueError(
            f"{num_target} target and {len(scores) - num_target} non-target trials: both are needed"
        )
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise ValueError(
            f"{len(bad)} scores are not finite; the first, {scores[bad[0]]}, at {bad[0]}"
        )
    return scores, is_target


def _ranking(scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ascending order, each distinct score's last place in it, and the thresholds."""
    order = np.argsort(scores)
    ascending = scores[order]
    last = np.flatnonzero(np.append(ascending[1:] != ascending[:-1], True))
    return order, last, np.append(ascending[last], np.inf)


def _weighted_roc(target, nontarget, last, thresholds) -> Roc:
    """Return the ROC from each trial's whole-number weights as target and as non-target."""
    rejected_target = np.cumsum(target)[last]
    rejected_nontarget = np.cumsum(nontarget)[last]
    # counts stay whole until one division, so that FPR = 3 / 1000 equals the number 0.003
    accepted = rejected_nontarget[-1] - rejected_nontarget
    fnr = np.concatenate([[0.0], rejected_target / rejected_target[-1]])
    fpr = np.concatenate([[1.0], accepted / rejected_nontarget[-1]])
    return Roc(fnr, fpr, thresholds)


def _crossing(fnr, fpr) -> float:
    difference = fnr - fpr
    after = int(np.searchsorted(difference, 0.0))
    before = after - 1
    part = difference[before] / (difference[before] - difference[after])
    return float(fnr[before] + part * (fnr[after] - fnr[before]))


def _speaker_index(enroll_speaker, test_speaker, is_target) -> tuple[np.ndarray, np.ndarray, int]:
    number = {name: i for i, name in enumerate(sorted({*enroll_speaker, *test_speaker}))}
    if len(number) < MIN_SPEAKERS:
        raise TooFewSpeakers(
            f"{len(number)} speakers are too few to resample: an interval needs {MIN_SPEAKERS}"
        )
    enroll = np.array([number[name] for name in enroll_speaker])
    test = np.array([number[name] for name in test_speaker])
    wrong = np.flatnonzero((enroll == test) != is_target)
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"{len(wrong)} trials' labels contradict the speakers; the first: "
            f"{enroll_speaker[first]} against {test_speaker[first]} is labelled "
            f"{'target' if is_target[first] else 'nontarget'}"
        )
    return enroll, test, len(number)
