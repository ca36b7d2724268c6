"""Front-end, backbone and head as one module; checkpoints in WeSpeaker's layout.

A saved model is a plain state dict with the backbone's keys bare, the front-end's under
``frontend.`` and the head's under ``projection.``, as WeSpeaker saves and loads it.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wespeaker_qmargin import adapter
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.features import apply_cmvn, fbank, spec_aug
from wespeaker_qmargin.frontend import SslFrontend, fit_model_args
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.moe import take_router_loss
from wespeaker_qmargin.parallel import ClassParallelQMargin, full_weight
from wespeaker_qmargin.sparse import Statistics
from wespeaker_qmargin.tensors import write_tensors


class SpeakerNet(nn.Module):
    """Waveforms and labels to (loss, statistics): everything that trains, in one ``forward``.

    Args:
        config: a ``config.Config``.
        num_class: number of classes of the head; None builds no head (extraction).
    """

    def __init__(self, config, num_class: int | None = None):
        super().__init__()
        self.dataset_args = config.dataset_args
        model_args = dict(config.model_args)
        self.frontend = None
        if self.dataset_args.frontend != "fbank":
            self.frontend = _build_frontend(self.dataset_args)
            model_args["feat_dim"] = self.frontend.output_size()
        if isinstance(self.frontend, SslFrontend):
            backbone = adapter.get_speaker_model(config.model)
            model_args = fit_model_args(backbone, config.model_args, self.frontend)
        self.backbone = adapter.build_speaker_model(config.model, model_args)
        if hasattr(self.backbone, "prepare_for_frontend"):
            self.backbone.prepare_for_frontend(self.dataset_args.frontend)
        self.projection = None
        if num_class is not None:
            args = {
                **config.projection_args,
                "embed_dim": model_args["embed_dim"],
                "num_class": num_class,
                "do_lm": config.do_lm,
            }
            self.projection = adapter.get_projection(args)
            self.criterion = getattr(nn, config.loss)(**config.loss_args)

    def train(self, mode: bool = True):
        """As nn.Module; but parts whose every parameter is frozen stay in evaluation.

        Their batch-norm statistics would drift, and dropout would blur what cannot adapt to it.
        """
        super().train(mode)
        for module in self.modules() if mode else ():
            own = list(module.parameters())
            if own and not any(p.requires_grad for p in own):
                module.eval()
        return self

    @functools.cached_property
    def min_samples(self) -> int:
        """Samples that an embedding needs; with another front-end than filter banks, one frame."""
        if isinstance(self.frontend, SslFrontend):
            return self.frontend.min_samples
        args, frames = self.dataset_args.fbank_args, 1
        if self.frontend is None:
            frames = adapter.fewest_frames(self.backbone, args.get("num_mel_bins", 80))
        seconds = (args.get("frame_length", 25) + (frames - 1) * args.get("frame_shift", 10)) / 1000
        return int(self.dataset_args.resample_rate * seconds)

    def features(self, wavs: Tensor, seeds: Sequence[int] | None = None):
        """Return the backbone's input for waveforms (B, T) in [-1, 1].

        ``seeds``, one a sample, drive dither and SpecAugment in training; without them: neither.
        Filter banks (B, frames, bands) that ``filter_banks`` has made are passed through.
        """
        if self.frontend is None:
            return wavs if wavs.dim() == 3 else filter_banks(self.dataset_args, wavs, seeds)
        lengths = None  # all of one length; upstream's front-ends want to be told
        if not isinstance(self.frontend, SslFrontend):
            lengths = torch.full((len(wavs),), wavs.shape[1], device=wavs.device)
        frames, _ = self.frontend(wavs, lengths)
        return _normalised(self.dataset_args, frames, seeds)

    def embed(self, wavs: Tensor, seeds: Sequence[int] | None = None) -> Tensor:
        """Return embeddings (B, D) of waveforms (B, T)."""
        output = self.backbone(self.features(wavs, seeds))
        # most backbones return (embed_a, embed_b) and mean the last
        return output[-1] if isinstance(output, tuple) else output

    def forward(
        self, wavs: Tensor, labels: Tensor, seeds: Sequence[int]
    ) -> tuple[Tensor, Statistics]:
        """Return the mean loss of a training batch, and what became of each of its samples."""
        take_router_loss(self)  # gradient checkpointing computed it again in the last backward pass
        embeddings = self.embed(wavs, seeds)
        loss, statistics = self._head_loss(embeddings, labels)
        router_loss = take_router_loss(self)
        return loss if router_loss is None else loss + router_loss, statistics

    def _head_loss(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Statistics]:
        if isinstance(self.projection, QMarginProduct):
            return self.projection.loss(embeddings, labels)
        output = self.projection(embeddings, labels)
        scores, loss = output if isinstance(output, tuple) else (output, None)
        if loss is None:
            loss = self.criterion(scores.float(), labels)
        return loss, _dense_statistics(scores.detach(), labels)


def filter_banks(args, wavs: Tensor, seeds: Sequence[int] | None = None) -> Tensor:
    """Return the filter banks (B, frames, bands) of waveforms as ``dataset_args`` say.

    ``seeds`` as of ``SpeakerNet.features``.
    """
    # upstream's default in training; an embedding is extracted without
    dither = args.fbank_args.get("dither", 1.0) if seeds is not None else 0.0
    fbank_args = {**args.fbank_args, "dither": dither, "sample_rate": args.resample_rate}
    return _normalised(args, fbank(wavs, seeds=seeds, **fbank_args), seeds)


def _normalised(args, frames, seeds):
    if args.cmvn:
        frames = apply_cmvn(frames, **args.cmvn_args)
    if args.spec_aug and seeds is not None:
        frames = spec_aug(frames, seeds, **args.spec_aug_args)
    return frames


def _dense_statistics(scores: Tensor, labels: Tensor) -> Statistics:
    """Return the statistics of a head whose every class is active; its scores have the margin."""
    good = scores.isfinite().all(dim=1)
    return Statistics(good * scores.shape[1], good, scores.argmax(dim=1) == labels, 0)


def _build_frontend(dataset_args) -> nn.Module:
    name = dataset_args.frontend
    arguments = getattr(dataset_args, f"{name}_args") or {}
    return adapter.get_frontend(name)(**arguments, sample_rate=dataset_args.resample_rate)


def to_wespeaker(state: dict) -> dict:
    """Return a ``SpeakerNet`` state dict under WeSpeaker's key names."""
    return {key.removeprefix("backbone."): value for key, value in state.items()}


