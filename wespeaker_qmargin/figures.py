"""Figures as SVG text: DET curves, training curves, heat maps, differences, experts.

matplotlib is imported when a figure is drawn, and without its global state (no pyplot, no backend).
"""

import io
import math
from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
from scipy.special import ndtri

from wespeaker_qmargin.roc import Roc

# Okabe & Ito (2008), safe for colour-blind readers; line styles tell systems apart without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "osD^vPX"
GREY = "#5f6b7a"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99)
PANELS = {  # key in metrics.jsonl -> title, factor
    "loss": ("Training loss", 1),
    "margin": ("Margin", 1),
    "lr": ("Learning rate", 1),
    "active": ("Active share of samples, %", 100),
    "effective_batch": ("Effective batch, samples", 1),
    "support": ("Mean support size, classes", 1),
    "alpha": ("alpha", 1),
    "valid_eer": ("Validation EER, %", 100),
}
SETTINGS = {
    "svg.fonttype": "none",  # text stays text: small files, and the reader's own fonts
    "svg.hashsalt": "wespeaker_qmargin",  # the same data, the same bytes
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "grid.color": "#e4e8ee",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "#ffffff",
}


def det_svg(title: str, curves: dict[str, Roc], *, order: Sequence[str]) -> str:
    """Return the DET plot of one trial list: FNR over FPR, both on normal-deviate axes.

    Each curve joins the points of its ROC; a marker is where FNR = FPR, the EER.

    Args:
        curves: system -> ROC.
        order: all systems of the report; a system has the same colour in every figure.

    Reference: Martin et al., 1997, "The DET curve in assessment of detection task performance".
    """
    with _figure(5.4, 5.2) as (figure, buffer):
        axes = figure.add_subplot()
        low, high = _det_limits(curves.values())
        axes.plot(ndtri([low, high]), ndtri([low, high]), color="#b8c0cc", lw=0.8, ls=":")
        for name, curve in curves.items():
            style = _style(order.index(name))
            axes.plot(*_det_points(curve, low), **{**style, "marker": None})
            eer = ndtri(min(max(curve.eer(), low), high))
            axes.plot(eer, eer, **style, mec="white", ms=7, zorder=3)
            axes.plot([], [], **style, label=_label(name, curve.eer()))
        ticks = _det_ticks(low, high)
        for axis, name in ((axes.xaxis, "False accepts, %"), (axes.yaxis, "False rejects, %")):
            axis.set_ticks(ndtri(np.divide(ticks, 100)), [f"{tick:g}" for tick in ticks])
            axis.set_label_text(name)
        axes.set(xlim=ndtri([low, high]), ylim=ndtri([low, high]), aspect="equal")
        axes.set_title(title, parse_math=False)
        for text in axes.legend(loc="lower left", title="EER").get_texts():
            text.set_parse_math(False)
    return buffer.getvalue()


def training_svg(series: dict[str, dict], *, order: Sequence[str]) -> str:
    """Return training curves as small multiples over the step, one panel a quantity that has data.

    Args:
        series: system -> quantity (a key of ``PANELS``) -> (steps, values).
        order: as for ``det_svg``.
    """
    panels = [key for key in PANELS if any(len(own[key][0]) for own in series.values())]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with _figure(3.7 * columns, 2.55 * rows + 0.35) as (figure, buffer):
        figure.get_layout_engine().set(hspace=0.08, wspace=0.05)
        for position, key in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, position)
            _draw_panel(axes, key, series, order)
            if position > len(panels) - columns:
                axes.set_xlabel("step")
        handles = [axes.plot([], [], **_style(order.index(name)))[0] for name in series]
        names = [_label(name) for name in series]
        legend = figure.legend(handles, names, loc="outside upper left", ncols=min(3, len(names)))
        for text in legend.get_texts():
            text.set_parse_math(False)
    return buffer.getvalue()


