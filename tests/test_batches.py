"""Batches from every kind of list, with workers, ranks and resuming; whole utterances."""

import io
import json
import re
import tarfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import kaldiio
import numpy as np
import pytest
import soundfile
import torch
from test_data import CROP, ramp, settings, train_set, write_utterances

from wespeaker_qmargin import cli
from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.augment import AudioSource, Augmenter
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.config import load_config, save_config
from wespeaker_qmargin.data import Batch, TrainSet, WholeSet, collate, train_loader
from wespeaker_qmargin.lists import read_utterances, speaker_labels
from wespeaker_qmargin.model import SpeakerNet, save_checkpoint
from wespeaker_qmargin.order import EpochBatches
from wespeaker_qmargin.sources import TarMember
from wespeaker_qmargin.train import train


@pytest.fixture
def utterances(tmp_path) -> list[Utterance]:
    return write_utterances(tmp_path)


def same(first: Batch, second: Batch) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(first, second)
    )


def loader_args(workers: int) -> SimpleNamespace:
    return SimpleNamespace(num_workers=workers, pin_memory=False, prefetch_factor=3)


def test_loader_gives_the_same_with_any_workers_and_when_resumed(utterances, tmp_path):
    (tmp_path / "4.wav").write_text("no audio")
    (tmp_path / "noise.scp").write_text(f"noise-a {utterances[0].source}\n")
    noise = AudioSource(tmp_path / "noise.scp")
    augmenter = Augmenter(noise, None, prob=0.5, sample_rate=16000)
    items = train_set(utterances, speed_perturb=True, augmenter=augmenter)
    epoch = {"seed": 5, "epoch": 2, "num_batches": 5}
    loaders = [
        train_loader(items, EpochBatches(len(items), 3, **epoch), loader_args(workers))
        for workers in (0, 2)
    ]
    plain, workers = (list(loader) for loader in loaders)
    assert len(plain) == len(loaders[0]) == 5
    assert all(same(a, b) for a, b in zip(plain, workers))
    resumed = train_loader(items, EpochBatches(len(items), 3, start=2, **epoch), loader_args(2))
    assert all(same(a, b) for a, b in zip(plain[2:], resumed))
    batch = plain[0]
    assert batch.wavs.shape == (3, CROP) and batch.wavs.dtype == torch.float32
    assert batch.labels.dtype == batch.seeds.dtype == torch.int64
    assert any(batch.problems for batch in plain)
    # no global generator is touched
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    items[0, 0]
    assert torch.equal(state[0], torch.get_rng_state())
    assert np.array_equal(state[1], np.random.get_state()[1])


def test_two_ranks_make_the_batches_of_one(utterances):
    items = train_set(utterances, speed_perturb=True)
    epoch = {"seed": 5, "epoch": 0, "num_batches": 3}
    one = train_loader(items, EpochBatches(8, 4, **epoch), loader_args(0))
    ranks = [
        train_loader(items, EpochBatches(8, 2, rank=r, world_size=2, **epoch), loader_args(0))
        for r in (0, 1)
    ]
    for whole, *parts in zip(one, *ranks):
        assert torch.equal(whole.wavs, torch.cat([part.wavs for part in parts]))
        assert torch.equal(whole.seeds, torch.cat([part.seeds for part in parts]))


