"""Find the audio files of a corpus, and measure how long they are.

Corpora of this recipe have files two folders deep: SPEAKER/VIDEO/00001.wav (VoxCeleb),
noise/free-sound/noise-free-sound-0000.wav (MUSAN), smallroom/Room001/Room001-00001.wav (simulated
impulse responses). Those three names make the key of a file, as in WeSpeaker.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from unpack import default_jobs

from wespeaker_qmargin import files
from wespeaker_qmargin.audio import Audio, AudioError, Utterance

logger = logging.getLogger(__name__)

EXAMPLE = """example:
  python recipes/voxceleb/local/measure.py data/raw_data/voxceleb1
"""
SAMPLE_RATE = 16000
SPEAKERS = r"id\d{5}"
NOISES = "music|noise|speech"
ROOMS = "(small|medium|large)room"
MAX_DEPTH = 4  # voxceleb2/dev/aac/id00012
CHUNK = 500  # files that a process measures at once


class Found(NamedTuple):
    """Files by key: ``audio`` that can be read, and ``m4a`` that must be converted first."""

    audio: dict[str, str]
    m4a: dict[str, str]


def find_folders(root, pattern: str) -> list[str]:
    """Return the folders named by ``pattern``, at most four levels below ``root``, sorted."""
    found, level = [], [os.path.abspath(root)]
    for _ in range(MAX_DEPTH):
        below = [path for folder in level for path in _folders(folder)]
        found += [path for path in below if re.fullmatch(pattern, os.path.basename(path))]
        level = [path for path in below if not re.fullmatch(pattern, os.path.basename(path))]
    return sorted(found)


def find_audio(folders: Iterable[str], *, jobs: int = 1) -> Found:
    """Return the files two folders below the parents of ``folders``.

    A key is ``SPEAKER/VIDEO/00001.wav``: it ends in ``.wav`` whatever the file is (wav, flac or
    m4a), so that lists and trials fit either.

    Raises:
        ValueError: two audio files, or two m4a files, of one key.
    """
    audio, m4a = {}, {}
    with ThreadPoolExecutor(jobs) as pool:
        for files in pool.map(_list_files, folders):
            for key, path in files:
                table = m4a if path.endswith(".m4a") else audio
                if table.setdefault(key, path) != path:
                    raise ValueError(f"{key} is there twice: {table[key]} and {path}")
    return Found(audio, m4a)


def _folders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [e.path for e in entries if e.is_dir() and not e.name.startswith(".")]


def _list_files(folder: str) -> list[tuple[str, str]]:
    files = []
    for inner in _folders(folder):
        prefix = f"{os.path.basename(folder)}/{os.path.basename(inner)}"
        with os.scandir(inner) as entries:
            for entry in entries:
                stem, suffix = os.path.splitext(entry.name)
                if suffix in (".wav", ".flac", ".m4a") and not entry.name.startswith("."):
                    files.append((f"{prefix}/{stem}.wav", entry.path))
    return files


def measure(audio: dict[str, str], *, jobs: int = 1) -> tuple[dict[str, float], dict[str, str]]:
    """Return (seconds of each key, what is wrong with the keys that cannot be used).

    Only headers are read. Unusable: missing, empty, not audio, shorter than its header says,
    not of 16 kHz.

    Args:
        audio: key -> path.
        jobs: processes.
    """
    items = list(audio.items())
    chunks = [items[i : i + CHUNK] for i in range(0, len(items), CHUNK)]
    seconds, bad = {}, {}
    with ProcessPoolExecutor(jobs) as pool:
        for chunk, lengths in zip(chunks, pool.map(_measure_chunk, chunks)):
            for (key, _), length in zip(chunk, lengths):
                (bad if isinstance(length, str) else seconds)[key] = length
    return seconds, bad


def _measure_chunk(chunk: Sequence[tuple[str, str]]) -> list[float | str]:
    lengths = []
    for key, path in chunk:
        try:
            with Audio(Utterance(key, None, path)) as audio:
                lengths.append(audio.num_samples / audio.rate)
                if audio.rate != SAMPLE_RATE:
                    lengths[-1] = f"{key}: {path}: {audio.rate} Hz, expected {SAMPLE_RATE}"
        except AudioError as error:
            lengths.append(str(error))
    return lengths


def report_bad(bad: dict[str, str], total: int, *, listed: Path, skip_bad: bool) -> None:
    """Name the files that cannot be used, and write all of them to ``listed``.

    Args:
        bad: key -> reason; without any, a ``listed`` of before is removed.
        total: how many files there are with them.

    Raises:
        ValueError: there are some, and not ``skip_bad`` (which makes it a warning).
    """
    if not bad:
        listed.unlink(missing_ok=True)
        return
    files.write_text(listed, "".join(f"{reason}\n" for reason in bad.values()))
    shown = "; ".join([*bad.values()][:5])
    text = f"{len(bad)} of {total} files cannot be used (all are named in {listed}): {shown}"
    if not skip_bad:
        raise ValueError(
            f"{text}. Remove them, unpack their archive again (unpack.py writes only what is not "
            "there) and repeat this; or leave them out with --skip_bad"
        )
    logger.warning("%s. They are left out", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="an unpacked corpus")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="default: %(default)s")
    args = parser.parse_args()
    try:
        folders = find_folders(args.folder, f"{SPEAKERS}|{NOISES}|{ROOMS}")
        found = find_audio(folders, jobs=args.jobs)
    except (OSError, ValueError) as error:
        sys.exit(f"measure.py: {error}")
    seconds, bad = measure(found.audio, jobs=args.jobs)
    first = {key.partition("/")[0] for key in seconds}
    print(f"{len(seconds)} files of {len(first)} speakers (or categories)")
    print(f"{sum(seconds.values()) / 3600:.1f} h; {len(found.m4a)} m4a files not counted")
    for reason in bad.values():
        print(f"unusable: {reason}")


if __name__ == "__main__":
    main()
