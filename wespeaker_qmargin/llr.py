"""Log-likelihood ratios (LLRs): their costs, and their fit to scores by logistic regression.

An LLR is ``log p(scores | target) - log p(scores | non-target)``, a natural logarithm.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression, minimize
from scipy.special import entr, expit, logit

from wespeaker_qmargin.roc import check_trials


class Calibration(NamedTuple):
    """The affine map from features to LLRs: ``names`` (K), ``weights`` float64 (K,), ``bias``."""

    names: tuple[str, ...]
    weights: np.ndarray
    bias: float

    def llr(self, features) -> np.ndarray:
        """Return ``bias + features @ weights``, float64 (N,), of ``features`` (N, K)."""
        return self.bias + np.asarray(features, dtype=np.float64) @ self.weights


def cllr(llr, is_target) -> float:
    """Return the cost of LLRs, ``(mean(log2(1 + e^-llr_t)) + mean(log2(1 + e^llr_n))) / 2``, bits.

    0 for perfect LLRs, 1 for those that say nothing (all 0), unbounded for wrong ones.
    Reference: Brummer and du Preez (2006), "Application-independent evaluation of speaker
    detection".  Raises as ``roc``.
    """
    return _cllr(*check_trials(llr, is_target))


def min_cllr(scores, is_target) -> float:
    """Return the least ``cllr`` that a rising function of the scores reaches, in [0, 1].

    The function is isotonic regression's (PAV) and keeps ties. ``cllr - min_cllr`` is what better
    calibration could win.  Reference and errors: as ``cllr``.
    """
    scores, is_target = check_trials(scores, is_target)
    _, level, count = np.unique(scores, return_inverse=True, return_counts=True)
    share = np.bincount(level, weights=is_target) / count
    posterior = isotonic_regression(share, weights=count).x[level]
    return _cllr(logit(posterior) - logit(is_target.mean()), is_target)


def _cllr(llr, is_target) -> float:
    costs = (np.logaddexp(0, -llr[is_target]).mean(), np.logaddexp(0, llr[~is_target]).mean())
    return float(sum(costs) / 2 / np.log(2))


def fit_calibration(
    features,
    is_target,
    *,
    names: Sequence[str] = ("score",),
    p_target: float = 0.01,
    l2: float = 1e-6,
) -> Calibration:
    """Fit the LLR ``b + w . x`` by prior-weighted logistic regression with a small L2 on w.

    Minimises, over w and b, with o = logit(p) and z the features shifted and scaled to mean 0 and
    variance 1 (both classes weighing the same)::

        (p mean_t log(1 + e^-(b + w.z + o)) + (1 - p) mean_n log(1 + e^(b + w.z + o))) / H(p)
            + l2 / 2 |w|^2

    H(p), the prior's entropy, makes the first part 1 where the LLR is 0. Strictly convex, so the
    result is one and finite also for classes that are separable; a feature that is constant here
    gets weight 0. Depends on neither the order nor the proportion of the classes.

    Args:
        features: float (N, K); the first is the score.
        names: of the K features.
        p_target: prior p at which the LLRs should be best.

    Raises:
        ValueError: one class only (with the counts), a non-finite feature, scores that are all
            equal, p_target outside (0, 1), l2 <= 0.
    Reference: Brummer et al. (2007), "Fusion of heterogeneous speaker recognition systems in the
    STBU submission for the NIST SRE 2006"; the measures: Thienpondt et al. (2021), "The IDLab
    VoxSRC-20 submission".
    """
    features = np.asarray(features, dtype=np.float64)
    if features.ndim != 2 or features.shape[1] != len(names):
        raise ValueError(f"expected features (N, {len(names)}), got shape {features.shape}")
    if not 0 < p_target < 1 or not 0 < l2 < np.inf:
        raise ValueError(f"expected 0 < p_target < 1 and l2 > 0, got {p_target} and {l2}")
    for name, column in zip(names, features.T):
        try:
            _, is_target = check_trials(column, is_target)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if np.ptp(features[:, 0]) == 0:
        raise ValueError(
            f"all {len(features)} scores are {features[0, 0]:g}: they tell no target from another"
        )
    share = np.where(is_target, 0.5 / is_target.sum(), 0.5 / (~is_target).sum())
    mean = share @ features
    with np.errstate(over="ignore"):
        spread = np.sqrt(share @ (features - mean) ** 2)
    spread[np.ptp(features, axis=0) == 0] = 1.0
    if not (np.isfinite(spread) & (spread > 0)).all():
        raise ValueError("the features spread over more than 1e150 or less than 1e-150")
    solution = _minimum((features - mean) / spread, is_target, share, p_target, l2)
    weights = solution[1:] / spread
    return Calibration(tuple(names), weights, float(solution[0] - weights @ mean))


def _minimum(standard, is_target, share, p_target: float, l2: float) -> np.ndarray:
    """Return (b, w) of the standardised features; ``share`` sums to 1/2 in each class."""
    design = np.column_stack([np.ones(len(standard)), standard])
    sign = np.where(is_target, 1.0, -1.0)
    entropy = entr(p_target) + entr(1 - p_target)
    weight = 2 * share * np.where(is_target, p_target, 1 - p_target) / entropy
    ridge = np.full(design.shape[1], l2)
    ridge[0] = 0.0  # both classes bound the bias

    def gain(x):
        return sign * (design @ x + logit(p_target))

    def loss(x):
        return weight @ np.logaddexp(0, -gain(x)) + 0.5 * ridge @ x**2

    def gradient(x):
        return design.T @ (-sign * weight * expit(-gain(x))) + ridge * x

    def hessian(x):
        curvature = weight * expit(gain(x)) * expit(-gain(x))
        return (design.T * curvature) @ design + np.diag(ridge)

    start = np.zeros(design.shape[1])
    return minimize(
        loss, start, jac=gradient, hess=hessian, method="trust-exact", options={"gtol": 1e-9}
    ).x
