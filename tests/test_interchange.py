"""Checkpoints both ways: WeSpeaker's trainer and ours, its exports of what we train."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys

import kaldiio
import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from torch import nn

from wespeaker_qmargin import adapter
from wespeaker_qmargin.checkpoints import average_epochs, read_checkpoint
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.experiment import Experiment, make_accelerator
from wespeaker_qmargin.extract import extract_experiment
from wespeaker_qmargin.train import train
from wespeaker_qmargin.upstream import wespeaker_module


def upstream_network(config, num_class: int, *, head: bool = True) -> nn.Module:
    """The network as WeSpeaker's train.py puts it together, of WeSpeaker's classes."""
    model = wespeaker_module("models.speaker_model").get_speaker_model(config.model)
    model = model(**config.model_args)
    if head:
        args = {"embed_dim": config.model_args["embed_dim"], "num_class": num_class}
        model.add_module("projection", adapter.get_projection({**config.projection_args, **args}))
    return model


@pytest.fixture
def config(tiny):
    return load_config(tiny, ["--valid_speakers", "0", "--num_epochs", "3"])


@pytest.fixture
def from_upstream(config, tmp_path):
    """Epoch 2 of a run of WeSpeaker's: its file, as its save_checkpoint writes it."""
    torch.manual_seed(3)
    model = upstream_network(config, 10)
    path = tmp_path / "upstream" / "models" / "model_2.pt"
    path.parent.mkdir(parents=True)
    wespeaker_module("utils.checkpoint").save_checkpoint(model, str(path))
    return path, model.state_dict()


def continued(config, checkpoint, **changes):
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    return load_config(config, ["--checkpoint", str(checkpoint), "--valid_speakers", "0", *words])


def test_a_run_of_wespeakers_goes_on_with_its_next_epoch(tiny, from_upstream, tmp_path):
    path, state = from_upstream
    config = continued(tiny, path, num_epochs=3, num_avg=1)
    at = Experiment(config, tmp_path / "other", make_accelerator(config), None)
    assert at.epoch == 3 and at.iteration == 2 * at.epoch_iter
    found = at.net.projection.weight
    assert torch.equal(found, state["projection.weight"])
    train(config)
    exp = tmp_path / "exp"
    assert [p.name for p in (exp / "models").iterdir()] == ["model_3.pt"]
    first = (exp / "metrics.jsonl").read_text().splitlines()[0]
    assert '"epoch": 3' in first and '"margin": 0.1' in first, "half-way up"
    assert "going on with epoch 3" in (exp / "train.log").read_text()


def test_another_name_starts_with_the_first_epoch(tiny, from_upstream, tmp_path):
    path, _ = from_upstream
    path = path.rename(path.with_name("avg_model.pt"))
    config = continued(tiny, path)
    assert Experiment(config, tmp_path / "other", make_accelerator(config), None).epoch == 1


def test_nothing_left_to_train(tiny, from_upstream):
    with pytest.raises(ValueError, match="is of epoch 2, and num_epochs is 2: nothing is left"):
        train(continued(tiny, from_upstream[0], num_epochs=2))


@pytest.fixture
def trained(config):
    train(config)
    return average_epochs(config.exp_dir, 2).parent.parent


def test_wespeakers_trainer_takes_ours(trained, config, caplog):
    path = trained / "models" / "model_3.pt"
    assert re.findall(r"(?<=model_)\d*(?=.pt)", str(path)) == ["3"]  # how it finds the epoch
    model = upstream_network(config, 10)
    with caplog.at_level(logging.INFO):
        wespeaker_module("utils.checkpoint").load_checkpoint(model, str(path))
    assert caplog.text == ""  # it logs what is missing, unexpected or of another shape
    ours = read_checkpoint(path)
    assert model.state_dict().keys() == ours.keys()
    assert all(torch.equal(x, ours[key]) for key, x in model.state_dict().items())


def load_as_wespeaker(exp) -> nn.Module:
    """Its load_model and its export scripts do this."""
    content = yaml.load((exp / "config.yaml").read_text(), Loader=yaml.FullLoader)
    model = wespeaker_module("models.speaker_model").get_speaker_model(content["model"])
    model = model(**content["model_args"])
    wespeaker_module("utils.checkpoint").load_checkpoint(
        model, str(exp / "models" / "avg_model.pt")
    )
    return model.eval()


def test_torchscript(trained, tmp_path):
    model = load_as_wespeaker(trained)
    torch.jit.script(model).save(tmp_path / "final.zip")
    frames = torch.randn(2, 90, 80)
    found = torch.jit.load(tmp_path / "final.zip")(frames)[-1]
    torch.testing.assert_close(found, model(frames)[-1])


