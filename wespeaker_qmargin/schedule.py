"""WeSpeaker's schedules, and parameter groups whose learning-rate ratio survives them."""

import torch
from torch import nn

from wespeaker_qmargin import adapter
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.lazy_sgd import LazySGD
from wespeaker_qmargin.model import to_wespeaker
from wespeaker_qmargin.ramps import HeadRamps


def parameter_groups(net: nn.Module, lr_ratio: dict[str, float]) -> list[dict]:
    """Return optimiser groups ``{"params", "lr_ratio", "name"}``.

    Args:
        lr_ratio: part of the model, as a prefix of its checkpoint's keys (``projection``,
            ``frontend.encoder``) or, where no key begins so, as names within them (``router``,
            ``experts``), to the factor on its learning rate; of several parts in a key the one
            that ends furthest in it decides; 0 freezes the part.

    Raises:
        ValueError: a part that the model does not have, a factor that is not a number >= 0.
    """
    for part, ratio in lr_ratio.items():
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio >= 0:
            raise ValueError(f"lr_ratio.{part}: expected a number >= 0, got {ratio!r}")
    parameters = to_wespeaker(dict(net.named_parameters()))
    groups: dict[str, list] = {}
    unused = set(lr_ratio)
    inner = {p for p in lr_ratio if not any(_end(p, name) for name in parameters)}
    for name, parameter in parameters.items():
        ends = {p: _end(p, name, within=p in inner) for p in lr_ratio}
        held = [p for p in lr_ratio if ends[p]]
        unused -= set(held)
        part = max(held, key=lambda p: (ends[p], len(p)), default="")
        if part and lr_ratio[part] == 0:
            parameter.requires_grad_(False)
        groups.setdefault(part, []).append(parameter)
    if unused:
        tops = sorted({name.split(".")[0] for name in parameters})
        raise ValueError(
            f"lr_ratio.{min(unused)}: the model has no such part; it has {', '.join(tops)}"
        )
    trained = {part: [p for p in params if p.requires_grad] for part, params in groups.items()}
    if not any(trained.values()):
        raise ValueError("lr_ratio: every part of the model is frozen, nothing would be trained")
    return [
        {"params": params, "lr_ratio": float(lr_ratio.get(part, 1.0)), "name": part or "rest"}
        for part, params in trained.items()
        if params
    ]


def _end(part: str, name: str, *, within: bool = False) -> int:
    """Return where ``part`` ends in a key; 0 where the key does not hold it."""
    place = f".{name}.".rfind(f".{part}.") if within else -1 + f".{name}.".startswith(f".{part}.")
    return place + len(part) if place >= 0 else 0


def build_optimizer(net: nn.Module, config) -> torch.optim.Optimizer:
    """Return the optimiser that ``config`` names, with its parameter groups."""
    arguments = dict(config.optimizer_args)
    if "initial_lr" in config.scheduler_args:
        arguments["lr"] = config.scheduler_args["initial_lr"]
    groups = parameter_groups(net, config.lr_ratio)
    if not groups:
        raise ValueError("lr_ratio: every parameter is frozen, there is nothing to train")
    if config.optimizer == "LazySGD":
        return LazySGD(groups, **arguments)
    return getattr(torch.optim, config.optimizer)(groups, **arguments)


class Schedules:
    """WeSpeaker's learning-rate and margin schedules, alpha's and scale's: functions of the step.

    ``ramps`` sets alpha and scale; None where the head has none.

    Args:
        net: has the head as ``.projection``.
        epoch_iter: optimiser steps an epoch.
        step_batch: utterances an optimiser step over all processes; a learning rate in the YAML is
            for 64 of them, as upstream.
    """

    def __init__(self, net, optimizer, config, *, epoch_iter: int, step_batch: int):
        self._optimizer = optimizer
        self.scale_ratio = step_batch / 64
        given = {
            "num_epochs": config.num_epochs,
            "epoch_iter": epoch_iter,
            "scale_ratio": self.scale_ratio,
        }
        self._lr = adapter.get_scheduler(config.scheduler)(
            optimizer, **{**config.scheduler_args, **given}
        )
        self._margin = adapter.get_scheduler(config.margin_scheduler)(
            model=net, **{**config.margin_update, "epoch_iter": epoch_iter}
        )
        self.lr = 0.0
        self.ramps = None
        if isinstance(net.projection, QMarginProduct):
            self.ramps = HeadRamps(net.projection, config, epoch_iter=epoch_iter)
            self.ramps.step(0)

    def step(self, iteration: int) -> None:
        """Set all of them for optimiser step ``iteration`` (from 0)."""
        self._lr.step(iteration)
        self.lr = self._lr.get_lr()  # before the ratios: upstream writes one rate into every group
        for group in self._optimizer.param_groups:
            group["lr"] *= group["lr_ratio"]
        self._margin.step(iteration)
        if self.ramps is not None:
            self.ramps.step(iteration)

    @property
    def margin(self) -> float:
        return float(self._margin.get_margin())
