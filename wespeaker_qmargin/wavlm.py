"""WavLM as a front-end, from transformers, the original file or s3prl."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from wespeaker_qmargin.frontend import SAMPLE_RATE, SslFrontend, checkpoint_layers, drop_layers
from wespeaker_qmargin.ssl_weights import hears_normalised, load_s3prl, load_transformers
from wespeaker_qmargin.wavlm_original import load_original

_S3PRL_SAMPLES = 800  # s3prl pads what is shorter


class WavLMFrontend(SslFrontend):
    """WavLM: Base and Base+ (L 13, D 768), Large (L 25, D 1024); one frame every 20 ms.

    The Base models normalise over time in their CNN, so padding changes every frame of a shorter
    utterance: a batch of unequal lengths is encoded one utterance after the other, as it is with
    s3prl. Inputs are not masked in training, whatever the checkpoint's config says.

    Args:
        model_name: where the weights are; for ``source: transformers`` a local folder or a name on
            the Hugging Face hub, for ``file`` the original ``WavLM-*.pt``, for ``s3prl`` that file
            or a name of its own.
        source: ``transformers``, ``file`` or ``s3prl``; the same network to 1e-4.
        frozen: train nothing of it; it stays in eval mode.
        freeze_cnn: do not train the CNN that reads the waveform.
        grad_mult: factor > 0 on the gradient of every trained parameter. For optimisers that
            forget the gradient's scale (Adam), use ``lr_ratio`` instead.
        layer_drop: probability to skip a layer in training. The skipped layer's state is the one
            below, so L stays; its gradient is 0. The first layer is never skipped.
        gradient_checkpointing: compute every layer again in the backward pass instead of keeping
            its activations.
        moe: `router.MoEOptions`: its feed-forward modules become mixtures of experts.
        feed_forward: options of `upcycle.replace_feed_forwards`: another module in their place.
        normalize: give waves mean 0 and variance 1; None: as the checkpoint says.
        sample_rate: of the waves, 16000 Hz.

    Raises:
        ImportError, FileNotFoundError, ValueError: see ``ssl_weights``; an option out of range.

    Reference: Chen et al. 2022, "WavLM: Large-scale self-supervised pre-training for full stack
    speech processing".
    """

    def __init__(
        self,
        model_name: str = "microsoft/wavlm-base-plus",
        *,
        source: str = "transformers",
        frozen: bool = False,
        freeze_cnn: bool = False,
        grad_mult: float = 1.0,
        layer_drop: float = 0.0,
        gradient_checkpointing: bool = False,
        moe: dict | None = None,
        feed_forward: dict | None = None,
        normalize: bool | None = None,
        sample_rate: int = SAMPLE_RATE,
    ):
        super().__init__(
            frozen=frozen, grad_mult=grad_mult, layer_drop=layer_drop, sample_rate=sample_rate
        )
        if source not in ("transformers", "file", "s3prl"):
            raise ValueError(f"source: expected transformers, file or s3prl, got {source!r}")
        if source == "s3prl" and gradient_checkpointing:
            raise ValueError("gradient_checkpointing: s3prl has none; use source: file")
        self._s3prl = source == "s3prl"
        wavlm, normalised = self._load(source, model_name, normalize)
        self.normalize = normalised if normalize is None else normalize
        self._convs = [
            (conv.kernel_size[0], conv.stride[0])
            for conv in wavlm.feature_extractor.modules()
            if isinstance(conv, nn.Conv1d)
        ]
        self._over_time = any(
            isinstance(m, nn.GroupNorm) for m in wavlm.feature_extractor.modules()
        )
        self.min_samples = _S3PRL_SAMPLES if self._s3prl else self._receptive_field()
        self._change_feed_forwards(wavlm, moe, feed_forward)
        if gradient_checkpointing:
            checkpoint_layers(wavlm)
        if layer_drop > 0:
            skipped = _skipped_s3prl if self._s3prl else _skipped
            drop_layers(wavlm.encoder.layers[1:], layer_drop, skipped)
        if freeze_cnn:
            self._freeze_cnn(wavlm)
        if frozen:
            wavlm.requires_grad_(False)

    def _load(self, source: str, model_name: str, normalize: bool | None):
        """Return the WavLM in ``encoder``, and whether it wants normalised waves."""
        if source == "s3prl":
            self.encoder = load_s3prl(model_name)
            self.num_layers, self.size = self.encoder.num_layers, self.encoder.hidden_sizes[0]
            expert = self.encoder.upstream
            normalised, expert.cfg.normalize = expert.cfg.normalize, False
            return expert.model, normalised
        if source == "file":
            self.encoder, normalised = load_original(model_name)
        else:
            self.encoder = load_transformers(model_name, "wavlm")
            normalised = hears_normalised(model_name) if normalize is None else None
        config = self.encoder.config
        self.num_layers, self.size = config.num_hidden_layers + 1, config.hidden_size
        return self.encoder, normalised

    def _freeze_cnn(self, wavlm: nn.Module) -> None:
        wavlm.feature_extractor.requires_grad_(False)
        if self._s3prl:
            wavlm.feature_grad_mult = 0.0
        else:
            wavlm.freeze_feature_encoder()  # or it asks for the waves' gradient in training

    def _receptive_field(self) -> int:
        samples = 1
        for kernel, stride in reversed(self._convs):
            samples = (samples - 1) * stride + kernel
        return samples

    def num_frames(self, samples):
        for kernel, stride in self._convs:
            samples = (samples - kernel) // stride + 1
        return samples

    def _hidden(self, wavs: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
        if bool((samples == wavs.shape[1]).all()):
            return self._encode(wavs, None)
        if not (self._s3prl or self._over_time):
            valid = torch.arange(wavs.shape[1]) < samples[:, None]
            return self._encode(wavs, valid.to(wavs.device))
        alone = [self._encode(wav[None, :n], None) for wav, n in zip(wavs, samples.tolist())]
        return tuple(
            pad_sequence([states[0] for states in layer], batch_first=True) for layer in zip(*alone)
        )

    def _encode(self, wavs: Tensor, valid: Tensor | None) -> tuple[Tensor, ...]:
        """The hidden states of waves whose samples are ``valid`` (B, samples); None: all are."""
        if self.normalize:
            wavs = _normalised(wavs, valid)
        if self._s3prl:
            hidden, _ = self.encoder(wavs, torch.full((len(wavs),), wavs.shape[1]))
            # it repeats the last frame, for one every 320 samples
            return tuple(states[:, : self.num_frames(wavs.shape[1])] for states in hidden)
        mask = None if valid is None else valid.long()
        found = self.encoder(wavs, attention_mask=mask, output_hidden_states=True)
        # releases of transformers differ in whether Large's last one is before its layer norm
        return (*found.hidden_states[:-1], found.last_hidden_state)


# The layers after one that is skipped need the position bias that the first one computed.
def _skipped(hidden: Tensor, arguments: dict) -> tuple:
    return hidden, arguments["position_bias"]


def _skipped_s3prl(hidden: Tensor, arguments: dict) -> tuple:
    return hidden, None, arguments["pos_bias"]


def _normalised(wavs: Tensor, valid: Tensor | None) -> Tensor:
    """Mean 0 and variance 1 of each utterance, as transformers' feature extractors do it."""
    weight = torch.ones_like(wavs) if valid is None else valid.to(wavs.dtype)
    count = weight.sum(dim=1, keepdim=True)
    centred = (wavs - (wavs * weight).sum(dim=1, keepdim=True) / count) * weight
    return centred / torch.sqrt(centred.square().sum(dim=1, keepdim=True) / count + 1e-7)
