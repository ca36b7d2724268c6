"""Logistic calibration: scores, with quality measures if wanted -> log-likelihood ratios (LLRs).

Upstream's stage 7 (its "QMF") with the same measures; unlike it the measures are standardised, the
fit is run to its optimum, and what cannot be fitted is refused.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wespeaker_qmargin.embeddings import refuse_missing
from wespeaker_qmargin.files import (
    Scores,
    read_cohort_columns,
    read_scores,
    read_table,
    write_scores,
    write_text,
)
from wespeaker_qmargin.llr import Calibration, cllr, fit_calibration, min_cllr
from wespeaker_qmargin.roc import roc

logger = logging.getLogger(__name__)

QUALITY = ("duration", "norm", "cohort")


def trial_features(
    path, quality: Sequence[str] = (), *, utt2dur=None, max_duration: float = 20.0
) -> tuple[Scores, np.ndarray, tuple[str, ...]]:
    """Return a score file's trials, their features (N, 1 + 4 M) and the features' names.

    The score, then of each measure's two values, enrol's and test's, the lower, the higher, their
    difference and their ratio: the order of the two sides does not count.

    Args:
        quality: ``duration`` (seconds, at most ``max_duration``), ``norm`` (of the embeddings after
            mean subtraction) and ``cohort`` (mean of the highest cohort scores); the last two are
            columns of AS-Norm's score files.
        utt2dur: file ``utterance seconds``, for ``duration``.

    Raises:
        FileNotFoundError, ValueError: as the readers of ``files``; a measure that is not above 0 (a
            ratio means nothing then), naming the trial.
    """
    scores = read_scores(path)
    cohort = read_cohort_columns(path) if {"norm", "cohort"} & {*quality} else None
    columns, names = [scores.scores], ["score"]
    for measure in quality:
        if measure == "duration":
            values = _durations(path, scores, utt2dur, max_duration)
        else:
            values = cohort[:, :2] if measure == "norm" else cohort[:, 2:]
        wrong = np.flatnonzero((values <= 0).any(axis=1))
        if len(wrong):
            first = wrong[0]
            raise ValueError(
                f"{path}: the {measure} of {len(wrong)} trials is not above 0, the first: "
                f"{scores.enroll[first]} {scores.test[first]}; leave {measure} out"
            )
        low, high = np.sort(values, axis=1).T
        columns += [low, high, high - low, high / low]
        names += [f"{measure}_{word}" for word in ("low", "high", "difference", "ratio")]
    return scores, np.column_stack(columns), tuple(names)


def _durations(path, scores: Scores, utt2dur, max_duration: float) -> np.ndarray:
    seconds = {}
    table = read_table(utt2dur)
    wanted = {*scores.enroll, *scores.test}
    refuse_missing(wanted - table.keys(), f"{path}: utterances without duration in {utt2dur}")
    for key in sorted(wanted):
        try:
            seconds[key] = min(float(table[key]), max_duration)
        except ValueError:
            seconds[key] = np.nan
        if not np.isfinite(seconds[key]):
            raise ValueError(f"{utt2dur}: duration of {key}: expected seconds, got {table[key]!r}")
    return np.array([[seconds[a], seconds[b]] for a, b in zip(scores.enroll, scores.test)])


def calibrate_files(
    fit,
    apply: Sequence,
    *,
    out,
    quality: Sequence[str] = (),
    utt2dur=None,
    max_duration: float = 20.0,
    p_target: float = 0.01,
    l2: float = 1e-6,
) -> list[Path]:
    """Fit on one labelled score file, apply to others; return the ``cali_<name>`` files written.

    They hold ``enroll test llr [label]``. The fit is left in ``calibration.json`` beside them: the
    weights, and Cllr, minCllr, actDCF and minDCF at ``p_target`` of the file that it was fitted on.

    Args:
        fit: score file of other speakers than those of ``apply``, else the result flatters.
        quality, utt2dur, max_duration: as ``trial_features``; the same for all files.
        p_target, l2: as ``fit_calibration``.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with the file; nothing is written.
    """
    _check_options(apply, quality, utt2dur)
    options = {"quality": list(quality), "utt2dur": utt2dur, "max_duration": max_duration}
    scores, features, names = trial_features(fit, **options)
    if scores.is_target is None:
        raise ValueError(f"{fit}: no labels; each line must end with target or nontarget")
    try:
        found = fit_calibration(features, scores.is_target, names=names, p_target=p_target, l2=l2)
    except ValueError as error:
        raise ValueError(f"{fit}: {error}") from error
    if found.weights[0] <= 0:
        logger.warning("%s: the scores look inverted: their weight is %g", fit, found.weights[0])
    record = {
        "fit": str(fit),
        **options,
        "utt2dur": utt2dur and str(utt2dur),
        "p_target": p_target,
        "l2": l2,
        **_record(found, scores, features, p_target),
    }
    logger.info("%s: Cllr %.4f, minCllr %.4f", fit, record["cllr"], record["min_cllr"])
    written = {}
    for path in apply:
        trials, features, _ = trial_features(path, **options)
        written[Path(out) / f"cali_{Path(path).name}"] = (trials, found.llr(features))
    for path, content in written.items():
        write_scores(path, *content)
    write_text(Path(out) / "calibration.json", json.dumps(record, indent=1) + "\n")
    return list(written)


def _check_options(apply: Sequence, quality: Sequence[str], utt2dur) -> None:
    if not apply:
        raise ValueError("expected one score file or more to apply the calibration to")
    names = [Path(path).name for path in apply]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two files would both be written as cali_{twice[0]}: rename one of them")
    if len({*quality} & {*QUALITY}) != len(quality):
        raise ValueError(f"quality must be some of {' '.join(QUALITY)}, got {' '.join(quality)}")
    if ("duration" in quality) != (utt2dur is not None):
        raise ValueError("the quality measure duration and the file utt2dur go together")


def _record(found: Calibration, scores: Scores, features, p_target: float) -> dict:
    llr, is_target = found.llr(features), scores.is_target
    curve = roc(llr, is_target)
    return {
        "llr": "bias + sum of weight * feature, natural logarithm",
        "bias": found.bias,
        "weights": dict(zip(found.names, found.weights.tolist())),
        "num_target": int(is_target.sum()),
        "num_nontarget": int((~is_target).sum()),
        "cllr": cllr(llr, is_target),
        "min_cllr": min_cllr(llr, is_target),
        "act_dcf": curve.act_dcf(p_target=p_target),
        "min_dcf": curve.min_dcf(p_target=p_target),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin calibrate``."""
    parser.epilog = (
        "example:\n"
        "  wespeaker-qmargin calibrate --fit exp/scores/train_asnorm300_cali.trials.score \\\n"
        "      --apply exp/scores/train_asnorm300_cv.trials.score --out exp/scores \\\n"
        "      --quality duration norm cohort --utt2dur data/all/utt2dur\n"
        "  wespeaker-qmargin metrics --llr exp/scores/cali_train_asnorm300_cv.trials.score"
    )
    add = parser.add_argument
    add("--fit", required=True, help="labelled score file of other speakers")
    add("--apply", required=True, nargs="+", help="score files to calibrate")
    add("--out", required=True, help="folder for the cali_<name> files and calibration.json")
    add("--quality", nargs="+", default=[], choices=QUALITY, help="measures beside the score")
    add("--utt2dur", help="duration: file 'utterance seconds' of all utterances")
    add("--max_duration", type=float, default=20.0, help="seconds, of longer ones (default 20)")
    add("--p_target", type=float, default=0.01, help="prior to fit for (default 0.01)")
    add(
        "--l2", type=float, default=1e-6, help="L2 on the weights, keeps them finite (default 1e-6)"
    )


def run(args: argparse.Namespace) -> None:
    """Calibrate, and print the names of the calibrated score files."""
    names = ("out", "quality", "utt2dur", "max_duration", "p_target", "l2")
    for path in calibrate_files(args.fit, args.apply, **{x: getattr(args, x) for x in names}):
        print(path)
