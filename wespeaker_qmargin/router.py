"""What a mixture of experts may be, and the losses that keep its router even and small.

T tokens, N experts, k of them a token; r = W x the router's logits (T, N), p = softmax r.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GATES = ("softmax", "logits")


def mean_square(logits: Tensor) -> Tensor:
    """FaceMoE's z loss, ``mean_tn r_tn^2`` of logits (T, N); 0 for no token.

    Reference: "FaceMoE", ECCV 2026, arXiv 2606.32040.
    """
    return logits.square().sum() / max(logits.numel(), 1)


def mean_logsumexp_square(logits: Tensor) -> Tensor:
    """ST-MoE's z loss, ``mean_t (log sum_n exp r_tn)^2`` of logits (T, N); 0 for no token.

    Reference: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return logits.logsumexp(dim=1).square().sum() / max(len(logits), 1)


def facemoe_balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """``N / T^2 sum_n (sum_t p_tn) (sum_t 1[n in top-k of t])``: k at uniform load, at most N.

    Args:
        probabilities: p, (T, N).
        chosen: (T, k) indices of the experts.

    Reference: "FaceMoE", ECCV 2026, arXiv 2606.32040; T is its B T.
    """
    tokens, experts = probabilities.shape
    load = torch.bincount(chosen.flatten(), minlength=experts)
    return experts * (probabilities.sum(dim=0) * load).sum() / max(tokens, 1) ** 2


def switch_balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """``N sum_n f_n P_n``: f_n the share of all choices that fell on n, P_n its mean p; 1 if even.

    Reference: Fedus et al. 2022, "Switch transformers", equation 4, with k choices a token.
    """
    return facemoe_balance(probabilities, chosen) / chosen.shape[1]


class RouterLosses(NamedTuple):
    """A z loss of the logits and a balance loss, with the weights of their paper."""

    z: Callable[[Tensor], Tensor]
    balance: Callable[[Tensor, Tensor], Tensor]
    z_weight: float
    balance_weight: float

    def total(self, logits: Tensor, probabilities: Tensor, chosen: Tensor, options) -> Tensor:
        """Return their weighted sum; ``options.z_loss``, ``balance_loss`` go before the paper's."""
        z = self.z_weight if options.z_loss is None else options.z_loss
        balance = self.balance_weight if options.balance_loss is None else options.balance_loss
        return z * self.z(logits) + balance * self.balance(probabilities, chosen)


ROUTER_LOSSES = {
    "facemoe": RouterLosses(mean_square, facemoe_balance, 10.0, 10.0),
    "switch": RouterLosses(mean_logsumexp_square, switch_balance, 1e-3, 1e-2),
}


@dataclass(frozen=True)
class MoEOptions:
    """What a mixture of experts is; the keys of ``moe:`` in a YAML.

    Args:
        experts, top_k: N, and k, 1 to N. In FaceMoE N = 3, k = 2 was best, and N = 8 collapsed.
        layers: which blocks of an encoder have one: ``all``, ``lastM``, or indices from 0.
        gates: ``softmax`` over the selected; ``logits``: their raw logits, as the released code of
            FaceMoE has it, which changes the function of an upcycled network.
        losses: ``facemoe`` or ``switch``, of `ROUTER_LOSSES`.
        z_loss, balance_loss: their weights >= 0; None: those of their paper.
        jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter).
        reinit: share in [0, 1) of the hidden units that every expert draws anew, as equal experts
            give the router no gradient of the task; 0 keeps the function of what is upcycled.

    Raises:
        ValueError: an option out of range.
    """

    experts: int = 3
    top_k: int = 2
    layers: str | Sequence[int] = "all"
    gates: str = "softmax"
    losses: str = "facemoe"
    z_loss: float | None = None
    balance_loss: float | None = None
    jitter: float = 0.0
    reinit: float = 0.0

    def __post_init__(self):
        for name in ("experts", "top_k"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"moe.{name}: expected a number >= 1, got {value!r}")
        if self.top_k > self.experts:
            count = self.experts
            raise ValueError(f"moe.top_k: {self.top_k} of {count} experts; expected 1 to {count}")
        for name, known in (("gates", GATES), ("losses", ROUTER_LOSSES)):
            if getattr(self, name) not in known:
                found = getattr(self, name)
                raise ValueError(f"moe.{name}: expected {' or '.join(known)}, got {found!r}")
        for name in ("z_loss", "balance_loss"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise ValueError(f"moe.{name}: expected a number >= 0, got {value!r}")
        for name in ("jitter", "reinit"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < 1):
                raise ValueError(f"moe.{name}: expected a number in [0, 1), got {value!r}")
