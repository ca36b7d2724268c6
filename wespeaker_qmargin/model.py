"""Front-end, backbone and head as one module; checkpoints in WeSpeaker's layout.

A saved model is a plain state dict with the backbone's keys bare, the front-end's under
``frontend.`` and the head's under ``projection.``, as WeSpeaker saves and loads it.
"""

import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from wespeaker_qmargin import adapter
from wespeaker_qmargin.features import apply_cmvn, fbank, spec_aug
from wespeaker_qmargin.frontend import SslFrontend, fit_model_args
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.parallel import ClassParallelQMargin, full_weight
from wespeaker_qmargin.sparse import Statistics
from wespeaker_qmargin.tensors import write_tensors

logger = logging.getLogger(__name__)


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
        embeddings = self.embed(wavs, seeds)
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


def read_checkpoint(path) -> dict[str, Tensor]:
    """Read a state dict: plain, or wrapped as ``{"state_dict"}`` / ``{"model"}``, or of DDP.

    Nothing in the file is executed (``weights_only``).

    Raises:
        FileNotFoundError, ValueError: no such file; no checkpoint; half a file; foreign content.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for damaged or foreign files
        first = str(error).split("\n")[0]
        raise ValueError(
            f"{path}: not a checkpoint of plain tensors, or damaged: {first}"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(
            f"{path}: expected a state dict of tensors, found {type(content).__name__}"
        )
    return {key.removeprefix("module."): value for key, value in content.items()}


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


def checkpoint_epoch(path) -> int | None:
    """Return the N of a file ``model_<N>.pt``, None for another name."""
    match = re.fullmatch(r"model_(\d+)\.pt", Path(path).name)
    return int(match[1]) if match else None


def numbered_checkpoints(exp_dir) -> dict[int, Path]:
    """Return epoch -> ``models/model_<epoch>.pt`` of an experiment, ascending."""
    paths = (Path(exp_dir) / "models").glob("model_*.pt")
    found = {checkpoint_epoch(path): path for path in paths}
    found.pop(None, None)
    return dict(sorted(found.items()))


def find_checkpoint(exp_dir, which: str = "avg") -> Path:
    """Return the file for ``which``: ``avg``, ``best``, an epoch number, or a path."""
    exp_dir = Path(exp_dir)
    places = {"avg": exp_dir / "models" / "avg_model.pt", "best": exp_dir / "best_model.pt"}
    if which in places:
        path = places[which]
    elif which.isdigit():
        path = exp_dir / "models" / f"model_{which}.pt"
    else:
        path = Path(which)
    if not path.is_file():
        epochs = ", ".join(map(str, numbered_checkpoints(exp_dir))) or "none"
        raise FileNotFoundError(f"{path}: no such checkpoint; epochs saved in {exp_dir}: {epochs}")
    return path


def average(paths: Sequence) -> dict[str, Tensor]:
    """Return the mean of checkpoints, tensor by tensor; integer tensors are the last one's.

    Raises:
        ValueError: no paths, or checkpoints of different models.
    """
    if not paths:
        raise ValueError("no checkpoint to average")
    total: dict[str, Tensor] = {}
    for path in paths:
        state = read_checkpoint(path)
        if total and {k: v.shape for k, v in state.items()} != {
            k: v.shape for k, v in total.items()
        }:
            raise ValueError(f"{path}: not the same model as {paths[0]}")
        for key, value in state.items():
            if value.is_floating_point():
                total[key] = total.get(key, 0) + value.double()
            else:
                total[key] = value
    last = read_checkpoint(paths[-1])
    return {
        key: (value / len(paths)).to(last[key].dtype) if value.is_floating_point() else value
        for key, value in total.items()
    }


def average_epochs(exp_dir, num: int) -> Path:
    """Write ``models/avg_model.pt``, the mean of the last ``num`` epochs saved; return its path."""
    found = list(numbered_checkpoints(exp_dir).values())
    if len(found) < num:
        raise ValueError(
            f"{exp_dir}/models: {num} checkpoints to average, found {len(found)}; ask for fewer "
            "(num_avg), or train on"
        )
    path = Path(exp_dir) / "models" / "avg_model.pt"
    state = average(found[-num:])
    write_tensors(path, state)
    logger.info("%s: mean of %s", path, ", ".join(p.name for p in found[-num:]))
    return path


def add_arguments(parser) -> None:
    parser.epilog = "example:\n  wespeaker-qmargin average --exp_dir exp/resnet34 --num 10"
    parser.add_argument("--exp_dir", required=True, help="experiment with models/model_<epoch>.pt")
    parser.add_argument("--num", type=int, default=10, help="how many of the last epochs [10]")


def run(args) -> None:
    print(average_epochs(args.exp_dir, args.num))
