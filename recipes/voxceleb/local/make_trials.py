"""Turn a VoxCeleb trial list (`1 enroll test`) into `enroll test target|nontarget` lines.

The utterance names stay as they are (id10270/5r0dWxy17C8/00001.wav); they are the keys of the
Kaldi folders that prepare_voxceleb.py writes.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from downloads import check_counts

from wespeaker_qmargin import files

EXAMPLE = """example:
  python recipes/voxceleb/local/make_trials.py veri_test2.txt data/trials/vox1_O.trials \\
    --wav_scp data/vox1_test/wav.scp
"""


def make_trials(
    voxceleb_list, out, wav_scps: Iterable = (), *, expected: dict | None = None
) -> dict[str, int]:
    """Write ``out``; return how many ``trials`` and ``targets`` it has.

    Args:
        voxceleb_list: lines ``1|0 enroll test`` (Kaldi's order is taken too).
        wav_scps: must hold every utterance of the list; none: not checked.
        expected: ``trials`` and ``targets`` to find, or None.

    Raises:
        FileNotFoundError: no list.  ValueError: a bad line, a list without labels, utterances
        without audio, other counts.
    """
    trials = files.read_trials(voxceleb_list)
    if trials.is_target is None:
        raise ValueError(f"{voxceleb_list}: expected lines '1|0 enroll test', found no labels")
    found = {"trials": len(trials.is_target), "targets": int(trials.is_target.sum())}
    check_counts(str(voxceleb_list), found, expected or {})
    _refuse_missing(voxceleb_list, {*trials.enroll, *trials.test}, list(wav_scps))
    words = np.where(trials.is_target, "target", "nontarget")
    lines = (" ".join(row) + "\n" for row in zip(trials.enroll, trials.test, words))
    files.write_text(out, "".join(lines))
    return found


def _refuse_missing(path, utterances: set[str], wav_scps: list) -> None:
    missing = set(utterances) if wav_scps else set()
    for wav_scp in wav_scps:
        missing -= files.read_table(wav_scp).keys()
    if missing:
        shown = ", ".join(sorted(missing)[:3])
        raise ValueError(
            f"{path}: {len(missing)} of {len(utterances)} utterances are not in "
            f"{', '.join(map(str, wav_scps))} (the first: {shown}); O needs vox1_test, E and H "
            "need vox1_dev too"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("voxceleb_list", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wav_scp", nargs="*", default=(), help="must hold every utterance")
    args = parser.parse_args()
    try:
        found = make_trials(args.voxceleb_list, args.out, args.wav_scp)
    except (OSError, ValueError) as error:
        sys.exit(f"make_trials.py: {error}")
    print("{trials} trials, {targets} of them targets".format(**found))


if __name__ == "__main__":
    main()
