"""Where encoders come from: transformers, the original file, s3prl; what does not load."""

import importlib
import importlib.util
import logging
import random
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from front_ends import (
    KINDS,
    build,
    check_layer_drop_keeps_layers,
    gradients,
    greatest_difference,
    noise,
)

from wespeaker_qmargin import ssl_weights
from wespeaker_qmargin.w2vbert import W2VBertFrontend
from wespeaker_qmargin.wavlm import WavLMFrontend

transformers = pytest.importorskip("transformers")


# --- sources --------------------------------------------------------------------------------------


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


# --- bad input ------------------------------------------------------------------------------------


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


# --- the tool -------------------------------------------------------------------------------------


def test_tool(make_tiny_encoder, tmp_path, monkeypatch, capsys):
    def run(*words) -> int:
        monkeypatch.setattr(sys, "argv", ["make_tiny_encoder.py", *map(str, words)])
        return make_tiny_encoder.main()

    words = ["wavlm", tmp_path / "a", "--layers", "1", "--dim", "24", "--heads", "2"]
    assert run(*words, "--conv_dim", "8", "--seed", "3", "--original", tmp_path / "a.pt") == 0
    assert "parameters" in capsys.readouterr().err
    for source, name in (("transformers", "a"), ("file", "a.pt")):
        net = WavLMFrontend(str(tmp_path / name), source=source)
        assert (net.num_layers, net.output_size()) == (2, 24)
    options = {"layers": 1, "dim": 24, "heads": 2, "conv_dim": 8}
    make_tiny_encoder.make_wavlm(tmp_path / "b", **options, seed=3)
    make_tiny_encoder.make_wavlm(tmp_path / "c", **options, seed=4)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    assert run("w2vbert", tmp_path / "d", "--layers", "2") == 0
    assert W2VBertFrontend(str(tmp_path / "d")).num_layers == 3
    assert run("w2vbert", tmp_path / "e", "--norm", "layer") == 1
    assert "error:" in capsys.readouterr().err
