"""What a probe found, as text, JSON and a figure."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wespeaker_qmargin.files import atomic_path
from wespeaker_qmargin.leads import Cell, Nearest, won_share
from wespeaker_qmargin.plan import Setting
from wespeaker_qmargin.transfer import Report
from wespeaker_qmargin.verdict import MILD, RULE, STARVING, THRESHOLDS, Advice, advise, verdict

_BINS = np.linspace(-2, 2, 201)
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Probe(NamedTuple):
    """A checkpoint, how its samples were made, and what a grid does with them.

    ``utterances`` of ``listed`` were looked at, as ``conditions`` say; ``speakers`` in the order of
    the prototypes, each with ``copies`` of them; ``batch_size`` is that of a training step.
    """

    checkpoint: str
    epoch: int | None
    report: Report
    has_list: bool
    conditions: str
    utterances: int
    listed: int
    speakers: list[str]
    copies: int
    batch_size: int
    margin: float
    samples: Nearest
    cells: list[Cell]

    @property
    def advice(self) -> Advice:
        return advise(self.cells, self.samples.lead, margin=self.margin)


def markdown(found: Sequence[Probe]) -> str:
    """Return a section with a table for every checkpoint, then the rules."""
    sections = [_section(one) for one in found]
    notes = (
        "Support: classes with p > 0, mean and 95th percentile. g: |p - e_y|_2, the gradient with "
        "respect to the scores, mean over all samples. Effective batch: B (sum g)^2 / (N sum g^2) "
        f"for B = {found[0].batch_size} samples a step.\n\n{THRESHOLDS}\n\n{RULE}\n"
    )
    return "\n".join([*sections, notes])


def _section(one: Probe) -> str:
    lead, advice = one.samples.lead, one.advice
    head = ["alpha", "scale", "margin", "k", "gap", "won %"]
    head += ["won %, own copies too"] if one.copies > 1 else []
    head += ["support", "95 % support", "g", "effective batch", "verdict"]
    rows = [head, ["---:"] * (len(head) - 1) + ["---"], *(_row(x, one) for x in one.cells)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = "".join(
        f"| {' | '.join(x.rjust(width) for x, width in zip(row, widths))} |\n" for row in rows
    )
    return (
        f"## {one.checkpoint}\n\n"
        f"{one.utterances} of {one.listed} utterances, {one.conditions}. {_prototypes(one)}\n\n"
        f"Lead (own cosine - best rival's): median {np.median(lead):.3f}, 5 to 95 % "
        f"{np.quantile(lead, 0.05):.3f} to {np.quantile(lead, 0.95):.3f}; "
        f"{100 * (lead > 0).mean():.1f} % of the samples lead.\n\n{table}\n"
        f"Recommended at margin {one.margin:g}: {_recommended(advice)}\n"
    )


def _recommended(advice: Advice) -> str:
    if advice.cell is None:
        return f"none. {advice.reason[0].upper()}{advice.reason[1:]}."
    setting = advice.cell.setting
    return f"alpha {setting.alpha:g}, scale {setting.scale:g} ({advice.reason})."


def _prototypes(one: Probe) -> str:
    report = one.report
    total = len(one.speakers) * one.copies
    text = (
        f"{total} prototypes of {len(one.speakers)} speakers: {report.rows_by_name} are the "
        f"checkpoint's, by name, {report.rows_from_means} class means"
    )
    if report.rows_random:
        text += f", {report.rows_random} random (no audio that can be used)"
    text += "." if one.has_list else "; no speakers.txt says whose rows its head has."
    if report.rows_by_name and report.rows_from_means:
        text += (
            " Class means beside trained prototypes are strong rivals until the head has been "
            "trained: more will be won then."
        )
    return text


def _row(cell: Cell, one: Probe) -> list[str]:
    alpha, scale, margin, gap = cell.setting
    crowded = [f"{100 * cell.won_crowded:.2f}"] if one.copies > 1 else []
    return [
        f"{alpha:g}",
        f"{scale:.4g}",
        f"{margin:g}",
        f"{cell.k:.3g}",
        f"{gap:.3f}",
        f"{100 * cell.won:.2f}",
        *crowded,
        f"{cell.support:.3g}",
        f"{cell.support_high}",
        f"{cell.gradient:.3g}",
        f"{cell.effective_share * one.batch_size:.3g}",
        "reference" if alpha == 1 else verdict(cell.won),
    ]


def to_json(found: Sequence[Probe]) -> dict:
    """Return everything as plain values; an infinite gap is null."""
    return {
        "thresholds": {"mild": MILD, "starving": STARVING, "reason": THRESHOLDS},
        "rule": RULE,
        "checkpoints": [_one_json(one) for one in found],
    }


def _one_json(one: Probe) -> dict:
    lead, advice = one.samples.lead, one.advice
    gap = advice.cell.setting.gap if advice.cell else Setting.of(1.5, 10.0, one.margin).gap
    same = ("checkpoint", "epoch", "conditions", "utterances", "listed", "copies", "batch_size")
    return {
        **{name: getattr(one, name) for name in same},
        "margin": one.margin,
        "transfer": dataclasses.asdict(one.report),
        "lead": {
            "mean": float(lead.mean(dtype=np.float64)),
            "quantiles": dict(zip(map(str, _QUANTILES), np.quantile(lead, _QUANTILES).tolist())),
            "histogram": {"edges": [-2, 2], "counts": np.histogram(lead, _BINS)[0].tolist()},
        },
        "cells": [_cell_json(cell, one.batch_size) for cell in one.cells],
        "recommended": _cell_json(advice.cell, one.batch_size) if advice.cell else None,
        "reason": advice.reason,
        "speakers_won_at_gap": gap,
        "speakers": _by_speaker(one, gap),
    }


def _cell_json(cell: Cell, batch_size: int) -> dict:
    setting = cell.setting._asdict()
    setting["gap"] = setting["gap"] if math.isfinite(setting["gap"]) else None
    values = {k: v for k, v in cell._asdict().items() if k != "setting"}
    effective = {"effective_batch": cell.effective_share * batch_size}
    return {**setting, "k": cell.k, **values, **effective, "verdict": verdict(cell.won)}


def _by_speaker(one: Probe, gap: float) -> dict:
    """Return speaker -> number of samples, mean lead, won share, and the rival met most often."""
    samples, size = one.samples, len(one.speakers)
    speaker, rival, lead = samples.label.numpy() % size, samples.rival.numpy() % size, samples.lead
    order = np.argsort(speaker, kind="stable")
    numbers, starts = np.unique(speaker[order], return_index=True)
    found = {}
    for number, mine in zip(numbers, np.split(order, starts[1:])):
        found[one.speakers[number]] = {
            "samples": len(mine),
            "mean_lead": float(lead[mine].mean(dtype=np.float64)),
            "won": won_share(lead[mine], gap),
            "rival": one.speakers[np.bincount(rival[mine]).argmax()],
        }
    return found


def draw(found: Sequence[Probe], path) -> None:
    """Draw the share won over the checkpoints, or of one checkpoint the leads with the gaps.

    PNG, SVG or PDF, after the name. Settings of one gap are one line.

    Reference: Mošner et al., Odyssey 2026, Figure 4.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from wespeaker_qmargin.figures import SETTINGS

    with rc_context(SETTINGS):
        figure = Figure(figsize=(6.6, 3.9), layout="constrained")
        axes = figure.add_subplot()
        (_draw_leads if len(found) == 1 else _draw_won)(axes, found)
        axes.legend(fontsize=8)
        with atomic_path(path) as temporary:
            kind = Path(path).suffix[1:] or "png"
            metadata = {"Date": None} if kind == "svg" else None  # the same data, the same bytes
            figure.savefig(temporary, format=kind, dpi=160, metadata=metadata)


