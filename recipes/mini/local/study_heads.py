"""A head that the study compares Q-Margin with, for ``project_type: study_heads:LogitMargin``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wespeaker_qmargin import q_margin_loss


class LogitMargin(nn.Module):
    """The alpha-loss with the margin on the target's logit, as CosFace has it, and q = 1.

    At alpha 1 that is Q-Margin, too (and CosFace); for alpha > 1 it is another loss.

    Args:
        in_features, out_features: D, C.  alpha: in [1, 2].  scale: s, of the cosines.
    """

    def __init__(
        self, in_features: int, out_features: int, *, alpha: float = 1.5, scale: float = 10.0
    ):
        super().__init__()
        self.alpha, self.scale, self.margin = alpha, scale, 0.0
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)

    def update(self, margin: float = 0.2) -> None:
        """Set the margin."""
        self.margin = margin

    def forward(self, input: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (B, C) without margin, and the mean loss."""
        scores = self.scale * F.linear(F.normalize(input), F.normalize(self.weight))
        margins = self.scale * self.margin * F.one_hot(label, scores.shape[1])
        return scores.detach(), q_margin_loss(scores - margins, label, alpha=self.alpha)
