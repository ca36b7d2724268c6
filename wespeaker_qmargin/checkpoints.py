"""Files of weights: reading one, finding those of an experiment, the mean of the last."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from wespeaker_qmargin.tensors import write_tensors

logger = logging.getLogger(__name__)


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
