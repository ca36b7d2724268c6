"""How far samples lead their best rivals, and what a grid of (alpha, scale, margin) makes of it.

Each batch of embeddings meets all prototypes once. Kept are a few numbers of each sample, and sums
and a histogram of each cell of the grid; nothing grows with samples x classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wespeaker_qmargin.functional import q_margin_per_sample
from wespeaker_qmargin.plan import Setting

_ELEMENTS = 2**22  # of the cosines that are held at a time
_PARTS = 200  # batches whose samples are kept apart
_HIGH = 0.95  # the percentile of the support


class Nearest(NamedTuple):
    """Of each sample (N,): label; cosines to the own and to the best rival's prototype; that rival.

    A rival is another speaker: the own speaker's copies at other speeds are none. They are in
    ``crowded``, the best cosine of any other class.
    """

    label: Tensor
    own: Tensor
    best: Tensor
    rival: Tensor
    crowded: Tensor

    @property
    def lead(self) -> np.ndarray:
        """Own cosine less the best rival's, float32 (N,)."""
        return (self.own - self.best).numpy()

    @property
    def crowded_lead(self) -> np.ndarray:
        """The same with the own speaker's copies among the rivals."""
        return (self.own - self.crowded).numpy()

    @staticmethod
    def join(parts: Sequence["Nearest"]) -> "Nearest":
        return Nearest(*(torch.cat([y.cpu() for y in x]) for x in zip(*parts)))


class Cell(NamedTuple):
    """What one setting does with the samples seen.

    won: share with exactly zero gradient, lead >= the gap; won_crowded: with the own copies as
    rivals.  support, support_high: mean and 95th percentile of the number of classes with p > 0.
    gradient: mean of g = |p - e_y|_2, that of the loss with respect to the scores, won samples (0)
    among them.  effective_share: (sum g)^2 / (N sum g^2), the share of a batch that its gradients
    are worth, at most 1 - won.
    """

    setting: Setting
    won: float
    won_crowded: float
    support: float
    support_high: int
    gradient: float
    effective_share: float

    @property
    def k(self) -> float:
        """scale (alpha - 1), which with the margin decides what is won."""
        return self.setting.scale * (self.setting.alpha - 1)


class GridStatistics:
    """Running statistics of samples under several settings of the loss.

    Args:
        prototypes: (C, D), of any length, no row zero.
        settings: of the loss.
        copies: classes a speaker has; class ``speed * C / copies + n`` is of speaker n.

    Raises:
        ValueError: fewer than two speakers.
    """

    def __init__(self, prototypes: Tensor, settings: Sequence[Setting], *, copies: int = 1):
        if len(prototypes) < 2 * copies:
            raise ValueError("expected prototypes of at least two speakers: one has no rival")
        self._units = F.normalize(prototypes.float())
        self._settings, self._copies = settings, copies
        num_class, device = len(prototypes), prototypes.device
        self._rows = max(1, _ELEMENTS // num_class)
        shape = len(settings), num_class + 1
        self._support = torch.zeros(shape, dtype=torch.int64, device=device)
        self._gradient = torch.zeros(len(settings), 2, dtype=torch.float64, device=device)
        self._parts: list[Nearest] = []

    @torch.no_grad()
    def add(self, embeddings: Tensor, labels: Tensor) -> None:
        """Take embeddings (B, D), finite, and labels (B,)."""
        for chunk in zip(embeddings.split(self._rows), labels.split(self._rows)):
            self._add(*chunk)

    def _add(self, embeddings: Tensor, labels: Tensor) -> None:
        cosines = F.linear(F.normalize(embeddings.float()), self._units)
        self._parts.append(nearest(cosines, labels, copies=self._copies))
        if len(self._parts) == _PARTS:  # many small tensors would fragment the memory
            self._parts = [Nearest.join(self._parts)]
        for number, setting in enumerate(self._settings):
            support, gradient = _support_and_gradient(cosines, labels, setting)
            self._support[number] += support.bincount(minlength=self._support.shape[1])
            powers = torch.stack([gradient, gradient.square()])
            self._gradient[number] += powers.double().sum(dim=1)

    def samples(self) -> Nearest:
        """Return what is kept of each sample, in the order in which they came.

        Raises:
            ValueError: there was none.
        """
        if not self._parts:
            raise ValueError("no sample could be used")
        return Nearest.join(self._parts)

    def cells(self, samples: Nearest) -> list[Cell]:
        """Return the statistics of every setting; ``samples`` is what ``samples()`` returned."""
        lead, crowded = samples.lead, samples.crowded_lead
        number = np.arange(self._support.shape[1])
        cells = []
        for setting, counts, (total, square) in zip(
            self._settings, self._support.cpu().numpy(), self._gradient.tolist()
        ):
            cells.append(
                Cell(
                    setting,
                    won=won_share(lead, setting.gap),
                    won_crowded=won_share(crowded, setting.gap),
                    support=float(counts @ number / len(lead)),
                    support_high=int(np.searchsorted(counts.cumsum(), _HIGH * len(lead))),
                    gradient=total / len(lead),
                    effective_share=total**2 / (len(lead) * square) if square else 0.0,
                )
            )
        return cells


def won_share(lead: np.ndarray, gap: float) -> float:
    """Return the share of samples whose lead is at least the zero-loss gap."""
    return float((lead >= gap).mean())


def nearest(cosines: Tensor, labels: Tensor, *, copies: int = 1) -> Nearest:
    """Return own and best rival's cosine of each row of ``cosines`` (B, C).

    The cosines to the own speaker's other copies become -inf in place: no class for the loss.
    """
    column = labels.unsqueeze(1)
    own = cosines.gather(1, column)
    cosines.scatter_(1, column, -torch.inf)
    crowded = cosines.amax(1)
    if copies > 1:
        num_speakers = cosines.shape[1] // copies
        speeds = num_speakers * torch.arange(copies, device=labels.device)
        cosines.scatter_(1, column % num_speakers + speeds, -torch.inf)
    best, rival = cosines.max(1)
    cosines.scatter_(1, column, own)
    return Nearest(labels, own.squeeze(1), best, rival, crowded)


@torch.enable_grad()
def _support_and_gradient(cosines: Tensor, labels: Tensor, setting: Setting):
    """Return (B,) each: classes with p > 0, |p - e_y|_2."""
    alpha, scale, margin, _ = setting
    scores = (scale * cosines).requires_grad_()
    loss, support, _ = q_margin_per_sample(
        scores, labels, alpha=alpha, log_q_target=-scale * margin
    )
    (slope,) = torch.autograd.grad(loss.sum(), scores)
    return support, torch.linalg.vector_norm(slope, dim=1)
