"""Score files -> EER, minDCF, FNR at given FPRs, with speaker-bootstrap intervals, per group.

Every rate is a fraction in here and in ``results.json``, a percentage where it is printed.
The numbers on plain arrays (``eer``, ``min_dcf``, ...) are those of ``wespeaker_qmargin.roc``.
"""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from wespeaker_qmargin.files import Scores, read_scores, read_table, write_text
from wespeaker_qmargin.llr import cllr, min_cllr
from wespeaker_qmargin.metrics_table import format_markdown, format_table
from wespeaker_qmargin.roc import (
    INTERVAL,
    Roc,
    TooFewSpeakers,
    act_dcf,
    bootstrap,
    eer,
    eer_upstream,
    fnr_at_fpr,
    min_dcf,
    roc,
)

logger = logging.getLogger(__name__)

Sides = tuple[list[str], list[str]]


def evaluate(
    paths: Sequence,
    *,
    utt2spk=None,
    by=None,
    p_target: float = 0.01,
    c_miss: float = 1.0,
    c_fa: float = 1.0,
    fpr: Sequence[float] = (1e-3, 1e-4),
    replicates: int = 1000,
    seed: int = 0,
    llr: bool = False,
    skip_bad: bool = False,
) -> dict:
    """Measure score files; return ``{"parameters": {...}, "results": [a dict for each file]}``.

    A dict holds scores (path), name, num_skipped, num_target, num_nontarget, num_speaker, eer,
    eer_interval, eer_upstream, eer_threshold, min_dcf, min_dcf_interval, fnr_at {"0.001": {fnr,
    interval}}, act_dcf, cllr, min_cllr and groups {name: {counts, eer, fnr, fpr, their intervals}};
    what was not asked for is None.

    Args:
        paths: score files ``enroll test score target|nontarget`` (AS-Norm's eight columns too).
        utt2spk: file that gives each utterance's speaker; without it there are no intervals.
        by: file that gives each utterance's, or speaker's, group. A trial counts for a group where
            both sides are in it. A group has its own EER, and its FNR and FPR at the threshold of
            the whole file's EER (which the intervals hold fixed).
        p_target, c_miss, c_fa: the detection cost, see ``Roc.min_dcf``.
        fpr: FPRs at which the FNR is read, see ``Roc.fnr_at_fpr``.
        replicates, seed: of the ``bootstrap``; 0 replicates for no intervals.
        llr: the scores are natural log-likelihood ratios: actDCF, Cllr and minCllr, too.
        skip_bad: leave out and count lines whose score is not finite.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and line, trial or key.
    """
    if not paths or replicates < 0:
        raise ValueError(
            f"expected score files and replicates >= 0, got {len(paths)}, {replicates}"
        )
    if not replicates or utt2spk is None:
        reason = "resampling speakers needs a utt2spk file" if replicates else "0 replicates"
        logger.warning("no intervals: %s", reason)
    parameters = {
        "p_target": p_target,
        "c_miss": c_miss,
        "c_fa": c_fa,
        "fpr": list(fpr),
        "bootstrap": replicates,
        "seed": seed,
        "interval": INTERVAL,
        "utt2spk": None if utt2spk is None else str(utt2spk),
        "by": None if by is None else str(by),
        "llr": llr,
        "skip_bad": skip_bad,
    }
    speaker_of = None if utt2spk is None else read_table(utt2spk)
    group_of = None if by is None else read_table(by)
    results = [_evaluate_file(path, speaker_of, group_of, parameters) for path in paths]
    return {"parameters": parameters, "results": results}


