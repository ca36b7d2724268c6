"""What WeSpeaker calls of torchaudio, on soundfile, soxr and plain torch.

For a torchaudio that is not there or has dropped it; `compat_torchaudio` says when. Names and
parameters are torchaudio's.
"""

import importlib.machinery
import io
import math
import os
import types
from typing import NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor, nn

from wespeaker_qmargin import audio, features

# soundfile's subtype -> the type that torchaudio gives with normalize=False, and bits per sample
_INTEGERS = {"PCM_16": ("int16", 16), "PCM_24": ("int32", 24), "PCM_32": ("int32", 32)}


class AudioMetaData(NamedTuple):
    """What `info` tells of a file."""

    sample_rate: int
    num_frames: int
    num_channels: int
    bits_per_sample: int
    encoding: str


def load(
    uri,
    frame_offset: int = 0,
    num_frames: int = -1,
    normalize: bool = True,
    channels_first: bool = True,
    format: str | None = None,
    buffer_size: int = 4096,
    backend: str | None = None,
) -> tuple[Tensor, int]:
    """Return the samples (channels, T) of a file or file object, and their rate in Hz.

    float32 in [-1, 1]; with ``normalize=False`` the integers that the file holds, if it does.
    ``format``, ``buffer_size`` and ``backend`` are for other decoders.

    Raises:
        soundfile.LibsndfileError, OSError: not a file that libsndfile reads.
    """
    with _open(uri) as file:
        dtype = "float32" if normalize else _INTEGERS.get(file.subtype, ("float32", 0))[0]
        file.seek(frame_offset)
        samples = torch.from_numpy(file.read(num_frames, dtype=dtype, always_2d=True))
        return (samples.t().contiguous() if channels_first else samples), file.samplerate


def info(uri, format: str | None = None, buffer_size: int = 4096, backend: str | None = None):
    """Return the `AudioMetaData` of a file or file object."""
    with _open(uri) as file:
        bits = _INTEGERS.get(file.subtype, ("", 0))[1]
        return AudioMetaData(file.samplerate, file.frames, file.channels, bits, file.subtype)


def _open(uri) -> soundfile.SoundFile:
    if isinstance(uri, str | os.PathLike):
        # libsndfile calls a missing file a "System error"
        with open(uri, "rb"):
            return soundfile.SoundFile(uri)
    return soundfile.SoundFile(io.BytesIO(uri.read()))


def apply_effects_tensor(
    tensor: Tensor, sample_rate: int, effects: list[list[str]], channels_first: bool = True
) -> tuple[Tensor, int]:
    """Return ``tensor`` (channels, T) after SoX's effects ``speed`` and ``rate``, and its rate.

    Equals SoX to 87-90 dB, in the same number of samples.

    Raises:
        ValueError: any other effect.
    """
    rate = float(sample_rate)
    channels = tensor.numpy() if channels_first else tensor.numpy().T
    for name, *values in effects:
        if name == "speed" and len(values) == 1:
            rate *= float(values[0])
        elif name == "rate" and len(values) == 1:
            channels = np.stack([audio.resample(c, rate, float(values[0])) for c in channels])
            rate = float(values[0])
        else:
            raise ValueError(f"effect {[name, *values]}: only speed FACTOR and rate HZ are there")
    wav = torch.from_numpy(np.ascontiguousarray(channels))
    return (wav if channels_first else wav.t()), round(rate)


def set_audio_backend(backend: str | None) -> None:
    """Do nothing, as torchaudio 2.1 to 2.8 do: every call finds its own decoder."""


def fbank(
    waveform: Tensor,
    *,
    num_mel_bins: int = 23,
    frame_length: float = 25.0,
    frame_shift: float = 10.0,
    dither: float = 0.0,
    sample_frequency: float = 16000.0,
    window_type: str = "povey",
    use_energy: bool = False,
) -> Tensor:
    """Return the log-mel filterbanks (frames, num_mel_bins) of ``waveform``'s first channel.

    Bit for bit Kaldi's as torchaudio has them; with ``dither`` the noise is as strong, but made of
    other random numbers (drawn from torch's generator, which ``torch.manual_seed`` seeds).

    Raises:
        ValueError: ``use_energy``; less than one frame; a window that is not there.
    """
    if use_energy:
        raise ValueError("use_energy: only the filterbanks without energy are there")
    # 2^15 is exact both ways: features.fbank takes waves in [-1, 1] and scales them itself
    wavs = waveform[:1].float() / (1 << 15)
    seeds = torch.randint(1 << 62, (1,)) if dither > 0.0 else None
    return features.fbank(
        wavs,
        num_mel_bins=num_mel_bins,
        frame_length=frame_length,
        frame_shift=frame_shift,
        dither=dither,
        sample_rate=int(sample_frequency),
        window_type=window_type,
        seeds=seeds,
    )[0]


