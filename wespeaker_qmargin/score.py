"""Embeddings and trial lists -> cosine scores, optionally normalised with a cohort.

Files and columns are upstream's: ``<out>/<trials>.score`` with ``enroll test score [label]``, and
``<out>/<cohort set>_asnorm300_<trials>.score`` with ``enroll test score label |enroll| |test|
enroll_mean test_mean`` (lengths after mean subtraction, means of the cohort scores).
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wespeaker_qmargin.embeddings import (
    Embeddings,
    read_cohort,
    read_embeddings,
    read_mean,
    refuse_missing,
)
from wespeaker_qmargin.files import Trials, read_trials, write_scores

logger = logging.getLogger(__name__)

_BLOCK = 1 << 24  # most float32 numbers of one matrix product: 64 MiB
_SMALLEST_STD = 1e-6  # of float32 cosines: below it only rounding differs


class CohortStatistics(NamedTuple):
    """Of each embedding ``keys`` (N): its ``norms`` after mean subtraction, and ``means`` and
    ``stds`` of its highest cosines with the cohort; float64 (N,) each."""

    keys: list[str]
    norms: np.ndarray
    means: np.ndarray
    stds: np.ndarray


def score_trials(trials: Trials, embeddings: Embeddings, mean=None) -> np.ndarray:
    """Return the cosine ``<e - mean, t - mean> / (|e - mean| |t - mean|)`` of each trial.

    float64 (N,) in [-1, 1]; ``mean`` (D,) or None for no subtraction.

    Raises:
        ValueError: a trial without embedding, a mean of another length, an embedding of length 0.
    """
    enroll, test = _rows(trials, embeddings.keys)
    unit, _ = _directions(embeddings, mean)
    scores = np.empty(len(enroll))
    for block in _blocks(len(enroll), max(1, _BLOCK // 4 // unit.shape[1])):
        a, b = unit[enroll[block]], unit[test[block]]
        scores[block] = np.einsum("nd,nd->n", a, b, dtype=np.float64)
    return np.clip(scores, -1, 1)


def cohort_statistics(
    embeddings: Embeddings, cohort: Embeddings, *, top_n: int, mean=None
) -> CohortStatistics:
    """Return mean and standard deviation of each embedding's ``top_n`` highest cohort cosines.

    Naively ``top = np.sort(cosine(e - mean, cohort - mean))[-top_n:]; top.mean(), top.std()``; here
    by blocks, in 64 MiB whatever the sizes. A ``top_n`` above the cohort's size means all of it.

    Raises:
        ValueError: top_n < 1, lengths that differ, a vector of length 0, a standard deviation of 0.
    """
    size, length = cohort.vectors.shape
    if length != embeddings.vectors.shape[1]:
        raise ValueError(
            f"embeddings have {embeddings.vectors.shape[1]} numbers, the cohort's {length}: "
            "they are of two models"
        )
    if top_n < 1:
        raise ValueError(f"top_n must be 1 or more, got {top_n}")
    if top_n > size:
        logger.warning("top_n %d is more than the cohort holds; all %d are used", top_n, size)
        top_n = size
    others, _ = _directions(cohort, mean)
    norms, means, stds = np.empty((3, len(embeddings.keys)))
    for block in _blocks(len(embeddings.keys), max(1, _BLOCK // size)):
        part = Embeddings(embeddings.keys[block], embeddings.vectors[block])
        unit, norms[block] = _directions(part, mean)
        cosines = unit @ others.T
        if top_n < size:
            cosines.partition(size - top_n, axis=1)
        top = cosines[:, size - top_n :]
        means[block] = top.mean(axis=1, dtype=np.float64)
        stds[block] = top.std(axis=1, dtype=np.float64)
    flat = np.flatnonzero(stds < _SMALLEST_STD)
    if len(flat):
        raise ValueError(
            f"the {top_n} highest cohort scores of {embeddings.keys[flat[0]]} are all equal "
            f"({len(flat)} such embeddings): take a larger top_n or a more varied cohort"
        )
    return CohortStatistics(embeddings.keys, norms, means, stds)


def normalise_scores(trials: Trials, scores, statistics: CohortStatistics) -> np.ndarray:
    """Return ``((s - mean_e) / std_e + (s - mean_t) / std_t) / 2`` for each trial, float64 (N,).

    With statistics of the highest cohort scores it is AS-Norm (AS-Norm1 of Matejka et al., 2017,
    "Analysis of score normalization in multilingual speaker recognition": each side by its own
    highest), with those of the whole cohort S-Norm.

    Raises:
        ValueError: a trial without statistics.
    """
    _, _, means, stds = statistics
    sides = [(scores - means[i]) / stds[i] for i in _rows(trials, statistics.keys)]
    return 0.5 * (sides[0] + sides[1])


def score_files(
    embeddings,
    trials: Sequence,
    *,
    out,
    mean=None,
    norm: str | None = None,
    cohort=None,
    cohort_utt2spk=None,
    top_n: int = 300,
    missing: str = "error",
    skip_bad: bool = False,
) -> list[Path]:
    """Score trial lists with the embeddings of an scp file; return the score files written.

    Args:
        embeddings: ``xvector.scp``; only the embeddings that some trial names are read.
        trials: trial lists ``enroll test [target|nontarget]``; without labels the score files have
            three columns.
        out: folder for the score files.
        mean: scp file of the (training) embeddings whose mean is subtracted everywhere; the mean
            is left beside it in ``mean_vec.npy``, as upstream does. Or such a .npy file.
        norm: ``asnorm`` (the ``top_n`` highest cohort scores), ``snorm`` (all) or None. The
            cohort should hold no speaker of the trials: utterances in both are counted and logged.
        cohort: scp file, one entry a speaker (upstream's ``spk_xvector.scp``), or one an utterance
            with ``cohort_utt2spk``, the speakers over which they are averaged.
        missing: ``error``, or ``skip``: trials without embedding are left out, counted and logged.
        skip_bad: leave out embeddings (and their trials) that hold NaN or infinity, likewise.

    Raises:
        FileNotFoundError, ValueError: what is wrong, with file and key; no score file is written.
    """
    if norm not in (None, "asnorm", "snorm"):
        raise ValueError(f"norm must be asnorm or snorm, got {norm!r}")
    if missing not in ("error", "skip"):
        raise ValueError(f"missing must be error or skip, got {missing!r}")
    if (norm is None) != (cohort is None) or (cohort_utt2spk and not cohort):
        raise ValueError("norm and cohort go together, and cohort_utt2spk needs them")
    lists = _read_lists(trials)
    wanted = {key for x in lists.values() for key in (*x.enroll, *x.test)}
    loaded = read_embeddings(embeddings, wanted, skip_missing=missing == "skip", skip_bad=skip_bad)
    lists = {name: _with_embeddings(name, x, loaded.keys) for name, x in lists.items()}
    average = None if mean is None else read_mean(mean, skip_bad=skip_bad)
    scores = {name: score_trials(x, loaded, average) for name, x in lists.items()}
    written = {f"{name}.score": (x, scores[name], ()) for name, x in lists.items()}
    if norm is not None:
        others = read_cohort(cohort, cohort_utt2spk, trial_keys=wanted, skip_bad=skip_bad)
        used = top_n if norm == "asnorm" else len(others.keys)
        logger.info("%s: %d highest of %d cohort scores", norm, used, len(others.keys))
        statistics = cohort_statistics(loaded, others, top_n=used, mean=average)
        system = f"{Path(cohort).parent.resolve().name}_{norm}{top_n if norm == 'asnorm' else ''}"
        for name, x in lists.items():
            normalised = normalise_scores(x, scores[name], statistics)
            columns = _columns(x, statistics)
            written[f"{system}_{name}.score"] = (x, normalised, columns)
    for name, content in written.items():
        write_scores(Path(out) / name, *content)
    return [Path(out) / name for name in written]


def _read_lists(paths: Sequence) -> dict[str, Trials]:
    """Read the trial lists, by the base names that their score files will have."""
    if not paths:
        raise ValueError("expected one trial list or more")
    by_name = {}
    for path in map(Path, paths):
        if path.name in by_name:
            raise ValueError(
                f"{by_name[path.name]} and {path} would both be scored into {path.name}.score: "
                "rename one of them or score them into two folders"
            )
        by_name[path.name] = path
    return {name: read_trials(path) for name, path in by_name.items()}


def _with_embeddings(name: str, trials: Trials, keys: Sequence[str]) -> Trials:
    """Return the trials whose two sides are in ``keys``; log what is left out."""
    enroll, test, is_target = trials
    known, total = set(keys), len(enroll)
    kept = [i for i in range(total) if enroll[i] in known and test[i] in known]
    if len(kept) == total:
        return trials
    lost = sorted({*enroll, *test} - known)
    message = (
        f"{name}: {total - len(kept)} of {total} trials have no finite embedding on one side or "
        f"both; {len(lost)} keys, the first: {' '.join(lost[:10])}"
    )
    if not kept:
        raise ValueError(message)
    logger.warning("%s: skipped", message)
    sides = ([side[i] for i in kept] for side in (enroll, test))
    return Trials(*sides, None if is_target is None else is_target[kept])


def _rows(trials: Trials, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return where in ``keys`` each trial's two sides stand."""
    row = {key: i for i, key in enumerate(keys)}
    refuse_missing({*trials.enroll, *trials.test} - row.keys(), "trials without embedding")
    sides = (trials.enroll, trials.test)
    enroll, test = (np.fromiter((row[key] for key in side), np.int64) for side in sides)
    return enroll, test


def _directions(embeddings: Embeddings, mean) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(x - mean) / |x - mean|``, float32 (N, D), and the lengths, float64 (N,)."""
    keys, vectors = embeddings
    if mean is not None and np.shape(mean) != vectors.shape[1:]:
        raise ValueError(
            f"embeddings have {vectors.shape[1]} numbers, but the mean has shape {np.shape(mean)}: "
            "they are of two models"
        )
    unit, norms = np.empty_like(vectors), np.empty(len(keys))
    for block in _blocks(len(keys), max(1, _BLOCK // 4 // vectors.shape[1])):
        rows = vectors[block].astype(np.float64)
        if mean is not None:
            rows -= mean
        norms[block] = np.linalg.norm(rows, axis=1)
        zero = np.flatnonzero(norms[block] == 0)
        if len(zero):
            raise ValueError(
                f"embedding {keys[block][zero[0]]} has length 0 after mean subtraction: "
                "it has no cosine"
            )
        unit[block] = rows / norms[block, None]
    return unit, norms


def _blocks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _columns(trials: Trials, statistics: CohortStatistics) -> tuple:
    """Return upstream's four more columns: both lengths, then both cohort means."""
    enroll, test = _rows(trials, statistics.keys)
    _, norms, means, _ = statistics
    return norms[enroll], norms[test], means[enroll], means[test]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin score``."""
    parser.epilog = (
        "example:\n"
        "  wespeaker-qmargin score --embeddings exp/embeddings/test/xvector.scp \\\n"
        "      --mean exp/embeddings/train/xvector.scp --trials data/test/trials/cv.trials \\\n"
        "      --norm asnorm --cohort exp/embeddings/train/xvector.scp \\\n"
        "      --cohort_utt2spk data/train/utt2spk --top_n 300 --out exp/scores"
    )
    add = parser.add_argument
    add("--embeddings", required=True, help="xvector.scp of the trials' utterances")
    add("--trials", required=True, nargs="+", help="trial lists: enroll test [target|nontarget]")
    add("--out", required=True, help="folder for the score files")
    add("--mean", help="scp file whose mean is subtracted, or a stored mean_vec.npy")
    add("--norm", choices=("asnorm", "snorm"), help="normalise with a cohort, too")
    add("--cohort", help="scp file of the cohort: one embedding a speaker")
    add("--cohort_utt2spk", help="average the cohort by these speakers")
    add("--top_n", type=int, default=300, help="asnorm: highest cohort scores used (default 300)")
    add(
        "--missing",
        choices=("error", "skip"),
        default="error",
        help="skip: leave out and count trials without embedding (default error: write nothing)",
    )
    add(
        *("--skip-bad", "--skip_bad"),
        action="store_true",
        help="leave out and count embeddings that hold NaN or infinity, and their trials",
    )


def run(args: argparse.Namespace) -> None:
    """Score, and print the names of the score files."""
    names = ("embeddings", "trials", "out", "mean", "norm", "cohort", "cohort_utt2spk", "top_n")
    names += ("missing", "skip_bad")
    for path in score_files(**{name: getattr(args, name) for name in names}):
        print(path)
