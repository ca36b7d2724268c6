"""Checkpoints: WeSpeaker's layout, refusals, averaging."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wespeaker_qmargin import adapter
from wespeaker_qmargin.checkpoints import average_epochs, find_checkpoint, read_checkpoint
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.model import SpeakerNet, full_state, load_checkpoint, save_checkpoint


@pytest.fixture
def net(tiny):
    torch.manual_seed(0)
    return SpeakerNet(load_config(tiny), 8)


def test_round_trip(net, tiny, tmp_path):
    save_checkpoint(net, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert "frame_1.conv_1d.weight" in state and "projection.weight" in state
    torch.manual_seed(1)
    other = SpeakerNet(load_config(tiny), 8)
    load_checkpoint(other, tmp_path / "model.pt")
    wavs = torch.randn(2, 16000) * 0.1
    net.eval(), other.eval()
    torch.testing.assert_close(net.embed(wavs), other.embed(wavs), atol=0, rtol=0)


def test_wespeakers_own_loader_takes_it(net, tiny, tmp_path, caplog):
    save_checkpoint(net, tmp_path / "model.pt")
    xvec = adapter.get_speaker_model("XVEC")(**load_config(tiny).model_args)
    xvec.add_module(
        "projection",
        adapter.get_projection({"project_type": "q_margin", "embed_dim": 16, "num_class": 8}),
    )
    adapter.wespeaker_module("utils.checkpoint").load_checkpoint(xvec, str(tmp_path / "model.pt"))
    assert not [r for r in caplog.records if "tensor" in r.getMessage()], "missing or unexpected"
    features = torch.randn(2, 50, 80)
    net.eval(), xvec.eval()
    torch.testing.assert_close(xvec(features)[-1], net.backbone(features)[-1], atol=0, rtol=0)


@pytest.mark.checkout
def test_wespeakers_own_average_takes_them(net, tmp_path):
    models = tmp_path / "models"
    for epoch in (1, 2):
        with torch.no_grad():
            net.backbone.seg_1.weight.fill_(epoch)
        save_checkpoint(net, models / f"model_{epoch}.pt")
    average_epochs(tmp_path, 2)
    ours = read_checkpoint(models / "avg_model.pt")
    script = Path(os.environ["WESPEAKER_ROOT"]) / "wespeaker" / "bin" / "average_model.py"
    command = [sys.executable, script, "--dst_model", models / "avg_model.pt"]
    subprocess.run([*command, "--src_path", models, "--num", "2"], check=True)
    theirs = read_checkpoint(models / "avg_model.pt")
    for key, value in ours.items():
        if value.is_floating_point():
            torch.testing.assert_close(theirs[key], value)


@pytest.mark.parametrize("wrap", [{"state_dict": None}, {"model": None}, "module."])
def test_wrapped_checkpoints(net, tmp_path, wrap):
    save_checkpoint(net, tmp_path / "model.pt")
    plain = read_checkpoint(tmp_path / "model.pt")
    if wrap == "module.":
        torch.save({f"module.{k}": v for k, v in plain.items()}, tmp_path / "wrapped.pt")
    else:
        torch.save({next(iter(wrap)): plain, "epoch": 3}, tmp_path / "wrapped.pt")
    found = read_checkpoint(tmp_path / "wrapped.pt")
    assert found.keys() == plain.keys()
    load_checkpoint(net, tmp_path / "wrapped.pt")


def test_extraction_needs_no_head(net, tiny, tmp_path):
    save_checkpoint(net, tmp_path / "model.pt")
    headless = SpeakerNet(load_config(tiny))
    load_checkpoint(headless, tmp_path / "model.pt", head=False)


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch evil",)


def test_files_that_are_no_checkpoint(tmp_path, net, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(net, tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(good[: len(good) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"evil": Evil()}, tmp_path / "evil2.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("half", "empty", "text", "evil", "evil2", "list"):
        with pytest.raises(ValueError, match=rf"{name}\.pt"):
            read_checkpoint(tmp_path / f"{name}.pt")
    assert not (tmp_path / "evil").exists()
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        read_checkpoint(tmp_path / "none.pt")


def test_another_architecture_is_refused_and_changes_nothing(net, tiny, tmp_path):
    save_checkpoint(net, tmp_path / "model.pt")
    words = ["--model_args.hid_dim", "20"]
    other = SpeakerNet(load_config(tiny, words), 8)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"does not fit this model.*other shape \(.*instead of"):
        load_checkpoint(other, tmp_path / "model.pt")
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
    with pytest.raises(ValueError, match=r"projection.weight: \(8, 16\) instead of \(9, 16\)"):
        load_checkpoint(SpeakerNet(load_config(tiny), 9), tmp_path / "model.pt")
    resnet = ["--model", "ResNet34", "--model_args", "{feat_dim: 80, embed_dim: 16}"]
    with pytest.raises(ValueError, match=r"missing.*unknown"):
        load_checkpoint(SpeakerNet(load_config(tiny, resnet), 8), tmp_path / "model.pt")


def test_average(net, tmp_path):
    states = []
    for epoch in (1, 2, 3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.full_like(parameter, float(epoch)))
            net.backbone.frame_1.bn.num_batches_tracked.fill_(epoch)
        save_checkpoint(net, tmp_path / "models" / f"model_{epoch}.pt")
        states.append(net.state_dict())
    path = average_epochs(tmp_path, 2)
    state = read_checkpoint(path)
    assert state["seg_1.weight"].unique().tolist() == [2.5]
    assert state["frame_1.bn.num_batches_tracked"].item() == 3
    assert state["frame_1.bn.num_batches_tracked"].dtype == torch.int64
    assert find_checkpoint(tmp_path, "avg") == path
    assert find_checkpoint(tmp_path, "2").name == "model_2.pt"
    with pytest.raises(ValueError, match="4 checkpoints to average, found 3"):
        average_epochs(tmp_path, 4)
    with pytest.raises(FileNotFoundError, match=r"epochs saved in .*: 1, 2, 3"):
        find_checkpoint(tmp_path, "9")
    with pytest.raises(FileNotFoundError, match="best_model.pt"):
        find_checkpoint(tmp_path, "best")


def test_seeds_drive_dither_and_masks_sample_by_sample(net):
    wavs = torch.randn(3, 16000) * 0.1
    seeds = torch.tensor([1, 2, 3])
    whole = net.features(wavs, seeds)
    torch.testing.assert_close(net.features(wavs[1:], seeds[1:]), whole[1:], atol=0, rtol=0)
    assert not torch.equal(net.features(wavs, seeds + 1), whole)
    torch.testing.assert_close(net.features(wavs), net.features(wavs), atol=0, rtol=0)


def test_tfmel_frontend_of_wespeaker(tiny):
    # it gives (B, F, T), which only ReDimNet2 takes: upstream's redimnet2.yaml
    words = ["--dataset_args.frontend", "tfmel", "--dataset_args.tfmel_args", "{n_mels: 72}"]
    words += ["--dataset_args.cmvn", "false", "--dataset_args.spec_aug", "false"]
    words += ["--model", "ReDimNet2B0", "--model_args", "{feat_dim: 72, embed_dim: 16}"]
    config = load_config(tiny, words)
    net = SpeakerNet(config, 8)
    loss, statistics = net(torch.randn(4, 16000) * 0.1, torch.arange(4), torch.arange(4))
    assert (statistics.support > 0).all()
    assert torch.isfinite(loss)
    loss.backward()


def test_float16_weights_load_into_float32(net, tiny, tmp_path):
    state = {k: v.half() if v.is_floating_point() else v for k, v in full_state(net).items()}
    torch.save(state, tmp_path / "half.pt")
    torch.manual_seed(1)
    other = SpeakerNet(load_config(tiny), 8)
    load_checkpoint(other, tmp_path / "half.pt")
    for key, tensor in full_state(other).items():
        assert tensor.dtype == full_state(net)[key].dtype
        torch.testing.assert_close(tensor, state[key].to(tensor.dtype))
