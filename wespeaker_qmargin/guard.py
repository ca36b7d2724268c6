"""What stops a training run: a loss that is not finite, too many files that cannot be used."""

import logging

import torch
from torch import Tensor

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

    def note(self, problems: list[str], too_short: list[str]) -> None:
        """Take the ``key: path: reason`` lines of one batch."""
        for problem in (*problems, *too_short):
            if problem not in self._seen:
                self._seen.add(problem)
                logger.warning("not used: %s", problem)
        self._broken.update(problems)
        if len(self._broken) > self._limit:
            raise ValueError(
                f"{len(self._broken)} files of the training list cannot be used, more than "
                f"dataset_args.max_bad_share {self._share} allows; one: {min(self._broken)}"
            )
