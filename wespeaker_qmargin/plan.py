"""What alpha, scale and margin mean, before anything is trained: gap, two-class curve, support."""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from wespeaker_qmargin.choice import expected_support
from wespeaker_qmargin.files import atomic_path, write_text
from wespeaker_qmargin.functional import alpha_softargmax, zero_loss_gap
from wespeaker_qmargin.head import auto_scale

RECOMMENDED_ALPHAS = (1.25, 1.5, 2.0)  # Mošner et al., Odyssey 2026: (20, 1.25), (10, 1.5), (5, 2)
REFERENCES = {"q = (1, 1)": 1.0, "q = (1/2, 1/2)": 0.5}
_CURVE_POINTS = 401
_RARELY_REACHED = 1.0  # a lead that own cosine 1 and rivals at 0 just have


class Setting(NamedTuple):
    """A point of the grid and its zero-loss gap."""

    alpha: float
    scale: float
    margin: float
    gap: float

    @classmethod
    def of(cls, alpha: float, scale: float, margin: float) -> "Setting":
        gap = zero_loss_gap(alpha=alpha, scale=scale, margin=margin)
        return cls(alpha, scale, margin, gap)


class Plan(NamedTuple):
    """What ``plan`` found; ``support`` is None where the number of classes was not told."""

    setting: Setting
    k: float
    saturation: dict[str, float]  # reference measure -> lead at which a two-class posterior is 1
    support: float | None
    num_class: int | None
    dim: int
    warnings: list[str]
    recommended: list[Setting]  # k = 5
    smallest_gap: list[Setting]  # k = 1 / margin


def plan(
    *,
    alpha: float,
    scale: float | str = "auto",
    margin: float = 0.2,
    num_class=None,
    dim: int = 256,
) -> Plan:
    """Return what a run with these hyper-parameters will and will not do.

    With ``k = scale (alpha - 1)`` a sample has exactly zero loss once it leads its best rival by
    ``exp(k margin) / k`` in cosine; for a given margin that is smallest, ``e margin``, at
    ``k = 1 / margin``. A two-class posterior without margin is ``0`` or ``1`` outside
    ``+-c^(1 - alpha) / k`` where both classes have ``q = c`` (trained is c = 1).

    Args:
        alpha: in [1, 2].
        scale: of the cosines, > 0, or ``"auto"``.
        margin: >= 0, in cosine units.
        num_class, dim: C >= 2 classes and D dimensions, for the support at initialisation.

    Raises:
        ValueError: a value outside its range.

    References: Mošner, Koutsianos, Stafylakis, "Beyond CosFace", Odyssey 2026, Figure 3.
    """
    _check(alpha, margin, num_class, dim)
    scale = auto_scale(alpha) if scale == "auto" else float(scale)
    setting, k = Setting.of(alpha, scale, margin), scale * (alpha - 1)
    support = None
    if num_class is not None:
        options = {"num_class": num_class, "dim": dim, "alpha": alpha, "scale": scale}
        support = float(num_class) if alpha == 1 else expected_support(**options)
    saturation = {
        name: c ** (1 - alpha) / k if k > 0 else math.inf for name, c in REFERENCES.items()
    }
    best = (
        [Setting.of(a, 1 / (margin * (a - 1)), margin) for a in RECOMMENDED_ALPHAS]
        if margin
        else []
    )
    return Plan(
        setting,
        k,
        saturation,
        support,
        num_class,
        dim,
        _warnings(setting, k, saturation["q = (1, 1)"], support, num_class),
        [Setting.of(a, auto_scale(a), margin) for a in RECOMMENDED_ALPHAS],
        best,
    )


def _check(alpha, margin, num_class, dim) -> None:
    if not (math.isfinite(margin) and margin >= 0):
        raise ValueError(f"margin: expected a number >= 0, got {margin}")
    if not 1 <= alpha <= 2:
        raise ValueError(f"alpha: expected a number in [1, 2], got {alpha}")
    if num_class is not None and num_class < 2:
        raise ValueError(f"classes: expected at least 2, got {num_class}")
    if dim < 1:
        raise ValueError(f"dim: expected at least 1, got {dim}")


def _warnings(setting: Setting, k: float, saturation: float, support, num_class) -> list[str]:
    alpha, scale, _, gap = setting
    if k == 0:
        return ["alpha 1 is CosFace: no loss is ever zero, every class has a gradient"]
    found, advice = [], f"; use scale {auto_scale(alpha):g}, or scale: auto" if k > 5.5 else ""
    if gap > 2:
        found.append(
            f"no sample can ever be won: that takes a lead of {gap:.3g}, and cosines differ by at "
            "most 2. Losing classes still drop out, samples do not" + advice
        )
    elif gap > _RARELY_REACHED:
        found.append(
            f"samples are hardly ever won: a lead of {gap:.3g} takes rivals of negative cosine"
            + advice
        )
    if saturation < 0.1:
        found.append(
            f"at s = {scale:g}, alpha = {alpha:g} the two-class curve is flat beyond a difference "
            f"of {saturation:.3g} in cosine: nearly all pairs of classes are decided, and only "
            "the margin keeps samples active" + advice
        )
    if support is not None and support < 2:
        found.append(
            f"at initialisation about {support:.2g} of {num_class} classes would have a gradient: "
            "learning starts slowly" + advice
        )
    return found


