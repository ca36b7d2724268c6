"""What the tests of the front-ends share: building one, noise, comparing hidden states."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from wespeaker_qmargin.w2vbert import W2VBertFrontend
from wespeaker_qmargin.wavlm import WavLMFrontend

KINDS = ("base", "large", "w2vbert")


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


def gradients(net: nn.Module, wavs, seed: int = 0) -> dict:
    """Gradients of a sum over all hidden states, by name; None where there is none."""
    torch.manual_seed(seed)
    net.zero_grad()
    hidden, _ = net(wavs)
    generator = torch.Generator().manual_seed(0)
    loss = sum((s * torch.randn(s.shape, generator=generator)).sum() for s in hidden)
    loss.backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}


def saved_bytes(net: nn.Module, wavs) -> int:
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(wavs)
    return sum(sizes.values())


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
