"""Which settings of the loss a probe looks at."""

import itertools
from collections.abc import Sequence

from wespeaker_qmargin.config import Config
from wespeaker_qmargin.head import auto_scale
from wespeaker_qmargin.plan import RECOMMENDED_ALPHAS, Setting

_PRODUCTS = (2.5, 5.0, 10.0)  # k = s (alpha - 1), and 1 / m beside them
_MARGINS = (0.1, 0.2)
_COSFACE = (1.0, 32.0)
_MOST = 80  # s m (alpha - 1) from which on the loss refuses its reference measure


def grid(
    config: Config,
    *,
    cells: Sequence[str] = (),
    scales: Sequence[float | str] | None = None,
    alphas: Sequence[float] | None = None,
    margins: Sequence[float] | None = None,
) -> list[Setting]:
    """Return the settings asked for, each once, by margin, k and alpha; else the default ones.

    By default, for margins 0.1, 0.2 and the final one of ``config``: alpha 1.25, 1.5 and 2 at
    k = s (alpha - 1) of 2.5, 5, 10 and 1 / m, where the gap is smallest; CosFace at scale 32; and
    the head of ``config``.

    Args:
        cells: texts ``scale,alpha,margin``.
        scales, alphas, margins: all their combinations, too; where one of them is given, the
            others are ``auto``, the recommended alphas, and the margin of ``config``.

    Raises:
        ValueError: a cell of another form, a value out of range; both are named.
    """
    margin = float(config.margin_update["final_margin"])
    values = [_parsed(text) for text in cells]
    if scales or alphas or margins:
        options = alphas or RECOMMENDED_ALPHAS, scales or ["auto"], margins or [margin]
        values += itertools.product(*options)
    settings = {}
    for value in values or _default(config, margin):
        setting = _checked(*value)
        settings[tuple(round(x, 9) for x in setting[:3])] = setting
    return sorted(settings.values(), key=lambda x: (x.margin, x.scale * (x.alpha - 1), x.alpha))


def _default(config: Config, margin: float) -> list[tuple]:
    pairs = [(a, k / (a - 1)) for k in _PRODUCTS for a in RECOMMENDED_ALPHAS]
    found = []
    for m in {*_MARGINS, margin}:
        smallest = [(a, 1 / (m * (a - 1))) for a in RECOMMENDED_ALPHAS] if m else []
        found += [(a, s, m) for a, s in (*pairs, *smallest, _COSFACE)]
    head = config.projection_args
    if head["project_type"] == "q_margin":
        found.append((head.get("alpha", 1.5), head.get("scale", "auto"), margin))
    return found


def _parsed(text: str) -> tuple:
    try:
        scale, alpha, margin = text.split(",")
        return float(alpha), scale if scale == "auto" else float(scale), float(margin)
    except ValueError:
        raise ValueError(
            f"--grid: expected scale,alpha,margin, as 10,1.5,0.2, got {text!r}"
        ) from None


def _checked(alpha: float, scale: float | str, margin: float) -> Setting:
    try:
        number = auto_scale(alpha) if scale == "auto" else float(scale)
        setting = Setting.of(float(alpha), number, margin)
        if not 0 <= margin * number * max(alpha - 1, 0.01) < _MOST:
            raise ValueError(f"margin must be >= 0, and margin x scale x (alpha - 1) below {_MOST}")
        return setting
    except ValueError as error:
        raise ValueError(f"cell scale {scale}, alpha {alpha}, margin {margin}: {error}") from None
