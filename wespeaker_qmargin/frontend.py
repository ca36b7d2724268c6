"""Pretrained encoders as front-ends: waveforms to the hidden states of all layers.

WeSpeaker's contract: ``output_size()``, ``forward(wavs, lens) -> (features, lens)``, keyword
``sample_rate``. The features are a tuple of L tensors (B, T, D), the input of the encoder's first
layer and the output of each, as WeSpeaker's ``W2VBert_Adapter_MFA`` and our ``MHFA`` take them;
``cmvn`` and ``spec_aug`` do not.
"""

import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from wespeaker_qmargin.upcycle import replace_feed_forwards, upcycle

SAMPLE_RATE = 16000  # Hz, what every one of these encoders was trained on


class SslFrontend(nn.Module):
    """What the front-ends ``WavLMFrontend`` and ``W2VBertFrontend`` share.

    A subclass sets ``encoder``, the pretrained network, ``num_layers`` (L), ``size`` (D) and
    ``min_samples``, what one frame needs. ``replaced`` names the modules in the place of its
    feed-forward modules.
    """

    encoder: nn.Module
    num_layers: int
    size: int
    min_samples: int
    replaced: list[str]

    def __init__(self, *, frozen: bool, grad_mult: float, layer_drop: float, sample_rate: int):
        super().__init__()
        if sample_rate != SAMPLE_RATE:
            raise ValueError(
                f"sample_rate {sample_rate}: the encoder hears {SAMPLE_RATE} Hz; set "
                f"dataset_args.resample_rate: {SAMPLE_RATE}"
            )
        if not grad_mult > 0:
            raise ValueError(
                f"grad_mult: expected a number > 0, got {grad_mult!r}; to train nothing of the "
                "encoder set frozen: True"
            )
        if not 0 <= layer_drop < 1:
            raise ValueError(f"layer_drop: expected a number in [0, 1), got {layer_drop!r}")
        self.frozen, self.grad_mult = frozen, grad_mult

    def _change_feed_forwards(self, net: nn.Module, moe: dict | None, other: dict | None) -> None:
        """Put experts, or another module, in the place of a network's feed-forward modules."""
        if moe and other:
            raise ValueError("moe and feed_forward: both replace the same modules, choose one")
        names = upcycle(net, **moe) if moe else []
        names += replace_feed_forwards(net, **other) if other else []
        self.replaced = [f"encoder.{name}" for name in names]

    def output_size(self) -> int:
        """Return D, the size of every hidden state."""
        return self.size

    def num_frames(self, samples):
        """Return how many frames so many samples give (an int, or an integer tensor)."""
        raise NotImplementedError

    def train(self, mode: bool = True):
        """Set the mode, as ``nn.Module.train``; a frozen encoder stays in eval."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(
        self, wavs: Tensor, lens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return hidden states, L x (B, T, D), and the valid frames of each utterance, (B,).

        An utterance's valid frames do not depend on what it is batched with.

        Args:
            wavs: (B, samples) in [-1, 1] at 16 kHz.
            lens: (B,) samples of each; what lies behind them is padding. None: all.

        Raises:
            ValueError: an utterance that is too short for one frame; ``lens`` beyond ``wavs``.
        """
        samples = torch.full((len(wavs),), wavs.shape[-1]) if lens is None else lens.cpu()
        self._check(wavs, samples)
        trained = any(parameter.requires_grad for parameter in self.encoder.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            hidden = self._hidden(wavs, samples)
        if self.grad_mult != 1:
            hidden = tuple(_ScaledGradient.apply(states, self.grad_mult) for states in hidden)
        return hidden, self.num_frames(samples).to(wavs.device)

    def _check(self, wavs: Tensor, samples: Tensor) -> None:
        if wavs.ndim != 2 or samples.shape != wavs.shape[:1] or samples.max() > wavs.shape[1]:
            raise ValueError(
                f"expected wavs (B, samples) and lens (B,) of at most so many, found wavs "
                f"{tuple(wavs.shape)} and lens {tuple(samples.shape)} up to {int(samples.max())}"
            )
        if samples.min() < self.min_samples:
            raise ValueError(
                f"an utterance of {int(samples.min())} samples: the encoder needs "
                f"{self.min_samples} for one frame; leave out what is shorter"
            )

    def _hidden(self, wavs: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
        """The hidden states; ``samples`` (on the CPU) of each utterance."""
        raise NotImplementedError


def fit_model_args(backbone: type[nn.Module], model_args: dict, frontend: SslFrontend) -> dict:
    """Return ``model_args`` with the front-end's dimension and number of layers filled in.

    Raises:
        ValueError: the backbone takes no tuple of hidden states; ``model_args`` say another
            dimension (-1: whatever it is) or number of layers.
    """
    parameters = inspect.signature(backbone).parameters
    # hidden states of all layers; layers, beside the first one's input
    counts = {
        "nb_layer": frontend.num_layers,
        "num_frontend_hidden_layers": frontend.num_layers - 1,
    }
    counts = {key: count for key, count in counts.items() if key in parameters}
    if not counts:
        raise ValueError(
            f"model: {backbone.__name__} takes one tensor, this front-end gives the hidden states "
            f"of {frontend.num_layers} layers; choose MHFA or W2VBert_Adapter_MFA"
        )
    fitting = {"feat_dim": frontend.output_size(), **counts}
    for key, value in fitting.items():
        given = model_args.get(key, value)
        if given not in (value, -1):
            raise ValueError(
                f"model_args.{key}: {given}, but this encoder has {value}; leave the key out, or "
                "choose another model_name"
            )
    return {**model_args, **fitting}


def checkpoint_layers(encoder: nn.Module) -> None:
    """Have the layers of an encoder of transformers computed again in the backward pass."""
    encoder.activation_checkpointing_enable({"use_reentrant": False})


class _ScaledGradient(torch.autograd.Function):
    """The input itself; its gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, hidden: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.factor, None


class _Passed(torch.autograd.Function):
    """The first input itself; the others, a skipped layer's parameters, get the gradient 0.

    Without it DistributedDataParallel waits for their gradient.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, *(torch.zeros_like(p) for p in ctx.saved_tensors)


def drop_layers(layers: Iterable[nn.Module], probability: float, skipped: Callable) -> None:
    """Make every layer skip itself in training with a probability.

    ``skipped(hidden, keyword arguments)`` is what it returns then. It is called all the same, so
    that hooks record its output. Keys of the state dict stay.
    """
    for layer in layers:
        layer.__class__ = _skippable(type(layer))
        layer.skip_probability, layer.skipped = probability, skipped


@functools.cache
def _skippable(layer_class: type[nn.Module]) -> type[nn.Module]:
    class Skippable(layer_class):
        def forward(self, hidden: Tensor, *args, **kwargs):
            # drawn from torch's generator, which gradient checkpointing rewinds
            if self.training and torch.rand([]) < self.skip_probability:
                trained = [p for p in self.parameters() if p.requires_grad]
                return self.skipped(_Passed.apply(hidden, *trained), kwargs)
            return super().forward(hidden, *args, **kwargs)

    return Skippable
