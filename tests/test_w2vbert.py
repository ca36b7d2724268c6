"""What w2v-BERT alone has: its input features, LoRA."""

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
)
from torch import nn

from wespeaker_qmargin.w2vbert_features import w2vbert_features

transformers = pytest.importorskip("transformers")


# --- input features of w2v-BERT -------------------------------------------------------------------


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


# --- LoRA -----------------------------------------------------------------------------------------


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
