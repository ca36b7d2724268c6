"""From the corpora as they are distributed to Kaldi folders: stage 1 of the VoxCeleb recipes.

For every corpus an unpacked tree is used if one is named (--vox1, ...) or lies in RAW_DIR, else the
archive in DOWNLOAD_DIR is unpacked there; VoxCeleb2's m4a files become wav or flac. Counts and
hours are compared with the published ones. `downloads.py DOWNLOAD_DIR` says what to download.

OUT_DIR gets {vox1_dev,vox1_test,vox1,vox2_dev}/{wav.scp,utt2spk,spk2utt,utt2dur} (vox1 is the first
two together), {musan,rirs}/wav.scp and trials/vox1_{O,E,H}.trials. Keys are WeSpeaker's:
id10270/5r0dWxy17C8/00001.wav, noise/free-sound/noise-free-sound-0000.wav. What is finished is
skipped; what was interrupted goes on where it stopped.
"""

import argparse
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

from convert_m4a import convert_missing
from downloads import (
    CORPORA,
    EXPECTED,
    LISTS,
    check_counts,
    check_md5,
    find_files,
    read_expected,
)
from kaldi_folder import join, write_folder
from make_trials import make_trials
from measure import NOISES, ROOMS, SPEAKERS, find_audio, find_folders, measure, report_bad
from unpack import default_jobs, unpack

from wespeaker_qmargin import files

logger = logging.getLogger(__name__)

EXAMPLE = """examples:
  python recipes/voxceleb/local/prepare_voxceleb.py data --download_dir /downloads --jobs 16
  python recipes/voxceleb/local/prepare_voxceleb.py data --vox1 /corpora/VoxCeleb1 \\
    --musan /corpora/musan --rirs /corpora/RIRS_NOISES --sets vox1_dev vox1_test musan rirs vox1_O
"""
SETS = (*CORPORA, *LISTS)
FOLDERS = {"musan": NOISES, "rirs": ROOMS}  # the others have speakers
TEST_SPEAKERS = {f"id{number}" for number in range(10270, 10310)}  # of VoxCeleb1


@dataclass(frozen=True)
class Plan:
    """Where everything is, and how it is prepared.

    ``trees``: corpus -> folder where it is unpacked already. ``expected``: set -> counts, and
    ``md5`` -> file name -> MD5; what is not in it is not checked. ``skip_bad``: leave out files
    that cannot be used, instead of stopping.
    """

    out_dir: Path
    download_dir: Path
    raw_dir: Path
    trees: dict[str, Path] = field(default_factory=dict)
    expected: dict[str, dict] = field(default_factory=lambda: EXPECTED)
    audio_format: str = "wav"
    skip_bad: bool = False
    jobs: int = 1
    ffmpeg: str | None = None

    def tree(self, name: str) -> Path:
        """Return where the corpus is unpacked, or will be."""
        return self.trees.get(name, self.raw_dir / CORPORA[name].root)

    def unpacking(self, name: str) -> Path:
        """Return the file that is there while the corpus is half unpacked."""
        return self.raw_dir / f".unpacking-{name}"

    @property
    def converted(self) -> Path:
        """Return where VoxCeleb2 goes as wav or flac."""
        return self.raw_dir / f"voxceleb2_{self.audio_format}"

    def must_unpack(self, name: str) -> bool:
        """Return whether the archive is needed."""
        if name in self.trees:
            return False
        if self.unpacking(name).exists():
            return True
        # who is short of disk removes the m4a files once they are converted
        kept = name == "vox2_dev" and self.converted.is_dir()
        return not self.tree(name).is_dir() and not kept


