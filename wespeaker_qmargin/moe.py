"""A mixture-of-experts feed-forward layer: a token-level router over copies of any FFN module.

T tokens of size D, N experts, k of them a token; r = W x the router's logits (T, N), p = softmax r.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wespeaker_qmargin.router import ROUTER_LOSSES, MoEOptions

COLLAPSED = 0.1  # of an even load


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
        feed_forward: module (T, D) -> (T, D) that treats every token alone; the experts are copies.
        dim: D.

    Attributes:
        valid: (B, T) which tokens are no padding, or None (all); set by `upcycle.watch_padding`.
            Padding takes part in no loss and no statistic.
        loss: weighted router losses of the last forward in training, or None.
        observer: called at every forward with p (T, N) and the choices (T, k), or None.

    References: Shazeer et al. 2017, "Outrageously large neural networks"; "FaceMoE", ECCV 2026,
    arXiv 2606.32040.
    """

    def __init__(self, feed_forward: nn.Module, dim: int, options: MoEOptions):
        super().__init__()
        self.experts = nn.ModuleList(copy.deepcopy(feed_forward) for _ in range(options.experts))
        self.router = nn.Linear(dim, options.experts, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        self.options, self.losses = options, ROUTER_LOSSES[options.losses]
        self.valid: Tensor | None = None
        self.loss: Tensor | None = None
        self.observer: Callable[[Tensor, Tensor], None] | None = None
        self._dropped: int | None = None
        self.draw_anew()

    @torch.no_grad()
    def draw_anew(self) -> None:
        """Draw a share ``reinit`` of every expert's hidden units, each expert its own.

        From normal distributions with the mean and deviation of the expert's two weights.
        Reference: Nakamura et al. 2025, "Drop-upcycling".
        """
        for expert in self.experts if self.options.reinit else ():
            first, last = (x for x in expert.children() if isinstance(x, nn.Linear))
            hidden = first.out_features
            drawn = torch.randperm(hidden)[: round(self.options.reinit * hidden)]
            units = drawn.to(first.weight.device)
            for weight in (first.weight, last.weight.T):
                mean, deviation = weight.mean().item(), weight.std().item()
                weight[units] = torch.empty_like(weight[units]).normal_(mean, deviation)

    def extra_repr(self) -> str:
        return str(self.options)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., D) for (..., D)."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = self._logits(tokens)
        top = logits.topk(min(self.options.top_k, len(self.experts) - (self._dropped is not None)))
        gates = top.values if self.options.gates == "logits" else top.values.softmax(dim=1)
        self._observe(logits, top.indices, hidden.shape[:-1])
        traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
        mix = self._mix_all if traced else self._mix_groups
        return mix(tokens, top.indices, gates).view_as(hidden)

    def _logits(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.float() if tokens.dtype != torch.float64 else tokens
            jitter = self.options.jitter
            if self.training and jitter:
                tokens = tokens * torch.empty_like(tokens).uniform_(1 - jitter, 1 + jitter)
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
            self.loss = self.losses.total(logits, probabilities, chosen, self.options)
        if self.observer is not None:
            self.observer(probabilities.detach(), chosen)


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
