"""Alpha and scale of the head over the epochs: from dense to sparse in one run."""

import math
from typing import NamedTuple

from wespeaker_qmargin.head import auto_scale


class Ramp(NamedTuple):
    """A value that goes from ``initial`` to ``final``, as WeSpeaker's margin does.

    ``initial`` until epoch ``start`` (from 1) begins, ``final`` from the begin of epoch ``end`` on;
    in between, at share ``x`` of the way, ``initial + (final - initial) r`` with ``r = x``
    (linear) or ``1 - 1e-3^x`` (exp: fast at first).
    """

    initial: float
    final: float
    start: float
    end: float
    increase_type: str = "linear"

    def at(self, epoch: float) -> float:
        """Return the value after ``epoch`` epochs (0 is the first step)."""
        if epoch >= self.end - 1:
            return self.final
        if epoch < self.start - 1:
            return self.initial
        share = (epoch - self.start + 1) / (self.end - self.start)
        ratio = share if self.increase_type == "linear" else 1 - 1e-3**share
        return self.initial + (self.final - self.initial) * ratio


# Signatures that the keys of the two sections are checked against
def alpha_ramp(
    *,
    final_alpha: float,
    increase_start_epoch: float,
    fix_start_epoch: float,
    initial_alpha: float = 1.0,
    increase_type: str = "linear",
) -> Ramp:
    """Return the ramp of ``alpha_update``; both alphas in [1, 2]."""
    ramp = Ramp(initial_alpha, final_alpha, increase_start_epoch, fix_start_epoch, increase_type)
    for name, value in (("initial_alpha", ramp.initial), ("final_alpha", ramp.final)):
        if not 1 <= value <= 2:
            raise ValueError(f"alpha_update.{name}: expected a number in [1, 2], got {value!r}")
    return _checked("alpha_update", ramp)


def scale_ramp(
    *,
    final_scale: float,
    increase_start_epoch: float,
    fix_start_epoch: float,
    initial_scale: float = 32.0,
    increase_type: str = "linear",
) -> Ramp:
    """Return the ramp of ``scale_update``; both scales > 0. It need not increase."""
    ramp = Ramp(initial_scale, final_scale, increase_start_epoch, fix_start_epoch, increase_type)
    for name, value in (("initial_scale", ramp.initial), ("final_scale", ramp.final)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"scale_update.{name}: expected a number > 0, got {value!r}")
    return _checked("scale_update", ramp)


def _checked(section: str, ramp: Ramp) -> Ramp:
    if ramp.increase_type not in ("linear", "exp"):
        raise ValueError(
            f"{section}.increase_type: expected linear or exp, got {ramp.increase_type!r}"
        )
    if not 1 <= ramp.start <= ramp.end:
        raise ValueError(
            f"{section}: expected 1 <= increase_start_epoch <= fix_start_epoch, got {ramp.start} "
            f"and {ramp.end}"
        )
    return ramp


class HeadRamps:
    """Sets alpha and scale of a Q-Margin head, as functions of the iteration.

    ``narrowing`` in (0, 1] brings alpha nearer to 1 at the scale that it would have without:
    ``1 + narrowing (alpha - 1)``. The starvation guard halves it.

    Args:
        head: a ``QMarginProduct``, made with the final alpha and scale.
        config: has ``alpha_update``, ``scale_update`` and ``projection_args``.
        epoch_iter: optimiser steps an epoch.
    """

    def __init__(self, head, config, *, epoch_iter: int):
        self._head, self._epoch_iter = head, epoch_iter
        self._alpha, self._scale = head.alpha, head.scale
        self._auto = config.projection_args.get("scale", "auto") == "auto"
        self._alphas = alpha_ramp(**config.alpha_update) if config.alpha_update else None
        self._scales = scale_ramp(**config.scale_update) if config.scale_update else None
        self.narrowing = 1.0

    def step(self, iteration: int) -> None:
        """Set both for optimiser step ``iteration`` (from 0)."""
        epoch = iteration / self._epoch_iter
        alpha = self._alpha if self._alphas is None else self._alphas.at(epoch)
        scale = auto_scale(alpha) if self._auto else self._scale
        if self._scales is not None:
            scale = self._scales.at(epoch)
        self._head.update_alpha(1 + self.narrowing * (alpha - 1), scale)
