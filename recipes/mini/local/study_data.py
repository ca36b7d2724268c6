"""Make the study's data from the lists of run.sh: wrong labels, and far-field test utterances.

OUT gets train/, train_flip5/, train_flip20/ (5 % and 20 % of the utterances with another speaker's
label, drawn evenly), test/ with every utterance also as far-<key>, convolved with a room's impulse
response, and test/trials/ with a far-field copy of each list: enrolment as it is, test far away.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import soundfile
from scipy.signal import fftconvolve

from wespeaker_qmargin.files import read_table, write_table, write_text

EXAMPLE = """example:
  python recipes/mini/local/study_data.py recipes/mini/exp/minivox_xvec/data study/data
"""
SHARES = (0, 5, 20)  # per cent
FAR = ("cv", "ls")


def flip_labels(utt2spk: dict[str, str], share: float, *, seed: int = 0) -> dict[str, str]:
    """Return the table with ``share`` of its utterances given to another speaker of it."""
    rng = np.random.default_rng(seed)
    keys, speakers = list(utt2spk), sorted(set(utt2spk.values()))
    flipped = dict(utt2spk)
    for i in rng.permutation(len(keys))[: round(share * len(keys))]:
        others = [name for name in speakers if name != utt2spk[keys[i]]]
        flipped[keys[i]] = others[rng.integers(len(others))]
    return flipped


def far_field(wav: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Return ``wav`` heard through a room, from the direct sound on, as loud as before."""
    direct = np.abs(response).argmax()
    wet = fftconvolve(wav, response)[direct : direct + len(wav)]
    return wet * np.sqrt(np.square(wav).sum() / max(np.square(wet).sum(), 1e-12))


def make(lists: Path, out: Path) -> None:
    """Write everything; see the top of this file."""
    wavs, speakers = (read_table(lists / "train" / name) for name in ("wav.scp", "utt2spk"))
    for share in SHARES:
        folder = out / (f"train_flip{share}" if share else "train")
        write_table(folder / "wav.scp", wavs)
        write_table(folder / "utt2spk", flip_labels(speakers, share / 100))
    _make_test(lists, out / "test")


def _make_test(lists: Path, out: Path) -> None:
    wavs, speakers = (read_table(lists / "test" / name) for name in ("wav.scp", "utt2spk"))
    responses = list(read_table(lists / "rirs" / "wav.scp").values())
    (out / "far").mkdir(parents=True, exist_ok=True)
    table, rng = dict(wavs), np.random.default_rng(0)
    for key, path in wavs.items():
        wav, rate = soundfile.read(path)
        response, _ = soundfile.read(responses[rng.integers(len(responses))])
        table[f"far-{key}"] = str((out / "far" / f"{key}.flac").resolve())
        wet = far_field(wav, response)
        soundfile.write(table[f"far-{key}"], wet / max(1.0, np.abs(wet).max()), rate)
    write_table(out / "wav.scp", table)
    far = {f"far-{key}": speaker for key, speaker in speakers.items()}
    write_table(out / "utt2spk", speakers | far)
    for path in sorted((lists / "test" / "trials").glob("*.trials")):
        text = path.read_text(encoding="utf-8")
        write_text(out / "trials" / path.name, text)
        if path.stem in FAR:
            rows = (line.split() for line in text.splitlines())
            lines = (f"{enroll} far-{test} {label}\n" for enroll, test, label in rows)
            write_text(out / "trials" / f"{path.stem}_far.trials", "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", type=Path, help="what prepare_data.py has written")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        make(args.lists, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"study_data.py: {error}")


if __name__ == "__main__":
    main()
