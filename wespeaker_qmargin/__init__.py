"""Q-Margin, a sparse alpha-divergence margin loss, as a head for WeSpeaker.

Importing this loads torch and nothing else; WeSpeaker itself is imported by ``register``.
"""

from wespeaker_qmargin.adapter import register, unregister
from wespeaker_qmargin.functional import alpha_softargmax, q_margin_loss, zero_loss_gap
from wespeaker_qmargin.head import QMarginProduct

__version__ = "0.1.0"
__all__ = [
    "QMarginProduct",
    "alpha_softargmax",
    "q_margin_loss",
    "register",
    "unregister",
    "zero_loss_gap",
]
