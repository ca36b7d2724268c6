"""A mixture-of-experts feed-forward layer: a token-level router over copies of any FFN module.

T tokens of size D, N experts, k of them a token; r = W x the router's logits (T, N), p = softmax r.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

GATES = ("softmax", "logits")
COLLAPSED = 0.1  # of an even load


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


ROUTER_LOSSES = {
    "facemoe": RouterLosses(mean_square, facemoe_balance, 10.0, 10.0),
    "switch": RouterLosses(mean_logsumexp_square, switch_balance, 1e-3, 1e-2),
}


class Usage(NamedTuple):
    """What became of ``tokens`` tokens: ``load`` (N,) the share of their choices on each expert,
    ``importance`` (N,) the mean p, ``entropy`` the mean of p's entropy in nats."""

    tokens: int
    load: Tensor
    importance: Tensor
    entropy: float


class MoEFeedForward(nn.Module):
    """``y_t = sum_(n in top-k of t) g_tn expert_n(x_t)``; no token is dropped.

    The gates g are p over the k selected, so that they sum to one: experts that are equal make the
    layer equal to one of them. The router is a linear layer without bias, always in float32; with
    k = 1 its gate is 1, and it learns from its own losses alone.

    Args:
        experts: modules (T, D) -> (T, D) that treat every token alone.
        dim: D.
        top_k: k, 1 to N.
        gates: ``softmax`` over the selected; ``logits``: their raw logits, as the released code of
            FaceMoE has it, which changes the function of an upcycled network.
        losses: ``facemoe`` or ``switch``, of `ROUTER_LOSSES`.
        z_loss, balance_loss: their weights >= 0; None: those of their paper.
        jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter).
        reinit: share of the hidden units that `upcycle.draw_anew` draws for every expert.

    Attributes:
        valid: (B, T) which tokens are no padding, or None (all); set by `upcycle.watch_padding`.
            Padding takes part in no loss and no statistic.
        loss: weighted router losses of the last forward in training, or None.
        observer: called at every forward with p (T, N) and the choices (T, k), or None.

    Raises:
        ValueError: an option out of range.

    References: Shazeer et al. 2017, "Outrageously large neural networks"; "FaceMoE", ECCV 2026,
    arXiv 2606.32040.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        dim: int,
        *,
        top_k: int = 2,
        gates: str = "softmax",
        losses: str = "facemoe",
        z_loss: float | None = None,
        balance_loss: float | None = None,
        jitter: float = 0.0,
        reinit: float = 0.0,
    ):
        super().__init__()
        check_options(len(experts), top_k, gates, losses, z_loss, balance_loss, jitter, reinit)
        self.experts = nn.ModuleList(experts)
        self.router = nn.Linear(dim, len(experts), bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        self.top_k, self.gates, self.jitter, self.reinit = top_k, gates, jitter, reinit
        self.losses = ROUTER_LOSSES[losses]
        self.z_weight = self.losses.z_weight if z_loss is None else z_loss
        self.balance_weight = self.losses.balance_weight if balance_loss is None else balance_loss
        self.valid: Tensor | None = None
        self.loss: Tensor | None = None
        self._dropped: int | None = None
        self.observer: Callable[[Tensor, Tensor], None] | None = None

    def extra_repr(self) -> str:
        return (
            f"experts={len(self.experts)}, top_k={self.top_k}, gates={self.gates}, "
            f"z_loss={self.z_weight:g}, balance_loss={self.balance_weight:g}, jitter={self.jitter}"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., D) for (..., D)."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = self._logits(tokens)
        top = logits.topk(min(self.top_k, len(self.experts) - (self._dropped is not None)))
        gates = top.values if self.gates == "logits" else top.values.softmax(dim=1)
        self._observe(logits, top.indices, hidden.shape[:-1])
        traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
        mix = self._mix_all if traced else self._mix_groups
        return mix(tokens, top.indices, gates).view_as(hidden)

    def _logits(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.float() if tokens.dtype != torch.float64 else tokens
            if self.training and self.jitter:
                tokens = tokens * torch.empty_like(tokens).uniform_(
                    1 - self.jitter, 1 + self.jitter
                )
            logits = nn.functional.linear(tokens, self.router.weight.to(tokens.dtype))
        if self._dropped is not None:
            dropped = torch.tensor([self._dropped], device=logits.device)
            logits = logits.index_fill(1, dropped, -torch.inf)
        return logits

    def _mix_all(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Every expert of every token: a graph of fixed shapes, for what traces (ONNX, export)."""
        weights = gates.new_zeros(len(tokens), len(self.experts)).scatter(1, chosen, gates)
        mixed = sum(weights[:, n, None] * expert(tokens) for n, expert in enumerate(self.experts))
        return mixed.to(tokens.dtype)

    def _mix_groups(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Group the choices by expert; every expert is called, also with no token, so that its
        parameters have a gradient on every process."""
        choices = chosen.flatten()
        order = choices.argsort(stable=True)
        counts = torch.bincount(choices, minlength=len(self.experts)).tolist()
        token = order.div(chosen.shape[1], rounding_mode="floor")
        groups = tokens[token].split(counts)
        outputs = torch.cat([expert(group) for expert, group in zip(self.experts, groups)])
        weighted = outputs * gates.flatten()[order, None]
        mixed = weighted.new_zeros(tokens.shape).index_add_(0, token, weighted)
        return mixed.to(outputs.dtype)

    def _observe(self, logits: Tensor, chosen: Tensor, shape: torch.Size) -> None:
        """Keep the loss in training, and tell who observes."""
        if not self.training and self.observer is None:
            return
        if self.valid is not None and self.valid.shape == shape:
            valid = self.valid.flatten()
            logits, chosen = logits[valid], chosen[valid]
        probabilities = logits.softmax(dim=1)
        if self.training:
            self.loss = self.z_weight * self.losses.z(logits)
            self.loss = self.loss + self.balance_weight * self.losses.balance(probabilities, chosen)
        if self.observer is not None:
            self.observer(probabilities.detach(), chosen)


def check_options(experts, top_k, gates, losses, z_loss, balance_loss, jitter, reinit) -> None:
    """Raise ValueError for an option of `MoEFeedForward` that is out of range."""
    for name, value in (("experts", experts), ("top_k", top_k)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"moe.{name}: expected a number >= 1, got {value!r}")
    if top_k > experts:
        raise ValueError(f"moe.top_k: {top_k} of {experts} experts; expected 1 to {experts}")
    for name, value, known in (("gates", gates, GATES), ("losses", losses, ROUTER_LOSSES)):
        if value not in known:
            raise ValueError(f"moe.{name}: expected {' or '.join(known)}, got {value!r}")
    for name, value in (("z_loss", z_loss), ("balance_loss", balance_loss)):
        if value is not None and not (isinstance(value, int | float) and value >= 0):
            raise ValueError(f"moe.{name}: expected a number >= 0, got {value!r}")
    for name, value in (("jitter", jitter), ("reinit", reinit)):
        if not (isinstance(value, int | float) and 0 <= value < 1):
            raise ValueError(f"moe.{name}: expected a number in [0, 1), got {value!r}")


def moe_layers(net: nn.Module) -> dict[str, MoEFeedForward]:
    """Return name -> layer of every mixture of experts in ``net``."""
    return {name: m for name, m in net.named_modules() if isinstance(m, MoEFeedForward)}


def take_router_loss(net: nn.Module) -> Tensor | None:
    """Return the mean over layers of their router losses since the last call; None without any.

    Part of the training loss: call it after the forward, on every process.
    """
    losses = []
    for layer in moe_layers(net).values():
        if layer.loss is not None:
            losses.append(layer.loss)
            layer.loss = None
    return torch.stack(losses).mean() if losses else None


class UsageCounter:
    """An ``observer`` that sums what becomes of the tokens of a layer."""

    def __init__(self):
        self._sums: list[Tensor] | None = None

    def __call__(self, probabilities: Tensor, chosen: Tensor) -> None:
        p = probabilities.double()
        load = torch.bincount(chosen.flatten(), minlength=p.shape[1]).double()
        found = [load, p.sum(dim=0), torch.special.entr(p).sum(), load.new_tensor(len(p))]
        self._sums = [a + b for a, b in zip(self._sums, found)] if self._sums else found

    def usage(self) -> Usage | None:
        """Return the means; None where no token came."""
        if self._sums is None or not self._sums[-1]:
            return None
        load, importance, entropy, tokens = (x.cpu() for x in self._sums)
        return Usage(int(tokens), load / load.sum(), importance / tokens, (entropy / tokens).item())


def count_usage(net: nn.Module) -> None:
    """Begin to count what the layers of ``net`` do, anew."""
    for layer in moe_layers(net).values():
        layer.observer = UsageCounter()


def usage(net: nn.Module) -> dict[str, Usage]:
    """Return name -> what became of the tokens since `count_usage`, of layers that saw some."""
    found = {name: layer.observer.usage() for name, layer in moe_layers(net).items()}
    return {name: x for name, x in found.items() if x is not None}


def summary(found: dict[str, Usage]) -> dict[str, float]:
    """Return how even the experts are used, of the least even layer, for a training log.

    ``least_load``: N times the smallest load, 1 at uniform load, 0 for an expert without a token;
    ``router_entropy``: the smallest entropy as a share of log N. Nothing for nothing.
    """
    if not found:
        return {}
    shares = [x.entropy / math.log(len(x.load)) for x in found.values() if len(x.load) > 1]
    return {
        "least_load": min(len(x.load) * x.load.min().item() for x in found.values()),
        "router_entropy": min(shares, default=1.0),
    }


def collapsed(found: dict[str, Usage]) -> dict[str, str]:
    """Return layer -> what is wrong, where an expert has less than a tenth of an even load."""
    faults = {}
    for name, (tokens, load, _, _) in found.items():
        least = int(load.argmin())
        if tokens and load[least] * len(load) < COLLAPSED:
            faults[name] = (
                f"expert {least} of {name} gets {100 * load[least]:.2g} % of the choices of "
                f"{tokens} tokens ({100 / len(load):.0f} % would be even): raise balance_loss, or "
                "take fewer experts"
            )
    return faults


@contextmanager
def without_expert(layer: MoEFeedForward, expert: int) -> Iterator[None]:
    """Route no token to ``expert`` inside the block; with k = N each token has one choice less."""
    if len(layer.experts) < 2 or not 0 <= expert < len(layer.experts):
        raise ValueError(f"cannot do without expert {expert} of {len(layer.experts)}")
    layer._dropped = expert
    try:
        yield
    finally:
        layer._dropped = None
