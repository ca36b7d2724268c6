"""A data folder before anything runs on it: what is wrong with its audio, speakers and trials.

What is found has a kind (`KINDS`); a cleaned copy of the lists leaves some of them out.
"""

import argparse
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.check_audio import (
    Finding,
    Limits,
    Measured,
    audio_findings,
    measure_all,
)
from wespeaker_qmargin.files import Trials, read_lines, read_trials, write_table, write_text
from wespeaker_qmargin.lists import audio_source

KINDS = {
    "list": "a faulty line, or a key that is in one list only",
    "bad": "cannot be read",
    "short": "shorter than --min_seconds",
    "silent": "no sound in it",
    "duplicate": "the same samples under two keys",
    "clipped": "cut off at full scale",
    "speaker": "fewer than two usable utterances",
    "trial": "a key without audio, or a list that cannot be read",
}
DROPPED = ("bad", "short", "silent", "duplicate")
_DROPPABLE = (*DROPPED, "clipped", "speaker")
_DROP_HELP = f"what the copy leaves out, of {', '.join(_DROPPABLE)} [{' '.join(DROPPED)}]"
FOUND = 3  # exit status


class Report(NamedTuple):
    """What a folder holds. ``wavs`` and ``speakers`` are its lists as they are, without the keys
    that a finding ``list`` names; ``kept`` the keys that a cleaned copy has."""

    folder: Path
    wavs: dict[str, str]
    speakers: dict[str, str] | None
    trials: dict[Path, Trials]
    measured: list[Measured]
    findings: list[Finding]
    kept: list[str]


def check_data(
    folder,
    *,
    trials: Iterable | None = None,
    limits: Limits = Limits(),  # noqa: B008 (immutable)
    drop: Collection[str] = DROPPED,
    jobs: int = 1,
    allow_pipes: bool = False,
) -> Report:
    """Check a folder with ``wav.scp`` and perhaps ``utt2spk`` and ``trials`` (a list, or several).

    Args:
        trials: lists; None: ``folder/trials``, or the files in it, if it is there.
        drop: kinds of findings whose utterances are unusable.
        allow_pipes: see ``lists.read_utterances``.

    Raises:
        FileNotFoundError: no wav.scp, or a trial list that was asked for.
        ValueError: a list that is empty or no text.
    """
    folder, findings = Path(folder), []
    wavs = _read_table(folder / "wav.scp", findings)
    speakers = None
    if (folder / "utt2spk").is_file():
        speakers = _read_table(folder / "utt2spk", findings)
        _drop_lone_keys(wavs, speakers, findings)
    found = {path: _read_trials(path, wavs, findings) for path in _trial_paths(folder, trials)}
    utterances = _utterances(wavs, speakers, findings, allow_pipes)
    measured = measure_all(utterances, jobs)
    findings += audio_findings(utterances, measured, limits)
    dropped = {finding.key for finding in findings if finding.kind in {*drop, "bad"}}
    kept = [key for key in wavs if key not in dropped]
    if speakers is not None:
        lone = _lone_speakers(speakers, kept)
        findings += lone
        if "speaker" in drop:
            names = {finding.key for finding in lone}
            kept = [key for key in kept if speakers[key] not in names]
    read = {path: lines for path, lines in found.items() if lines is not None}
    return Report(folder, wavs, speakers, read, measured, findings, kept)


def _read_table(path: Path, findings: list[Finding]) -> dict[str, str]:
    """As ``files.read_table``, but a faulty line is a finding."""
    table, unclear = {}, set()
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        key, _, value = line.replace("\t", " ", 1).partition(" ")
        value = value.strip()
        if not value or key.split() != [key]:
            text = f"{where}: expected 'key value', found {line[:80]!r}"
            findings.append(Finding("list", f"{path.name}:{number}", text))
        elif key in table:
            if table[key] != value:
                unclear.add(key)
            with_what = "another value: left out" if key in unclear else "the same value"
            text = f"{where}: key {key!r} comes twice, with {with_what}"
            findings.append(Finding("list", key, text))
        else:
            table[key] = value
    return {key: value for key, value in table.items() if key not in unclear}


def _drop_lone_keys(wavs: dict, speakers: dict, findings: list[Finding]) -> None:
    for table, other, name in ((wavs, speakers, "utt2spk"), (speakers, wavs, "wav.scp")):
        lone = [key for key in table if key not in other]
        findings += [Finding("list", key, f"{key}: not in {name}") for key in lone]
        for key in lone:
            del table[key]


def _utterances(wavs, speakers, findings, allow_pipes: bool) -> list[Utterance]:
    utterances = []
    for key, text in wavs.items():
        try:
            source = audio_source(key, text, allow_pipes=allow_pipes)
        except ValueError as error:
            findings.append(Finding("bad", key, str(error)))
            continue
        utterances.append(Utterance(key, speakers and speakers[key], source))
    return utterances


def _trial_paths(folder: Path, trials: Iterable | None) -> list[Path]:
    if trials is not None:
        return [Path(path) for path in trials]
    path = folder / "trials"
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    return [path] if path.is_file() else []


def _read_trials(path: Path, wavs: dict[str, str], findings: list[Finding]) -> Trials | None:
    try:
        trials = read_trials(path)
    except ValueError as error:
        findings.append(Finding("trial", path.name, str(error)))
        return None
    missing = Counter(key for key in (*trials.enroll, *trials.test) if key not in wavs)
    for key, count in missing.items():
        text = f"{key}: in {count} trials of {path}, without audio"
        findings.append(Finding("trial", key, text))
    return trials


