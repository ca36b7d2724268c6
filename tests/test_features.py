"""Fbank against torchaudio (bit for bit) and kaldi-native-fbank; randomness, sample by sample."""

import numpy as np
import pytest
import torch

from wespeaker_qmargin.features import apply_cmvn, fbank, spec_aug


def speechlike(batch: int, samples: int, seed: int = 0) -> torch.Tensor:
    """Noise whose level wanders over 60 dB, (batch, samples)."""
    generator = torch.Generator().manual_seed(seed)
    level = torch.sin(torch.arange(samples) / 3000.0) * 1.5 - 1.5
    return 0.1 * torch.randn(batch, samples, generator=generator) * 10**level


SETTINGS = [
    {},
    {"num_mel_bins": 72},
    {"sample_rate": 8000, "num_mel_bins": 40, "window_type": "povey"},
    {"frame_length": 20, "frame_shift": 20, "window_type": "povey"},
    {"sample_rate": 44100},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dither", [0.0, 1.0])
def test_same_bits_as_torchaudio(settings, dither):
    try:
        from torchaudio.compliance import kaldi
    except (ImportError, OSError) as error:
        pytest.skip(f"torchaudio.compliance.kaldi does not load here: {error}")
    wavs = speechlike(5, 3 * settings.get("sample_rate", 16000))
    features = fbank(wavs, **settings, dither=dither, seeds=range(5))
    settings = {"num_mel_bins": 80, "frame_length": 25, "frame_shift": 10, **settings}
    settings.setdefault("window_type", "hamming")
    rate = settings.pop("sample_rate", 16000)
    for seed, wav in enumerate(wavs):
        torch.manual_seed(seed)
        expected = kaldi.fbank(
            wav[None] * (1 << 15),
            sample_frequency=rate,
            dither=dither,
            use_energy=False,
            **settings,
        )
        assert torch.equal(features[seed], expected)


def native_fbank(wav: torch.Tensor, settings: dict, dither: float = 0.0) -> torch.Tensor:
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither = dither
    options.frame_opts.samp_freq = settings.get("sample_rate", 16000)
    options.frame_opts.frame_length_ms = settings.get("frame_length", 25)
    options.frame_opts.frame_shift_ms = settings.get("frame_shift", 10)
    options.frame_opts.window_type = settings.get("window_type", "hamming")
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = settings.get("num_mel_bins", 80)
    online = knf.OnlineFbank(options)
    online.accept_waveform(options.frame_opts.samp_freq, (wav * (1 << 15)).tolist())
    online.input_finished()
    frames = [online.get_frame(i) for i in range(online.num_frames_ready)]
    return torch.from_numpy(np.stack(frames))


@pytest.mark.parametrize("settings", SETTINGS)
def test_equals_kaldi_native_fbank(settings):
    wavs = speechlike(2, 2 * settings.get("sample_rate", 16000))
    features = fbank(wavs, **settings)
    for wav, found in zip(wavs, features):
        expected = native_fbank(wav, settings)
        assert found.shape == expected.shape
        error = (found - expected).abs()
        assert error.mean() < 5e-5 and error.max() < 1e-2


def test_dither_has_kaldis_statistics():
    silence = torch.zeros(1, 80000)
    found = fbank(silence, dither=1.0, seeds=[3])[0]
    expected = native_fbank(silence[0], {}, dither=1.0)
    # 498 frames with a spread of 1.2: the means of a bin differ by 0.08, six times that never
    assert (found.mean(0) - expected.mean(0)).abs().max() < 0.5
    assert (found.mean() - expected.mean()).abs() < 0.05
    half = fbank(silence, dither=0.5, seeds=[3])[0]
    torch.testing.assert_close(half, found - np.log(4.0), atol=1e-4, rtol=0)
    assert torch.allclose(fbank(silence), torch.tensor(-15.942385))


def test_dither_follows_the_samples_seed_not_its_batch():
    wavs, seeds = speechlike(4, 8000), [11, 12, 13, 2**63 - 1]
    together = fbank(wavs, dither=1.0, seeds=torch.tensor(seeds))
    for i, seed in enumerate(seeds):
        assert torch.equal(together[i : i + 1], fbank(wavs[i : i + 1], dither=1.0, seeds=[seed]))
    assert not torch.equal(together[:1], fbank(wavs[:1], dither=1.0, seeds=[99]))


@pytest.mark.parametrize(
    "change, shape",
    [
        ({}, (98, 80)),
        ({"num_mel_bins": 40}, (98, 40)),
        ({"frame_shift": 20}, (49, 80)),
        ({"frame_length": 40}, (97, 80)),
        ({"sample_rate": 8000}, (198, 80)),
        ({"window_type": "povey"}, (98, 80)),
    ],
)
def test_every_setting_counts(change, shape):
    wavs = speechlike(1, 16000)
    features = fbank(wavs, **change)
    assert features.shape == (1, *shape)
    assert change == {} or not torch.equal(features, fbank(wavs))


def test_gradient_reaches_the_wave():
    wavs = speechlike(2, 1600).double().float().requires_grad_()
    direction = torch.randn(2, 1600, generator=torch.Generator().manual_seed(1))
    fbank(wavs).sum().backward()
    step = 1e-5
    with torch.no_grad():
        ahead, behind = (fbank(wavs + s * direction).double().sum() for s in (step, -step))
    slope = (ahead - behind) / (2 * step)
    assert (wavs.grad * direction).sum().item() == pytest.approx(slope.item(), rel=2e-2)


def test_float32_under_autocast_and_from_half():
    wavs = speechlike(2, 8000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = fbank(wavs)
    assert features.dtype == torch.float32 and torch.equal(features, fbank(wavs))
    assert fbank(wavs.half()).dtype == torch.float32


def test_use_in_inference_mode_leaves_training_possible():
    settings = {"num_mel_bins": 33}  # so that nothing is cached yet
    wavs = speechlike(1, 1600)
    with torch.inference_mode():
        fbank(wavs, **settings)
    wavs.requires_grad_()
    fbank(wavs, **settings).sum().backward()
    assert wavs.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fbank(torch.zeros(1, 399)), "at least 400 samples"),
        (lambda: fbank(torch.zeros(400)), r"expected wavs \(B, T\)"),
        (lambda: fbank(torch.zeros(2, 400), dither=1.0), "one seed a sample"),
        (lambda: fbank(torch.zeros(2, 400), dither=1.0, seeds=[1]), "expected 2, found 1"),
        (lambda: fbank(torch.zeros(1, 400), window_type="hann"), "hamming or povey"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_cmvn():
    features = fbank(speechlike(3, 16000))
    assert torch.equal(apply_cmvn(features, norm_mean=False), features)
    centred = apply_cmvn(features)
    torch.testing.assert_close(centred, features - features.mean(1, keepdim=True))
    scaled = apply_cmvn(features, norm_var=True)
    torch.testing.assert_close(scaled.std(1), torch.ones(3, 80), atol=1e-4, rtol=0)


def masked_runs(row: torch.Tensor) -> list[int]:
    edges = np.diff(np.concatenate([[0], row.numpy().astype(int), [0]]))
    return list(np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1))


def test_spec_aug_masks():
    ones = torch.ones(2000, 50, 20)
    masked = spec_aug(ones, range(2000), max_t=7, max_f=4, prob=0.5) == 0
    times, bins = masked.all(dim=2), masked.all(dim=1)
    changed = times.any(1)
    assert torch.equal(changed, bins.any(1))
    assert 0.45 < changed.float().mean() < 0.55
    for rows, longest in ((times[changed], 7), (bins[changed], 4)):
        runs = [masked_runs(row) for row in rows]
        assert all(len(run) == 1 for run in runs)
        lengths = {run[0] for run in runs}
        assert lengths == set(range(1, longest + 1))
        assert (rows.any(0)).all()  # it may fall anywhere
    # nothing else is masked
    assert torch.equal(masked, times[:, :, None] | bins[:, None, :])


def test_spec_aug_counts_and_probability():
    ones = torch.ones(200, 400, 300)
    masked = spec_aug(ones, range(200), num_t_mask=3, num_f_mask=0, max_t=2, prob=1.0) == 0
    assert torch.equal(masked.any(2), masked.all(2))
    counts = [len(masked_runs(row)) for row in masked.all(2)]
    assert max(counts) == 3 and np.mean(counts) > 2.9
    masked = spec_aug(ones, range(200), num_t_mask=0, num_f_mask=2, max_f=2, prob=1.0) == 0
    assert torch.equal(masked.any(1), masked.all(1)) and masked.any(2).any(1).all()
    assert torch.equal(spec_aug(ones, range(200), prob=0.0), ones)


def test_spec_aug_follows_the_samples_seed_and_keeps_gradients():
    features = torch.rand(6, 40, 20) + 1.0
    copy = features.clone()
    features.requires_grad_()
    seeds = torch.arange(6) * 7919
    out = spec_aug(features, seeds, prob=0.7)
    for i in range(6):
        assert torch.equal(out[i], spec_aug(features[i : i + 1], seeds[i : i + 1], prob=0.7)[0])
    out.sum().backward()
    assert torch.equal(features.grad, (out != 0).float())
    assert torch.equal(features, copy)


@pytest.mark.gpu
def test_cuda_equals_cpu():
    wavs = speechlike(4, 32000)
    found = fbank(wavs.cuda())
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), fbank(wavs), atol=2e-3, rtol=0)
    seeds = list(range(4))
    masked = spec_aug(found, seeds, prob=1.0).cpu() == 0
    assert torch.equal(masked, spec_aug(fbank(wavs), seeds, prob=1.0) == 0)
    dithered = fbank(wavs.cuda(), dither=1.0, seeds=seeds)
    assert torch.equal(dithered[1:2], fbank(wavs[1:2].cuda(), dither=1.0, seeds=seeds[1:2]))
    assert 0 < (dithered - found).abs().mean() < 1.0