def prepare(plan: Plan, sets=SETS) -> dict[str, dict[str, float]]:
    """Prepare ``sets``; see the top of this file.

    Returns:
        set -> what was found: ``speakers``, ``utterances``, ``hours`` and how many files were
        ``left_out``; or ``trials``, ``targets``.

    Raises:
        FileNotFoundError: something must be downloaded first; nothing was done.
        ValueError: a broken archive, files that cannot be used, other counts than expected. What
        was finished stays.
    """
    _refuse_what_is_missing(plan, sets)
    found = {}
    for name in (name for name in CORPORA if name in sets):
        found[name] = _once(plan, name)
    halves = [plan.out_dir / name for name in ("vox1_dev", "vox1_test")]
    halves = [half for half in halves if (half / ".done").is_file()]
    if len(halves) == 2:
        join(halves, plan.out_dir / "vox1")
    for name in (name for name in LISTS if name in sets):
        if not halves:
            raise ValueError(f"{name}: its utterances are not prepared: add vox1_test to --sets")
        source = plan.download_dir / LISTS[name]
        _check_md5(plan, source)
        found[name] = make_trials(
            source,
            plan.out_dir / "trials" / f"{name}.trials",
            [half / "wav.scp" for half in halves],
            expected=plan.expected.get(name),
        )
    return found


def _refuse_what_is_missing(plan: Plan, sets) -> None:
    missing = []
    for name in sets:
        if name in plan.trees and not plan.trees[name].is_dir():
            raise FileNotFoundError(f"{name}: {plan.trees[name]}: no such folder")
        if name in LISTS or (plan.must_unpack(name) and not _found_before(plan, name)):
            missing += find_files(name, plan.download_dir)[1]
    if missing:
        raise FileNotFoundError(
            f"not in {plan.download_dir}: {', '.join(missing)}; `downloads.py {plan.download_dir}` "
            "says where to get them. An unpacked corpus is named by --vox1, --vox2, --musan, --rirs"
        )


def _check_md5(plan: Plan, path: Path) -> None:
    md5 = plan.expected.get("md5", {}).get(path.name)
    if md5 is not None:
        check_md5(path, md5)


def _settings(plan: Plan, name: str) -> dict:
    return {
        "tree": str(plan.tree(name)),
        "expected": plan.expected.get(name),
        "audio_format": plan.audio_format if name == "vox2_dev" else None,
    }


def _found_before(plan: Plan, name: str) -> dict[str, float] | None:
    done = plan.out_dir / name / ".done"
    before = json.loads(done.read_text()) if done.is_file() else {}
    return before["found"] if before.get("settings") == _settings(plan, name) else None


def _once(plan: Plan, name: str) -> dict[str, float]:
    done = plan.out_dir / name / ".done"
    found = _found_before(plan, name)
    if found is not None:
        logger.info("%s: done before (remove %s to do it again)", name, done)
        return found
    logger.info("%s: preparing", name)
    done.unlink(missing_ok=True)
    found = _prepare_corpus(plan, name)
    files.write_text(done, json.dumps({"settings": _settings(plan, name), "found": found}))
    return found


def _prepare_corpus(plan: Plan, name: str) -> dict[str, float]:
    if plan.must_unpack(name):
        _unpack(plan, name)
    audio, bad = _find(plan, name)
    logger.info("%s: reading the headers of %d files", name, len(audio))
    seconds, unusable = measure(audio, jobs=plan.jobs)
    bad = {**bad, **unusable}
    listed = plan.out_dir / name / "bad.list"
    report_bad(bad, len(seconds) + len(bad), listed=listed, skip_bad=plan.skip_bad)
    found = {
        "speakers": len({key.partition("/")[0] for key in seconds}),
        "utterances": len(seconds) + len(bad),
        "hours": sum(seconds.values()) / 3600,
        "left_out": len(bad),
    }
    check_counts(f"{name}: {plan.tree(name)}", found, plan.expected.get(name, {}))
    audio = {key: audio[key] for key in sorted(seconds)}
    write_folder(plan.out_dir / name, audio, None if name in FOLDERS else seconds)
    return found