def heat_maps_svg(title: str, cells: dict[tuple[float, float, float], float]) -> str:
    """Return an ablation as heat maps, margin over alpha, a panel a scale; every cell has a number.

    One scale of colours, logarithmic, as the worst cells may be ten times the best.

    Args:
        cells: (alpha, scale, margin) -> value; NaN is a cell that is not finished.

    Reference: Mošner, Koutsianos, Stafylakis, "Beyond CosFace", Odyssey 2026, Figures 1 and 2.
    """
    from matplotlib.colors import LogNorm

    alphas, scales, margins = (sorted(set(axis)) for axis in zip(*cells))
    positive = [value for value in cells.values() if value > 0]
    low, high = (min(positive), max(positive)) if positive else (1, 10)
    norm = LogNorm(low, max(high, 1.01 * low))
    width = 0.75 * len(alphas) + 0.3
    size = (len(scales) * width + 0.8, 0.45 * len(margins) + 1.3)
    with _figure(*size) as (figure, buffer):
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        for number, scale in enumerate(scales):
            axes = figure.add_subplot(1, len(scales), number + 1)
            grid = [[cells.get((a, scale, m), math.nan) for a in alphas] for m in margins]
            _draw_cells(axes, np.array(grid, dtype=float), norm)
            axes.set_title(f"scale {scale:g}")
            axes.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
            axes.set_yticks(range(len(margins)), [f"{margin:g}" for margin in margins])
            axes.set_xlabel("alpha")
            if number == 0:
                axes.set_ylabel("margin m")
    return buffer.getvalue()


def differences_svg(panels: dict[str, dict[str, tuple]]) -> str:
    """Return differences between systems, a row each, a panel a quantity; blue where 0 is outside.

    Args:
        panels: title -> name of the difference -> (difference, low, high); all have the same names.
    """
    names = list(next(iter(panels.values())))
    rows = range(len(names))
    with _figure(2.0 + 2.4 * len(panels), 0.8 + 0.25 * len(names)) as (figure, buffer):
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, found) in zip(all_axes, panels.items()):
            values, low, high = np.array([found[name] for name in names], dtype=float).T
            colours = np.where(low * high > 0, COLOURS[0], GREY)
            axes.axvline(0, color="#b8c0cc", lw=1.2)
            axes.hlines(rows, low, high, colors=colours, lw=1.7)
            axes.scatter(values, rows, c=colours, s=22, zorder=3)
            axes.set_title(title, parse_math=False)
        all_axes[0].set_ylim(len(names) - 0.5, -0.5)
        all_axes[0].set_yticks(rows, names, parse_math=False)
    return buffer.getvalue()


