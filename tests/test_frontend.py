"""The front-ends WavLM and w2v-BERT: sources, padding, what trains, layer drop, LoRA, bad input."""

import copy
import importlib
import importlib.util
import json
import logging
import random
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from wespeaker_qmargin import adapter, ssl_weights  # noqa: E402
from wespeaker_qmargin.frontend import fit_model_args  # noqa: E402
from wespeaker_qmargin.mhfa import MHFA  # noqa: E402
from wespeaker_qmargin.w2vbert import W2VBertFrontend  # noqa: E402
from wespeaker_qmargin.w2vbert_features import w2vbert_features  # noqa: E402
from wespeaker_qmargin.wavlm import WavLMFrontend  # noqa: E402

TOOL = Path(__file__).resolve().parent.parent / "tools" / "make_tiny_encoder.py"
SPEC = importlib.util.spec_from_file_location("make_tiny_encoder", TOOL)
tiny_encoder = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tiny_encoder)

KINDS = ("base", "large", "w2vbert")


@pytest.fixture(scope="session")
def encoders(tmp_path_factory) -> Path:
    """Folders base, large, w2vbert of 3 layers of 32, and base.pt, large.pt in the first layout."""
    folder = tmp_path_factory.mktemp("encoders")
    for name, norm in (("base", "group"), ("large", "layer")):
        original = folder / f"{name}.pt"
        tiny_encoder.make_wavlm(folder / name, layers=3, norm=norm, original=original)
    tiny_encoder.make_w2vbert(folder / "w2vbert", layers=3)
    return folder


def build(encoders: Path, kind: str, **options):
    if kind == "w2vbert":
        return W2VBertFrontend(str(encoders / kind), **{"frozen": False, **options})
    return WavLMFrontend(str(encoders / kind), **options)


