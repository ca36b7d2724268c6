"""Utterances per second and core of the data path: read, speed, noise, reverberation, fbank.

    python tools/bench_pipeline.py [--minivox DIR --items 400 --num_frms 200 --no_scoring]

Uses minivox where it is found (beside the checkout or in QMARGIN_MINIVOX), else 8 s of generated
noise, as flac and wav. One thread; the files are in the page cache from a first pass. Then runs
bench_scoring.py: scoring and measuring at VoxCeleb size.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import soundfile
import torch

from wespeaker_qmargin.audio import Utterance, load_audio
from wespeaker_qmargin.augment import AudioSource, Augmenter, change_speed
from wespeaker_qmargin.data import TrainSet
from wespeaker_qmargin.features import apply_cmvn, fbank, spec_aug
from wespeaker_qmargin.files import read_table
from wespeaker_qmargin.lists import speaker_labels

ROOT = Path(__file__).resolve().parent.parent
RATE = 16000


def minivox_data(corpus: Path, folder: Path) -> tuple[dict, AudioSource, AudioSource]:
    """Return (name -> utterances, noise, reverb); the corpus has paths relative to itself."""
    speakers = read_table(corpus / "train" / "utt2spk")
    utterances = [
        Utterance(key, speakers[key], str(corpus / path))
        for key, path in read_table(corpus / "train" / "wav.scp").items()
    ]
    sources = []
    for name in ("noise", "rir"):
        table = read_table(corpus / "aug" / f"{name}.scp")
        (folder / name).write_text("".join(f"{k} {corpus / p}\n" for k, p in table.items()))
        sources.append(AudioSource(folder / name))
    return {"flac": utterances, "wav": to_wav(utterances[:400], folder)}, *sources


def to_wav(utterances: list[Utterance], folder: Path) -> list[Utterance]:
    copies = []
    for number, utterance in enumerate(utterances):
        path = folder / f"{number}.wav"
        soundfile.write(path, load_audio(utterance, RATE), RATE)
        copies.append(utterance._replace(source=str(path)))
    return copies


def generated_data(folder: Path) -> tuple[dict, AudioSource, AudioSource]:
    rng = np.random.default_rng(0)
    flac, lines = [], {"noise": [], "rir": []}
    for number in range(200):
        path = folder / f"{number}.flac"
        soundfile.write(path, 0.1 * rng.standard_normal(8 * RATE), RATE)
        flac.append(Utterance(str(number), str(number % 50), str(path)))
    for name, count, seconds in (("noise", 6, 20), ("rir", 40, 0.5)):
        for number in range(count):
            path = folder / f"{name}{number}.flac"
            decay = np.exp(-np.arange(int(seconds * RATE)) / 2000) if name == "rir" else 1.0
            soundfile.write(path, 0.1 * decay * rng.standard_normal(int(seconds * RATE)), RATE)
            lines[name].append(f"{name}-{number} {path}\n")
        (folder / name).write_text("".join(lines[name]))
    sources = [AudioSource(folder / name) for name in lines]
    return {"flac": flac, "wav": to_wav(flac, folder)}, *sources


def train_set(utterances, num_frms: int, *, speed: bool = False, augmenter=None) -> TrainSet:
    args = SimpleNamespace(
        resample_rate=RATE,
        num_frms=num_frms,
        frontend="fbank",
        fbank_args={},
        filter=True,
        filter_args={},
        speed_perturb=speed,
        speed_perturb_mode="random",
        speed_perturb_labels="new",
    )
    return TrainSet(utterances, speaker_labels(utterances), args, seed=0, augmenter=augmenter)


def measure(name: str, work, items: int) -> None:
    """Print how long ``work(i)`` takes for i < ``items``; the better of two passes."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        for i in range(items):
            work(i)
        seconds.append(time.perf_counter() - start)
    print(f"{name:42s} {1e3 * min(seconds) / items:7.3f} ms {items / min(seconds):9.0f} utt/s")


def bench(data, noise: AudioSource, reverb: AudioSource, args: argparse.Namespace) -> None:
    crops = {name: train_set(utterances, args.num_frms) for name, utterances in data.items()}
    wavs = [crops["wav"][0, i % len(crops["wav"])].wav for i in range(args.items)]
    for name, utterances in data.items():
        measure(
            f"read whole, {name}",
            lambda i, u=utterances: load_audio(u[i % len(u)], RATE),
            args.items,
        )
        measure(f"read a crop, {name}", lambda i, s=crops[name]: s[0, i % len(s)], args.items)
    arrays = [wav.numpy() for wav in wavs]
    measure("speed 0.9", lambda i: change_speed(arrays[i], 0.9), args.items)
    for name, pair in (("noise", (noise, None)), ("reverberation", (None, reverb))):
        augmenter = Augmenter(*pair, prob=1.0, sample_rate=RATE)
        rng = np.random.default_rng(0)
        measure(name, lambda i, a=augmenter, r=rng: a(arrays[i], r), args.items)
    batches = [torch.stack(wavs[i : i + 32]) for i in range(0, len(wavs), 32)]
    for name, work in (
        ("fbank, dither 0", lambda wavs: fbank(wavs)),
        ("fbank, dither 1", lambda wavs: fbank(wavs, dither=1.0, seeds=range(len(wavs)))),
        ("CMN + SpecAugment", features_after(fbank(batches[0]))),
    ):
        measure(
            f"{name} (batches of 32)",
            lambda i, w=work: w(batches[i // 32]) if i % 32 == 0 else None,
            args.items,
        )
    bench_together(data, noise, reverb, args)


def features_after(features: torch.Tensor):
    return lambda wavs: spec_aug(apply_cmvn(features), range(len(features)))


def bench_together(data, noise, reverb, args) -> None:
    augmenter = Augmenter(noise, reverb, prob=0.6, sample_rate=RATE)
    for name, utterances in data.items():
        items = train_set(utterances, args.num_frms, speed=True, augmenter=augmenter)

        def batch(i, items=items):
            if i % 32:
                return
            samples = [items[0, j % len(items)] for j in range(i, i + 32)]
            wavs = torch.stack([sample.wav for sample in samples])
            fbank(wavs, dither=1.0, seeds=[sample.seed for sample in samples])

        measure(f"a worker's part, {name}", lambda i, s=items: s[0, i % len(s)], args.items)
        measure(f"all with fbank and dither, {name}", batch, args.items)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("QMARGIN_MINIVOX", ROOT.parent / "shared" / "minivox"))
    parser.add_argument("--minivox", type=Path, default=default)
    parser.add_argument("--items", type=int, default=400, help="utterances a measurement")
    parser.add_argument("--num_frms", type=int, default=200, help="frames of a crop")
    parser.add_argument("--no_scoring", action="store_true", help="only the data path")
    args = parser.parse_args()
    args.items -= args.items % 32
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if (args.minivox / "train" / "wav.scp").is_file():
            data = minivox_data(args.minivox, Path(folder))
            where = "minivox"
        else:
            data = generated_data(Path(folder))
            where = "generated"
        seconds = np.mean([soundfile.info(u.source).duration for u in data[0]["wav"]])
        print(
            f"{where} utterances of {seconds:.1f} s on average, crops of {args.num_frms} frames, "
            "speed perturbation on two in three and noise or reverberation on 60 % of all"
        )
        bench(*data, args)
    if not args.no_scoring:
        subprocess.run([sys.executable, ROOT / "tools" / "bench_scoring.py"], check=True)


if __name__ == "__main__":
    main()
