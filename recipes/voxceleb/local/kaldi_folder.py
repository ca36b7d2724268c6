"""Write Kaldi folders with VoxCeleb's keys (SPEAKER/VIDEO/00001.wav), and join them."""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from wespeaker_qmargin import files

EXAMPLE = """example:
  python recipes/voxceleb/local/kaldi_folder.py data/vox1_dev data/vox1_test data/vox1
"""


def write_folder(folder: Path, audio: dict[str, str], seconds: dict[str, float] | None) -> None:
    """Write ``wav.scp`` and, unless ``seconds`` is None, ``utt2spk``, ``spk2utt``, ``utt2dur``.

    Args:
        audio: key -> path, sorted by key; a key begins with its speaker.
        seconds: key -> length.
    """
    files.write_table(folder / "wav.scp", audio)
    if seconds is None:
        return
    speakers = {key: key.partition("/")[0] for key in audio}
    by_speaker = {speaker: " ".join(keys) for speaker, keys in groupby(speakers, speakers.get)}
    files.write_table(folder / "utt2spk", speakers)
    files.write_table(folder / "spk2utt", by_speaker)
    files.write_table(folder / "utt2dur", {key: f"{seconds[key]:.4f}" for key in audio})


def join(folders, out: Path) -> int:
    """Write the Kaldi folder ``out`` from folders of `write_folder`; return its utterances."""
    audio, seconds = {}, {}
    for folder in folders:
        audio |= files.read_table(Path(folder) / "wav.scp")
        seconds |= files.read_table(Path(folder) / "utt2dur")
    audio = dict(sorted(audio.items()))
    write_folder(out, audio, {key: float(text) for key, text in seconds.items()})
    return len(audio)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="+", type=Path, help="with wav.scp and utt2dur")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        print(f"{join(args.folder, args.out)} utterances in {args.out}")
    except (OSError, ValueError) as error:
        sys.exit(f"kaldi_folder.py: {error}")


if __name__ == "__main__":
    main()