def noise(*lens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Waves (B, max(lens)) that are 0 behind their ends, and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    wavs = [0.1 * torch.randn(length, generator=generator) for length in lens]
    return nn.utils.rnn.pad_sequence(wavs, batch_first=True), torch.tensor(lens)


def without_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return net


def greatest_difference(hidden, other) -> float:
    assert len(hidden) == len(other)
    return max((a - b).abs().max().item() for a, b in zip(hidden, other))


# --- sources -------------------------------------------------------------------------------------


def plain_hidden_states(folder: Path, wav: torch.Tensor) -> tuple:
    """What transformers itself gives for one wave, feature extractor and model as they come."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = extractor(wav.numpy(), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs, output_hidden_states=True)
    return (*found.hidden_states[:-1], found.last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_transformers_own(encoders, kind):
    net = build(encoders, kind).eval()
    wavs, _ = noise(16000)
    with torch.no_grad():
        hidden, lens = net(wavs, torch.tensor([16000]))
    assert isinstance(hidden, tuple) and len(hidden) == net.num_layers == 4
    assert hidden[0].shape == (1, 49, net.output_size()) == (1, 49, 32)
    assert lens.tolist() == [49] == [net.num_frames(16000)]
    expected = plain_hidden_states(encoders / kind, wavs[0])
    assert greatest_difference(hidden, expected) < (1e-3 if kind == "w2vbert" else 1e-5)
    assert all(greatest_difference(*pair) > 0.1 for pair in pairwise((s,) for s in hidden))


@pytest.mark.parametrize("kind", ["base", "large"])
@pytest.mark.parametrize("source", ["file", "s3prl"])
def test_sources_agree(encoders, kind, source):
    if source == "s3prl":
        need_s3prl()
    wavs, lens = noise(16000, 11111, 5000)
    net = build(encoders, kind).eval()
    other = WavLMFrontend(str(encoders / f"{kind}.pt"), source=source).eval()
    assert other.normalize == net.normalize == (kind == "large")
    with torch.no_grad():
        expected, expected_lens = net(wavs, lens)
        hidden, found_lens = other(wavs, lens)
    assert found_lens.tolist() == expected_lens.tolist() == [49, 34, 15]
    for states, wanted in zip(hidden, expected):
        for row, length in enumerate(found_lens):
            torch.testing.assert_close(
                states[row, :length], wanted[row, :length], atol=1e-4, rtol=1e-4
            )


def need_s3prl() -> None:
    try:
        ssl_weights.require("s3prl.nn", "this test", "s3prl")
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("source", ["transformers", "file", "s3prl"])
def test_building_draws_no_random_numbers(encoders, source):
    if source == "s3prl":
        need_s3prl()
    torch.manual_seed(7), random.seed(7)
    expected = torch.rand(2), random.random()
    torch.manual_seed(7), random.seed(7)
    place = encoders / ("base" if source == "transformers" else "base.pt")
    WavLMFrontend(str(place), source=source)
    assert torch.equal(torch.rand(2), expected[0]) and random.random() == expected[1]


def test_s3prl_trains(encoders):
    need_s3prl()
    net = WavLMFrontend(str(encoders / "base.pt"), source="s3prl", layer_drop=0.5)
    check_layer_drop_keeps_layers(net.train(), net.encoder.upstream.model.encoder.layers)
    hidden, _ = net(noise(8000, 8000)[0])
    sum(states.square().sum() for states in hidden).backward()
    trained = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in trained.values())
    cnn = "encoder.upstream.model.feature_extractor.conv_layers.0.0.weight"
    assert trained[cnn].any()
    net = WavLMFrontend(str(encoders / "base.pt"), source="s3prl", freeze_cnn=True).train()
    found = gradients(net, noise(8000, 8000)[0])
    without = {name for name, gradient in found.items() if gradient is None}
    assert cnn in without and all("feature_ext" in n or "mask_emb" in n for n in without)
    with pytest.raises(ValueError, match=r"hubert: expected a file, or a WavLM of s3prl: .*wavlm"):
        WavLMFrontend("hubert", source="s3prl")


DIM, HEADS, CHANNELS = 24, 4, 16


def original_checkpoint(large: bool) -> dict:
    """A file as Microsoft's, names and shapes as their code gives them, filled by a formula."""
    shapes = {
        "mask_emb": (DIM,),
        "encoder.pos_conv.0.bias": (DIM,),
        "encoder.pos_conv.0.weight_g": (1, 1, 16),
        "encoder.pos_conv.0.weight_v": (DIM, DIM // 4, 16),
        "encoder.layers.0.self_attn.relative_attention_bias.weight": (32, HEADS),
    }
    affine = {"post_extract_proj": (DIM, CHANNELS), "layer_norm": (CHANNELS,)}
    affine["encoder.layer_norm"] = (DIM,)
    for i, kernel in enumerate((10, 3, 3, 3, 3, 2, 2)):
        conv = f"feature_extractor.conv_layers.{i}"
        shapes[f"{conv}.0.weight"] = (CHANNELS, CHANNELS if i else 1, kernel)
        if large or i == 0:
            affine[f"{conv}.2.1" if large else f"{conv}.2"] = (CHANNELS,)
    for i in range(2):
        layer = f"encoder.layers.{i}"
        shapes[f"{layer}.self_attn.grep_a"] = (1, HEADS, 1, 1)
        for part in ("k", "v", "q", "out"):
            affine[f"{layer}.self_attn.{part}_proj"] = (DIM, DIM)
        affine[f"{layer}.self_attn.grep_linear"] = (8, DIM // HEADS)
        affine[f"{layer}.self_attn_layer_norm"] = affine[f"{layer}.final_layer_norm"] = (DIM,)
        affine[f"{layer}.fc1"], affine[f"{layer}.fc2"] = (4 * DIM, DIM), (DIM, 4 * DIM)
    for name, shape in affine.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    model = {}
    for index, (name, shape) in enumerate(sorted(shapes.items())):
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        model[name] = (0.4 * torch.sin(0.7 * values + 3 * index)).float().reshape(shape)
    cfg = {
        "extractor_mode": "layer_norm" if large else "default",
        "encoder_layers": 2,
        "encoder_embed_dim": DIM,
        "encoder_ffn_embed_dim": 4 * DIM,
        "encoder_attention_heads": HEADS,
        "activation_fn": "gelu",
        "layer_norm_first": large,
        "conv_feature_layers": "[(16,10,5)] + [(16,3,2)] * 4 + [(16,2,2)] * 2",
        "conv_bias": False,
        "feature_grad_mult": 0.1,
        "normalize": large,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.05,
        "dropout_input": 0.1,
        "dropout_features": 0.1,
        "conv_pos": 16,
        "conv_pos_groups": 4,
        "relative_position_embedding": True,
        "num_buckets": 32,
        "max_distance": 80,
        "gru_rel_pos": True,
    }
    return {"cfg": cfg, "model": model}


# two values each of frames 7 and 40, by Microsoft's own code as s3prl 0.4.18 carries it
ORIGINAL_STATES = {
    False: [
        [0.01037, 0.46642, 0.01779, -0.07748],
        [-0.75866, 0.05688, 0.39233, 0.40893],
        [0.56647, -0.05835, -0.3106, -0.19366],
    ],
    True: [
        [0.93326, -0.87138, 0.87096, 0.92166],
        [-0.1366, 1.83561, 2.10076, -5.86259],
        [-0.06002, 0.0976, 0.13893, -0.25196],
    ],
}


@pytest.mark.parametrize("large", [False, True])
def test_original_file_gives_what_the_original_code_gives(large, tmp_path):
    torch.save(original_checkpoint(large), tmp_path / "WavLM.pt")
    time = torch.arange(16000, dtype=torch.float64) / 16000
    wave = 0.1 * torch.sin(2 * torch.pi * (200 + 900 * time) * time)
    wave = (wave + 0.05 * torch.sin(4000 * time * time)).float()
    net = WavLMFrontend(str(tmp_path / "WavLM.pt"), source="file").eval()
    with torch.no_grad():
        hidden, _ = net(wave[None])
    found = [[*states[0, 7, :2].tolist(), *states[0, 40, -2:].tolist()] for states in hidden]
    np.testing.assert_allclose(found, ORIGINAL_STATES[large], atol=1e-4)


def test_wave_normalisation(encoders):
    wavs, lens = noise(16000, 9000)
    wavs = 0.3 * wavs + 0.02
    states = {}
    for option in (None, True, False):
        net = build(encoders, "large", normalize=option).eval()
        with torch.no_grad():
            states[option], _ = net(wavs, lens)
            louder, _ = net(5 * wavs, lens)
        same = greatest_difference(states[option], louder) < 1e-3
        assert same == (option is not False)
    assert greatest_difference(states[None], states[True]) == 0
    assert greatest_difference(states[True], states[False]) > 1e-2


# --- padding, lengths ----------------------------------------------------------------------------


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


# --- input features of w2v-BERT ------------------------------------------------------------------


def test_features_equal_the_feature_extractor():
    wavs, lens = noise(16000, 560, 720, 11111, 48000, 32000)
    wavs[5] = 0  # digital silence
    extractor = transformers.SeamlessM4TFeatureExtractor()
    utterances = [wav[:length].numpy() for wav, length in zip(wavs, lens)]
    expected = extractor(utterances, sampling_rate=16000, return_tensors="pt")
    features, valid = w2vbert_features(wavs, lens)
    frames = features.shape[1]
    assert torch.equal(valid, expected["attention_mask"][:, :frames].bool())
    assert not expected["attention_mask"][:, frames:].any()
    difference = (features - expected["input_features"][:, :frames])[valid].abs()
    assert difference.max() < 1e-3 and difference.mean() < 2e-5
    assert not features[~valid].any()


@pytest.mark.minivox
def test_features_of_recordings_equal_the_feature_extractor(minivox):
    soundfile = pytest.importorskip("soundfile")
    extractor = transformers.SeamlessM4TFeatureExtractor()
    found = []
    for path in sorted((minivox / "test").rglob("*.flac"))[::60][:8]:
        wav = soundfile.read(path, dtype="float32")[0][:80000]
        expected = extractor(wav, sampling_rate=16000, return_tensors="pt")["input_features"]
        features, _ = w2vbert_features(torch.from_numpy(wav)[None])
        found.append((features - expected[:, : features.shape[1]]).abs().flatten())
    difference = torch.cat(found)
    # float32 leaves bins of next to no energy uncertain, there as here
    assert (difference > 1e-3).float().mean() < 1e-3
    assert difference.max() < 5e-2 and difference.mean() < 2e-5


def test_features_of_more_bins():
    wavs, _ = noise(8000)
    extractor = transformers.SeamlessM4TFeatureExtractor(feature_size=40, num_mel_bins=40)
    expected = extractor(wavs[0].numpy(), sampling_rate=16000, return_tensors="pt")
    features, valid = w2vbert_features(wavs, num_mel_bins=40)
    assert valid is None and features.shape == (1, 24, 80)
    torch.testing.assert_close(features, expected["input_features"][:, :24], atol=1e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(encoders, kind):
    net = build(encoders, kind).eval()
    wavs, lens = noise(16000, 9000)
    with torch.no_grad():
        expected, _ = net(wavs, lens)
        hidden, frames = net.cuda()(wavs.cuda(), lens.cuda())
    assert frames.is_cuda and all(states.is_cuda for states in hidden)
    for states, wanted in zip(hidden, expected):
        for row, length in enumerate(frames.tolist()):
            torch.testing.assert_close(
                states[row, :length].cpu(), wanted[row, :length], atol=5e-3, rtol=1e-2
            )


# --- what trains ---------------------------------------------------------------------------------


def gradients(net: nn.Module, wavs, seed: int = 0) -> dict:
    """Gradients of a sum over all hidden states, by name; None where there is none."""
    torch.manual_seed(seed)
    net.zero_grad()
    hidden, _ = net(wavs)
    generator = torch.Generator().manual_seed(0)
    loss = sum((s * torch.randn(s.shape, generator=generator)).sum() for s in hidden)
    loss.backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}


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


def saved_bytes(net: nn.Module, wavs) -> int:
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(wavs)
    return sum(sizes.values())


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


# --- layer drop ----------------------------------------------------------------------------------


def encoder_layers(net) -> nn.ModuleList:
    return net.encoder.encoder.layers


def check_layer_drop_keeps_layers(net, layers) -> None:
    """Over some steps layers are skipped, and then hand on what they got."""
    wavs, _ = noise(8000, 8000)
    skipped = torch.zeros(len(layers))
    for seed in range(30):
        torch.manual_seed(seed)
        with torch.no_grad():
            hidden, _ = net(wavs)
        assert len(hidden) == net.num_layers == len(layers) + 1
        skipped += torch.tensor([float(torch.equal(a, b)) for a, b in pairwise(hidden)])
    assert ((skipped[1:-1] > 5) & (skipped[1:-1] < 25)).all(), skipped


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


# --- LoRA ----------------------------------------------------------------------------------------


def trained_names(net: nn.Module) -> set[str]:
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


@pytest.fixture
def lora(encoders):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    arguments = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.5}
    return build(encoders, "w2vbert", frozen=True, use_lora=True, lora_config_args=arguments)


def test_lora_trains_its_updates_only(encoders, lora):
    assert all("lora_" in name for name in trained_names(lora))
    assert sum(p.numel() for p in lora.parameters() if p.requires_grad) == 3 * 2 * 3 * (32 + 32)
    wavs, _ = noise(8000, 8000)
    with torch.no_grad():
        plain = build(encoders, "w2vbert").eval()(wavs)[0]
        assert greatest_difference(lora.eval()(wavs)[0], plain) < 1e-6, "B starts at 0"
    found = gradients(lora.train(), wavs)
    assert {n for n, gradient in found.items() if gradient is not None} == trained_names(lora)
    base = [m for n, m in lora.encoder.named_modules() if "lora_" not in n]
    dropouts = [m for m in base if isinstance(m, nn.Dropout)]
    assert dropouts and not any(m.training for m in dropouts)
    ours = [m for n, m in lora.encoder.named_modules() if n.endswith("lora_dropout.default")]
    assert ours and all(m.training for m in ours)
    lora.eval()
    assert not any(m.training for m in lora.modules())


def test_lora_options(encoders, lora):
    names = trained_names(lora)
    assert any("linear_q" in n for n in names) and not any("linear_k" in n for n in names)
    arguments = {"target_modules": ["linear_k"], "r": 2}
    other = build(encoders, "w2vbert", frozen=True, use_lora=True, lora_config_args=arguments)
    assert all(".linear_k." in name for name in trained_names(other))
    assert sum(p.numel() for p in other.parameters() if p.requires_grad) == 3 * 2 * (32 + 32)


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, {"layer_drop": 0.5}])
def test_lora_with_the_other_options(encoders, lora, option):
    wavs, _ = noise(16000, 16000)
    net = build(encoders, "w2vbert", frozen=True, use_lora=True, **option).train()
    if "layer_drop" in option:
        check_layer_drop_keeps_layers(net, net.encoder.get_base_model().encoder.layers)
    else:
        assert saved_bytes(net, wavs) < 0.5 * saved_bytes(lora.train(), wavs)
    found = gradients(net, wavs)
    assert {n for n, gradient in found.items() if gradient is not None} == trained_names(net)


