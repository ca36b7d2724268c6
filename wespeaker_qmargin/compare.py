"""Is one system better than another: paired speaker bootstrap on the same trials, over seeds."""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from wespeaker_qmargin.files import Scores, read_scores, read_table, write_text
from wespeaker_qmargin.roc import MIN_SPEAKERS, Roc, interval, replicate, roc, warn_if_inverted

logger = logging.getLogger(__name__)

FPR = 0.001
QUANTITIES = {"eer": "EER %", "min_dcf": "minDCF", "fnr": f"FNR % at FPR {100 * FPR:g} %"}


def compare(
    systems: Mapping[str, Sequence], utt2spk, *, replicates: int = 1000, seed: int = 0
) -> dict:
    """Measure every system over its seeds, and every one against the first.

    In each replicate of the bootstrap all systems are measured on the same draw of speakers, so a
    difference has an interval of its own, and a p: twice the smaller share of replicates on either
    side of 0 (with one added to both counts; two-sided). The mixed interval draws the seeds, too,
    each system's on its own: it says how sure the difference is for another seed.

    Args:
        systems: name -> score files (labelled), one a seed; all hold the same trials.
        utt2spk: speakers of the test utterances.

    Returns:
        ``{"systems": {name: {quantity: {"seeds", "mean", "sd", "interval"}}}, "differences":
        {"B - A": {quantity: {"difference", "interval", "mixed_interval", "p"}}}, "parameters"}``;
        quantities are ``eer``, ``min_dcf`` and ``fnr`` (at FPR 0.1 %), fractions. ``sd`` is None
        where there is one seed, ``mixed_interval`` where no system has more.

    Raises:
        ValueError: no system, trials of two systems that differ, fewer than 10 speakers, a speaker
            without utterance in ``utt2spk``.
    """
    if not systems or not all(systems.values()):
        raise ValueError("expected systems, each with at least one score file")
    speaker_of, trials, values = read_table(utt2spk), None, {}
    for name, paths in systems.items():
        for path in paths:
            scores = read_scores(path)
            found = _trials(scores, path)
            if trials is not None and found != trials:
                raise ValueError(f"{path}: not the trials of {next(iter(systems.values()))[0]}")
            trials = found
            options = {"replicates": replicates, "seed": seed}
            values.setdefault(name, []).append(_measure(scores, path, speaker_of, options))
    arrays = {name: np.stack(x) for name, x in values.items()}  # seeds, 1 + replicates, quantities
    first, *others = arrays
    rng = np.random.default_rng(seed)
    return {
        "systems": {name: _by_quantity(_summary, x) for name, x in arrays.items()},
        "differences": {
            f"{name} - {first}": _by_quantity(_difference, arrays[name], arrays[first], rng=rng)
            for name in others
        },
        "parameters": {"bootstrap": replicates, "seed": seed, "fpr": FPR},
    }


def spread(values: dict) -> tuple[float, float, float]:
    """Return a difference with its ends, over seeds too where there are some; NaN without any."""
    ends = values["mixed_interval"] or values["interval"] or (float("nan"),) * 2
    return values["difference"], *ends


def _trials(scores: Scores, path) -> frozenset:
    if scores.is_target is None:
        raise ValueError(f"{path}: no labels; each line must end with target or nontarget")
    return frozenset(zip(scores.enroll, scores.test, scores.is_target.tolist()))


def _statistics(curve: Roc) -> list[float]:
    return [curve.eer(), curve.min_dcf(), curve.fnr_at_fpr(FPR)]


def _measure(scores: Scores, path, speaker_of: dict, options: dict) -> np.ndarray:
    """Return the quantities (1 + replicates, 3): of all trials, then of each replicate."""
    values = [_statistics(roc(scores.scores, scores.is_target))]
    warn_if_inverted(values[0][0], f"{path}: ")
    if options["replicates"]:
        missing = sorted({*scores.enroll, *scores.test} - speaker_of.keys())
        if missing:
            raise ValueError(
                f"{path}: {len(missing)} utterances without speaker, first {' '.join(missing[:10])}"
            )
        speakers = ([speaker_of[key] for key in side] for side in (scores.enroll, scores.test))
        values += list(
            replicate(scores.scores, scores.is_target, *speakers, _statistics, **options)
        )
    return np.array(values)


def _by_quantity(function, *arrays: np.ndarray, **options) -> dict:
    return {
        name: function(*(x[:, :, i] for x in arrays), **options)
        for i, name in enumerate(QUANTITIES)
    }


def _summary(values: np.ndarray) -> dict:
    """``values`` (seeds, 1 + replicates)."""
    seeds, means = values[:, 0], values.mean(axis=0)
    return {
        "seeds": seeds.tolist(),
        "mean": float(means[0]),
        "sd": float(seeds.std(ddof=1)) if len(seeds) > 1 else None,
        "interval": _ends(means[1:]),
    }


