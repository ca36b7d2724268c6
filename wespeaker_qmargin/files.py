"""Kaldi-style text tables in, whole files out.

Every reader names file and line of what it refuses; every writer leaves either the old file or the
complete new one, never half of one.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

_LABELS = {"target": True, "1": True, "nontarget": False, "0": False}


class Trials(NamedTuple):
    """A trial list: keys, and ``is_target`` bool (N,) or None when it has no labels."""

    enroll: list[str]
    test: list[str]
    is_target: np.ndarray | None


class Scores(NamedTuple):
    """A score file: the trials, and ``scores`` float64 (N,)."""

    enroll: list[str]
    test: list[str]
    scores: np.ndarray
    is_target: np.ndarray | None


@contextmanager
def atomic_path(path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that becomes ``path`` when the block ends well.

    The parent folder is made. If the block raises, the temporary file goes and ``path`` stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        os.chmod(temporary, 0o666 & ~_umask())
        yield temporary
        with open(temporary, "rb") as done:
            os.fsync(done.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path``, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_lines(path) -> list[tuple[int, str]]:
    """Return (line number, stripped text) of every line that is not blank.

    Takes CRLF, a byte-order mark and a missing final newline.

    Raises:
        FileNotFoundError: no such file.  ValueError: the file holds no line, or is not UTF-8 text.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file ({error})") from error
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), 1)]
    lines = [(i, line) for i, line in lines if line]
    if not lines:
        raise ValueError(f"{path}: the file is empty")
    return lines


def read_table(path) -> dict[str, str]:
    """Read ``key value`` lines (wav.scp, utt2spk, ...); the value is the rest of the line.

    Raises:
        ValueError: a line without value, or a key that comes twice with different values.
    """
    table: dict[str, str] = {}
    for number, line in read_lines(path):
        key, _, value = line.replace("\t", " ").partition(" ")
        value = value.strip()
        if not value:
            raise ValueError(f"{path}:{number}: expected 'key value', found {line!r}")
        if table.setdefault(key, value) != value:
            raise ValueError(f"{path}:{number}: key {key!r} comes twice with different values")
    return table


def read_trials(path) -> Trials:
    """Read trials ``enroll test [target|nontarget|1|0]`` or VoxCeleb's ``1|0 enroll test``.

    All lines must have the same form.

    Raises:
        ValueError: another number of words or another label, naming the line.
    """
    rows = [(number, line.split()) for number, line in read_lines(path)]
    label_column = _label_column(path, rows)
    enroll, test, labels = [], [], []
    for number, words in rows:
        if len(words) != (2 if label_column is None else 3):
            raise ValueError(
                f"{path}:{number}: expected 'enroll test [target|nontarget]' as in the first line, "
                f"found {' '.join(words)!r}"
            )
        if label_column is not None:
            labels.append(_label(path, number, words.pop(label_column)))
        enroll.append(words[0])
        test.append(words[1])
    return Trials(enroll, test, None if label_column is None else np.array(labels, dtype=bool))


def _label_column(path, rows) -> int | None:
    number, first = rows[0]
    if len(first) == 2:
        return None
    if len(first) == 3 and first[2] in _LABELS:
        return 2
    # VoxCeleb's own lists put 1 or 0 first; a Kaldi list could have an utterance of that name
    if len(first) == 3 and first[0] in ("0", "1"):
        return 0
    raise ValueError(
        f"{path}:{number}: expected 'enroll test target|nontarget', found {' '.join(first)!r}"
    )


def _label(path, number: int, word: str) -> bool:
    if word not in _LABELS:
        raise ValueError(f"{path}:{number}: expected target or nontarget (or 1, 0), found {word!r}")
    return _LABELS[word]


def read_scores(path) -> Scores:
    """Read scores ``enroll test score [target|nontarget]``; more columns (AS-Norm's) are ignored.

    Raises:
        ValueError: a missing, non-numeric or non-finite score, or an unknown label, with the line.
    """
    enroll, test, scores, labels = [], [], [], []
    for number, line in read_lines(path):
        words = line.split()
        if len(words) < 3:
            raise ValueError(
                f"{path}:{number}: expected 'enroll test score [label]', found {line!r}"
            )
        try:
            score = float(words[2])
        except ValueError:
            raise ValueError(f"{path}:{number}: {words[2]!r} is not a score") from None
        if not np.isfinite(score):
            raise ValueError(f"{path}:{number}: score {words[2]} of {words[0]} {words[1]}")
        enroll.append(words[0])
        test.append(words[1])
        scores.append(score)
        if len(words) > 3:
            labels.append(_label(path, number, words[3]))
    if labels and len(labels) != len(scores):
        raise ValueError(
            f"{path}: {len(labels)} of {len(scores)} lines have a label; all or none may"
        )
    is_target = np.array(labels, dtype=bool) if labels else None
    return Scores(enroll, test, np.array(scores, dtype=np.float64), is_target)