def test_merged_lora_is_a_plain_encoder(encoders, lora):
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    lora.eval()
    wavs, lens = noise(8000, 5000)
    plain = build(encoders, "w2vbert").eval()
    with torch.no_grad():
        expected, _ = lora(wavs, lens)
        assert greatest_difference(plain(wavs, lens)[0], expected) > 0.1
        lora.merge_lora()
        assert greatest_difference(lora(wavs, lens)[0], expected) < 1e-4
        plain.load_state_dict(lora.state_dict())
        assert greatest_difference(plain(wavs, lens)[0], expected) < 1e-4
    with pytest.raises(ValueError, match="no LoRA"):
        lora.merge_lora()


# --- backbones, WeSpeaker ------------------------------------------------------------------------


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


# --- full sizes ----------------------------------------------------------------------------------


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


# --- bad input -----------------------------------------------------------------------------------


def test_hub_without_network(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for frontend, name in ((WavLMFrontend, "nobody/wavlm"), (W2VBertFrontend, "nobody/w2v-bert")):
        with pytest.raises(FileNotFoundError, match=rf"{name}: no such folder.*hf download {name}"):
            frontend(name)


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "half the weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "no preprocessor":
        (folder / "preprocessor_config.json").unlink()
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        state = safetensors.load_file(weights)
        name = "encoder.layers.1.layer_norm.weight"
        if how == "a tensor less":
            del state[name]
        else:
            state[name] = torch.zeros(5)
        safetensors.save_file(state, weights, {"format": "pt"})


SPOILT = {
    "no config": (FileNotFoundError, r"no config\.json in this folder"),
    "no weights": (FileNotFoundError, r"does not load: .*no file"),
    "half the weights": (ValueError, r"does not load"),
    "no preprocessor": (FileNotFoundError, r"no preprocessor_config.*set normalize: True"),
    "a tensor less": (ValueError, r"1 tensors are missing, encoder\.layers\.1\.layer_norm\.weight"),
    "another shape": (ValueError, r"1 tensors are of another shape, encoder\.layers\.1\.layer"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_folders_that_do_not_load(encoders, tmp_path, how):
    folder = tmp_path / "wavlm"
    shutil.copytree(encoders / "base", folder)
    spoil(folder, how)
    error, message = SPOILT[how]
    with pytest.raises(error, match=rf"wavlm: .*{message}|wavlm: {message}"):
        WavLMFrontend(str(folder))
    if how == "no preprocessor":
        assert WavLMFrontend(str(folder), normalize=False).normalize is False


def test_other_encoders_and_places(encoders, tmp_path):
    with pytest.raises(ValueError, match=r"expected a wavlm encoder, found wav2vec2-bert"):
        WavLMFrontend(str(encoders / "w2vbert"))
    with pytest.raises(ValueError, match=r"expected a wav2vec2-bert encoder, found wavlm"):
        W2VBertFrontend(str(encoders / "base"))
    for place in (tmp_path / "nowhere", "./nowhere", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=r"no such folder$"):
            WavLMFrontend(str(place))
    with pytest.raises(FileNotFoundError, match=r"base\.pt: a file.*source: file"):
        WavLMFrontend(str(encoders / "base.pt"))
    with pytest.raises(FileNotFoundError, match=r"no such file.*original"):
        WavLMFrontend(str(encoders / "base"), source="file")


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch evil",)


def test_original_files_that_do_not_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = original_checkpoint(False)

    def refuse(content, message):
        torch.save(content, "WavLM.pt")
        with pytest.raises(ValueError, match=rf"^WavLM\.pt: .*{message}"):
            WavLMFrontend("WavLM.pt", source="file")

    refuse({**good, "extra": Evil()}, "original WavLM layout")
    assert not Path("evil").exists()
    refuse(good["model"], "KeyError: 'cfg'")
    refuse({**good, "cfg": {**good["cfg"], "gru_rel_pos": False}}, "not a WavLM")
    refuse({**good, "cfg": {**good["cfg"], "conv_feature_layers": "[(1,2)]"}}, r"cannot read")
    code = "[(16,10,5)] + __import__('os').system('touch evil')"
    refuse({**good, "cfg": {**good["cfg"], "conv_feature_layers": code}}, r"cannot read")
    assert not Path("evil").exists()
    refuse(
        {**good, "cfg": {**good["cfg"], "encoder_layers": 3}}, r"missing or unknown, encoder\.la"
    )
    refuse({**good, "cfg": {**good["cfg"], "encoder_ffn_embed_dim": 32}}, "do not fit its cfg")
    less = {k: v for k, v in good["model"].items() if k != "layer_norm.bias"}
    refuse({**good, "model": less}, r"1 tensors missing or unknown, layer_norm\.bias")
    Path("WavLM.pt").write_text("hello")
    with pytest.raises(ValueError, match="original WavLM layout"):
        WavLMFrontend("WavLM.pt", source="file")


def test_options_out_of_range(encoders):
    for kind in ("base", "w2vbert"):
        for options, message in (
            ({"sample_rate": 8000}, r"hears 16000 Hz; set dataset_args.resample_rate: 16000"),
            ({"grad_mult": 0.0}, r"grad_mult: expected a number > 0, got 0.0.*frozen: True"),
            ({"layer_drop": 1.0}, r"layer_drop: expected a number in \[0, 1\), got 1.0"),
        ):
            with pytest.raises(ValueError, match=message):
                build(encoders, kind, **options)
    with pytest.raises(ValueError, match=r"source: expected transformers, file or s3prl, got 'hf'"):
        build(encoders, "base", source="hf")
    with pytest.raises(ValueError, match=r"gradient_checkpointing: s3prl has none"):
        build(encoders, "base", source="s3prl", gradient_checkpointing=True)


def test_lora_options_out_of_range(encoders):
    pytest.importorskip("peft")
    for options, message in (
        ({"use_lora": True, "frozen": False}, "frozen: True"),
        ({"lora_config_args": {"r": 2}}, "use_lora: True"),
        ({"use_lora": True, "lora_config_args": {"rank": 2}}, "lora_config_args: .*rank"),
        ({"use_lora": True, "lora_config_args": {"target_modules": ["x"]}}, "lora_config_args: "),
    ):
        with pytest.raises(ValueError, match=message):
            build(encoders, "w2vbert", **{"frozen": True, **options})


@pytest.mark.parametrize("package", ["transformers", "peft", "s3prl.nn"])
def test_missing_packages_are_named(encoders, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    extra = "s3prl" if package == "s3prl.nn" else "ssl"
    with pytest.raises(ImportError, match=rf"package {package[:5]}.*wespeaker-qmargin\[{extra}\]"):
        if package == "s3prl.nn":
            WavLMFrontend(str(encoders / "base.pt"), source="s3prl")
        else:
            build(encoders, "w2vbert", frozen=True, use_lora=True)


def test_old_transformers_is_named(encoders, monkeypatch):
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.9.1")
    with pytest.raises(ImportError, match=r"transformers >= 5\.24, this is 5\.9\.1; upgrade"):
        build(encoders, "base")


def test_nothing_is_printed(encoders, capfd):
    build(encoders, "base"), build(encoders, "w2vbert").train()
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level != logging.ERROR


# --- the tool ------------------------------------------------------------------------------------


def test_tool(tmp_path, monkeypatch, capsys):
    def run(*words) -> int:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, words)])
        return tiny_encoder.main()

    words = ["wavlm", tmp_path / "a", "--layers", "1", "--dim", "24", "--heads", "2"]
    assert run(*words, "--conv_dim", "8", "--seed", "3", "--original", tmp_path / "a.pt") == 0
    assert "parameters" in capsys.readouterr().err
    for source, name in (("transformers", "a"), ("file", "a.pt")):
        net = WavLMFrontend(str(tmp_path / name), source=source)
        assert (net.num_layers, net.output_size()) == (2, 24)
    options = {"layers": 1, "dim": 24, "heads": 2, "conv_dim": 8}
    tiny_encoder.make_wavlm(tmp_path / "b", **options, seed=3)
    tiny_encoder.make_wavlm(tmp_path / "c", **options, seed=4)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    assert run("w2vbert", tmp_path / "d", "--layers", "2") == 0
    assert W2VBertFrontend(str(tmp_path / "d")).num_layers == 3
    assert run("w2vbert", tmp_path / "e", "--norm", "layer") == 1
    assert "error:" in capsys.readouterr().err
