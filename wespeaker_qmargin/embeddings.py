"""Reading embeddings (Kaldi ``xvector.scp``): whole, averaged, or averaged by speaker.

Each reader passes over the file once, in its order, and refuses what is no finite vector of the
common length, naming key and file.
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import kaldiio
import numpy as np

from wespeaker_qmargin.files import read_table


class Embeddings(NamedTuple):
    """``keys`` (N) and their ``vectors``, float32 (N, D)."""

    keys: list[str]
    vectors: np.ndarray


def read_embeddings(scp, keys: Iterable[str] | None = None) -> Embeddings:
    """Read the embeddings of ``keys`` (default: all), in the order of the scp file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a key without embedding (the first ten and how many), a key that comes twice
            with different places, an embedding that cannot be read, is not a vector, has another
            length than the first, or is not finite.
    """
    table = read_table(scp)
    if keys is not None:
        keys = set(keys)
        refuse_missing(keys - table.keys(), f"{scp}: keys without embedding")
        table = {key: place for key, place in table.items() if key in keys}
    vectors = np.empty((0, 0), np.float32)
    for row, (_, vector) in enumerate(_vectors(scp, table)):
        if row == 0:
            vectors = np.empty((len(table), len(vector)), np.float32)
        vectors[row] = vector
    return Embeddings(list(table), vectors)


def mean_vector(source) -> np.ndarray:
    """Return the mean embedding, float64 (D,), of an scp file, or the one stored in a .npy file.

    Raises:
        FileNotFoundError, ValueError: as ``read_embeddings``; a .npy file without finite vector.
    """
    if Path(source).suffix == ".npy":
        mean = np.load(source, allow_pickle=False)
        if mean.ndim != 1 or not np.isfinite(mean).all():
            raise ValueError(f"{source}: expected one finite vector, found shape {mean.shape}")
        return mean.astype(np.float64)
    table = read_table(source)
    total = sum(vector.astype(np.float64) for _, vector in _vectors(source, table))
    return total / len(table)


def speaker_means(scp, utt2spk) -> Embeddings:
    """Return each speaker's mean embedding; the keys are the speakers, in order of appearance.

    Raises:
        FileNotFoundError, ValueError: as ``read_embeddings``; an embedding without speaker.
    """
    table, speaker_of = read_table(scp), read_table(utt2spk)
    refuse_missing(table.keys() - speaker_of.keys(), f"{utt2spk}: no speaker for keys of {scp}")
    speakers = list(dict.fromkeys(speaker_of[key] for key in table))
    totals, counts = dict.fromkeys(speakers, 0.0), dict.fromkeys(speakers, 0)
    for key, vector in _vectors(scp, table):
        totals[speaker_of[key]] = totals[speaker_of[key]] + vector.astype(np.float64)
        counts[speaker_of[key]] += 1
    means = [totals[speaker] / counts[speaker] for speaker in speakers]
    return Embeddings(speakers, np.array(means, dtype=np.float32))


def refuse_missing(missing: Iterable[str], complaint: str) -> None:
    """Raise ValueError with the first ten of ``missing`` and their number, if there are any."""
    missing = sorted(missing)
    if missing:
        raise ValueError(f"{complaint}: {len(missing)}, the first: {' '.join(missing[:10])}")


def _vectors(scp, table: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (key, float32 vector) in the table's order; one archive is open at a time."""
    lines = io.StringIO("".join(f"{key} {place}\n" for key, place in table.items()))
    reader = kaldiio.load_scp_sequential(lines)
    length = None
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
        if not np.isfinite(vector).all():
            raise ValueError(f"{scp}: embedding {key} at {place} holds NaN or infinity")
        yield key, vector