def from_wespeaker(state: dict) -> dict:
    """Return a WeSpeaker state dict under the key names of ``SpeakerNet``."""
    own = ("frontend.", "projection.")
    return {key if key.startswith(own) else f"backbone.{key}": v for key, v in state.items()}


def full_state(net: SpeakerNet) -> dict[str, Tensor]:
    """Return the state dict of ``net`` on the CPU under WeSpeaker's names, with all prototypes.

    Collective if its head is class-parallel; only rank 0 then gets the prototypes.
    """
    state = {k: v.detach().cpu() for k, v in to_wespeaker(net.state_dict()).items()}
    if isinstance(net.projection, ClassParallelQMargin):
        state["projection.weight"] = full_weight(net.projection)
    return state


def save_checkpoint(net: SpeakerNet, path, *, write: bool = True) -> None:
    """Write the plain `full_state` of ``net`` atomically; every process calls, one writes."""
    state = full_state(net)
    if not write:
        return
    write_tensors(path, state)


def load_checkpoint(net: SpeakerNet, path, *, head: bool = True) -> None:
    """Load a checkpoint into ``net``; every tensor must be there and fit.

    Args:
        head: False leaves the head of ``net`` as it is and ignores the checkpoint's.

    Raises:
        ValueError: missing, unknown or differently shaped tensors: another architecture.
    """
    state = from_wespeaker(read_checkpoint(path))
    wanted = {key: value.shape for key, value in net.state_dict().items()}
    if isinstance(net.projection, ClassParallelQMargin):  # takes its own rows of all
        wanted["projection.weight"] = (net.projection.out_features, net.projection.in_features)
    if not head:
        state = {k: v for k, v in state.items() if not k.startswith("projection.")}
        wanted = {k: v for k, v in wanted.items() if not k.startswith("projection.")}
    missing = sorted(wanted.keys() - state.keys())
    unknown = sorted(state.keys() - wanted.keys())
    shapes = [
        f"{k}: {tuple(state[k].shape)} instead of {tuple(wanted[k])}"
        for k in wanted.keys() & state.keys()
        if state[k].shape != wanted[k]
    ]
    if missing or unknown or shapes:
        faults = [
            f"{len(found)} {what} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
            for what, found in (("missing", missing), ("unknown", unknown), ("other shape", shapes))
            if found
        ]
        raise ValueError(
            f"{path}: does not fit this model, of {len(wanted)} tensors: {'; '.join(faults)}. "
            "Use the config that it was trained with"
        )
    net.load_state_dict(state, strict=head)
