"""``package.module:Class``: any network of features or waveforms, any head; what is refused."""

import sys
import textwrap

import pytest
import torch

from wespeaker_qmargin import adapter
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet
from wespeaker_qmargin.schedule import Schedules, build_optimizer
from wespeaker_qmargin.train import train

CODE = """
    import torch
    from torch import nn

    class OfFrames(nn.Module):
        def __init__(self, feat_dim, embed_dim, width=8, name=""):
            super().__init__()
            self.name = name
            self.layers = nn.Sequential(nn.Linear(feat_dim, width), nn.Linear(width, embed_dim))

        def forward(self, frames):
            return None, self.layers(frames).mean(dim=1)

    class OfWaves(nn.Module):
        '''Knows its own sizes.'''

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 12, 400, stride=160)
            self.number = 3

        def forward(self, wavs):
            assert wavs.ndim == 2 and wavs.abs().max() <= 1
            return self.conv(wavs[:, None]).abs().mean(dim=2)

    class Colliding(OfWaves):
        def __init__(self):
            super().__init__()
            self.projection = nn.Linear(2, 2)

    class Cosines(nn.Module):
        def __init__(self, embed_dim, num_class, scale=30.0):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(num_class, embed_dim))
            self.scale, self.margins = scale, []

        def update(self, margin):
            self.margins.append(margin)

        def forward(self, embeddings, labels):
            normalised = torch.nn.functional.normalize
            return self.scale * normalised(embeddings) @ normalised(self.weight).T

    class NoNetwork:
        pass
"""
WAVE = ["--dataset_args.frontend", "wave", "--dataset_args.cmvn", "false"]
WAVE += ["--dataset_args.spec_aug", "false", "--model_args", "{embed_dim: 12}"]


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "lib" / "somebodys").mkdir(parents=True)
    (tmp_path / "lib" / "somebodys" / "__init__.py").write_text("")
    (tmp_path / "lib" / "somebodys" / "nets.py").write_text(textwrap.dedent(CODE))
    monkeypatch.syspath_prepend(tmp_path / "lib")
    yield
    for name in ("somebodys", "somebodys.nets"):
        sys.modules.pop(name, None)


def test_a_model_of_features(tiny):
    words = ["--model", "somebodys.nets:OfFrames", "--num_epochs", "1"]
    words += ["--model_args", "{feat_dim: 80, embed_dim: 16, width: 4}"]
    state = read_checkpoint(train(load_config(tiny, words)) / "models" / "model_1.pt")
    assert state["layers.0.weight"].shape == (4, 80) and state["layers.1.weight"].shape == (16, 4)


def test_a_model_of_waveforms_that_knows_its_sizes(tiny):
    words = ["--model", "somebodys.nets:OfWaves", *WAVE, "--num_epochs", "1"]
    config = load_config(tiny, words)
    torch.manual_seed(config.seed)
    before = SpeakerNet(config, 8)
    wavs = torch.rand(2, 8000) - 0.5
    assert torch.equal(before.embed(wavs), before.backbone(wavs))
    state = read_checkpoint(train(config) / "models" / "model_1.pt")
    assert state.keys() == {"conv.weight", "conv.bias", "projection.weight"}
    assert state["projection.weight"].shape == (8, 12)
    assert not torch.equal(state["conv.weight"], before.backbone.conv.weight)


def test_a_head(tiny):
    config = load_config(tiny, ["--projection_args", "{project_type: 'somebodys.nets:Cosines'}"])
    net = SpeakerNet(config, 8)
    head, embeddings, labels = net.projection, torch.randn(4, 16), torch.arange(4)
    schedules = Schedules(net, build_optimizer(net, config), config, epoch_iter=2, step_batch=8)
    schedules.step(0)
    assert head.scale == 30 and head.weight.shape == (8, 16) and head.margins
    assert head(embeddings, labels).abs().max() <= 30
    words = ["--projection_args", "{project_type: 'somebodys.nets:Cosines', scale: 8.0}"]
    state = read_checkpoint(train(load_config(tiny, words)) / "models" / "model_5.pt")
    assert state["projection.weight"].shape == (8, 16)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--projection_args", "{project_type: 'somebodys.nets:Cosine'}"],
            "project_type: somebodys.nets:Cosine: somebodys.nets has no nn.Module 'Cosine'",
        ),
        (
            ["--projection_args", "{project_type: 'somebodys.nets:Cosines', scal: 3}"],
            "projection_args.scal: not an argument of somebodys.nets:Cosines",
        ),
        (["--model", "nowhere.nets:Net"], "cannot import nowhere.nets .*PYTHONPATH"),
        (["--model", "somebodys.nets:Nets"], "no nn.Module 'Nets'; it has OfFrames, OfWaves"),
        (["--model", "somebodys.nets:NoNetwork"], "no nn.Module 'NoNetwork'"),
        (
            ["--model", "somebodys.nets:OfFrames", "--model_args", "{feat_dim: 80}"],
            "model_args.embed_dim: missing; the size of somebodys.nets:OfFrames's embeddings",
        ),
        (
            ["--model", "somebodys.nets:OfFrames", "--model_args", "{embed_dim: 16}"],
            "model_args.feat_dim: missing; OfFrames needs it",
        ),
        (
            ["--model", "somebodys.nets:OfFrames", "--model_args.widht", "4"],
            "model_args.widht: not an argument of OfFrames. Did you mean 'width'",
        ),
        (
            ["--model", "somebodys.nets:OfWaves", *WAVE, "--dataset_args.cmvn", "true"],
            "frontend wave gives no filter banks: set cmvn and spec_aug to False",
        ),
        (
            ["--model", "somebodys.nets:OfWaves", *WAVE, "--dataset_args.wave_args", "{gain: 2}"],
            "wave_args.gain: not an argument",
        ),
    ],
)
def test_faults_are_named(tiny, words, message):
    args = [] if "--model_args" in words else ["--model_args", "{feat_dim: 80, embed_dim: 16}"]
    with pytest.raises(ValueError, match=message):
        load_config(tiny, [*args, *words])


def test_names_that_a_checkpoint_keeps_for_other_parts():
    with pytest.raises(ValueError, match="Colliding has an attribute 'projection'"):
        adapter.build_speaker_model("somebodys.nets:Colliding", {"embed_dim": 12})


def test_texts_among_the_arguments_stay_texts():
    """Unlike those of WeSpeaker's classes, which may name a class of their module."""
    args = {"feat_dim": 3, "embed_dim": 2, "name": "OfWaves"}
    assert adapter.build_speaker_model("somebodys.nets:OfFrames", args).name == "OfWaves"
