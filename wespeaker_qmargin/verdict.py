"""Whether a setting leaves enough samples a gradient, and which setting to take: stated rules."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wespeaker_qmargin.leads import Cell

MILD, STARVING = 0.5, 0.8  # shares of samples won, from which on a setting is called so
_K = 5.0  # scale (alpha - 1) of the three pairs that the paper recommends
THRESHOLDS = (
    "safe: less than 50 % of the samples won (loss and gradient exactly zero), mild: 50 to 80 %, "
    "starving: 80 % or more. The reason is Mošner et al., Odyssey 2026: 50, 75, more than 80 and "
    "90 % were won at epochs 40, 80, 120 and 150 of a ResNet34 that fine-tuning with Q-Margin did "
    "not help, 0.38 % of a WavLM + MHFA that it did."
)
RULE = (
    "Recommended is, of the safe cells with alpha > 1 at the target margin, the one whose "
    "k = s (alpha - 1) is nearest to 5 (as a ratio), then the one with the largest alpha; where "
    "none is safe, the mild one that wins least; where none is mild, none."
)


class Advice(NamedTuple):
    """The recommended cell (None: none is) and why, as one sentence."""

    cell: Cell | None
    reason: str


def verdict(won: float) -> str:
    """Return ``safe``, ``mild`` or ``starving`` for a share of samples won, in [0, 1]."""
    return "safe" if won < MILD else "mild" if won < STARVING else "starving"


def advise(cells: Sequence[Cell], lead: np.ndarray, *, margin: float) -> Advice:
    """Return the advice of `RULE` for samples with these leads, at the target ``margin``."""
    sparse = [x for x in cells if x.setting.alpha > 1 and math.isclose(x.setting.margin, margin)]
    if not sparse:
        return Advice(None, f"no cell with alpha > 1 has the target margin {margin:g}: add one")
    safe = [x for x in sparse if verdict(x.won) == "safe"]
    mild = [x for x in sparse if verdict(x.won) == "mild"]
    if safe:
        best = min(safe, key=lambda x: (_distance(x.k), -x.setting.alpha, x.won))
        return Advice(best, f"safe, {_percent(best.won)} won")
    if mild:
        best = min(mild, key=lambda x: (x.won, -x.setting.alpha))
        return Advice(best, f"no cell is safe; this one wins least, {_percent(best.won)}")
    return Advice(None, _stay(sparse, lead))


def _distance(k: float) -> float:
    return round(abs(math.log(k / _K)), 9)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _stay(cells: Sequence[Cell], lead: np.ndarray) -> str:
    """Return the advice where all cells starve."""
    least = min(x.won for x in cells)
    # half of the samples are active where the gap exp(k m) / k is their median lead
    margin = max(0.0, math.log(_K * float(np.median(lead))) / _K)
    return (
        f"every cell starves, {_percent(least)} won at least: stay with CosFace, or raise the "
        f"margin (at k = 5, half of these samples would be active at {margin:.2f})"
    )
