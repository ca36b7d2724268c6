"""Check a Kaldi-style data folder and write the lists the recipe trains and tests on.

DATA_DIR (paths in its .scp files are absolute, or relative to DATA_DIR):

    train/{wav.scp,utt2spk}   test/{wav.scp,utt2spk}
    test/trials/*.trials      or one file test/trials: enroll test target|nontarget
    aug/{noise,rir}.scp       optional (musan/wav.scp and rirs/wav.scp are taken too)
    NOTE                      optional, one line that the report shows

OUT_DIR gets {train,test}/{wav.scp,utt2spk}, test/trials/*.trials, {musan,rirs}/wav.scp and NOTE,
with absolute paths. Nothing is written before everything has been checked.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import soundfile

from wespeaker_qmargin import files
from wespeaker_qmargin.lists import local_path

EXAMPLE = """example:
  python recipes/mini/local/prepare_data.py my_corpus recipes/mini/data
"""
NOISE_SOURCES = ("aug/noise.scp", "musan/wav.scp")
RIR_SOURCES = ("aug/rir.scp", "rirs/wav.scp")
NOISE_CATEGORIES = ("noise", "speech", "music")  # MUSAN's: the prefix of a key decides its SNR


def prepare_data(data_dir, out_dir, *, allow_overlap: bool = False) -> dict:
    """Check ``data_dir`` and write ``out_dir``; see the top of this file for both.

    Args:
        allow_overlap: accept speakers that are both in train and in test.

    Returns:
        what was found: ``{"train": (utterances, speakers), "test": ..., "trials": {name: Trials},
        "noise": files, "rir": files}``.

    Raises:
        FileNotFoundError: a list is missing.  ValueError: audio that cannot be opened, keys in one
        list and not in the other, a trial without audio, trials of one kind only, shared speakers.
    """
    data_dir, out_dir = Path(data_dir).resolve(), Path(out_dir)
    if not data_dir.is_dir():
        raise FileNotFoundError(f"{data_dir}: no such folder; expected a Kaldi-style data folder")
    wavs, speakers = {}, {}
    for split in ("train", "test"):
        wavs[split], speakers[split] = _read_split(data_dir, data_dir / split)
    if not allow_overlap:
        shared = sorted(set(speakers["train"].values()) & set(speakers["test"].values()))
        _refuse(data_dir, "speakers in both train and test (--allow_overlap takes them)", shared)
    trials = _read_trials(data_dir / "test", wavs["test"])
    noise, rir = (_read_optional_scp(data_dir, names) for names in (NOISE_SOURCES, RIR_SOURCES))
    noise = {_with_category(key): path for key, path in noise.items()}

    for split in ("train", "test"):
        files.write_table(out_dir / split / "wav.scp", wavs[split])
        files.write_table(out_dir / split / "utt2spk", speakers[split])
    _replace_trials(out_dir / "test" / "trials", trials)
    _write_or_remove(out_dir / "musan" / "wav.scp", _table(noise))
    _write_or_remove(out_dir / "rirs" / "wav.scp", _table(rir))
    note = data_dir / "NOTE"
    _write_or_remove(out_dir / "NOTE", note.read_text(encoding="utf-8") if note.is_file() else "")
    counts = {split: (len(utts), len(set(utts.values()))) for split, utts in speakers.items()}
    return {**counts, "trials": trials, "noise": len(noise), "rir": len(rir)}


def draw_trials(utt2spk: dict, *, per_speaker: int, ratio: float, seed: int = 0) -> files.Trials:
    """Draw a trial list: distinct pairs of different utterances, the same for the same seed.

    Args:
        per_speaker: target pairs a speaker gives, at most (all of them if there are fewer).
        ratio: non-target pairs for each target pair, as far as there are so many.

    Raises:
        ValueError: fewer than two speakers, or no speaker with two utterances.
    """
    rng = np.random.default_rng(seed)
    utts = sorted(utt2spk)
    rows, columns = np.triu_indices(len(utts), k=1)
    names = np.unique([utt2spk[utt] for utt in utts], return_inverse=True)[1]
    same = names[rows] == names[columns]
    if not same.any() or same.all():
        raise ValueError(f"no trials in {len(utts)} utterances of {len(set(names))} speakers")
    targets, speakers = np.flatnonzero(same), names[rows][same]
    chosen = [
        rng.permutation(targets[speakers == speaker])[:per_speaker]
        for speaker in range(names.max() + 1)
    ]
    num_nontarget = round(ratio * sum(map(len, chosen)))
    chosen.append(rng.permutation(np.flatnonzero(~same))[:num_nontarget])
    picked = np.sort(np.concatenate(chosen))
    enroll, test = ([utts[i] for i in side[picked]] for side in (rows, columns))
    return files.Trials(enroll, test, same[picked])


def write_trials(path, trials: files.Trials) -> None:
    """Write ``enroll test target|nontarget`` lines, atomically."""
    words = np.where(trials.is_target, "target", "nontarget")
    lines = (" ".join(row) + "\n" for row in zip(trials.enroll, trials.test, words))
    files.write_text(path, "".join(lines))


def _table(table: dict) -> str:
    return "".join(f"{key} {value}\n" for key, value in table.items())


def _refuse(path, what: str, items) -> None:
    if items:
        shown = ", ".join(items[:5]) + (", ..." if len(items) > 5 else "")
        raise ValueError(f"{path}: {what}, {len(items)} in all: {shown}")


def _read_split(data_dir: Path, split_dir: Path):
    wavs = _read_scp(data_dir, split_dir / "wav.scp")
    speakers = files.read_table(split_dir / "utt2spk")
    _refuse(split_dir, "keys in wav.scp and not in utt2spk", sorted(set(wavs) - set(speakers)))
    _refuse(split_dir, "keys in utt2spk and not in wav.scp", sorted(set(speakers) - set(wavs)))
    return wavs, speakers


def _read_scp(data_dir: Path, path: Path) -> dict[str, str]:
    table = {
        key: os.path.normpath(data_dir / local_path(f"{path}: {key}", value))
        for key, value in files.read_table(path).items()
    }
    problems = [f"{key} {wav} ({why})" for key, wav in table.items() if (why := _audio_fault(wav))]
    _refuse(path, "audio files that cannot be used", problems)
    return table


def _audio_fault(path: str) -> str | None:
    if not os.path.isfile(path):
        return "no such file"
    try:
        return None if soundfile.info(path).frames else "no samples"
    except soundfile.SoundFileError:
        return "empty" if os.path.getsize(path) == 0 else "not an audio file"


def _read_optional_scp(data_dir: Path, names) -> dict[str, str]:
    for name in names:
        if (data_dir / name).is_file():
            return _read_scp(data_dir, data_dir / name)
    return {}


def _with_category(key: str) -> str:
    known = any(part.startswith(NOISE_CATEGORIES) for part in key.split("/"))
    return key if known else f"noise-{key}"


def _read_trials(test_dir: Path, wavs: dict) -> dict[str, files.Trials]:
    where = test_dir / "trials"
    paths = sorted(where.glob("*.trials")) if where.is_dir() else [where]
    if not paths or not where.exists():
        raise FileNotFoundError(f"{where}: expected a trial list, or a folder of *.trials files")
    lists = {}
    for path in paths:
        trials = lists[path.stem] = files.read_trials(path)
        if trials.is_target is None or trials.is_target.all() or not trials.is_target.any():
            raise ValueError(f"{path}: both target and nontarget trials are needed to measure")
        _refuse(path, "keys without audio", sorted({*trials.enroll, *trials.test} - set(wavs)))
    return lists


def _replace_trials(folder: Path, lists: dict) -> None:
    for name, trials in lists.items():
        write_trials(folder / f"{name}.trials", trials)
    for stale in set(folder.glob("*.trials")) - {folder / f"{name}.trials" for name in lists}:
        stale.unlink()


def _write_or_remove(path: Path, text: str) -> None:
    if text:
        files.write_text(path, text)
    else:
        path.unlink(missing_ok=True)  # of a corpus prepared here before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data_dir")
    parser.add_argument("out_dir")
    parser.add_argument(
        "--allow_overlap", action="store_true", help="accept speakers in both train and test"
    )
    args = parser.parse_args()
    try:
        found = prepare_data(args.data_dir, args.out_dir, allow_overlap=args.allow_overlap)
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_data.py: {error}")
    for split in ("train", "test"):
        print("{}: {} utterances of {} speakers".format(split, *found[split]))
    for name, trials in found["trials"].items():
        num_target = int(trials.is_target.sum())
        print(f"trials {name}: {num_target} target, {len(trials.test) - num_target} nontarget")
    print(f"augmentation: {found['noise']} noises, {found['rir']} room impulse responses")


if __name__ == "__main__":
    main()