def _unpack(plan: Plan, name: str) -> None:
    paths, _ = find_files(name, plan.download_dir)
    marker = plan.unpacking(name)
    stamp = "".join(f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}\n" for p in paths)
    if not marker.is_file() or marker.read_text() != stamp:
        for path in paths:
            _check_md5(plan, path)
        files.write_text(marker, stamp)
    target = plan.raw_dir / CORPORA[name].target
    logger.info("%s: unpacking into %s", name, target)
    unpack(paths, target, jobs=plan.jobs)
    if not plan.tree(name).is_dir():
        raise ValueError(f"{paths[0]}: holds no folder {plan.tree(name).name}; is it {name}?")
    marker.unlink()


def _find(plan: Plan, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (key -> audio file, key -> why it could not be converted)."""
    tree, bad = plan.tree(name), {}
    if name == "vox2_dev" and (tree / "dev").is_dir():
        tree = tree / "dev"  # the test speakers may lie beside it
    folders = find_folders(tree, FOLDERS.get(name, SPEAKERS)) if tree.is_dir() else []
    if name.startswith("vox1"):
        is_test = name == "vox1_test"
        folders = [f for f in folders if (Path(f).name in TEST_SPEAKERS) == is_test]
    found = find_audio(folders, jobs=plan.jobs)
    audio = found.audio
    if name == "vox2_dev":
        audio, bad = convert_missing(
            found,
            plan.converted,
            audio_format=plan.audio_format,
            ffmpeg=plan.ffmpeg,
            jobs=plan.jobs,
        )
    if not audio and not bad:
        raise ValueError(
            f"{name}: no audio in {tree}; expected folders {FOLDERS.get(name, 'id.....')} with two "
            "more levels in them, as in id10270/5r0dWxy17C8/00001.wav"
        )
    return audio, bad


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        plan = Plan(
            args.out_dir,
            args.download_dir or args.out_dir / "download_data",
            args.raw_dir or args.out_dir / "raw_data",
            trees={name: tree.resolve() for name, tree in _trees(args) if tree},
            expected=read_expected(args.expect),
            audio_format=args.format,
            skip_bad=args.skip_bad,
            jobs=args.jobs,
            ffmpeg=args.ffmpeg,
        )
        found = prepare(plan, args.sets)
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_voxceleb.py: {error}")
    for name, counts in found.items():
        print(f"{name}: " + ", ".join(f"{round(n, 2)} {what}" for what, n in counts.items()))


def _trees(args) -> list[tuple[str, Path | None]]:
    vox1 = [("vox1_dev", args.vox1), ("vox1_test", args.vox1)]
    return [*vox1, ("vox2_dev", args.vox2), ("musan", args.musan), ("rirs", args.rirs)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("out_dir", type=Path, help="gets the Kaldi folders")
    parser.add_argument(
        "--download_dir", type=Path, help="archives and lists (default: OUT_DIR/download_data)"
    )
    parser.add_argument(
        "--raw_dir", type=Path, help="corpora are unpacked here (default: OUT_DIR/raw_data)"
    )
    for name in ("vox1", "vox2", "musan", "rirs"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="where it is unpacked")
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=SETS, metavar="SET", help=f"of {' '.join(SETS)}"
    )
    parser.add_argument(
        "--format", choices=("wav", "flac"), default="wav", help="of VoxCeleb2 (default: wav)"
    )
    parser.add_argument(
        "--expect",
        default="official",
        metavar="official|none|FILE",
        help="counts and MD5s that must be found: JSON {SET: {speakers, utterances, hours, trials, "
        "targets}, md5: {FILE: MD5}} (default: the published ones)",
    )
    parser.add_argument(
        "--skip_bad", action="store_true", help="leave out files that cannot be used"
    )
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="default: %(default)s")
    parser.add_argument("--ffmpeg", help="the program (default: in PATH, or imageio-ffmpeg's)")


if __name__ == "__main__":
    main()
