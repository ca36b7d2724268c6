"""Input features of w2v-BERT in plain torch, batched, on the device where the waveforms are.

The package ``transformers`` computes them one utterance at a time in numpy on the CPU, 17-44 ms for
3 s, which a training step on a GPU would have to wait for.
"""

import torch
from torch import Tensor

from wespeaker_qmargin.features import fbank

SAMPLE_RATE = 16000  # Hz
STRIDE = 2  # fbank frames that one input frame holds, side by side
MIN_SAMPLES = 560  # of one input frame: a window of 25 ms and one 10 ms later


def num_frames(samples):
    """Return how many input frames so many samples give (an int, or an integer tensor)."""
    return (1 + (samples - 400) // 160) // STRIDE


def w2vbert_features(
    wavs: Tensor, lens: Tensor | None = None, *, num_mel_bins: int = 80
) -> tuple[Tensor, Tensor | None]:
    """Return input features (B, T', 2 * num_mel_bins) and which frames are valid (B, T').

    Where valid, equal to 1e-3 to ``transformers.SeamlessM4TFeatureExtractor`` (in bins that hold
    next to no energy, about 1 of 10^4 of recorded speech, float32 leaves either a larger error, up
    to 2e-2): Kaldi's log-mel filterbanks (povey window, 25 ms every 10 ms), mean 0 and variance 1
    of each bin over the utterance, two frames side by side. A last odd frame counts for mean and
    variance only; there it makes a frame that is masked, here none. Invalid frames are 0.

    Args:
        wavs: (B, T) in [-1, 1] at 16 kHz, T at least 560.
        lens: (B,) samples of each utterance, at least 560; None: all T, and then the mask is None.
    """
    # the scale of int16 and the floor of the energies are those of fbank
    features = fbank(wavs, num_mel_bins=num_mel_bins, window_type="povey", sample_rate=SAMPLE_RATE)
    valid = None
    if lens is not None:
        valid = _before(1 + (lens.to(wavs.device) - 400) // 160, features.shape[1])
    features = _normalise(features, valid)
    even = features.shape[1] // STRIDE * STRIDE
    features = features[:, :even].reshape(len(wavs), even // STRIDE, STRIDE * num_mel_bins)
    if lens is None:
        return features, None
    valid = _before(num_frames(lens.to(wavs.device)), features.shape[1])
    return features * valid[:, :, None], valid


def _before(ends: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=ends.device) < ends[:, None]


def _normalise(features: Tensor, valid: Tensor | None) -> Tensor:
    """Mean 0 and variance 1 over the valid frames of each utterance."""
    weight = features.new_ones(features.shape[:2]) if valid is None else valid.to(features.dtype)
    count = weight.sum(dim=1)[:, None, None]
    mean = (features * weight[:, :, None]).sum(dim=1, keepdim=True) / count
    centred = (features - mean) * weight[:, :, None]
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1)
    return centred / torch.sqrt(variance + 1e-7)