class Exported(nn.Module):
    """What export_onnx.py exports: the embedding less a mean."""

    def __init__(self, model: nn.Module, mean: torch.Tensor):
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean)

    def forward(self, feats):
        return self.model(feats)[-1] - self.mean


def test_onnx(trained, tmp_path):
    model = load_as_wespeaker(trained)
    mean = torch.linspace(-0.1, 0.1, 16)
    torch.onnx.export(
        Exported(model, mean).eval(),
        torch.ones(1, 200, 80),
        tmp_path / "model.onnx",
        opset_version=14,
        input_names=["feats"],
        output_names=["embs"],
        dynamic_axes={"feats": {0: "B", 1: "T"}, "embs": {0: "B"}},
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    for shape in ((1, 200, 80), (3, 137, 80)):
        frames = rng.standard_normal(shape).astype(np.float32)
        (found,) = session.run(["embs"], {"feats": frames})
        expected = model(torch.from_numpy(frames))[-1] - mean
        np.testing.assert_allclose(found, expected.detach(), atol=1e-4)


# --- WeSpeaker's own programs, with a checkout ---------------------------------------------------


@pytest.fixture
def launched(trained, corpus):
    """A function that runs a script of the checkout's, unchanged, with the launcher."""

    def launched(script: str, *words) -> None:
        command = [sys.executable, "-m", "wespeaker_qmargin.launch", script, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]

    if "WESPEAKER_ROOT" not in os.environ:
        pytest.skip("needs a WeSpeaker checkout in WESPEAKER_ROOT")
    pytest.importorskip("fire", reason="WeSpeaker's scripts need fire")
    return launched


def ours(trained, corpus) -> dict[str, np.ndarray]:
    scp = extract_experiment(
        trained, data_type="kaldi", data=str(corpus), out_dir=trained / "ours", device="cpu"
    )
    return dict(kaldiio.load_scp(str(scp)))


@pytest.mark.checkout
def test_extraction_by_both(trained, corpus, launched, tmp_path):
    lines = []
    for line in (corpus / "wav.scp").read_text().splitlines():
        key, path = line.split(maxsplit=1)
        lines.append(json.dumps({"key": key, "wav": path, "spk": key.split("-")[0]}) + "\n")
    (tmp_path / "raw.list").write_text("".join(lines))
    words = ["--config", trained / "config.yaml", "--model_path", trained / "models/avg_model.pt"]
    words += ["--data_type", "raw", "--data_list", tmp_path / "raw.list", "--num_workers", "1"]
    words += ["--embed_ark", tmp_path / "theirs.ark", "--batch_size", "1"]
    launched("extract.py", *words)
    theirs = dict(kaldiio.load_scp(str(tmp_path / "theirs.scp")))
    found = ours(trained, corpus)
    assert theirs.keys() == found.keys() and len(found) == 60
    for key, embedding in theirs.items():
        np.testing.assert_allclose(found[key], embedding, atol=1e-5 * np.abs(embedding).max())


@pytest.mark.checkout
def test_load_model_by_hand(trained, corpus, launched, tmp_path):
    pytest.importorskip("silero_vad", reason="WeSpeaker's command line needs silero_vad")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(trained / "config.yaml", folder)
    shutil.copy(trained / "models" / "avg_model.pt", folder)
    keys = ["s0-0", "s3-2"]
    script = tmp_path / "embed.py"
    script.write_text(
        "import sys, numpy, wespeaker\n"
        "model = wespeaker.load_model(sys.argv[1])\n"
        "numpy.save(sys.argv[2], [model.extract_embedding(x).numpy() for x in sys.argv[3:]])\n"
    )
    wavs = [corpus / f"{key}.wav" for key in keys]
    launched(script, folder, tmp_path / "theirs.npy", *wavs)
    found = ours(trained, corpus)
    for key, embedding in zip(keys, np.load(tmp_path / "theirs.npy")):
        np.testing.assert_allclose(found[key], embedding, atol=1e-5 * np.abs(embedding).max())


@pytest.mark.checkout
def test_export_scripts(trained, launched, tmp_path):
    words = ["--config", trained / "config.yaml"]
    words += ["--checkpoint", trained / "models" / "avg_model.pt"]
    launched("export_jit.py", *words, "--output_file", tmp_path / "final.zip")
    launched("export_onnx.py", *words, "--output_model", tmp_path / "model.onnx")
    model, frames = load_as_wespeaker(trained), torch.randn(2, 90, 80)
    expected = model(frames)[-1]
    torch.testing.assert_close(torch.jit.load(tmp_path / "final.zip")(frames)[-1], expected)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["embs"], {"feats": frames.numpy()})
    np.testing.assert_allclose(found, expected.detach(), atol=1e-4)
