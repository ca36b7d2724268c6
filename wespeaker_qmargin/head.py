"""The Q-Margin head: cosine scores, the margin in the reference measure, running statistics.

Meets WeSpeaker's contract for a projection: ``weight`` is (num_class, embed_dim),
``update(margin)`` and ``.margin`` serve the margin scheduler, ``forward(input, label)`` returns
(scores, loss). ``loss(input, label)`` does without the scores.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wespeaker_qmargin.choice import fastest, rule
from wespeaker_qmargin.functional import q_margin_per_sample, zero_loss_gap
from wespeaker_qmargin.sparse import Statistics, sparse_q_margin

IMPLS = ("auto", "dense", "streaming", "top_k")

# s (alpha - 1) = 5 has the smallest zero-loss gap at m = 0.2, and holds for all three pairs that
# the Odyssey 2026 paper recommends: (20, 1.25), (10, 1.5), (5, 2).
_AUTO_PRODUCT = 5.0
_AUTO_CEILING = 32.0
_DENSE_ONLY = "impl top_k and sparse_grad need alpha > 1: at 1 all classes are active"


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
        impl: how the loss is computed; all give the same numbers. ``"dense"`` holds the B x C
            scores; ``"streaming"`` passes over the classes in chunks and holds only the pairs that
            can be active; ``"top_k"`` screens the best ``top_k`` rivals of every sample, and twice
            as many where they do not suffice. ``"auto"``: on a CPU dense or streaming by
            `choice.rule`, a measured one; on another device whichever is the fastest when it is
            first run there (so that there another process may choose another).
        top_k: of that impl, >= 1.
        sparse_grad: give ``weight`` a row-sparse gradient (for ``LazySGD``; torch's SGD and
            SparseAdam take it too). Not for the dense impl, nor for alpha = 1.
        mixed_precision: under autocast, let the products that decide which classes are kept run in
            its dtype. Loss and gradient stay float32, of the exact scores (but for alpha = 1).

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
        impl: str = "auto",
        top_k: int = 64,
        sparse_grad: bool = False,
        mixed_precision: bool = False,
    ):
        super().__init__()
        alpha, scale = _alpha_and_scale(alpha, scale)
        if impl not in IMPLS:
            raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k must be an integer >= 1, got {top_k!r}")
        if alpha == 1 and (impl == "top_k" or sparse_grad):
            raise ValueError(_DENSE_ONLY)
        if impl == "dense" and sparse_grad:
            raise ValueError("sparse_grad: the dense impl has a dense gradient; use another impl")
        self.in_features = in_features
        self.out_features = out_features
        self.alpha = alpha
        self.scale = scale
        self.impl = impl
        self.top_k = top_k
        self.sparse_grad = sparse_grad
        self.mixed_precision = mixed_precision
        self._fastest: dict = {}
        self._init_weight()
        self.update(margin)
        self.reset_statistics()

    def _init_weight(self) -> None:
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features))
        nn.init.xavier_uniform_(self.weight)

    def update(self, margin: float = 0.2) -> None:
        """Set the margin; WeSpeaker's margin scheduler calls this before every step."""
        margin = float(margin)
        if not (math.isfinite(margin) and margin >= 0):
            raise ValueError(f"margin must be a finite number >= 0, got {margin}")
        self.margin = margin

    def update_alpha(self, alpha: float, scale: float | str = "auto") -> None:
        """Set alpha and scale, as the constructor does; for a schedule of both."""
        alpha, scale = _alpha_and_scale(alpha, scale)
        if alpha == 1 and (self.impl == "top_k" or self.sparse_grad):
            raise ValueError(_DENSE_ONLY)
        if (alpha == 1) != (self.alpha == 1):
            self._fastest.clear()  # other forms are the fastest
        self.alpha, self.scale = alpha, scale

    def forward(self, input: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(scores, loss)`` for embeddings (B, D) and labels (B,): WeSpeaker's contract.

        ``scores`` (B, C) are the scaled cosines without margin, float32 also under autocast (the
        margin is in q, so they are what accuracy is to be read from), and carry no gradient;
        ``loss`` is a scalar. Where nobody needs the scores, ``loss`` is cheaper.
        """
        if self._impl(input, label) == "dense":
            scores, loss, statistics = self._dense(input, label)
            if self.training:
                self._count(statistics)
            return scores.detach(), loss.mean()
        loss, _ = self.loss(input, label)
        with torch.no_grad():
            return self._scores(input), loss

    def loss(self, input: Tensor, label: Tensor) -> tuple[Tensor, Statistics]:
        """Return ``(loss, statistics)`` of embeddings (B, D) and labels (B,).

        ``loss`` is the scalar of ``forward``, ``statistics`` say of each sample what a training log
        needs (`Statistics`). Nothing of the size B x C is held, but for the dense impl.
        """
        impl = self._impl(input, label)
        if impl == "dense":
            _, loss, statistics = self._dense(input, label)
        else:
            loss, statistics = self._sparse(input, label, impl)
        if self.training:
            self._count(statistics)
        return loss.mean(), statistics

    def _impl(self, input: Tensor, label: Tensor) -> str:
        if self.impl != "auto":
            return self.impl
        if self.sparse_grad:
            return "streaming"
        if input.device.type == "cpu":
            size = {"num_class": self.out_features, "dim": self.in_features}
            return rule(**size, alpha=self.alpha, scale=self.scale)
        key = input.device, len(label).bit_length()  # a last, shorter batch is not timed anew
        if key not in self._fastest:
            self._fastest[key] = self._time_impls(input.detach(), label)
        return self._fastest[key]

    def _time_impls(self, input: Tensor, label: Tensor) -> str:
        input = input.clone().requires_grad_()

        @torch.enable_grad()
        def run(impl):
            if impl == "dense":
                loss = self._dense(input, label)[1]
            else:
                loss = self._sparse(input, label, impl)[0]
            torch.autograd.grad(loss.sum(), [input, self.weight])

        impls = ("dense", "streaming", "top_k") if self.alpha > 1 else ("dense", "streaming")
        size = {"rows": len(label), "num_class": self.out_features}
        return fastest(run, impls, **size, device=input.device)

    def _dense(self, input: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Statistics]:
        scores = self._scores(input)
        loss, support, active = q_margin_per_sample(
            scores, label, alpha=self.alpha, log_q_target=-self.scale * self.margin
        )
        with torch.no_grad():
            reached = scores >= scores.gather(1, label.long().unsqueeze(1))
            correct = (reached.sum(1) == 1) & loss.isfinite()
        return scores, loss, Statistics(support, active, correct, 0)

    def _sparse(self, input: Tensor, label: Tensor, impl: str) -> tuple[Tensor, Statistics]:
        return sparse_q_margin(
            input,
            self.weight,
            label,
            alpha=self.alpha,
            scale=self.scale,
            margin=self.margin,
            top_k=self.top_k if impl == "top_k" else None,
            sparse_grad=self.sparse_grad,
            compute_dtype=self._compute_dtype(input.device),
        )

    def _compute_dtype(self, device: torch.device) -> torch.dtype | None:
        if not (self.mixed_precision and torch.is_autocast_enabled(device.type)):
            return None
        return torch.get_autocast_dtype(device.type)

    def _scores(self, input: Tensor) -> Tensor:
        # half-precision cosines would move the thresholds, so autocast stays out
        with torch.autocast(input.device.type, enabled=False):
            dtype = torch.promote_types(
                torch.promote_types(input.dtype, self.weight.dtype), torch.float32
            )
            cosines = F.linear(F.normalize(input.to(dtype)), F.normalize(self.weight.to(dtype)))
            return self.scale * cosines

    @torch.no_grad()
    def _count(self, statistics: Statistics) -> None:
        support, active, correct, doublings = statistics
        totals = torch.stack([correct.sum(), active.sum(), support.sum()])
        self._totals = totals if self._totals is None else self._totals + totals
        self._samples += len(support)
        self._doublings += doublings

    def reset_statistics(self) -> None:
        """Forget the running statistics."""
        # A plain attribute: a buffer would be overwritten by rank 0's at every DDP forward.
        self._totals, self._samples, self._doublings = None, 0, 0

    def statistics(self) -> dict[str, float]:
        """Return means over the training samples seen since the last ``reset_statistics``.

        ``accuracy`` of the scores without margin; ``active``, the share of samples with a non-zero
        gradient; ``support``, the mean number of classes with p > 0; ``samples``, their count;
        ``doublings`` of ``top_k``, how many in all.
        """
        totals = [math.nan] * 3 if self._totals is None else self._totals.tolist()
        means = [total / max(self._samples, 1) for total in totals]
        means = dict(zip(("accuracy", "active", "support"), means))
        return {**means, "samples": self._samples, "doublings": self._doublings}

    def extra_repr(self) -> str:
        gap = zero_loss_gap(alpha=self.alpha, scale=self.scale, margin=self.margin)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"alpha={self.alpha:g}, scale={self.scale:g}, margin={self.margin:g}, "
            f"impl={self.impl}, zero_loss_gap={gap:.3f}"
        )


def _alpha_and_scale(alpha, scale) -> tuple[float, float]:
    alpha = float(alpha)
    if not 1 <= alpha <= 2:
        raise ValueError(f"alpha must be in [1, 2] (1 is CosFace, 2 the sparsest), got {alpha}")
    return alpha, auto_scale(alpha) if scale == "auto" else _positive("scale", scale)


def _positive(name: str, value) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f'{name} must be a number > 0 or "auto", got {value!r}') from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f'{name} must be a finite number > 0 or "auto", got {value!r}')
    return number