def write_shards(tmp_path, utterances) -> Path:
    lines = []
    for number, size in enumerate((3, 5)):
        path = tmp_path / f"{number}.tar"
        with tarfile.open(path, "w") as tar:
            for utterance in utterances[3 * number : 3 * number + size]:
                for suffix, data in (
                    ("spk", utterance.spk.encode()),
                    ("wav", Path(utterance.source).read_bytes()),
                ):
                    info = tarfile.TarInfo(f"{utterance.key}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        lines.append(f"{path}\n")
    (tmp_path / "shard.list").write_text("".join(lines))
    return tmp_path / "shard.list"


def test_kaldi_raw_and_shard_give_the_same_items(utterances, tmp_path):
    (tmp_path / "wav.scp").write_text("".join(f"{u.key} {u.source}\n" for u in utterances))
    (tmp_path / "utt2spk").write_text("".join(f"{u.key} {u.spk}\n" for u in utterances))
    entries = [{"key": u.key, "spk": u.spk, "wav": u.source} for u in utterances]
    (tmp_path / "raw.list").write_text("".join(json.dumps(e) + "\n" for e in entries))
    shards = write_shards(tmp_path, utterances)
    sets = [
        train_set(read_utterances(data_type, path), speed_perturb=True)
        for data_type, path in (
            ("kaldi", tmp_path),
            ("raw", tmp_path / "raw.list"),
            ("shard", shards),
        )
    ]
    for index in range(8):
        kaldi, raw, shard = (collate([items[1, index]]) for items in sets)
        assert same(kaldi, raw) and same(kaldi, shard)
    assert sets[0].block is None and sets[2].block == [3, 5]
    expanded = train_set(
        read_utterances("shard", shards), speed_perturb=True, speed_perturb_mode="expanded"
    )
    assert expanded.block == [9, 15] and len(expanded) == 24


def test_raw_vad_is_what_a_crop_comes_from(utterances):
    utterance = utterances[6]._replace(vad=((0.2, 0.4), (0.7, 0.9)))
    items = train_set([utterance], num_frms=25)
    speech = np.concatenate([ramp(16000, 6)[3200:6400], ramp(16000, 6)[11200:14400]])
    for epoch in range(20):
        wav = items[epoch, 0].wav.numpy()
        at = int(np.flatnonzero(speech == wav[0])[0])
        assert np.array_equal(wav, speech[at : at + len(wav)])
    short = utterance._replace(vad=((0.2, 0.25),))
    with pytest.raises(ValueError, match="too short"):
        train_set([short])[0, 0]


def test_whole_set_never_raises_for_a_file(utterances, tmp_path):
    (tmp_path / "1.wav").unlink()
    soundfile.write(tmp_path / "2.wav", ramp(399, 2), 16000)
    member = TarMember(str(tmp_path / "no.tar"), 0, 10, "x.wav")
    items = WholeSet([*utterances[:3], Utterance("x", None, member)], 16000, min_samples=400)
    assert len(items) == 4
    key, wav, problem = items[0]
    assert (key, problem) == ("u0", None) and np.array_equal(wav, ramp(16000, 0))
    for index, reason in ((1, "No such file"), (2, "too short: 0.025 s"), (3, r"x.wav: No such")):
        key, wav, problem = items[index]
        assert wav is None and problem.startswith(f"{key}: {tmp_path}") and reason in problem
    assert WholeSet(utterances[2:3], 16000, min_samples=399)[0][2] is None
    assert len(WholeSet(utterances[:1], 8000, min_samples=1)[0][1]) == 8000


@pytest.mark.minivox
def test_real_speech(tmp_path, minivox):
    for name in ("train/wav.scp", "aug/noise.scp", "aug/rir.scp"):
        lines = (minivox / name).read_text().split("\n")[:-1]
        absolute = [f"{key} {minivox / path}\n" for key, path in map(str.split, lines)]
        (tmp_path / Path(name).name).write_text("".join(absolute))
    utterances = read_utterances("kaldi", tmp_path / "wav.scp", minivox / "train" / "utt2spk")
    labels = speaker_labels(utterances)
    assert len(utterances) == 1721 and len(labels) == 452
    noise, rir = (AudioSource(tmp_path / f"{name}.scp") for name in ("noise", "rir"))
    augmenter = Augmenter(noise, rir, prob=0.6, sample_rate=16000)
    args = settings(num_frms=200, filter_args={}, speed_perturb=True)
    items = TrainSet(utterances, labels, args, seed=0, augmenter=augmenter)
    batches = EpochBatches(len(items), 32, seed=0, epoch=0, num_batches=3)
    for batch in train_loader(items, batches, loader_args(0)):
        assert batch.wavs.shape == (32, 32240) and batch.problems == []
        assert batch.wavs.abs().amax(dim=1).min() > 1e-3 and batch.wavs.abs().max() <= 1
        speaker = {utterance.key: utterance.spk for utterance in utterances}
        assert (batch.labels % 452).tolist() == [labels[speaker[key]] for key in batch.keys]
    whole = WholeSet(utterances[:5], 16000, min_samples=400)
    for number, utterance in enumerate(utterances[:5]):
        expected, _ = soundfile.read(utterance.source, dtype="float32")
        assert np.array_equal(whole[number][1], expected)


def run(tiny, folder, *words) -> Path:
    values = ("--train_data", folder, "--valid_speakers", 0, "--num_epochs", 1, *words)
    return train(load_config(tiny, [str(value) for value in values]))


def finite(exp_dir) -> bool:
    state = read_checkpoint(Path(exp_dir) / "models" / "model_1.pt")
    return all(torch.isfinite(tensor).all() for tensor in state.values())


def write_list(folder, utterances) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "wav.scp").write_text("".join(f"{u.key} {u.source}\n" for u in utterances))
    (folder / "utt2spk").write_text("".join(f"{u.key} {u.spk}\n" for u in utterances))
    return folder


@pytest.mark.parametrize(
    "speakers, words",
    [
        (["a", "b"], ("--dataloader_args.num_workers", 4, "--dataloader_args.batch_size", 2)),
        (["a", "a", "b"], ("--dataset_args.sample_num_per_epoch", 16)),
        (["a", "b", "b", "b", "b", "b", "b", "b"], ()),  # a speaker with one utterance
        (["a"] * 8, ()),  # one speaker only
    ],
)
def test_tiny_lists_train(tiny, utterances, tmp_path, speakers, words):
    few = [u._replace(spk=spk) for u, spk in zip(utterances, speakers)]
    assert finite(run(tiny, write_list(tmp_path / "few", few), *words))