def _evaluate_file(path, speaker_of, group_of, parameters) -> dict:
    logger.info("measuring %s", path)
    trials = read_scores(path, skip_bad=parameters["skip_bad"])
    if trials.is_target is None:
        raise ValueError(f"{path}: no labels; each line must end with target or nontarget")
    speakers = groups = None
    if speaker_of is not None:
        speakers = _look_up(
            trials, speaker_of, f"{path}: without speaker in {parameters['utt2spk']}"
        )
    if group_of is not None:
        by_key = {**{k: group_of.get(s) for k, s in (speaker_of or {}).items()}, **group_of}
        groups = _look_up(trials, by_key, f"{path}: without group in {parameters['by']}")
    result = {"scores": str(path), "name": Path(path).name.removesuffix(".score")}
    result["num_skipped"] = trials.num_skipped
    try:
        result.update(_measure(trials, speakers, parameters))
        result["groups"] = groups and _measure_groups(
            trials, speakers, groups, result["eer_threshold"], parameters
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return result


def _look_up(trials: Scores, table: dict, complaint: str) -> Sides:
    sides = tuple([table.get(key) for key in keys] for keys in (trials.enroll, trials.test))
    keys = zip(trials.enroll + trials.test, sides[0] + sides[1])
    missing = sorted({key for key, value in keys if value is None})
    if missing:
        raise ValueError(f"{complaint}: {len(missing)} keys, first {' '.join(missing[:10])}")
    return sides


def _measure(trials: Scores, speakers: Sides | None, parameters: dict) -> dict:
    scores, is_target = trials.scores, trials.is_target
    costs = {name: parameters[name] for name in ("p_target", "c_miss", "c_fa")}
    rates = parameters["fpr"]

    def statistics(curve: Roc) -> list[float]:
        return [curve.eer(), curve.min_dcf(**costs), *(curve.fnr_at_fpr(x) for x in rates)]

    values = [eer(scores, is_target), min_dcf(scores, is_target, **costs)]
    values += [fnr_at_fpr(scores, is_target, x) for x in rates]
    intervals = _intervals(trials, speakers, statistics, parameters, "all trials")
    intervals = intervals or [None] * len(values)
    return {
        **_counts(is_target, speakers),
        "eer": values[0],
        "eer_interval": intervals[0],
        "eer_upstream": eer_upstream(scores, is_target),
        "eer_threshold": roc(scores, is_target).eer_threshold(),
        "min_dcf": values[1],
        "min_dcf_interval": intervals[1],
        "fnr_at": {
            f"{x:g}": {"fnr": value, "interval": interval}
            for x, value, interval in zip(rates, values[2:], intervals[2:])
        },
        "act_dcf": act_dcf(scores, is_target, **costs) if parameters["llr"] else None,
        "cllr": cllr(scores, is_target) if parameters["llr"] else None,
        "min_cllr": min_cllr(scores, is_target) if parameters["llr"] else None,
    }


def _measure_groups(trials, speakers, groups: Sides, threshold: float, parameters) -> dict:
    enroll, test = (np.array(side) for side in groups)
    measured = {}
    for group in sorted({*groups[0], *groups[1]}):
        inside = np.flatnonzero((enroll == group) & (test == group))
        part = Scores(
            [trials.enroll[i] for i in inside],
            [trials.test[i] for i in inside],
            trials.scores[inside],
            trials.is_target[inside],
        )
        part_speakers = speakers and tuple([side[i] for i in inside] for side in speakers)
        measured[group] = _measure_group(group, part, part_speakers, threshold, parameters)
    return measured


def _measure_group(group, trials, speakers, threshold, parameters) -> dict:
    def statistics(curve: Roc) -> list[float]:
        return [curve.eer(), *curve.at(threshold)]

    names = ("eer", "fnr", "fpr")
    counts = _counts(trials.is_target, speakers)
    values = intervals = None
    if counts["num_target"] and counts["num_nontarget"]:
        values = statistics(roc(trials.scores, trials.is_target))
        intervals = _intervals(trials, speakers, statistics, parameters, f"group {group}")
    else:
        logger.warning("group %s: no rates, as one class has no trial: %s", group, counts)
    return {
        **counts,
        **dict(zip(names, values or [None] * 3)),
        **{f"{name}_interval": x for name, x in zip(names, intervals or [None] * 3)},
    }


def _counts(is_target, speakers: Sides | None) -> dict:
    return {
        "num_target": int(is_target.sum()),
        "num_nontarget": int((~is_target).sum()),
        "num_speaker": None if speakers is None else len({*speakers[0], *speakers[1]}),
    }


def _intervals(
    trials: Scores, speakers: Sides | None, statistics: Callable, parameters: dict, what: str
) -> list[list[float]] | None:
    if speakers is None or not parameters["bootstrap"]:
        return None
    options = {"replicates": parameters["bootstrap"], "seed": parameters["seed"]}
    try:
        return bootstrap(trials.scores, trials.is_target, *speakers, statistics, **options).tolist()
    except TooFewSpeakers as error:
        logger.warning("no intervals for %s: %s", what, error)
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin metrics``."""
    parser.epilog = (
        "example:\n"
        "  wespeaker-qmargin metrics exp/scores/cv.trials.score --utt2spk data/test/utt2spk \\\n"
        "      --by data/test/spk2gender --out exp/scores/results.json"
    )
    add = parser.add_argument
    add("scores", nargs="+", help="score files: enroll test score target|nontarget")
    add("--utt2spk", help="speakers of the utterances; needed for the 95 %% intervals")
    add("--by", help="file 'utterance-or-speaker group': EER, FNR and FPR per group")
    add("--p_target", type=float, default=0.01, help="prior of a target (default 0.01)")
    add("--c_miss", type=float, default=1.0, help="cost of a rejected target (default 1)")
    add("--c_fa", type=float, default=1.0, help="cost of an accepted non-target (default 1)")
    add("--fpr", type=float, nargs="+", default=[1e-3, 1e-4], help="FPRs to read the FNR at")
    add("--bootstrap", type=int, default=1000, help="replicates (default 1000; 0: no intervals)")
    add("--seed", type=int, default=0, help="seed of the bootstrap (default 0)")
    add(
        "--llr", action="store_true", help="scores are log-likelihood ratios: actDCF, Cllr, minCllr"
    )
    add(
        *("--skip-bad", "--skip_bad"),
        action="store_true",
        help="leave out and count lines whose score is nan or infinite",
    )
    add("--out", help="write everything to this JSON file (rates are fractions)")


def run(args: argparse.Namespace) -> None:
    """Measure, print a table and Markdown rows, and write ``--out``."""
    names = ("utt2spk", "by", "p_target", "c_miss", "c_fa", "fpr", "seed", "llr", "skip_bad")
    options = {name: getattr(args, name) for name in names}
    report = evaluate(args.scores, replicates=args.bootstrap, **options)
    print(format_table(report), format_markdown(report), sep="\n\n")
    if args.out:
        write_text(args.out, json.dumps(report, indent=2, allow_nan=False) + "\n")
