"""Reading embeddings (Kaldi ``xvector.scp``): whole, averaged, or averaged by speaker.

Each reader passes over the file once, in its order, and refuses what is no finite vector of the
common length, naming key and file. With ``skip_bad`` those that hold NaN or infinity are left out,
counted and logged.
"""

import io
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import kaldiio
import numpy as np

from wespeaker_qmargin.files import atomic_path, read_table

logger = logging.getLogger(__name__)


class Embeddings(NamedTuple):
    """``keys`` (N) and their ``vectors``, float32 (N, D)."""

    keys: list[str]
    vectors: np.ndarray


def read_embeddings(
    scp, keys: Iterable[str] | None = None, *, skip_missing: bool = False, skip_bad: bool = False
) -> Embeddings:
    """Read the embeddings of ``keys`` (default: all), in the order of the scp file.

    ``skip_missing`` leaves out the keys that the file lacks, as ``skip_bad`` does non-finite ones.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a key without embedding (the first ten and how many), a key that comes twice
            with different places, an embedding that cannot be read, is not a vector, has another
            length than the first, or is not finite; nothing is left.
    """
    table = read_table(scp)
    if keys is not None:
        keys = set(keys)
        missing = keys - table.keys()
        if not skip_missing or (missing and missing == keys):
            refuse_missing(missing, f"{scp}: keys without embedding")
        table = {key: place for key, place in table.items() if key in keys}
    found, vectors = [], np.empty((0, 0), np.float32)
    for key, vector in _vectors(scp, table, skip_bad=skip_bad):
        if not found:
            vectors = np.empty((len(table), len(vector)), np.float32)
        vectors[len(found)] = vector
        found.append(key)
    return Embeddings(found, vectors[: len(found)])


def mean_vector(source, *, skip_bad: bool = False) -> np.ndarray:
    """Return the mean embedding, float64 (D,), of an scp file, or the one stored in a .npy file.

    Raises:
        FileNotFoundError, ValueError: as ``read_embeddings``; a .npy file without finite vector.
    """
    if Path(source).suffix == ".npy":
        return _stored_mean(source)
    table = read_table(source)
    total, count = 0.0, 0
    for _, vector in _vectors(source, table, skip_bad=skip_bad):
        total, count = total + vector.astype(np.float64), count + 1
    return total / count


def _stored_mean(path) -> np.ndarray:
    try:
        mean = np.load(path, allow_pickle=False).astype(np.float64)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a stored vector of numbers ({error})") from error
    if mean.ndim != 1 or not np.isfinite(mean).all():
        raise ValueError(
            f"{path}: expected one finite vector, found shape {mean.shape} with "
            f"{np.sum(~np.isfinite(mean))} numbers that are NaN or infinity"
        )
    return mean


def speaker_means(scp, utt2spk, *, skip_bad: bool = False) -> Embeddings:
    """Return each speaker's mean embedding; the keys are the speakers, in order of appearance.

    Raises:
        FileNotFoundError, ValueError: as ``read_embeddings``; an embedding without speaker.
    """
    table, speaker_of = read_table(scp), read_table(utt2spk)
    refuse_missing(table.keys() - speaker_of.keys(), f"{utt2spk}: no speaker for keys of {scp}")
    totals, counts = {}, {}
    for key, vector in _vectors(scp, table, skip_bad=skip_bad):
        speaker = speaker_of[key]
        totals[speaker] = totals.get(speaker, 0.0) + vector.astype(np.float64)
        counts[speaker] = counts.get(speaker, 0) + 1
    means = [totals[speaker] / counts[speaker] for speaker in totals]
    return Embeddings(list(totals), np.array(means, dtype=np.float32))


def read_cohort(scp, utt2spk=None, *, trial_keys=frozenset(), skip_bad=False) -> Embeddings:
    """Return a cohort's embeddings, one an entry of ``scp`` or one a speaker of ``utt2spk``.

    Utterances that are also in the set ``trial_keys`` are counted and logged, not left out.

    Raises:
        FileNotFoundError, ValueError: as ``read_embeddings`` and ``speaker_means``.
    """
    shared = sorted(trial_keys & read_table(scp).keys())
    if shared:
        logger.warning(
            "%s: the cohort holds %d utterances of the trials, the first: %s; an utterance's "
            "cosine with itself lowers its normalised scores: take other speakers as cohort",
            *(scp, len(shared), " ".join(shared[:10])),
        )
    if utt2spk:
        return speaker_means(scp, utt2spk, skip_bad=skip_bad)
    return read_embeddings(scp, skip_bad=skip_bad)


def read_mean(source, *, skip_bad: bool = False) -> np.ndarray:
    """Return ``mean_vector(source)``, and leave one of an scp file beside it as ``mean_vec.npy``.

    Upstream looks for it there. Where it cannot be written, that is logged.
    """
    mean = mean_vector(source, skip_bad=skip_bad)
    place = Path(source).parent / "mean_vec.npy"
    if Path(source).suffix != ".npy":
        try:
            with atomic_path(place) as temporary, open(temporary, "wb") as stream:
                np.save(stream, mean)
        except OSError as error:
            logger.warning("%s is not written (%s); the scores do not need it", place, error)
    return mean


def refuse_missing(missing: Iterable[str], complaint: str) -> None:
    """Raise ValueError with the first ten of ``missing`` and their number, if there are any."""
    missing = sorted(missing)
    if missing:
        raise ValueError(f"{complaint}: {len(missing)}, the first: {' '.join(missing[:10])}")


def _vectors(scp, table: dict[str, str], *, skip_bad: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (key, float32 vector) in the table's order; one archive is open at a time."""
    lines = io.StringIO("".join(f"{key} {place}\n" for key, place in table.items()))
    reader = kaldiio.load_scp_sequential(lines)
    length, bad = None, []
    for key, place in table.items():
        try:
            vector = np.asarray(next(reader)[1], dtype=np.float32)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{scp}: cannot read {key} at {place} ({reason})") from error
        length = vector.size if length is None else length
        if vector.ndim != 1 or vector.size != length or not length:
            raise ValueError(
                f"{scp}: {key} at {place} has shape {vector.shape}; expected a vector of "
                f"{length or 'one or more'} numbers"
            )
        if np.isfinite(vector).all():
            yield key, vector
        elif skip_bad:
            bad.append(key)
        else:
            raise ValueError(f"{scp}: embedding {key} at {place} holds NaN or infinity")
    if bad:
        message = f"{scp}: {len(bad)} of {len(table)} embeddings hold NaN or infinity"
        if len(bad) == len(table):
            raise ValueError(message)
        logger.warning("%s: skipped, the first: %s", message, " ".join(bad[:10]))