class Resample(nn.Module):
    """Waves (..., T) at another rate, ceil(T * new / orig) samples, by a windowed sinc.

    The sinc ends after six zero crossings under a Hann window; its cut-off is 0.99 of the lower
    Nyquist frequency.

    Reference: Smith 2002, "Digital audio resampling home page", band-limited interpolation.
    """

    _CROSSINGS, _ROLLOFF = 6, 0.99

    def __init__(self, orig_freq: int = 16000, new_freq: int = 16000):
        super().__init__()
        common = math.gcd(int(orig_freq), int(new_freq))
        self.orig, self.new = int(orig_freq) // common, int(new_freq) // common
        cutoff = min(self.orig, self.new) * self._ROLLOFF
        self.width = math.ceil(self._CROSSINGS * self.orig / cutoff)
        phases = torch.arange(self.new, dtype=torch.float64)[:, None] / self.new
        taps = torch.arange(-self.width, self.width + self.orig, dtype=torch.float64) / self.orig
        x = ((taps - phases) * cutoff).clamp(-self._CROSSINGS, self._CROSSINGS)
        window = torch.cos(x * math.pi / self._CROSSINGS / 2).square()
        kernel = torch.sinc(x) * window * cutoff / self.orig
        self.register_buffer("kernel", kernel[:, None].float(), persistent=False)

    def forward(self, waveform: Tensor) -> Tensor:
        """Return ``waveform`` (..., T) at the new rate."""
        if self.orig == self.new:
            return waveform
        flat = waveform.reshape(-1, 1, waveform.shape[-1])
        padded = nn.functional.pad(flat, (self.width, self.width + self.orig))
        phases = nn.functional.conv1d(padded, self.kernel.to(padded), stride=self.orig)
        size = math.ceil(self.new * waveform.shape[-1] / self.orig)
        wav = phases.transpose(1, 2).flatten(1)[:, :size]
        return wav.reshape(*waveform.shape[:-1], size)


class _Spectrogram(nn.Module):
    def __init__(self, n_fft: int, win_length: int, hop_length: int, window: Tensor):
        super().__init__()
        self.sizes = {"n_fft": n_fft, "win_length": win_length, "hop_length": hop_length}
        self.register_buffer("window", window)

    def forward(self, waveform: Tensor) -> Tensor:
        flat = waveform.reshape(-1, waveform.shape[-1])
        found = torch.stft(flat, **self.sizes, window=self.window, return_complex=True)
        power = found.abs().square()
        return power.reshape(*waveform.shape[:-1], *power.shape[-2:])


class _MelScale(nn.Module):
    def __init__(self, filters: Tensor):
        super().__init__()
        self.register_buffer("fb", filters)

    def forward(self, power: Tensor) -> Tensor:
        return (power.transpose(-1, -2) @ self.fb).transpose(-1, -2)


class MelSpectrogram(nn.Sequential):
    """Mel power spectrogram of waves (..., T): (..., n_mels, frames), the frames centred.

    Filters are triangles of height 1, even on HTK's mel scale. The saved keys are torchaudio's.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        n_fft: int = 400,
        win_length: int | None = None,
        hop_length: int | None = None,
        f_min: float = 0.0,
        f_max: float | None = None,
        n_mels: int = 128,
        window_fn=torch.hann_window,
    ):
        super().__init__()
        size = win_length or n_fft
        window = window_fn(size)
        self.spectrogram = _Spectrogram(n_fft, size, hop_length or size // 2, window)
        ends = torch.tensor([f_min, f_max or sample_rate // 2], dtype=torch.float64)
        low, high = (2595.0 * torch.log10(1.0 + ends / 700.0)).tolist()
        mel = torch.linspace(low, high, n_mels + 2, dtype=torch.float64)
        hertz = 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
        bins = torch.linspace(0, sample_rate // 2, n_fft // 2 + 1, dtype=torch.float64)[:, None]
        left, centre, right = hertz[:-2], hertz[1:-1], hertz[2:]
        rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
        self.mel_scale = _MelScale(torch.minimum(rising, falling).clamp_min(0.0).float())


def modules() -> dict[str, types.ModuleType]:
    """Return the stand-in for the whole package: module name -> module."""
    contents = {
        "torchaudio": {
            "load": load,
            "info": info,
            "set_audio_backend": set_audio_backend,
            "AudioMetaData": AudioMetaData,
            "__version__": "0+wespeaker.qmargin",
        },
        "torchaudio.sox_effects": {"apply_effects_tensor": apply_effects_tensor},
        "torchaudio.transforms": {"Resample": Resample, "MelSpectrogram": MelSpectrogram},
        "torchaudio.compliance": {},
        "torchaudio.compliance.kaldi": {"fbank": fbank},
    }
    made = {}
    for name, names in contents.items():
        module = made[name] = types.ModuleType(name, "Stand-in by wespeaker_qmargin.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(names)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return made
