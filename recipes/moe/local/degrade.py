"""Make the study's data from the lists of recipes/mini: degraded speech, and trials over it.

OUT gets
  train/            the training speech as it is
  train_degraded/   every utterance in one kind of degradation, drawn evenly; `opus` is held out,
                    and so is every second language of the test speech
  train_far/        the same utterances, all in the kind `far`
  test/             the test speech (one list of trials) as it is, and as <kind>-<key> in each kind
  by_kind/<kind>/   the test speech of one kind alone, also of clean; by_language/<language>/: clean
  test/trials/      clean, <kind>_clean (clean enrolment, degraded probe), <kind>_both

Kinds: band (8 kHz), mulaw (8 kHz, 8 bit), opus (8 kHz, 8 kbit/s), far (a room and noise at 0 to 10
dB), short (1.5 s).
"""

import argparse
import io
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile
from study_data import far_field

from wespeaker_qmargin.audio import resample
from wespeaker_qmargin.files import read_table, write_table, write_text

EXAMPLE = """example:
  python recipes/moe/local/degrade.py recipes/mini/exp/minivox_xvec/data exp/moe/data
"""
RATE, BAND = 16000, 8000  # Hz
SNR = (0.0, 10.0)  # dB
SHORT = 1.5  # seconds
# libsndfile's scale from 256 (0) to 6 (1) kbit/s a channel
OPUS_LEVEL = (256 - 8) / (256 - 6)
KINDS = ("band", "mulaw", "opus", "far", "short")
HELD_OUT = "opus"
SEEN = [kind for kind in KINDS if kind != HELD_OUT]


def coded(wav: np.ndarray, **how) -> np.ndarray:
    """Return ``wav`` (8 kHz) after a codec of libsndfile, as long as before."""
    file = io.BytesIO()
    soundfile.write(file, np.clip(wav, -1, 1), BAND, **how)
    file.seek(0)
    found, _ = soundfile.read(file, dtype="float32")
    return np.pad(found, (0, max(0, len(wav) - len(found))))[: len(wav)]