def test_too_tiny_a_list_says_what_is_missing(tiny, utterances, tmp_path):
    with pytest.raises(ValueError, match="3 utterances an epoch make no step of 8"):
        run(tiny, write_list(tmp_path / "few", utterances[:3]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_list_of_utterances_below_the_minimum_ends_at_once(tiny, utterances, tmp_path, workers):
    words = ("--dataloader_args.num_workers", workers, "--dataset_args.filter", "true")
    words += ("--dataset_args.filter_args", "{min_num_frames: 101}")
    with pytest.raises(ValueError, match="200 too short.*at least 1.010 s"):
        run(tiny, write_list(tmp_path / "all", utterances), *words)


def test_one_shard_serves_two_ranks(utterances, tmp_path):
    write_shards(tmp_path, utterances)
    (tmp_path / "one.list").write_text(f"{tmp_path}/1.tar\n")
    items = train_set(read_utterances("shard", tmp_path / "one.list"))
    assert items.block == [5]
    keys = []
    for rank in (0, 1):
        epoch = {"seed": 5, "epoch": 0, "num_batches": 2, "block": items.block}
        batches = EpochBatches(5, 2, rank=rank, world_size=2, **epoch)
        loader = train_loader(items, batches, loader_args(2))
        keys.append([key for batch in loader for key in batch.keys])
    assert len(keys[0]) == len(keys[1]) == 4 and len({*keys[0], *keys[1]}) == 5


def odd_audio(folder) -> tuple[dict[str, str], dict[str, str]]:
    """Utterances that have an embedding, and those that are refused, with the reason."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    good, wavs = {}, {}
    wavs["short"] = (rng.standard_normal(4000) / 9, 16000, {})
    wavs["zeros"] = (np.zeros(32000), 16000, {})
    wavs["constant"] = (np.full(32000, 0.5), 16000, {})
    wavs["stereo"] = (rng.standard_normal((16000, 2)) / 9, 16000, {})
    for rate in (8000, 44100, 48000):
        wavs[f"rate{rate}"] = (rng.standard_normal(rate) / 9, rate, {})
    for subtype in ("PCM_16", "PCM_32", "FLOAT", "DOUBLE"):
        wavs[subtype] = (rng.standard_normal(16000) / 9, 16000, {"subtype": subtype})
    for name, (wav, rate, options) in wavs.items():
        soundfile.write(folder / f"{name}.wav", wav, rate, **options)
        good[name] = f"{folder}/{name}.wav"
    one = rng.standard_normal(16000) / 9
    for suffix, subtype in (("flac", "PCM_24"), ("mp3", "MPEG_LAYER_III"), ("ogg", "OPUS")):
        soundfile.write(folder / f"x.{suffix}", one, 16000, subtype=subtype)
        good[suffix] = f"{folder}/x.{suffix}"
    for samples in (0, 1, 399):
        soundfile.write(folder / f"n{samples}.wav", one[:samples], 16000)
    data = (folder / "x.flac").read_bytes()
    (folder / "cut.flac").write_bytes(data[: len(data) // 2])
    (folder / "empty.wav").write_bytes(b"")
    refused = {
        "n0.wav": "holds no samples",
        "n1.wav": "too short: 0.000 s",
        "n399.wav": "too short: 0.025 s",
        "cut.flac": "truncated|broken",
        "empty.wav": "the file is empty",
        "gone.wav": "No such file",
        ".": "Is a directory",
    }
    return good, {f"{folder}/{name}": reason for name, reason in refused.items()}


def test_odd_audio_has_finite_embeddings_or_is_named_and_the_rest_goes_on(tiny, tmp_path):
    good, refused = odd_audio(tmp_path / "odd")
    config = load_config(tiny)
    save_config(config, tmp_path / "exp" / "config.yaml")
    torch.manual_seed(0)
    save_checkpoint(SpeakerNet(config, 8), tmp_path / "exp" / "models" / "avg_model.pt")
    lines = [f"{key} {path}\n" for key, path in good.items()]
    lines += [f"bad{number} {path}\n" for number, path in enumerate(refused)]
    (tmp_path / "wav.scp").write_text("".join(lines[::-1]))  # the bad ones first
    words = ("--exp_dir", tmp_path / "exp", "--data", tmp_path / "wav.scp", "--out", tmp_path / "x")
    words = ["extract", *map(str, words), "--device", "cpu"]
    assert cli.main(words) == 1 and cli.main([*words, "--skip_bad"]) == 0
    vectors = dict(kaldiio.load_scp(str(tmp_path / "x" / "xvector.scp")))
    assert vectors.keys() == good.keys()
    assert all(np.isfinite(vector).all() for vector in vectors.values())
    told = (tmp_path / "x" / "xvector.bad").read_text().splitlines()[::-1]
    assert len(told) == len(refused)
    for number, (path, reason) in enumerate(refused.items()):
        assert re.match(rf"bad{number}: {re.escape(path)}: .*({reason})", told[number])


def test_a_crop_of_a_long_file_reads_the_crop_only(tmp_path):
    minutes, rate = 180, 16000
    with soundfile.SoundFile(tmp_path / "a.wav", "w", rate, 1) as file:
        file.truncate(minutes * 60 * rate)  # 3 h of zeros, which take no disk
        file.seek(0)
        file.write(ramp(16000, 0))
    items = train_set([Utterance("u", "s", str(tmp_path / "a.wav"))])
    tracemalloc.start()
    assert items[0, 0].wav.shape == (CROP,)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