def _lines(found: Sequence[Probe]):
    """Yield (one cell of each gap that can be reached, its line's style), by margin and k."""
    from wespeaker_qmargin.figures import COLOURS, DASHES

    cells = {round(x.setting.gap, 9): x for x in found[0].cells if x.setting.gap <= 2}
    ordered = sorted(cells.values(), key=lambda x: (x.setting.margin, x.k))
    for number, cell in enumerate(ordered):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // 2 % len(DASHES)]
        yield cell, {"color": colour, "ls": dash, "lw": 1.5}


def _name(cell: Cell) -> str:
    return f"k {cell.k:.3g}, m {cell.setting.margin:g}: gap {cell.setting.gap:.3f}"


def _draw_leads(axes, found: Sequence[Probe]) -> None:
    lead = found[0].samples.lead
    counts, _, _ = axes.hist(lead, bins=60, color="#c9d3e0")
    for cell, style in _lines(found):
        label = f"{_name(cell)}, {100 * cell.won:.3g} % won"
        axes.plot([cell.setting.gap] * 2, [0, counts.max()], label=label, **style)
    axes.set(xlabel="own cosine - best rival's", ylabel="samples")
    axes.set_title("lead of the samples, and what wins")


def _draw_won(axes, found: Sequence[Probe]) -> None:
    epochs = [one.epoch for one in found]
    distinct = None not in epochs and len(set(epochs)) == len(epochs)
    places = epochs if distinct else list(range(len(found)))
    for cell, style in _lines(found):
        won = [100 * won_share(one.samples.lead, cell.setting.gap) for one in found]
        axes.plot(places, won, marker="o", ms=4, label=_name(cell), **style)
    for share, name in ((MILD, "mild"), (STARVING, "starving")):
        axes.axhline(100 * share, color="#b8c0cc", lw=0.8, ls=":")
        axes.annotate(name, (0, 100 * share), xycoords=("axes fraction", "data"), fontsize=8)
    if not distinct:
        names = [Path(one.checkpoint).name for one in found]
        axes.set_xticks(places, names, rotation=20, ha="right")
    axes.set(xlabel="epoch" if distinct else "", ylabel="samples won, %", ylim=(-2, 102))
    axes.set_title("share of samples with exactly zero gradient")