def experts_svg(report: dict) -> str:
    """Return what ``wespeaker-qmargin experts`` has found, as three panels.

    Similarity of each hidden state before and after, a line a data set; how far each expert went;
    the load of each expert in each data set.

    Args:
        report: of `experts.analyse`.
    """
    names = list(report["data"])
    mixed = any(found["experts"] for found in report["data"].values())
    heights = [2.6, 1.9] + ([0.4 * len(names) + 1.1] if mixed else [])
    with _figure(9.0, sum(heights)) as (figure, buffer):
        figure.get_layout_engine().set(hspace=0.08)
        axes = figure.subplots(len(heights), 1, height_ratios=heights)
        axes[0].set_title("Linear CKA of hidden states, before and after")
        for i, name in enumerate(names):
            axes[0].plot(report["data"][name]["cka"], label=_label(name), **_style(i))
        similar = [value for found in report["data"].values() for value in found["cka"]]
        axes[0].set_ylim(math.floor(10 * min(0.9, *similar)) / 10, 1.01)
        axes[0].set_xticks(range(len(report["data"][names[0]]["cka"])))
        axes[0].set_xlabel("hidden state, 0: input of the first layer")
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1.05)} if len(names) > 6 else {}
        axes[0].legend(ncols=-(-len(names) // 12), **beside).set_zorder(5)
        _draw_drift(axes[1], list(report["drift"].values()))
        if mixed:
            _draw_load(axes[2], report["data"])
    return buffer.getvalue()


def _draw_drift(axes, drift: list[list[float]]) -> None:
    axes.set_title("Change of the feed-forward weights, relative (module.expert)")
    colours = [COLOURS[i % len(COLOURS)] for i, moved in enumerate(drift) for _ in moved]
    axes.bar(range(len(colours)), [value for moved in drift for value in moved], color=colours)
    axes.set_xticks(range(len(colours)), _places(drift))


def _draw_load(axes, data: dict) -> None:
    loads = {name: [x["load"] for x in found["experts"].values()] for name, found in data.items()}
    rows = np.array([[value for layer in layers for value in layer] for layers in loads.values()])
    axes.set_title("Share of a mixture's choices that falls on each expert (mixture.expert)")
    axes.imshow(rows, cmap="cividis_r", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(rows):
        colour = "white" if value > 0.5 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(rows.shape[1]), _places(next(iter(loads.values()))))
    axes.set_yticks(range(len(rows)), list(loads))
    axes.grid(False)


def _places(layers: list[list[float]]) -> list[str]:
    return [f"{i}.{j}" for i, layer in enumerate(layers) for j in range(len(layer))]


def _draw_cells(axes, values: np.ndarray, norm) -> None:
    axes.imshow(np.ma.masked_invalid(values), cmap="cividis_r", norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        dark = value > 0 and norm(value) > 0.5
        text = f"{value:.3g}" if np.isfinite(value) else "-"
        axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=GREY)


@contextmanager
def _figure(width: float, height: float):
    """Yield an empty figure and the buffer that holds its SVG after the block."""
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, buffer
        figure.savefig(buffer, format="svg", metadata={"Date": None})


def _style(index: int) -> dict:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "ls": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "lw": 1.7,
    }


def _label(name: str, eer: float | None = None) -> str:
    # matplotlib leaves labels out that begin with an underscore
    name = f" {name}" if name.startswith("_") else name
    return name if eer is None else f"{name}: {100 * eer:.2f} %"


def _det_limits(curves) -> tuple[float, float]:
    """Return the lowest and highest rate shown: the finest step of any curve, and past the EERs."""
    curves = list(curves)
    finest = max(np.min(rate[rate > 0]) for curve in curves for rate in (curve.fnr, curve.fpr))
    low = max([tick for tick in TICKS if tick <= 100 * min(finest, 0.01)], default=TICKS[0])
    worst = max(0.2, *(1.6 * curve.eer() for curve in curves))
    high = min([tick for tick in TICKS if tick >= 100 * worst], default=TICKS[-1])
    return low / 100, high / 100


def _det_ticks(low: float, high: float) -> list[float]:
    """Return the ticks in per cent, without those whose labels would touch."""
    kept, gap = [], 0.06 * (ndtri(high) - ndtri(low))
    for tick in TICKS:
        if 99.9 * low <= tick <= 100.1 * high and (
            not kept or ndtri(tick / 100) - ndtri(kept[-1] / 100) > gap
        ):
            kept.append(tick)
    return kept


def _det_points(curve: Roc, low: float) -> tuple[np.ndarray, np.ndarray]:
    """Return deviates of FPR and FNR, without points that fall together on paper."""
    edge = low / 10  # rates of 0 and 1 lie at infinity: draw them outside the frame
    points = ndtri(np.clip([curve.fpr, curve.fnr], edge, 1 - edge))
    keep = np.append(True, np.any(np.diff(np.round(300 * points)), axis=0))
    return points[0, keep], points[1, keep]


def _draw_panel(axes, key: str, series: dict, order: Sequence[str]) -> None:
    title, factor = PANELS[key]
    shown = []
    for name, own in series.items():
        steps, values = own[key]
        style = _style(order.index(name))
        if len(steps) > 20:  # markers would hide the curve
            style.pop("marker")
        axes.plot(steps, factor * np.asarray(values), ms=4, mec="white", **style)
        shown.extend(factor * np.asarray(values))
    axes.set_title(title)
    if min(shown) > 0 and max(shown) > 100 * min(shown):
        axes.set_yscale("log")
    elif min(shown) >= 0:
        axes.set_ylim(bottom=0, top=1.08 * max(shown) or 1)
