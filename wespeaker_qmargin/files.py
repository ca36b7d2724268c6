"""Kaldi-style text tables in, whole files out.

Every reader names file and line of what it refuses; every writer leaves either the old file or the
complete new one, never half of one.
"""

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

_LABELS = {"target": True, "1": True, "nontarget": False, "0": False}


class Trials(NamedTuple):
    """A trial list: keys, and ``is_target`` bool (N,) or None when it has no labels."""

    enroll: list[str]
    test: list[str]
    is_target: np.ndarray | None


class Scores(NamedTuple):
    """A score file: the trials, ``scores`` float64 (N,), and how many lines were skipped."""

    enroll: list[str]
    test: list[str]
    scores: np.ndarray
    is_target: np.ndarray | None
    num_skipped: int = 0


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


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left in ``folder``; nobody may be writing there."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[a-z0-9_]{8}\.tmp", path.name):
            path.unlink(missing_ok=True)


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
        key, *value = re.split(r"[ \t]+", line, maxsplit=1)
        if not value:
            raise ValueError(f"{path}:{number}: expected 'key value', found {line!r}")
        if table.setdefault(key, value[0]) != value[0]:
            raise ValueError(f"{path}:{number}: key {key!r} comes twice with different values")
    return table


def write_table(path, table: dict) -> None:
    """Write lines ``key value``, atomically."""
    write_text(path, "".join(f"{key} {value}\n" for key, value in table.items()))


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


def read_scores(path, *, skip_bad: bool = False) -> Scores:
    """Read scores ``enroll test score [target|nontarget]``; more columns (AS-Norm's) are ignored.

    With ``skip_bad`` lines whose score is nan, inf or -inf are left out, counted and logged.

    Raises:
        ValueError: a missing, non-numeric or non-finite score, or an unknown label, with the line;
            no finite score at all.
    """
    enroll, test, scores, labels, bad = [], [], [], [], []
    for number, line in read_lines(path):
        words = line.split()
        if len(words) < 3:
            raise ValueError(
                f"{path}:{number}: expected 'enroll test score [label]', found {line!r}"
            )
        score = _number(path, number, words[2], "score")
        if not np.isfinite(score):
            if not skip_bad:
                raise ValueError(f"{path}:{number}: score {words[2]} of {words[0]} {words[1]}")
            bad.append(number)
            continue
        enroll.append(words[0])
        test.append(words[1])
        scores.append(score)
        if len(words) > 3:
            labels.append(_label(path, number, words[3]))
    if labels and len(labels) != len(scores):
        raise ValueError(
            f"{path}: {len(labels)} of {len(scores)} lines have a label; all or none may"
        )
    if bad:
        total = len(bad) + len(scores)
        message = f"{path}: {len(bad)} of {total} scores are not finite, the first in line {bad[0]}"
        if not scores:
            raise ValueError(message)
        logger.warning("%s: skipped", message)
    is_target = np.array(labels, dtype=bool) if labels else None
    return Scores(enroll, test, np.array(scores, dtype=np.float64), is_target, len(bad))


def write_scores(path, trials: Trials | Scores, scores, columns=()) -> None:
    """Write ``enroll test score [label]`` with eight significant digits, atomically.

    ``columns``: arrays (N,) of further numbers, which stand after a label: only where there is one.
    """
    fields = [trials.enroll, trials.test, (f"{x:.8g}" for x in scores.tolist())]
    if trials.is_target is not None:
        fields.append("target" if x else "nontarget" for x in trials.is_target)
        fields += [(f"{x:.8g}" for x in column.tolist()) for column in columns]
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        stream.writelines(" ".join(words) + "\n" for words in zip(*fields))
    logger.info("%s: %d scores", path, len(scores))


def read_cohort_columns(path) -> np.ndarray:
    """Return AS-Norm's columns 5 to 8, ``|enroll| |test| enroll_mean test_mean``, float64 (N, 4).

    Raises:
        ValueError: a line with fewer columns, or no finite number in one of them, with the line.
    """
    rows = []
    for number, line in read_lines(path):
        words = line.split()
        if len(words) < 8:
            raise ValueError(
                f"{path}:{number}: expected the 8 columns of normalised, labelled scores "
                f"(`wespeaker-qmargin score --norm asnorm`), found {len(words)}"
            )
        rows.append([_number(path, number, word, "number") for word in words[4:8]])
        if not np.isfinite(rows[-1]).all():
            raise ValueError(f"{path}:{number}: columns 5 to 8 hold {' '.join(words[4:8])}")
    return np.array(rows)


def _number(path, line: int, word: str, what: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{path}:{line}: {word!r} is not a {what}") from None