def _lone_speakers(speakers: dict[str, str], kept: list[str]) -> list[Finding]:
    usable, listed = Counter(speakers[key] for key in kept), Counter(speakers.values())
    return [
        Finding("speaker", spk, f"speaker {spk}: {usable[spk]} usable of {count} utterances")
        for spk, count in listed.items()
        if usable[spk] < 2
    ]


def write_clean(report: Report, out) -> None:
    """Write the lists of ``report`` with ``kept`` only, and problems.tsv with all findings.

    wav.scp, utt2spk and spk2utt (if there are speakers), and the trials whose keys are both kept,
    as ``enroll test [target|nontarget]``. Paths stay as they are written in the old list.

    Raises:
        ValueError: nothing is left, or ``out`` is the folder itself; nothing is written then.
    """
    out, kept = Path(out), set(report.kept)
    if out.resolve() == report.folder.resolve():
        raise ValueError(f"{out}: is the folder that was checked; give another one")
    if not kept:
        raise ValueError(f"{report.folder}: no utterance is left for a cleaned copy")
    names = {_copy_name(report.folder, path): path for path in report.trials}
    if len(names) < len(report.trials):
        raise ValueError("--trials: two lists of the same name; check them one after the other")
    write_table(out / "wav.scp", {key: report.wavs[key] for key in report.kept})
    if report.speakers is not None:
        write_table(out / "utt2spk", {key: report.speakers[key] for key in report.kept})
        of_speaker: dict[str, list[str]] = {}
        for key in report.kept:
            of_speaker.setdefault(report.speakers[key], []).append(key)
        write_table(out / "spk2utt", {spk: " ".join(keys) for spk, keys in of_speaker.items()})
    for name, path in names.items():
        lines = _trial_lines(report.trials[path], kept)
        if lines:
            write_text(out / name, "".join(lines))
    rows = (f"{kind}\t{key}\t{text}\n" for kind, key, text in report.findings)
    write_text(out / "problems.tsv", "".join(rows))


def _copy_name(folder: Path, path: Path) -> Path:
    inside = path.is_relative_to(folder)
    return path.relative_to(folder) if inside else Path("trials", path.name)


def _trial_lines(trials: Trials, kept: set[str]) -> list[str]:
    labels = [""] * len(trials.enroll)
    if trials.is_target is not None:
        labels = np.where(trials.is_target, " target", " nontarget").tolist()
    return [
        f"{enroll} {test}{label}\n"
        for enroll, test, label in zip(trials.enroll, trials.test, labels)
        if enroll in kept and test in kept
    ]


def summary(report: Report, *, show: int = 10) -> str:
    """Return the report as text: sizes, then every kind with its number and ``show`` lines."""
    good = [values for values in report.measured if values.problem is None]
    hours = sum(values.num_samples / values.rate for values in good) / 3600
    rates = Counter(f"{values.rate} Hz" for values in good)
    rates |= Counter(
        f"{values.channels} channels, the first is used" for values in good if values.channels > 1
    )
    people = f" of {len(set(report.speakers.values()))} speakers" if report.speakers else ""
    lines = [f"{report.folder}: {len(report.wavs)} utterances{people}, {hours:.2f} h"]
    lines += [f"  {count} at {name}" for name, count in rates.most_common() if "Hz" in name]
    lines += [f"  {count} with {name}" for name, count in rates.most_common() if "Hz" not in name]
    for kind, meaning in KINDS.items():
        found = [finding.text for finding in report.findings if finding.kind == kind]
        lines.append(f"{kind:9} {len(found):7}  {meaning}")
        lines += [f"    {text}" for text in found[:show]]
        if len(found) > show:
            lines.append(f"    and {len(found) - show} more")
    lines.append(f"{len(report.kept)} utterances are usable")
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``wespeaker-qmargin check-data``."""
    parser.epilog = (
        "example:\n  wespeaker-qmargin check-data data/train --out data/train_clean\n"
        f"exit status: 0 nothing found that the cleaned copy leaves out; {FOUND} something found; "
        "1 no report\n(say, no wav.scp, or nothing is left for --out); 2 bad usage"
    )
    limits, add = Limits(), parser.add_argument
    add("folder", metavar="DIR", help="with wav.scp, and perhaps utt2spk and trials")
    add("--trials", nargs="+", metavar="FILE", help="trial lists [DIR/trials, or the files in it]")
    add("--out", metavar="DIR", help="for a cleaned copy of the lists, and problems.tsv")
    add("--drop", nargs="+", choices=_DROPPABLE, default=DROPPED, metavar="KIND", help=_DROP_HELP)
    add("--min_seconds", type=float, default=limits.min_seconds, help="shortest [%(default)s]")
    add("--silent_dbfs", type=float, default=limits.silent_dbfs, help="silence [%(default)s]")
    add(
        "--clipped_share",
        type=float,
        default=limits.clipped_share,
        help="of the samples, at full scale [%(default)s]",
    )
    add("--jobs", type=int, default=_num_cores(), help="processes [one a core]")
    add("--show", type=int, default=10, help="lines to print of each kind [%(default)s]")
    add("--allow-pipes", "--allow_pipes", action="store_true", help="run the commands in wav.scp")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(args: argparse.Namespace) -> None:
    """Print the report, write the copy, exit with 3 if the copy leaves something out."""
    if args.jobs < 1:
        raise ValueError(f"--jobs: expected a number >= 1, got {args.jobs}")
    report = check_data(
        args.folder,
        trials=args.trials,
        limits=Limits(args.min_seconds, args.silent_dbfs, args.clipped_share),
        drop=args.drop,
        jobs=args.jobs,
        allow_pipes=args.allow_pipes,
    )
    print(summary(report, show=args.show), end="")
    if args.out:
        write_clean(report, args.out)
    if any(finding.kind in {"list", "bad", "trial", *args.drop} for finding in report.findings):
        raise SystemExit(FOUND)
