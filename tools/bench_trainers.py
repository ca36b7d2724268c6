"""Utterances per second through WeSpeaker's trainer (launched by us) and through ours, same YAML.

    WESPEAKER_ROOT=DIR python tools/bench_trainers.py [--data DIR --model ECAPA_TDNN_c512]

DIR of --data has wav.scp and utt2spk; without it 200 utterances of 8 s of noise are made. Speed
perturbation, crops of 2 s, filter banks with dither, no noise or reverberation. First the data path
alone, in one process and one thread, file to normalised filter banks, alternating over three
passes, best of each; its parts by profile. (Where the network is on a GPU, ours makes the filter
banks there, and its workers only do the part named so; WeSpeaker's do all.) Then two whole
trainings, twice, one after the other.
"""

import argparse
import cProfile
import json
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import soundfile
import torch
import yaml

from wespeaker_qmargin import launch
from wespeaker_qmargin.checkout import find_script
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.data import TrainSet
from wespeaker_qmargin.features import apply_cmvn, fbank
from wespeaker_qmargin.files import read_table
from wespeaker_qmargin.lists import read_utterances, speaker_labels

RATE, SECONDS, BATCH = 16000, 8, 32
PASSES = 3


def make_data(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = {"wav.scp": [], "utt2spk": []}
    for i in range(200):
        path = folder / f"u{i}.wav"
        soundfile.write(path, 0.1 * rng.standard_normal(SECONDS * RATE), RATE)
        lines["wav.scp"].append(f"u{i} {path}\n")
        lines["utt2spk"].append(f"u{i} s{i % 20}\n")
    for name, content in lines.items():
        (folder / name).write_text("".join(content))
    return folder


def write_list(data: Path, folder: Path) -> None:
    wavs, speakers = (read_table(data / name) for name in ("wav.scp", "utt2spk"))
    lines = [json.dumps({"key": k, "wav": w, "spk": speakers[k]}) for k, w in wavs.items()]
    (folder / "raw.list").write_text("\n".join(lines) + "\n")
    (folder / "utt2spk").write_text("".join(f"{k} {v}\n" for k, v in speakers.items()))


def write_config(folder: Path, args: argparse.Namespace) -> Path:
    content = {
        "exp_dir": str(folder / "exp"),
        "gpus": "[0]",
        "num_avg": 1,
        "enable_amp": False,
        "seed": 42,
        "num_epochs": 1,
        "save_epoch_interval": 1,
        "log_batch_interval": 2,
        "data_type": "raw",
        "train_data": str(folder / "raw.list"),
        "train_label": str(folder / "utt2spk"),
        "dataloader_args": {
            "batch_size": BATCH,
            "num_workers": args.workers,
            "prefetch_factor": 4,
            "pin_memory": False,
            "drop_last": True,
        },
        "dataset_args": {
            "sample_num_per_epoch": BATCH * args.steps,
            "shuffle": True,
            "shuffle_args": {
                "shuffle_size": BATCH
            },  # a larger one would read before the clock starts
            "filter": True,
            "filter_args": {"min_num_frames": 50, "max_num_frames": 800},
            "resample_rate": RATE,
            "speed_perturb": True,
            "num_frms": 200,
            "aug_prob": 0.0,
            "fbank_args": {
                "num_mel_bins": 80,
                "frame_shift": 10,
                "frame_length": 25,
                "dither": 1.0,
            },
            "spec_aug": False,
        },
        "model": args.model,
        "model_init": None,
        "model_args": {"feat_dim": 80, "embed_dim": 192, "pooling_func": "ASTP"},
        "projection_args": {"project_type": "q_margin", "alpha": 1.5, "scale": 10.0},
        "margin_scheduler": "MarginScheduler",
        "margin_update": {
            "initial_margin": 0.0,
            "final_margin": 0.2,
            "increase_start_epoch": 1,
            "fix_start_epoch": 1,
            "update_margin": True,
        },
        "loss": "CrossEntropyLoss",
        "loss_args": {},
        "optimizer": "SGD",
        "optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
        "scheduler": "ExponentialDecrease",
        "scheduler_args": {
            "initial_lr": 0.01,
            "final_lr": 0.001,
            "warm_up_epoch": 0,
            "warm_from_zero": True,
        },
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def upstream_batches(config_path: Path):
    """Yield the features of WeSpeaker's batches for ever, in this process."""
    from wespeaker.dataset.dataset import Dataset

    configs = yaml.safe_load(config_path.read_text())
    speakers = sorted(set(read_table(configs["train_label"]).values()))
    dataset = Dataset(
        configs["data_type"],
        configs["train_data"],
        configs["dataset_args"],
        {name: i for i, name in enumerate(speakers)},
        reverb_lmdb_file=None,
        noise_lmdb_file=None,
    )
    for batch in torch.utils.data.DataLoader(dataset, batch_size=BATCH, drop_last=True):
        yield batch["feat"]


def our_batches(config_path: Path, *, features: bool = True):
    """Yield the same of ours; without ``features`` what a worker does, waveforms."""
    config = load_config(config_path)
    utterances = read_utterances(config.data_type, config.train_data, config.train_label)
    train_set = TrainSet(utterances, speaker_labels(utterances), config.dataset_args, seed=0)
    order, epoch = np.random.default_rng(0), 0
    while True:
        places = order.permutation(len(train_set))
        for start in range(0, len(places) - BATCH + 1, BATCH):
            samples = [train_set[epoch, int(i)] for i in places[start : start + BATCH]]
            wavs = torch.stack([sample.wav for sample in samples])
            seeds = [sample.seed for sample in samples]
            if not features:
                yield wavs
                continue
            yield apply_cmvn(fbank(wavs, **config.dataset_args.fbank_args, seeds=seeds))
        epoch += 1


def seconds_of(batches, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return time.perf_counter() - start


def bench_data(config_path: Path, steps: int) -> None:
    sources = {
        "WeSpeaker": upstream_batches(config_path),
        "ours": our_batches(config_path),
        "ours, a worker's part": our_batches(config_path, features=False),
    }
    best = {name: seconds_of(source, 2) for name, source in sources.items()}  # warm up
    best = dict.fromkeys(best, float("inf"))
    for _ in range(PASSES):
        for name, source in sources.items():
            best[name] = min(best[name], seconds_of(source, steps))
    rates = {name: steps * BATCH / seconds for name, seconds in best.items()}
    for name, rate in rates.items():
        ratio = rate / rates["WeSpeaker"]
        print(f"data path alone, {name:22s} {rate:7.1f} utt/s on one core, {ratio:.2f}x")
    for name, source in sources.items():
        with cProfile.Profile() as profile:
            seconds_of(source, 2)
        print(f"\n{name}: functions by own time, {2 * BATCH} utterances")
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(8)


def logged_rate(path: Path) -> float:
    """Utterances a second between the first and the last log line of a training, of its steps."""
    times = []
    for line in path.read_text().splitlines():
        found = re.search(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})", line)
        # WeSpeaker's table: epoch, batch; ours: step
        step = re.search(r"\|\s+1\|\s+(\d+)\|", line) or re.search(r" step (\d+)/", line)
        if found and step:
            when = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f")
            times.append((int(step[1]), when.timestamp()))
    (first, begin), (last, end) = times[0], max(times, key=lambda x: x[0])
    return (last - first) * BATCH / (end - begin)


def bench_training(config_path: Path, folder: Path) -> None:
    commands = {
        "WeSpeaker": ["-m", "wespeaker_qmargin.launch", "train.py"],
        "ours": ["-m", "wespeaker_qmargin.cli", "train"],
    }
    rates: dict[str, list[float]] = {name: [] for name in commands}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for number in range(2):
        for name, command in commands.items():
            exp = folder / f"exp_{name}_{number}"
            words = ["--config", str(config_path), "--exp_dir", str(exp)]
            done = subprocess.run(
                [sys.executable, *command, *words], capture_output=True, text=True, env=environment
            )
            if done.returncode:
                sys.exit(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
            rates[name].append(logged_rate(exp / "train.log"))
    best = {name: max(x) for name, x in rates.items()}
    for name, rate in best.items():
        print(f"whole training, {name:10s} {rate:8.1f} utt/s")
    print(f"whole training, ratio      {best['ours'] / best['WeSpeaker']:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with wav.scp and utt2spk")
    parser.add_argument("--model", default="ECAPA_TDNN_c512", help="as WeSpeaker names it")
    parser.add_argument("--workers", type=int, default=1, help="data loading processes")
    parser.add_argument("--steps", type=int, default=12, help=f"of {BATCH} utterances")
    parser.add_argument("--data_alone", action="store_true", help="no trainings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(launch.prepare(find_script("train.py")))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_list(args.data or make_data(folder), folder)
        config_path = write_config(folder, args)
        bench_data(config_path, max(2, args.steps // 2))
        if not args.data_alone:
            bench_training(config_path, folder)


if __name__ == "__main__":
    main()
