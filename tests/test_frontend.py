"""The front-ends WavLM and w2v-BERT: lengths, what trains, layer drop, backbones."""

import copy
import json
from pathlib import Path

import pytest
import torch
from front_ends import (
    KINDS,
    build,
    check_layer_drop_keeps_layers,
    gradients,
    greatest_difference,
    noise,
    saved_bytes,
    without_dropout,
)
from torch import nn

from wespeaker_qmargin import adapter
from wespeaker_qmargin.frontend import fit_model_args
from wespeaker_qmargin.mhfa import MHFA
from wespeaker_qmargin.w2vbert import W2VBertFrontend

transformers = pytest.importorskip("transformers")


# --- padding, lengths -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batch_equals_each_alone(encoders, kind):
    net = build(encoders, kind).eval()
    wavs, lens = noise(16000, 560, 9123, 16000)
    behind = torch.arange(16000) >= lens[:, None]
    with torch.no_grad():
        hidden, frames = net(wavs.masked_fill(behind, 0.7), lens)
        for row, length in enumerate(lens.tolist()):
            alone, _ = net(wavs[row : row + 1, :length])
            for states, expected in zip(hidden, alone):
                found = states[row, : frames[row]]
                torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "shortest"), [("base", 400), ("large", 400), ("w2vbert", 560)])
def test_number_of_frames(encoders, kind, shortest):
    net = build(encoders, kind).eval()
    assert net.min_samples == shortest
    for samples in (shortest, shortest + 319, shortest + 320, 16000, 48000):
        with torch.no_grad():
            hidden, lens = net(noise(samples)[0])
        assert lens.tolist() == [hidden[0].shape[1]] == [(samples - shortest) // 320 + 1]
        assert all(torch.isfinite(states).all() for states in hidden)
    with pytest.raises(ValueError, match=rf"utterance of {shortest - 1} samples.*needs {shortest}"):
        net(*noise(16000, shortest - 1))


def test_lengths_that_do_not_fit(encoders):
    net = build(encoders, "base")
    wavs, _ = noise(8000, 8000)
    for lens in (torch.tensor([8000, 8001]), torch.tensor([8000])):
        with pytest.raises(ValueError, match="lens"):
            net(wavs, lens)
    with pytest.raises(ValueError, match=r"found wavs \(8000,\)"):
        net(wavs[0])


# --- what trains ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_trains(encoders, kind):
    found = gradients(build(encoders, kind).train(), noise(8000, 8000)[0])
    assert all(gradient is not None for gradient in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_stays_in_eval_and_gets_no_gradient(encoders, kind):
    net = build(encoders, kind, frozen=True)
    nn.Sequential(net, nn.Linear(1, 1)).train()
    assert net.training and not any(module.training for module in net.encoder.modules())
    wavs, _ = noise(8000, 8000)
    hidden, again = net(wavs)[0], net(wavs)[0]
    assert greatest_difference(hidden, again) == 0
    assert not any(states.requires_grad for states in hidden)
    assert not any(parameter.requires_grad for parameter in net.parameters())
    trained = build(encoders, kind).train()
    assert trained.encoder.training
    assert greatest_difference(trained(wavs)[0], trained(wavs)[0]) > 1e-2, "dropout"


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_not_masked_in_training(encoders, kind):
    config = json.loads((encoders / kind / "config.json").read_text())
    assert config["mask_time_prob"] > 0 and config["layerdrop"] > 0
    net = without_dropout(build(encoders, kind))
    wavs, _ = noise(48000, 48000)
    with torch.no_grad():
        difference = greatest_difference(net.train()(wavs)[0], net.eval()(wavs)[0])
    assert difference < 1e-5


@pytest.mark.parametrize("kind", ["base", "large"])
def test_frozen_cnn(encoders, kind):
    wavs, _ = noise(8000, 8000)
    plain = gradients(without_dropout(build(encoders, kind)).train(), wavs)
    found = gradients(without_dropout(build(encoders, kind, freeze_cnn=True)).train(), wavs)
    cnn = {name for name in found if ".feature_extractor." in name}
    assert cnn and {name for name, gradient in found.items() if gradient is None} == cnn
    for name in found.keys() - cnn:
        torch.testing.assert_close(found[name], plain[name], atol=1e-4, rtol=1e-4)
    net = build(encoders, kind, freeze_cnn=True).train()
    assert not net.encoder.feature_extractor(wavs).requires_grad, "no graph is kept"


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_multiplier(encoders, kind):
    wavs, _ = noise(8000, 8000)
    plain = gradients(without_dropout(build(encoders, kind)).train(), wavs)
    scaled = gradients(without_dropout(build(encoders, kind, grad_mult=0.08)).train(), wavs)
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], 0.08 * gradient, atol=1e-5, rtol=1e-4)
    nets = [build(encoders, kind, grad_mult=mult).eval() for mult in (1.0, 0.08)]
    with torch.no_grad():
        assert greatest_difference(*(net(wavs)[0] for net in nets)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer_drop", [0.0, 0.5])
def test_gradient_checkpointing(encoders, kind, layer_drop):
    wavs, _ = noise(16000, 16000)
    nets = [
        build(encoders, kind, gradient_checkpointing=on, layer_drop=layer_drop).train()
        for on in (False, True)
    ]
    plain, checkpointed = (gradients(net, wavs, seed=3) for net in nets)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-4, rtol=1e-4)
    if layer_drop == 0:
        kept, less = (saved_bytes(net, wavs) for net in nets)
        assert less < 0.5 * kept