def two_class_curve(lead, *, alpha: float, scale: float, margin: float = 0.0, q: float = 1.0):
    """Return p of the own class against one rival, for ``lead = cos_own - cos_rival`` (N,).

    The measure is ``(q exp(-scale margin), q)``.
    """
    lead = torch.as_tensor(lead, dtype=torch.float64)
    scores = torch.stack([scale * lead, torch.zeros_like(lead)], dim=-1)
    log_q = torch.tensor([math.log(q) - scale * margin, math.log(q)], dtype=torch.float64)
    if alpha == 1:
        return torch.softmax(scores + log_q, dim=-1)[..., 0].numpy()
    return alpha_softargmax(scores, alpha=alpha, log_q=log_q.expand_as(scores))[..., 0].numpy()


def curves(found: Plan) -> dict[str, np.ndarray]:
    """Return ``lead`` in [-1, 1] and the posterior of each reference measure over it."""
    lead = np.linspace(-1, 1, _CURVE_POINTS)
    alpha, scale, margin, _ = found.setting
    options = {"alpha": alpha, "scale": scale}
    values = {name: two_class_curve(lead, q=q, **options) for name, q in REFERENCES.items()}
    trained = {f"trained: q = (exp(-s m), 1), m = {margin:g}": {"margin": margin}} if margin else {}
    values |= {name: two_class_curve(lead, **x, **options) for name, x in trained.items()}
    return {"lead": lead, **values}


def draw(found: Plan, path) -> None:
    """Draw the two-class curves (Figure 3 of the paper) as PNG, SVG or PDF, after the name."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from wespeaker_qmargin.figures import COLOURS, DASHES, SETTINGS

    values = curves(found)
    lead = values.pop("lead")
    with rc_context(SETTINGS):
        figure = Figure(figsize=(6.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for (name, p), colour, dash in zip(values.items(), COLOURS, DASHES):
            axes.plot(lead, p, color=colour, ls=dash, lw=1.7, label=name)
        alpha, scale, _, gap = found.setting
        if gap <= 1:
            axes.axvline(gap, color="#b8c0cc", lw=0.8, ls=":")
            axes.annotate(f"gap {gap:.3g}", (gap, 0.02), xytext=(3, 0), textcoords="offset points")
        axes.set(
            xlabel="cosine to the own class - cosine to the rival", ylabel="p of the own class"
        )
        axes.set_title(f"two classes: alpha {alpha:g}, s {scale:g}")
        axes.legend(loc="upper left")
        with atomic_path(path) as temporary:
            kind = Path(path).suffix[1:] or "png"
            metadata = {"Date": None} if kind == "svg" else None  # the same data, the same bytes
            figure.savefig(temporary, format=kind, dpi=160, metadata=metadata)


def describe(found: Plan) -> str:
    """Return the plan as text."""
    alpha, scale, margin, gap = found.setting
    lines = [
        f"alpha {alpha:g}, scale {scale:g}, margin {margin:g}; k = s (alpha - 1) = {found.k:g}",
        f"zero-loss gap exp(k m) / k: {_gap(gap)}",
        "two classes without margin, p is 0 or 1 from a difference of cosines of",
    ]
    what = {
        "q = (1, 1)": "what is trained",
        "q = (1/2, 1/2)": "as the paper's Figure 3 seems drawn",
    }
    lines += [
        f"  {'no difference' if x == math.inf else format(x, '.4g')}  with {name}, {what[name]}"
        for name, x in found.saturation.items()
    ]
    if found.support is not None:
        lines.append(
            f"at initialisation about {found.support:.3g} of {found.num_class} classes are active "
            f"({100 * found.support / found.num_class:.2g} %), in {found.dim} dimensions"
        )
    lines += [f"warning: {text}" for text in found.warnings]
    lines.append(f"recommended at margin {margin:g} (k = 5):")
    lines += [_line(x) for x in found.recommended]
    if found.smallest_gap:
        lines.append(f"smallest gap at margin {margin:g} (k = 1 / m = {1 / margin:g}):")
        lines += [_line(x) for x in found.smallest_gap]
    return "\n".join(lines)


def _gap(gap: float) -> str:
    if gap == math.inf:
        return "infinite, no sample is ever won"
    return f"{gap:.4g}, " + ("out of reach (> 2)" if gap > 2 else "reachable")


def _line(x: Setting) -> str:
    return f"  alpha {x.alpha:<5g} scale {x.scale:<7.4g} gap {_gap(x.gap)}"


def _number(text: str) -> float | str:
    return text if text == "auto" else float(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin plan``."""
    parser.epilog = (
        "example:\n  wespeaker-qmargin plan --alpha 1.5 --scale 10 --margin 0.2 --classes 5994 "
        "--dim 256 --plot plan.png"
    )
    add = parser.add_argument
    add("--alpha", type=float, required=True, help="in [1, 2]")
    add("--scale", type=_number, default="auto", help="a number, or auto [min(32, 5/(alpha-1))]")
    add("--margin", type=float, default=0.2, help="the target margin [0.2]")
    add("--classes", type=int, help="number of training speakers, for the support at the start")
    add("--dim", type=int, default=256, help="size of an embedding [256]")
    add("--plot", help="PNG, SVG or PDF with the two-class curves")
    add("--out", help="JSON with all numbers and the curves")


def run(args: argparse.Namespace) -> None:
    """Print the plan; write what was asked for."""
    options = {"alpha": args.alpha, "scale": args.scale, "margin": args.margin}
    found = plan(**options, num_class=args.classes, dim=args.dim)
    if args.plot:
        draw(found, args.plot)
    if args.out:
        write_text(args.out, json.dumps(to_json(found), indent=1) + "\n")
    print(describe(found))


def to_json(found: Plan) -> dict:
    """Return the plan with its curves as plain values; infinite ones as null."""

    def finite(value):
        if isinstance(value, dict):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return finite(value._asdict())
        if isinstance(value, list | tuple | np.ndarray):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return finite({**found._asdict(), "curves": {k: v.tolist() for k, v in curves(found).items()}})
