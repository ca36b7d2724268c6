"""The Q-Margin head: cosine scores, the margin in the reference measure, running statistics.

Meets WeSpeaker's contract for a projection: ``weight`` is (num_class, embed_dim),
``update(margin)`` and ``.margin`` serve the margin scheduler, ``forward(input, label)`` returns
(scores, loss).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wespeaker_qmargin.functional import q_margin_per_sample, zero_loss_gap

# s (alpha - 1) = 5 has the smallest zero-loss gap at m = 0.2, and holds for all three pairs that
# the Odyssey 2026 paper recommends: (20, 1.25), (10, 1.5), (5, 2).
_AUTO_PRODUCT = 5.0
_AUTO_CEILING = 32.0


def auto_scale(alpha: float) -> float:
    """Return the scale that ``scale="auto"`` stands for: ``min(32, 5 / (alpha - 1))``."""
    if alpha <= 1:
        return _AUTO_CEILING
    return min(_AUTO_CEILING, _AUTO_PRODUCT / (alpha - 1))


class QMarginProduct(nn.Module):
    """Cosine classifier trained with the Q-Margin loss.

    Equals, with ``theta = scale * cos(input, weight)`` and ``q_label = exp(-scale * margin)``,
    ``q_j = 1`` otherwise::

        loss = mean over the batch of the alpha-divergence Fenchel-Young loss of (theta, q)

    ``alpha = 1`` is CosFace (WeSpeaker's ``AddMarginProduct`` followed by cross-entropy).

    Args:
        in_features: embedding size D.
        out_features: number of classes C.
        alpha: in [1, 2]; above 1 the posterior has exact zeros.
        scale: of the cosines, > 0; ``"auto"`` is ``min(32, 5 / (alpha - 1))``.
        margin: >= 0, in cosine units; a margin scheduler changes it by ``update``.

    References:
        Koutsianos, Mošner, Panagakis, Stafylakis, "Sparsity-Inducing Divergence Losses for
        Biometric Verification", arXiv 2606.31664, 2026.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        alpha: float = 1.5,
        scale: float | str = "auto",
        margin: float = 0.2,
    ):
        super().__init__()
        alpha = float(alpha)
        if not 1 <= alpha <= 2:
            raise ValueError(f"alpha must be in [1, 2] (1 is CosFace, 2 the sparsest), got {alpha}")
        scale = auto_scale(alpha) if scale == "auto" else _positive("scale", scale)
        self.in_features = in_features
        self.out_features = out_features
        self.alpha = alpha
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.update(margin)
        self.reset_statistics()

    def update(self, margin: float = 0.2) -> None:
        """Set the margin; WeSpeaker's margin scheduler calls this before every step."""
        margin = float(margin)
        if not (math.isfinite(margin) and margin >= 0):
            raise ValueError(f"margin must be a finite number >= 0, got {margin}")
        self.margin = margin

    def forward(self, input: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(scores, loss)`` for embeddings (B, D) and labels (B,).

        ``scores`` (B, C) are the scaled cosines without margin, float32 also under autocast (the
        margin is in q, so they are what accuracy is to be read from); ``loss`` is a scalar.
        """
        # half-precision cosines would move the thresholds, so autocast stays out
        with torch.autocast(input.device.type, enabled=False):
            dtype = torch.promote_types(
                torch.promote_types(input.dtype, torch.float32), torch.float32
            )
            cosines = F.linear(F.normalize(input.to(dtype)), F.normalize(self.weight.to(dtype)))
            scores = self.scale * cosines
            loss, support, active = q_margin_per_sample(
                scores, label, alpha=self.alpha, log_q_target=-self.scale * self.margin
            )
        if self.training:
            self._count(scores, label, support, active)
        return scores, loss.mean()

    @torch.no_grad()
    def _count(self, scores: Tensor, label: Tensor, support: Tensor, active: Tensor) -> None:
        correct = scores.argmax(dim=1) == label
        counts = torch.stack(
            [correct.sum(), active.sum(), support.sum(), torch.ones_like(label).sum()]
        )
        self._totals = counts if self._totals is None else self._totals + counts

    def reset_statistics(self) -> None:
        """Forget the running statistics."""
        # A plain attribute: a buffer would be overwritten by rank 0's at every DDP forward.
        self._totals = None

    def statistics(self) -> dict[str, float]:
        """Return means over the training samples seen since the last ``reset_statistics``.

        ``accuracy`` of the scores without margin; ``active``, the share of samples with a non-zero
        gradient; ``support``, the mean number of classes with p > 0; ``samples``, their count.
        """
        correct, active, support, samples = (
            (0, 0, 0, 0) if self._totals is None else self._totals.tolist()
        )
        if samples == 0:
            nan = float("nan")
            return {"accuracy": nan, "active": nan, "support": nan, "samples": 0}
        return {
            "accuracy": correct / samples,
            "active": active / samples,
            "support": support / samples,
            "samples": samples,
        }

    def extra_repr(self) -> str:
        gap = zero_loss_gap(alpha=self.alpha, scale=self.scale, margin=self.margin)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"alpha={self.alpha:g}, scale={self.scale:g}, margin={self.margin:g}, "
            f"zero_loss_gap={gap:.3f}"
        )


def _positive(name: str, value) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f'{name} must be a number > 0 or "auto", got {value!r}') from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f'{name} must be a finite number > 0 or "auto", got {value!r}')
    return number
