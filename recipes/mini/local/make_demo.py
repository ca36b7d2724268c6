"""Make a small corpus of synthetic voices, for a machine that has no speech at all.

espeak-ng (through the PyPI wheel espeakng-loader, `pip install espeakng-loader`) speaks made-up
English sentences; a voice is a language's letter-to-sound rules and sounds with formants, pitch and
manner drawn at random. Each utterance also draws its speed, pitch, channel and background noise.
SMOKE DATA: it shows that everything runs; error rates on it mean nothing.

OUT_DIR gets {train,test}/{wav.scp,utt2spk,wav/}, test/trials/demo.trials, aug/{noise,rir}.scp, NOTE
and README. It appears when it is whole; a folder that is already there is kept. The same arguments
make the same data.
"""

import argparse
import ctypes
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile
import soxr
from prepare_data import draw_trials, write_trials
from scipy.fft import next_fast_len
from scipy.signal import lfilter

from wespeaker_qmargin import files

EXAMPLE = """example:
  python recipes/mini/local/make_demo.py recipes/mini/data/demo --num_speakers 100 --seed 0
"""
SAMPLE_RATE = 16000
NOTE = "Synthetic voices (espeak-ng): smoke data, error rates on it mean nothing."
README = f"""{NOTE}
Made by recipes/mini/local/make_demo.py. espeak-ng is GPL-3 software; it was used as a tool, and
nothing of it is in this folder. The sentences and the voices' settings were drawn at random.
"""
# Latin-script languages: espeak-ng reads the English words by each one's own rules.
LANGUAGES = """
    en / en-us / en-gb-scotland / de / fr / es / es-419 / it / pt / pt-br / nl / pl / sv / da / nb
    / fi / hu / cs / ro / hr / tr / id / sw / ca / et / lv / lt / sk / sl / cy / is / sq / af / eu
"""
SENTENCE = (  # one of each
    """
    My neighbour / The old captain / A young doctor / Nobody here / The whole village / Our teacher
    / That painter / The last visitor / Your brother / A tired driver
    """,
    """
    remembers / has forgotten / carried / wanted to sell / is looking for / painted / used to repair
    / will never open / quietly moved / talked about
    """,
    """
    the wooden boat / a box of oranges / the yellow bicycle / seven letters / this bridge / two maps
    / an empty garden / the kitchen window / his winter coat / a broken violin
    """,
    """
    before sunrise / near the river / in the afternoon / without a word / after the storm
    / behind the station / on Friday / for a long time / under the stairs / at the market
    """,
)
RATE, PITCH = 1, 3  # espeak_PARAMETER
SYNCHRONOUS, DONT_EXIT, UTF8 = 2, 0x8000, 1


class Espeak:
    """espeak-ng with voices of our own: ``variants`` maps a name to the text of its voice file."""

    def __init__(self, variants: dict[str, str]):
        try:
            import espeakng_loader
        except ImportError as error:
            raise OSError("espeak-ng is missing: pip install espeakng-loader") from error
        self._home = tempfile.TemporaryDirectory(prefix="espeak-")
        self._link_data(Path(espeakng_loader.get_data_path()), variants)
        # a fresh copy: the library keeps state that espeak_Terminate does not clear
        library = Path(self._home.name) / "libespeak-ng.so"
        shutil.copyfile(espeakng_loader.get_library_path(), library)
        self._library = ctypes.CDLL(str(library))
        home = self._home.name.encode()
        self._rate = self._library.espeak_Initialize(SYNCHRONOUS, 0, home, DONT_EXIT)
        if self._rate <= 0:
            raise OSError(
                f"espeak-ng does not start with its data in {self._home.name}; if that path is "
                "longer than some 130 characters, set TMPDIR to a shorter one"
            )
        self._chunks = []
        samples = ctypes.POINTER(ctypes.c_short)
        callback = ctypes.CFUNCTYPE(ctypes.c_int, samples, ctypes.c_int, ctypes.c_void_p)
        self._callback = callback(self._collect)  # must live as long as the library calls it
        self._library.espeak_SetSynthCallback(self._callback)

    def _link_data(self, source: Path, variants: dict[str, str]) -> None:
        # espeak-ng looks for voice files only inside its data folder: make one of links
        data = Path(self._home.name) / "espeak-ng-data"
        (data / "voices" / "!v").mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name != "voices":
                (data / entry.name).symlink_to(entry)
        for name, text in variants.items():
            (data / "voices" / "!v" / name).write_text(f"language variant\nname {name}\n{text}")

    def _collect(self, samples, count, _events) -> int:
        if samples and count > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._library.espeak_Terminate()
        self._home.cleanup()

    def say(self, text: str, *, language: str, variant: str, rate: int, pitch: int) -> np.ndarray:
        """Return float32 (T,) at 16 kHz; ``rate`` in words a minute, ``pitch`` 0-99."""
        self._chunks.clear()
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # else the clock seeds its jitter
        if self._library.espeak_SetVoiceByName(f"{language}+{variant}".encode()) != 0:
            raise OSError(f"espeak-ng has no language {language}")
        self._library.espeak_SetParameter(RATE, rate, 0)
        self._library.espeak_SetParameter(PITCH, pitch, 0)
        data = text.encode() + b"\0"
        self._library.espeak_Synth(data, len(data), 0, 0, 0, UTF8, None, None)
        speech = np.concatenate(self._chunks).astype(np.float32) / 32768
        return soxr.resample(speech, self._rate, SAMPLE_RATE)


