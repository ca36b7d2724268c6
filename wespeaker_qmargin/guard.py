"""What stops a training run, or turns it: a loss that is not finite, too many files that cannot be
used, too few samples that still have a gradient; and an expert that gets no tokens is told.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from wespeaker_qmargin.functional import zero_loss_gap
from wespeaker_qmargin.moe import collapsed, count_usage, summary, usage

logger = logging.getLogger(__name__)


class LossGuard:
    """Remembers the last batch and raises if its loss is not finite.

    ``check`` is called one batch later, when a GPU has finished it (so nothing waits), and before
    anything is saved.
    """

    def __init__(self):
        self._last = None

    def watch(self, loss: Tensor, support: Tensor, keys: list[str], where: str) -> None:
        """Remember a batch: mean loss, support (B,), keys; ``where`` is said in the error.

        ``support`` counts the classes with p > 0: none, where the loss is not finite.
        """
        self._last = (loss.detach(), support, keys, where)

    def check(self) -> None:
        """Raise ValueError if the loss that was watched last is not finite."""
        if self._last is None:
            return
        loss, support, keys, where = self._last
        self._last = None
        if torch.isfinite(loss):
            return
        rows = (support == 0).nonzero().flatten().tolist()
        named = [keys[row] for row in rows] or list(keys)
        raise ValueError(
            f"the loss is {loss.item()} at {where}; utterances {', '.join(named[:8])}"
            f"{', ...' if len(named) > 8 else ''}. Nothing was saved since. Lower the learning "
            "rate, set clip_grad_norm, or look at this audio; --resume goes on from the last state"
        )


ACTIONS = ("warn", "widen", "stop")
_NARROWEST = 0.02  # alpha - 1 below which widening is over: nearly CosFace


class StarvationGuard:
    """Sees that enough samples have a gradient; acts at most once an epoch.

    Args:
        schedules: has ``ramps``, whose ``narrowing`` ``widen`` halves: alpha nearer to 1 at the
            same scale, so that the zero-loss gap ``exp(k m) / k`` grows (s 10, m 0.2: from 0.544 at
            alpha 1.5 to 0.659 at 1.25).
        min_active: smallest share of active samples, in (0, 1).
        action: ``warn``, ``widen`` or ``stop``.
    """

    def __init__(self, schedules, *, min_active: float = 0.2, action: str = "warn"):
        if not 0 < min_active < 1:
            raise ValueError(f"starvation.min_active: expected a share in (0, 1), got {min_active}")
        if action not in ACTIONS:
            raise ValueError(
                f"starvation.action: expected one of {', '.join(ACTIONS)}, got {action!r}"
            )
        self._schedules, self._least, self._action = schedules, min_active, action
        self._epoch = None

    def starves(self, active: float, head, epoch: int) -> bool:
        """Take the active share of an interval, warn or widen; return whether to stop."""
        if active >= self._least or self._epoch == epoch:
            return False
        self._epoch = epoch
        logger.warning(
            "epoch %d: only %.1f %% of the samples have a gradient, less than "
            "starvation.min_active %g: the others are won (zero-loss gap %.3f)",
            epoch,
            100 * active,
            self._least,
            _gap(head),
        )
        if self._action == "widen":
            self._widen(head)
        return self._action == "stop"

    def _widen(self, head) -> None:
        ramps = self._schedules.ramps
        if (head.alpha - 1) / 2 < _NARROWEST:
            logger.warning("alpha %g is nearly CosFace: not widened further", head.alpha)
            return
        ramps.narrowing /= 2
        head.update_alpha(1 + (head.alpha - 1) / 2, head.scale)
        logger.info("starvation: alpha is %g now, zero-loss gap %.3f", head.alpha, _gap(head))


def _gap(head) -> float:
    return zero_loss_gap(alpha=head.alpha, scale=head.scale, margin=head.margin)


class ExpertGuard:
    """Watches how evenly the experts of a network's mixtures are used; a collapse is told once."""

    def __init__(self, net):
        self._net, self._told = net, set()

    def start(self) -> None:
        """Begin an interval."""
        count_usage(self._net)

    def values(self) -> dict[str, float]:
        """Return the interval's `moe.summary` for the log, of this process's tokens."""
        found = usage(self._net)
        for layer, fault in collapsed(found).items():
            if layer not in self._told:
                self._told.add(layer)
                logger.warning("%s", fault)
        return summary(found)


class FileGuard:
    """Tells once of every training file that cannot be used, and raises when they are too many.

    Args:
        num_files: of the training list.
        max_bad_share: of them, in [0, 1]; one bad file alone never stops a run.
    """

    def __init__(self, num_files: int, max_bad_share: float):
        self._limit = max(max_bad_share * num_files, 1)
        self._share = max_bad_share
        self._seen: set[str] = set()
        self._broken: set[str] = set()

    def note(
        self, problems: list[str], too_short: list[str], bad_sources: Sequence[str] = ()
    ) -> None:
        """Take the ``key: path: reason`` lines of one batch; only ``problems`` are counted."""
        for problem in (*problems, *too_short, *bad_sources):
            if problem not in self._seen:
                self._seen.add(problem)
                logger.warning("not used: %s", problem)
        self._broken.update(problems)
        if len(self._broken) > self._limit:
            raise ValueError(
                f"{len(self._broken)} files of the training list cannot be used, more than "
                f"dataset_args.max_bad_share {self._share} allows; one: {min(self._broken)}"
            )
