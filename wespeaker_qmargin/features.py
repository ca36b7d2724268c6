"""Kaldi's log-mel filterbanks and what follows them, batched, in plain torch, on any device.

``wavs`` (B, T) in [-1, 1] -> features (B, frames, F), float32 whatever comes in, also under
autocast, and differentiable. What is random takes one seed a sample, so a sample does not depend
on its batch.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_LOW_FREQ = (
    20.0  # Hz, where Kaldi's first mel filter begins; the last one ends at half the sample rate
)
_PREEMPHASIS = 0.97
_SPEC_AUG = 0x5BEC  # keeps the masks' random numbers apart from the dither's


def fbank(
    wavs: Tensor,
    *,
    num_mel_bins: int = 80,
    frame_length: float = 25,
    frame_shift: float = 10,
    dither: float = 0.0,
    sample_rate: int = 16000,
    window_type: str = "hamming",
    seeds: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Return log-mel filterbanks (B, frames, num_mel_bins).

    Row by row the same bits as ``torchaudio.compliance.kaldi.fbank(2**15 * wavs[i : i + 1],
    use_energy=False, ...)`` on CPU, which is WeSpeaker's call, also with ``dither`` after
    ``torch.manual_seed(seeds[i])``. ``frames = 1 + (T - frame_length) // frame_shift``: there is
    no padding at the ends.

    Args:
        wavs: (B, T) in [-1, 1]; scaled by 2^15 here. frame_length, frame_shift: in ms. dither:
        standard deviation of the Gaussian noise added to every frame, on the 2^15 scale.
        sample_rate: in Hz. window_type: ``hamming`` (WeSpeaker) or ``povey`` (Kaldi). seeds:
        (B,) one for each sample, needed where ``dither`` > 0; kept on the CPU they cost no sync.

    Raises:
        ValueError: T is less than one frame; ``dither`` without seeds; an unknown window.
    """
    size = int(sample_rate * frame_length * 0.001)
    shift = int(sample_rate * frame_shift * 0.001)
    if wavs.ndim != 2 or wavs.shape[1] < size:
        raise ValueError(
            f"expected wavs (B, T) of at least {size} samples, found {tuple(wavs.shape)}"
        )
    seeds = _as_list(seeds) if dither > 0.0 and seeds is not None else []
    if dither > 0.0 and len(seeds) != len(wavs):
        raise ValueError(
            f"dither needs one seed a sample: expected {len(wavs)}, found {len(seeds)}"
        )
    options = (num_mel_bins, dither, sample_rate, _window(window_type, size, wavs.device))
    # on a CPU one by one: the frames of a sample stay in its cache, those of a batch do not
    count = 1 if wavs.device.type == "cpu" else max(len(wavs), 1)
    with torch.autocast(wavs.device.type, enabled=False):
        frames = (wavs.float() * (1 << 15)).unfold(1, size, shift)
        parts = [
            _log_mel(frames[i : i + count], seeds[i : i + count], *options)
            for i in range(0, max(len(wavs), 1), count)
        ]
        return torch.cat(parts)


def _log_mel(frames: Tensor, seeds, num_bins: int, dither: float, sample_rate: int, window: Tensor):
    size = len(window)
    padded = 1 << (size - 1).bit_length()
    if dither > 0.0:
        frames = frames + dither * _noise(frames.shape, seeds, frames.device)
    frames = frames - frames.mean(dim=2, keepdim=True)
    previous = torch.nn.functional.pad(frames, (1, 0), mode="replicate")[:, :, :-1]
    frames = (frames - _PREEMPHASIS * previous) * window
    power = torch.fft.rfft(frames, padded).abs().pow(2.0)
    energies = power @ _mel_filters(num_bins, padded, sample_rate, frames.device)
    return energies.clamp_min(torch.finfo(torch.float32).eps).log()


def apply_cmvn(features: Tensor, *, norm_mean: bool = True, norm_var: bool = False) -> Tensor:
    """Return features (B, frames, F) with mean 0, and variance 1, of each bin over time."""
    if norm_mean:
        features = features - features.mean(dim=1, keepdim=True)
    if norm_var:
        features = features / torch.sqrt(features.var(dim=1, keepdim=True) + 1e-7)
    return features


