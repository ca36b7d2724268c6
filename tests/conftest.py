"""Fixtures that several test files share: a small synthetic corpus, a tiny configuration."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)  # tests run in parallel on few cores


def pytest_collection_modifyitems(items):
    minivox = find_minivox()
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("minivox") and minivox is None:
            item.add_marker(pytest.mark.skip(reason="needs minivox beside the checkout"))
        if item.get_closest_marker("checkout") and "WESPEAKER_ROOT" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs a checkout in WESPEAKER_ROOT"))


def find_minivox() -> Path | None:
    folder = Path(os.environ.get("QMARGIN_MINIVOX", ROOT.parent / "shared" / "minivox"))
    return folder if (folder / "train" / "wav.scp").is_file() else None


@pytest.fixture(scope="session")
def minivox() -> Path:
    return find_minivox()


def voice(speaker: int, take: int, seconds: float = 1.4) -> np.ndarray:
    """A buzz whose pitch and spectral envelope belong to the speaker."""
    rng = np.random.default_rng([speaker, take])
    who = np.random.default_rng(speaker)
    f0, tilt = who.uniform(80, 300), who.uniform(0.3, 2.0, size=12)
    t = np.arange(int(seconds * 16000)) / 16000
    pitch = f0 * (1 + 0.02 * rng.standard_normal())
    wave = sum(a * np.sin(2 * np.pi * pitch * (k + 1) * t) for k, a in enumerate(tilt))
    wave = wave * (1 + 0.5 * np.sin(2 * np.pi * rng.uniform(2, 5) * t))
    wave = wave + 0.3 * rng.standard_normal(len(t))
    return (0.1 * wave / np.abs(wave).max()).astype(np.float32)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A Kaldi folder: 10 speakers, 6 utterances of 1.4 s each."""
    folder = tmp_path_factory.mktemp("corpus")
    scp, utt2spk = [], []
    for speaker in range(10):
        for take in range(6):
            key = f"s{speaker}-{take}"
            soundfile.write(folder / f"{key}.wav", voice(speaker, take), 16000)
            scp.append(f"{key} {folder}/{key}.wav\n")
            utt2spk.append(f"{key} s{speaker}\n")
    (folder / "wav.scp").write_text("".join(scp))
    (folder / "utt2spk").write_text("".join(utt2spk))
    return folder


@pytest.fixture
def tiny(corpus, tmp_path) -> Path:
    """A config that trains a very small XVEC on ``corpus`` in seconds; 5 epochs of 6 steps of 8."""
    values = {
        "exp_dir": str(tmp_path / "exp"),
        "data_type": "kaldi",
        "train_data": str(corpus),
        "device": "cpu",
        "num_avg": 2,
        "num_epochs": 5,
        "save_epoch_interval": 1,
        "log_batch_interval": 3,
        "valid_speakers": 2,
        "dataloader_args": {"batch_size": 8},
        "dataset_args": {
            "num_frms": 60,
            "filter": False,
            "speed_perturb_labels": "same",
            "spec_aug": True,
            "spec_aug_args": {"max_t": 5},
        },
        "model": "XVEC",
        "model_args": {"feat_dim": 80, "hid_dim": 16, "stats_dim": 24, "embed_dim": 16},
        "projection_args": {"project_type": "q_margin", "alpha": 1.5},
        "margin_update": {
            "initial_margin": 0.0,
            "final_margin": 0.2,
            "increase_start_epoch": 2,
            "fix_start_epoch": 4,
            "update_margin": True,
        },
        "optimizer_args": {"momentum": 0.9, "nesterov": True},
        "scheduler_args": {"initial_lr": 0.1, "final_lr": 0.01, "warm_up_epoch": 1},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="session")
def make_tiny_encoder():
    """The tool of that name, as a module."""
    pytest.importorskip("transformers")
    path = ROOT / "tools" / "make_tiny_encoder.py"
    spec = importlib.util.spec_from_file_location("make_tiny_encoder", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def encoders(make_tiny_encoder, tmp_path_factory) -> Path:
    """Folders base, large, w2vbert of 3 layers of 32, and base.pt, large.pt in the first layout."""
    folder = tmp_path_factory.mktemp("encoders")
    for name, norm in (("base", "group"), ("large", "layer")):
        original = folder / f"{name}.pt"
        make_tiny_encoder.make_wavlm(folder / name, layers=3, norm=norm, original=original)
    make_tiny_encoder.make_w2vbert(folder / "w2vbert", layers=3)
    return folder


@pytest.fixture(scope="session")
def tiny_wavlm(make_tiny_encoder, tmp_path_factory) -> Path:
    """A folder with a WavLM of two layers, untrained."""
    folder = tmp_path_factory.mktemp("encoder") / "wavlm"
    make_tiny_encoder.make_wavlm(folder, layers=2, dim=16, heads=2, conv_dim=8)
    return folder


@pytest.fixture
def tiny_ssl(tiny, tiny_wavlm) -> Path:
    """``tiny`` with a WavLM and MHFA in the place of filter banks and XVEC; an epoch."""
    content = yaml.safe_load(tiny.read_text())
    content["dataset_args"] = {
        **{"frontend": "wavlm", "wavlm_args": {"model_name": str(tiny_wavlm)}},
        **{"cmvn": False, "spec_aug": False, "filter": False, "num_frms": 60},
        "speed_perturb": False,
    }
    content |= {"model": "MHFA", "valid_speakers": 0, "num_epochs": 1, "num_avg": 1}
    content["model_args"] = {"head_nb": 2, "embed_dim": 16, "compression_dim": 8}
    tiny.write_text(yaml.safe_dump(content))
    return tiny