# --- layer drop -----------------------------------------------------------------------------------


def encoder_layers(net) -> nn.ModuleList:
    return net.encoder.encoder.layers


@pytest.mark.parametrize("kind", ["base", "w2vbert"])
def test_layer_drop_keeps_the_number_of_layers(encoders, kind):
    net = without_dropout(build(encoders, kind, layer_drop=0.5))
    check_layer_drop_keeps_layers(net.train(), encoder_layers(net))
    plain = build(encoders, kind).eval()
    wavs, _ = noise(8000, 8000)
    with torch.no_grad():
        assert greatest_difference(net.eval()(wavs)[0], plain(wavs)[0]) == 0
    assert list(net.state_dict()) == list(plain.state_dict())
    copied = copy.deepcopy(net).train()
    check_layer_drop_keeps_layers(copied, encoder_layers(copied))


@pytest.mark.parametrize("kind", ["base", "large", "w2vbert"])
def test_skipped_layers_get_the_gradient_zero(encoders, kind):
    net = build(encoders, kind, layer_drop=0.95).train()
    found = gradients(net, noise(8000, 8000)[0], seed=1)
    assert all(gradient is not None for gradient in found.values())
    layers = [f"encoder.encoder.layers.{i}." for i in range(3)]
    trained = {
        layer: any(gradient.any() for name, gradient in found.items() if name.startswith(layer))
        for layer in layers
    }
    assert not trained[layers[1]] and not trained[layers[2]]
    assert trained[layers[0]] == (kind != "w2vbert"), "WavLM's first layer has the positions"


class Net(nn.Module):
    def __init__(self, frontend, backbone):
        super().__init__()
        self.frontend, self.backbone = frontend, backbone

    def forward(self, wavs):
        output = self.backbone(self.frontend(wavs, None)[0])
        return output[-1] if isinstance(output, tuple) else output