def spec_aug(
    features: Tensor,
    seeds: Sequence[int] | Tensor,
    *,
    num_t_mask: int = 1,
    num_f_mask: int = 1,
    max_t: int = 10,
    max_f: int = 8,
    prob: float = 0.6,
) -> Tensor:
    """Return features (B, frames, F) with random stretches of time and of bins set to 0.

    Each sample is masked with probability ``prob``, on its own (upstream: the whole batch
    alike), by ``num_t_mask`` stretches of 1 to ``max_t`` frames and ``num_f_mask`` of 1 to
    ``max_f`` bins, which begin anywhere and are cut at the end. Gradients pass where nothing is
    masked. The masks are the same on every device.

    Reference: Park et al. 2019, SpecAugment, section 2.
    """
    _, num_frames, num_bins = features.shape
    count = 1 + 2 * (num_t_mask + num_f_mask)
    generator = torch.Generator()
    uniform = torch.stack(
        [torch.rand(count, generator=generator.manual_seed(s)) for s in _spec_aug_seeds(seeds)]
    )
    chosen, times, bins = uniform.split([1, 2 * num_t_mask, 2 * num_f_mask], dim=1)
    masked = (
        _stretches(times, num_frames, max_t)[:, :, None]
        | _stretches(bins, num_bins, max_f)[:, None]
    )
    masked &= (chosen < prob)[:, :, None]
    return features.masked_fill(masked.to(features.device), 0.0)


def _spec_aug_seeds(seeds: Sequence[int] | Tensor) -> list[int]:
    return [seed ^ _SPEC_AUG for seed in _as_list(seeds)]


def _as_list(seeds: Sequence[int] | Tensor) -> list[int]:
    return seeds.tolist() if isinstance(seeds, Tensor) else list(seeds)


def _stretches(uniform: Tensor, size: int, longest: int) -> Tensor:
    """(B, 2 n) uniform numbers, n for starts and n for lengths -> (B, size) bool."""
    starts, lengths = uniform.chunk(2, dim=1)
    starts = (starts * size).long()[:, :, None]
    stops = starts + 1 + (lengths * longest).long()[:, :, None]
    positions = torch.arange(size)
    return ((positions >= starts) & (positions < stops)).any(dim=1)


def _noise(shape: torch.Size, seeds, device: torch.device) -> Tensor:
    generator = torch.Generator(device)
    noise = torch.empty(shape, device=device)
    for row, seed in zip(noise, seeds):
        row.normal_(generator=generator.manual_seed(seed))
    return noise


# Tensors that are made in inference mode could not be used in training afterwards.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _window(window_type: str, size: int, device: torch.device) -> Tensor:
    if window_type == "hamming":
        window = torch.hamming_window(size, periodic=False, alpha=0.54, beta=0.46)
    elif window_type == "povey":
        window = torch.hann_window(size, periodic=False).pow(0.85)
    else:
        raise ValueError(f"window_type {window_type!r}: expected hamming or povey")
    return window.to(device)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _mel_filters(num_bins: int, padded: int, sample_rate: int, device: torch.device) -> Tensor:
    """(padded / 2 + 1, num_bins): triangles of height 1, evenly spaced in mel."""
    low, high = (1127.0 * math.log(1.0 + f / 700.0) for f in (_LOW_FREQ, sample_rate / 2))
    step = (high - low) / (num_bins + 1)
    mel = 1127.0 * (1.0 + sample_rate / padded * torch.arange(padded // 2) / 700.0).log()[:, None]
    index = torch.arange(num_bins)
    left, centre, right = (low + (index + i) * step for i in (0.0, 1.0, 2.0))
    rising, falling = (mel - left) / (centre - left), (right - mel) / (right - centre)
    filters = torch.minimum(rising, falling).clamp_min(0.0)
    return torch.nn.functional.pad(filters, (0, 0, 0, 1)).to(
        device
    )  # nothing at half the sample rate