def _difference(one: np.ndarray, other: np.ndarray, *, rng) -> dict:
    difference = one.mean(axis=0) - other.mean(axis=0)
    replicates, p, mixed = difference[1:], None, None
    if len(replicates):
        sides = (1 + (replicates <= 0).sum(), 1 + (replicates >= 0).sum())
        p = float(min(1.0, 2 * min(sides) / (1 + len(replicates))))
        if len(one) > 1 or len(other) > 1:
            mixed = _ends(_redrawn(one, rng) - _redrawn(other, rng))
    return {
        "difference": float(difference[0]),
        "interval": _ends(replicates),
        "mixed_interval": mixed,
        "p": p,
    }


def _redrawn(values: np.ndarray, rng) -> np.ndarray:
    """Return each replicate's mean over as many seeds, drawn with replacement."""
    seeds, replicates = len(values), values.shape[1] - 1
    drawn = rng.integers(seeds, size=(seeds, replicates))
    return values[drawn, 1 + np.arange(replicates)].mean(axis=0)


def _ends(values: np.ndarray) -> list[float] | None:
    return interval(values).tolist() if len(values) else None


def markdown(report: dict) -> str:
    """Return two tables: the systems, and the differences to the first."""
    tables = []
    for section, cell in (("systems", _system_cell), ("differences", _difference_cell)):
        if report[section]:
            rows = [[section[:-1], *QUANTITIES.values()], ["---"] * (1 + len(QUANTITIES))]
            for name, values in report[section].items():
                cells = [cell(values[key], unit(key)) for key in QUANTITIES]
                rows.append([name, *cells])
            tables.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "\n".join(tables) + "\n" + _legend(report)


def unit(quantity: str) -> tuple[float, int]:
    """Return what a quantity is multiplied by to be shown, and its decimals."""
    return (1, 3) if quantity == "min_dcf" else (100, 2)


def _system_cell(values: dict, unit: tuple[float, int]) -> str:
    text = _number(values["mean"], unit)
    if values["sd"] is not None:
        text += f" ± {_number(values['sd'], unit)}"
    return text + _brackets(values["interval"], unit)


def _difference_cell(values: dict, unit: tuple[float, int]) -> str:
    text = _number(values["difference"], unit, "+") + _brackets(values["interval"], unit, "+")
    if values["mixed_interval"] is not None:
        text += f", seeds too{_brackets(values['mixed_interval'], unit, '+')}"
    return text if values["p"] is None else f"{text}, p {values['p']:.3f}"


def _number(value: float, unit: tuple[float, int], sign: str = "") -> str:
    return format(unit[0] * value, f"{sign}.{unit[1]}f")


def _brackets(ends, unit: tuple[float, int], sign: str = "") -> str:
    return f" [{', '.join(_number(x, unit, sign) for x in ends)}]" if ends else ""


def _legend(report: dict) -> str:
    counts = {len(x["eer"]["seeds"]) for x in report["systems"].values()}
    lines = []
    if report["parameters"]["bootstrap"]:
        lines.append(
            f"Brackets: 95 % intervals from {report['parameters']['bootstrap']} bootstrap "
            "replicates over speakers, the same draws for all systems."
        )
    if max(counts) > 1:
        lines.append("Means over the seeds ± their standard deviation.")
    if min(counts) == 1:
        lines.append("A system with one seed has no standard deviation: another seed may differ.")
    return " ".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin compare``."""
    parser.epilog = (
        "example:\n"
        "  wespeaker-qmargin compare --utt2spk data/test/utt2spk --systems \\\n"
        "      CosFace=exp/cos_0/scores/cv.score,exp/cos_1/scores/cv.score \\\n"
        "      Q-Margin=exp/q_0/scores/cv.score,exp/q_1/scores/cv.score"
    )
    add = parser.add_argument
    add("--systems", nargs="+", required=True, metavar="NAME=FILE,...", help="a file a seed")
    add("--utt2spk", required=True, help=f"speakers of the utterances, at least {MIN_SPEAKERS}")
    add("--bootstrap", type=int, default=1000, help="replicates; 0: no intervals [1000]")
    add("--seed", type=int, default=0, help="of the bootstrap [0]")
    add("--out", help="JSON with all numbers")


def run(args: argparse.Namespace) -> None:
    """Print the tables; write the JSON."""
    systems = {}
    for text in args.systems:
        name, equals, paths = text.partition("=")
        if not (name and equals and paths):
            raise ValueError(f"--systems: expected NAME=FILE,FILE,..., found {text!r}")
        if name in systems:
            raise ValueError(f"--systems: the name {name!r} comes twice")
        systems[name] = [Path(path) for path in paths.split(",")]
    report = compare(systems, args.utt2spk, replicates=args.bootstrap, seed=args.seed)
    if args.out:
        write_text(args.out, json.dumps(report, indent=1) + "\n")
    print(markdown(report), end="")