def train_on_two_ranks(rank: int, encoders: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for kind in ("base", "w2vbert"):
        torch.manual_seed(0)
        frontend = build(Path(encoders), kind, layer_drop=0.5)
        backbone = MHFA(feat_dim=32, embed_dim=4, head_nb=2, compression_dim=4, nb_layer=4)
        net = Net(frontend, backbone)
        model = nn.parallel.DistributedDataParallel(net.train())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(rank)  # the ranks drop different layers
        for step in range(6):
            optimizer.zero_grad()
            loss = model(noise(4000, 4000, seed=2 * step + rank)[0]).square().mean()
            loss.backward()
            optimizer.step()
        torch.save(net.state_dict(), f"{folder}/{kind}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_train_with_layer_drop(encoders, tmp_path):
    torch.multiprocessing.spawn(train_on_two_ranks, (str(encoders), str(tmp_path)), nprocs=2)
    for kind in ("base", "w2vbert"):
        first, second = (
            torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=True) for rank in range(2)
        )
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        before = build(encoders, kind).state_dict()
        moved = [k for k in before if not torch.equal(before[k], first[f"frontend.{k}"])]
        assert any(".layers.1." in name for name in moved)


# --- backbones, WeSpeaker -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["MHFA", "W2VBert_Adapter_MFA"])
def test_both_backbones_take_both_encoders(encoders, kind, name):
    frontend = build(encoders, kind)
    backbone = MHFA if name == "MHFA" else adapter.get_speaker_model(name)
    arguments = {"embed_dim": 8, "feat_dim": -1}
    if name == "W2VBert_Adapter_MFA":
        arguments["adapter_dim"] = 4
    arguments = fit_model_args(backbone, arguments, frontend)
    net = Net(frontend, backbone(**arguments)).train()
    output = net(noise(8000, 8000)[0])
    assert output.shape == (2, 8)
    output.square().sum().backward()
    without = {n for n, parameter in net.named_parameters() if parameter.grad is None}
    assert not without


def test_model_args_that_do_not_fit(encoders):
    frontend = build(encoders, "base")
    w2vbert_mfa = adapter.get_speaker_model("W2VBert_Adapter_MFA")
    fitted = fit_model_args(MHFA, {"embed_dim": 8}, frontend)
    assert fitted == {"embed_dim": 8, "feat_dim": 32, "nb_layer": 4}
    fitted = fit_model_args(w2vbert_mfa, {"num_frontend_hidden_layers": 3}, frontend)
    assert fitted == {"feat_dim": 32, "num_frontend_hidden_layers": 3}
    for backbone, args, message in (
        (MHFA, {"nb_layer": 13}, r"model_args.nb_layer: 13, but this encoder has 4"),
        (MHFA, {"feat_dim": 768}, r"model_args.feat_dim: 768, but this encoder has 32"),
        (w2vbert_mfa, {"num_frontend_hidden_layers": 24}, r"hidden_layers: 24, but .* has 3"),
        (adapter.get_speaker_model("XVEC"), {}, r"XVEC takes one tensor.*choose MHFA"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_model_args(backbone, args, frontend)


@pytest.mark.parametrize("use_lora", [False, True])
def test_wespeakers_w2vbert_frontend_is_the_same_network(encoders, use_lora):
    pytest.importorskip("peft")
    theirs = adapter.get_frontend("w2vbert")
    if theirs is W2VBertFrontend:
        theirs = adapter.wespeaker_module("frontend.w2vbert").W2VBertFrontend
    options = {
        "frozen": True,
        "use_lora": use_lora,
        "lora_config_args": {"r": 2} if use_lora else None,
    }
    upstream = theirs(model_name=str(encoders / "w2vbert"), **options).eval()
    ours = build(encoders, "w2vbert", **options).eval()
    state = upstream.state_dict()
    assert list(state) == list(ours.state_dict())
    ours.load_state_dict(state)
    wavs, lens = noise(16000, 16000)
    with torch.no_grad():
        expected, _ = upstream(wavs, lens)
        hidden, _ = ours(wavs, lens)
    assert greatest_difference(hidden, expected) < 2e-3


# --- full sizes -----------------------------------------------------------------------------------


def test_full_sizes():
    settings = {"mask_time_prob": 0.0}
    with torch.device("meta"):
        base = transformers.WavLMModel(transformers.WavLMConfig(**settings))
        w2vbert = transformers.Wav2Vec2BertModel(transformers.Wav2Vec2BertConfig(**settings))
        mhfa = MHFA()
        mfa = adapter.get_speaker_model("W2VBert_Adapter_MFA")(feat_dim=1024)
        found = base.eval()(torch.zeros(2, 48000), output_hidden_states=True)
        assert mhfa(found.hidden_states).shape == (2, 256)
        found = w2vbert.eval()(torch.zeros(2, 149, 160), output_hidden_states=True)
        assert len(found.hidden_states) == 25 and mfa(found.hidden_states)[-1].shape == (2, 256)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (base, mhfa, w2vbert, mfa)]
    assert sizes == [94_381_168, 2_302_554, 580_492_096, 6_160_640]
