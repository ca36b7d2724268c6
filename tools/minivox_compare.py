"""How much of a rebuilt minivox is the same as the manifest's, and the report of it."""

import hashlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import soundfile
from minivox_audio import RATE

from wespeaker_qmargin.files import read_lines

CLASSES = ("exact", "samples", "close", "length", "copied", "differs", "missing")
LEGEND = """exact: made, the manifest's bytes; samples: all samples equal SPEC's, in other bytes;
close: equal length, samples within the tolerance; length: equal length, SPEC has no audio;
copied: from SPEC, which says nothing; differs: anything else."""


def compared(path: str, digest: str, spec: Path, out: Path, seconds, tolerance: int) -> str:
    """Return which of CLASSES a file of the manifest is in; ``seconds`` as in metadata.tsv."""
    made = out / path
    if not made.is_file():
        return "missing"
    if hashlib.sha256(made.read_bytes()).hexdigest() == digest:
        return "exact"
    if made.suffix != ".flac":
        return "differs"
    wav, _ = soundfile.read(made, dtype="int16")
    if not (spec / path).is_file():
        return "length" if seconds and round(len(wav) / RATE, 3) == float(seconds) else "differs"
    wanted, _ = soundfile.read(spec / path, dtype="int16")
    if len(wav) != len(wanted):
        return "differs"
    worst = np.abs(wav.astype(int) - wanted).max()
    return "samples" if worst == 0 else "close" if worst <= tolerance else "differs"


def comparison(rows, bad, copied, spec: Path, out: Path, *, tolerance: int) -> dict[str, str]:
    """Return path -> class for every file of the manifest.

    Args:
        rows: of metadata.tsv.
        bad: paths that could not be made.
        copied: paths that were copied from ``spec``.
    """
    seconds = {row["rel"]: row["dur"] for row in rows}
    result = {}
    for _, line in read_lines(spec / "MANIFEST.sha256"):
        digest, _, name = line.partition("  ")
        name = name.removeprefix("./")
        if name in bad:  # what an earlier run left under that name does not count
            result[name] = "missing"
        else:
            found = compared(name, digest, spec, out, seconds.get(name), tolerance)
            result[name] = "copied" if found == "exact" and name in copied else found
    return result


def kind_of(path: str, sources: dict[str, str]) -> str:
    """Return the line of the report that a path counts in."""
    for folder in ("aug/noise/", "aug/rir/"):
        if path.startswith(folder):
            return folder[:-1]
    return sources.get(path, "tables and texts")


def report(result: dict[str, str], bad: dict[str, str], rows: list[dict[str, str]]) -> str:
    """Return the counts of every class, a line for every kind of file, and what is not the same."""
    sources = {row["rel"]: f"{row['src']} {row['split']}" for row in rows}
    counts: dict[str, Counter] = defaultdict(Counter)
    for path, found in result.items():
        counts[kind_of(path, sources)][found] += 1
    lines = [" " * 22 + "".join(f"{word:>9}" for word in (*CLASSES, "all"))]
    for kind, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        numbers = [*(count[word] for word in CLASSES), count.total()]
        lines.append(f"{kind:<22}" + "".join(f"{number:>9}" for number in numbers))
    lines += [LEGEND]
    lines += [f"{found}: {path}" for path, found in result.items() if found == "differs"]
    lines += [
        f"missing: {path}: {bad.get(path, 'it cannot be made, and SPEC has none')}"
        for path, found in result.items()
        if found == "missing"
    ]
    return "\n".join(lines)
