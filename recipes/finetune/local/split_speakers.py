"""Split a Kaldi folder into two with no speaker in common: one to train on, one to fine-tune on.

Every second of the sorted speakers goes to the second folder, so that a corpus whose speakers'
names begin with their origin is split evenly.
"""

import argparse
import sys
from pathlib import Path

from wespeaker_qmargin.files import read_table, write_table

EXAMPLE = """example:
  python recipes/finetune/local/split_speakers.py data/train data/train_base data/train_new
"""


def split_speakers(folder, first, second) -> tuple[int, int]:
    """Write wav.scp and utt2spk of both halves; return how many speakers each has.

    Raises:
        FileNotFoundError, ValueError: a list is missing or bad; fewer than two speakers a half.
    """
    wavs, speakers = (read_table(Path(folder) / name) for name in ("wav.scp", "utt2spk"))
    names = sorted(set(speakers.values()))
    if len(names) < 4:
        raise ValueError(f"{folder}: {len(names)} speakers; two halves need two each")
    for out, half in ((first, names[::2]), (second, names[1::2])):
        utterances = [utt for utt in wavs if speakers[utt] in set(half)]
        for name, table in (("wav.scp", wavs), ("utt2spk", speakers)):
            write_table(Path(out) / name, {utt: table[utt] for utt in utterances})
    return len(names[::2]), len(names[1::2])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("folder", "first", "second"):
        parser.add_argument(name)
    try:
        counts = split_speakers(**vars(parser.parse_args()))
    except (OSError, ValueError) as error:
        sys.exit(f"split_speakers.py: {error}")
    print("{} and {} speakers".format(*counts))


if __name__ == "__main__":
    main()