def far(wav: np.ndarray, response: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Return ``wav`` in a room, from the direct sound on and as loud as before, plus noise."""
    noise = np.resize(noise, len(wav))
    level = np.square(wav).mean() / max(np.square(noise).mean(), 1e-12) / 10 ** (snr / 10)
    return far_field(wav, response) + np.sqrt(level) * noise


class Degrader:
    """Degrades waveforms (16 kHz); what is drawn is drawn from ``seed`` and the key.

    Args:
        rooms, noises: wav.scp of responses and noise.
    """

    def __init__(self, rooms: Path, noises: Path):
        self._rooms, self._noises = (
            [soundfile.read(path, dtype="float32")[0] for path in read_table(scp).values()]
            for scp in (rooms, noises)
        )

    def __call__(self, wav: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
        """Return the waveform in [-1, 1]."""
        if kind == "far":
            noise = self._noises[rng.integers(len(self._noises))]
            noise = np.roll(noise, rng.integers(len(noise)))
            room = self._rooms[rng.integers(len(self._rooms))]
            degraded = far(wav, room, noise, rng.uniform(*SNR))
        elif kind == "short":
            length = min(len(wav), round(SHORT * RATE))
            start = rng.integers(len(wav) - length + 1)
            degraded = wav[start : start + length]
        else:
            narrow = resample(wav, RATE, BAND)
            if kind == "mulaw":
                narrow = coded(narrow, format="WAV", subtype="ULAW")
            elif kind == "opus":
                narrow = coded(narrow, format="OGG", subtype="OPUS", compression_level=OPUS_LEVEL)
            degraded = resample(narrow, BAND, RATE)
        return degraded / max(1.0, np.abs(degraded).max())


def _rng(*words) -> np.random.Generator:
    return np.random.default_rng(list("/".join(words).encode()))


def _write(degrader: Degrader, wavs: dict, kind_of: dict, folder: Path) -> dict[str, str]:
    """Write every utterance of ``kind_of`` in its kind; return key -> path."""
    folder.mkdir(parents=True, exist_ok=True)
    table = {}
    for key, kind in kind_of.items():
        wav, rate = soundfile.read(wavs[key], dtype="float32")
        if rate != RATE:
            raise ValueError(f"{wavs[key]}: expected {RATE} Hz, found {rate}")
        table[key] = str((folder / f"{key}.flac").resolve())
        soundfile.write(table[key], degrader(wav, kind, _rng(kind, key)), RATE)
    return table


def language(speaker: str) -> str:
    """Return the language in a name ``cv-LANGUAGE[-REGION]-ID``; of other names ``unknown``."""
    parts = speaker.split("-")
    return parts[1] if len(parts) > 2 else "unknown"


def held_out_languages(speakers: Iterable[str]) -> set[str]:
    """Return every second of the languages of test speakers, by name."""
    return set(sorted(set(map(language, speakers)))[1::2])


def make(lists: Path, out: Path, *, trials: str = "cv") -> None:
    """Write everything; see the top of this file."""
    degrader = Degrader(lists / "rirs/wav.scp", lists / "musan/wav.scp")
    wavs, speakers = (read_table(lists / "train" / name) for name in ("wav.scp", "utt2spk"))
    test = _make_test(degrader, lists / "test", out / "test", trials)
    _write_part(out / "train", wavs, speakers)
    unheard = held_out_languages(test)
    kind_of = {
        key: SEEN[_rng("kind", key).integers(len(SEEN))]
        for key in wavs
        if language(speakers[key]) not in unheard
    }
    for name, kinds in (("degraded", kind_of), ("far", dict.fromkeys(kind_of, "far"))):
        folder = out / f"train_{name}"
        _write_part(folder, _write(degrader, wavs, kinds, folder / "wav"), speakers)
        write_table(folder / "utt2kind", kinds)


def _make_test(degrader: Degrader, lists: Path, out: Path, trials: str) -> set[str]:
    """Write the test speech; return its speakers."""
    text = (lists / "trials" / f"{trials}.trials").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines()]
    keys = sorted({key for row in rows for key in row[:2]})
    wavs, speakers = (read_table(lists / name) for name in ("wav.scp", "utt2spk"))
    table, spk = {key: wavs[key] for key in keys}, {key: speakers[key] for key in keys}
    heard = set(spk.values())
    write_text(out / "trials/clean.trials", text)
    _write_part(out.parent / "by_kind/clean", table, spk)
    for name in sorted(set(map(language, heard))):
        own = {key: path for key, path in table.items() if language(spk[key]) == name}
        _write_part(out.parent / "by_language" / name, own, spk)
    for kind in KINDS:
        found = _write(degrader, wavs, dict.fromkeys(keys, kind), out / kind)
        _write_part(out.parent / "by_kind" / kind, found, spk)
        table |= {f"{kind}-{key}": path for key, path in found.items()}
        spk |= {f"{kind}-{key}": speakers[key] for key in keys}
        for name, enroll in (("clean", ""), ("both", f"{kind}-")):
            lines = [f"{enroll}{a} {kind}-{b} {label}\n" for a, b, label in rows]
            write_text(out / "trials" / f"{kind}_{name}.trials", "".join(lines))
    _write_part(out, table, spk)
    return heard


def _write_part(folder: Path, wavs: dict, speakers: dict) -> None:
    write_table(folder / "wav.scp", wavs)
    write_table(folder / "utt2spk", {key: speakers[key] for key in wavs})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", type=Path, help="what recipes/mini/local/prepare_data.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", default="cv", help="the list of test/trials [cv]")
    args = parser.parse_args()
    try:
        make(args.lists, args.out, trials=args.trials)
    except (OSError, ValueError) as error:
        sys.exit(f"degrade.py: {error}")


if __name__ == "__main__":
    main()