def draw_variant(rng) -> str:
    """Return the text of an espeak-ng voice file: a vocal tract, a pitch range, a manner."""
    tract = rng.uniform(0.85, 1.25)  # formants scale as 1 / length of the vocal tract
    pitch = 90 * tract**2.5 * rng.uniform(0.8, 1.25)
    lines = [f"pitch {pitch:.0f} {pitch * rng.uniform(1.2, 1.7):.0f}"]
    for formant in range(9):
        frequency = 100 * tract * rng.uniform(0.95, 1.05)
        height, width = rng.uniform(70, 130), rng.uniform(80, 140)
        lines.append(f"formant {formant} {frequency:.0f} {height:.0f} {width:.0f}")
    lines += [f"roughness {rng.integers(0, 5)}", f"flutter {rng.integers(0, 6)}"]
    lines.append("breath 0 " + " ".join(str(rng.integers(0, 4)) for _ in range(7)))
    return "\n".join(lines) + "\n"


def record(speech: np.ndarray, rng) -> np.ndarray:
    """Return ``speech`` as another session: a channel's tilt, background noise, another level."""
    speech = lfilter([1, -rng.uniform(-0.4, 0.7)], [1], speech)
    noise = coloured_noise(len(speech), rng.uniform(0.5, 1.5), rng)
    level = speech.std() * 10 ** (-rng.uniform(12, 30) / 20)
    mixed = speech + level * noise
    return mixed * (10 ** (rng.uniform(-14, -3) / 20) / np.abs(mixed).max())


def coloured_noise(length: int, slope: float, rng) -> np.ndarray:
    """Return noise (length,) of power ~ 1 / f^(2 slope) and standard deviation 1."""
    period = next_fast_len(length, real=True)
    spectrum = np.fft.rfft(rng.standard_normal(period))
    spectrum[0] = 0
    spectrum[1:] /= np.arange(1, len(spectrum)) ** slope
    noise = np.fft.irfft(spectrum, period)[:length]
    return noise / noise.std()


def room_response(reverberation_s: float, rng) -> np.ndarray:
    """Return an impulse response: direct sound, then noise that falls 60 dB in that time."""
    time = np.arange(int(reverberation_s * SAMPLE_RATE)) / SAMPLE_RATE
    response = 0.05 * rng.standard_normal(len(time)) * 10 ** (-3 * time / reverberation_s)
    response[: int(0.002 * SAMPLE_RATE)] = 0
    response[0] = 1
    return 0.5 * response / np.abs(response).max()


def make_demo(out_dir, *, num_speakers: int = 100, num_utts: int = 10, seed: int = 0) -> bool:
    """Make the corpus in ``out_dir``; a fifth of the speakers (at least two) are for testing.

    Returns:
        False if a complete corpus of the same arguments was there already.

    Raises:
        ValueError: too few speakers or utterances, or ``out_dir`` holds something else.
    """
    out_dir = Path(out_dir)
    if num_speakers < 4 or num_utts < 2:
        raise ValueError(f"at least 4 speakers of 2 utterances, not {num_speakers} of {num_utts}")
    arguments = {"num_speakers": num_speakers, "num_utts": num_utts, "seed": seed}
    complete = out_dir / "complete.json"
    if complete.is_file() and json.loads(complete.read_text()) == arguments:
        return False
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(f"{out_dir}: holds something else than this corpus; remove or rename it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as temporary:
        folder = Path(temporary) / "demo"
        _write_speech(folder, num_speakers, num_utts, seed)
        _write_augmentation(folder, np.random.default_rng([seed, 1]))
        files.write_text(folder / "NOTE", NOTE + "\n")
        files.write_text(folder / "README", README)
        files.write_text(folder / "complete.json", json.dumps(arguments) + "\n")
        folder.rename(out_dir)
    return True


def _choices(text: str) -> list[str]:
    return [choice.strip() for choice in text.split("/")]


def _write_speech(folder: Path, num_speakers: int, num_utts: int, seed: int) -> None:
    rngs = [np.random.default_rng([seed, 0, speaker]) for speaker in range(num_speakers)]
    languages = [_choices(LANGUAGES)[i % len(_choices(LANGUAGES))] for i in range(num_speakers)]
    names = [f"demo{i:03d}-{language}" for i, language in enumerate(languages)]
    num_test = max(2, num_speakers // 5)
    splits = {"train": range(num_test, num_speakers), "test": range(num_test)}
    tables = {split: ({}, {}) for split in splits}
    with Espeak({f"v{i}": draw_variant(rng) for i, rng in enumerate(rngs)}) as espeak:
        for split, speakers in splits.items():
            wavs, utt2spk = tables[split]
            for i, number in [(i, number) for i in speakers for number in range(num_utts)]:
                rng, utt = rngs[i], f"{names[i]}-{number:02d}"
                wavs[utt] = f"{split}/wav/{names[i]}/{utt}.wav"
                utt2spk[utt] = names[i]
                text = " ".join(str(rng.choice(_choices(part))) for part in SENTENCE)
                rate, pitch = int(rng.integers(150, 200)), int(rng.integers(40, 60))
                manner = {"language": languages[i], "variant": f"v{i}", "rate": rate}
                speech = espeak.say(text, **manner, pitch=pitch)
                _write_wav(folder / wavs[utt], record(speech, rng))
    for split, (wavs, utt2spk) in tables.items():
        files.write_table(folder / split / "wav.scp", wavs)
        files.write_table(folder / split / "utt2spk", utt2spk)
    trials = draw_trials(tables["test"][1], per_speaker=num_utts**2, ratio=1, seed=seed)
    write_trials(folder / "test" / "trials" / "demo.trials", trials)


def _write_augmentation(folder: Path, rng) -> None:
    noises, rirs = {}, {}
    for number, slope in enumerate((0, 0.3, 0.5, 0.7, 1.0, 1.3)):
        noise = coloured_noise(10 * SAMPLE_RATE, slope, rng)
        swell = 1 + 0.5 * np.sin(2 * np.pi * rng.uniform(0.2, 2) * np.arange(len(noise)) / 16000)
        noises[f"noise-{number}"] = f"aug/noise/noise-{number}.wav"
        _write_wav(folder / noises[f"noise-{number}"], 0.15 * noise * swell)
    for number, reverberation_s in enumerate(np.linspace(0.15, 0.8, 20)):
        rirs[f"rir-{number:02d}"] = f"aug/rir/rir-{number:02d}.wav"
        _write_wav(folder / rirs[f"rir-{number:02d}"], room_response(reverberation_s, rng))
    files.write_table(folder / "aug" / "noise.scp", noises)
    files.write_table(folder / "aug" / "rir.scp", rirs)


def _write_wav(path: Path, samples: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.clip(samples, -1, 1), SAMPLE_RATE, subtype="PCM_16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir")
    parser.add_argument("--num_speakers", type=int, default=100)
    parser.add_argument("--num_utts", type=int, default=10, help="of each speaker")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        made = make_demo(
            args.out_dir, num_speakers=args.num_speakers, num_utts=args.num_utts, seed=args.seed
        )
    except (OSError, ValueError) as error:
        sys.exit(f"make_demo.py: {error}")
    print(f"{args.out_dir}: {'made' if made else 'already complete'}. {NOTE}")


if __name__ == "__main__":
    main()
