"""The Q-Margin of a cosine head in the memory of its active pairs, exact at any number of classes.

    embeddings (B, d)     prototypes (C, d)     labels (B,)     scores (B, C) = scale * cosine

The posterior is sparse: a class far below the best one has p = 0 exactly. So nothing of size B x C
is held, and backward has no product of that size. Each step is a function of its own, so that
another form (classes spread over ranks) can exchange its findings between them:

    screen           keeps the (row, class) pairs that may be active, with their exact scores
    solve_pairs      loss and p - e_y of the kept pairs, by `q_margin_per_sample`
    pair_gradients   of embeddings and prototypes, from the support alone
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from wespeaker_qmargin.functional import (
    _as_log_q,
    _check_alpha,
    _check_first_derivative,
    _check_labels,
    q_margin_per_sample,
)
from wespeaker_qmargin.screen import (
    EPS,
    Plan,
    by_length,
    default_chunk,
    norm,
    score_chunks,
    score_pairs,
    screen,
    screen_top_k,
)


class Statistics(NamedTuple):
    """What a training log needs of each sample; none has a gradient.

    support (B,) int64: classes with p > 0.  active (B,) bool: the gradient is not zero.  correct
    (B,) bool: no other class's score reaches the target's (accuracy without margin; a tie is an
    error).  doublings: how often ``top_k`` was doubled for some row. 0 and False where the loss is
    NaN.
    """

    support: torch.Tensor
    active: torch.Tensor
    correct: torch.Tensor
    doublings: int


def sparse_q_margin(
    embeddings,
    prototypes,
    labels,
    *,
    alpha,
    scale,
    margin,
    top_k=None,
    chunk_size=None,
    sparse_grad=False,
    compute_dtype=None,
):
    """Return (loss (B,), `Statistics`) of a cosine head without ever holding its B x C scores.

    Equals, in the loss and in the gradients of embeddings and prototypes::

        scores = scale * F.linear(F.normalize(embeddings), F.normalize(prototypes))
        q_margin_per_sample(scores, labels, alpha=alpha, log_q_target=-scale * margin)

    Args:
        embeddings: (B, d) floating point.  prototypes: (C, d).  labels: (B,) integers in [0, C).
        alpha: float in [1, 2]. The nearer to 1, the less is sparse; at 1 (CosFace) the prototypes
            are streamed again in backward, and memory is that of one chunk.
        scale: of the cosines, > 0.  margin: in cosines.
        top_k: None, or K: keep the K best rivals of every row. Exact as well: where the K-th may
            be active, the row is screened again with twice K.
        chunk_size: classes at a time; None: `default_chunk`. It does not change the result.
        sparse_grad: give the prototypes a COO gradient of the active rows, sorted and each once
            (for SGD, SparseAdam), instead of a dense one.
        compute_dtype: of the products, such as torch.bfloat16; None: float32 (float64 for
            float64). They decide what is kept, so it does not change the result (at alpha = 1 it
            does).

    Returns:
        loss (B,) float32 (float64 if an input is float64), under autocast too. An embedding with
        NaN or inf has NaN loss, and NaN gradients for itself and its target's prototype alone (at
        alpha = 1 for all prototypes); a prototype with NaN or inf gives NaN everywhere. Rows of
        zeros are as in F.normalize.

    Raises:
        ValueError: an argument outside its range or of another shape or dtype, a label outside
            [0, C), top_k or sparse_grad at alpha = 1.

    References: Koutsianos et al. 2026, for the top-K rule; Wijmans et al., Cut Your Losses in
    Large-Vocabulary Language Models, ICLR 2025, for the streamed softmax.
    """
    _check_alpha(alpha)
    _check_inputs(embeddings, prototypes, labels)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be > 0 and finite, got {scale}")
    if alpha == 1 and (top_k is not None or sparse_grad):
        raise ValueError("top_k and sparse_grad need alpha > 1: at 1 every class is active")
    dtype, num_class = _work_dtype(embeddings, prototypes), len(prototypes)
    if chunk_size is None:
        chunk_size = default_chunk(*embeddings.shape, dtype, embeddings.device)
    plan = Plan(
        alpha=float(alpha),
        scale=float(scale),
        log_q=_as_log_q(-float(scale) * float(margin), None, alpha - 1),
        chunk_size=_count("chunk_size", chunk_size, num_class),
        compute_dtype=_compute_dtype(compute_dtype, dtype),
        top_k=None if top_k is None else _count("top_k", top_k, num_class),
    )
    inputs = embeddings, prototypes, labels.long(), plan
    if alpha == 1:
        loss, *statistics = StreamedSoftmax.apply(*inputs)
    else:
        loss, *statistics = SparseQMargin.apply(*inputs, sparse_grad)
    return loss, Statistics(*statistics)


class SparseQMargin(torch.autograd.Function):
    """(loss, *`Statistics`) for alpha > 1; saves the inputs and p - e_y on the support."""

    @staticmethod
    def forward(ctx, embeddings, prototypes, labels, plan, sparse_grad):
        with torch.autocast(embeddings.device.type, enabled=False):
            queries, own = _queries(embeddings, prototypes, plan), _row_numbers(labels)
            target = score_pairs(queries, prototypes, own, labels)
            select = screen if plan.top_k is None else screen_top_k
            pairs, floor, doublings = select(queries, prototypes, labels, target, plan)
            target = target + floor * 0  # a NaN that was seen reaches the loss
            loss, statistics, slope = solve_pairs(target, pairs, plan)
        rows, classes = torch.cat([own, pairs.rows]), torch.cat([labels, pairs.classes])
        kept = (slope != 0).nonzero().squeeze(1)
        ctx.save_for_backward(embeddings, prototypes, rows[kept], classes[kept], slope[kept])
        ctx.scale, ctx.sparse_grad = plan.scale, sparse_grad
        ctx.mark_non_differentiable(*statistics)
        return loss, *statistics, doublings

    @staticmethod
    def backward(ctx, grad_loss, *_):
        _check_first_derivative()
        embeddings, prototypes, rows, classes, slope = ctx.saved_tensors
        weights = slope * (ctx.scale * grad_loss)[rows]
        grad, index, values = pair_gradients(embeddings, prototypes, rows, classes, weights)
        if not ctx.needs_input_grad[1]:
            full = None
        elif ctx.sparse_grad:
            full = torch.sparse_coo_tensor(
                index[None], values, prototypes.shape, is_coalesced=True, check_invariants=False
            )
        elif len(index) == len(prototypes):
            full = values
        else:
            full = torch.zeros_like(prototypes).index_copy_(0, index, values)
        return grad, full, None, None, None


class StreamedSoftmax(torch.autograd.Function):
    """(loss, *`Statistics`) for alpha = 1, a running log-sum-exp; backward streams once more."""

    @staticmethod
    def forward(ctx, embeddings, prototypes, labels, plan):
        with torch.autocast(embeddings.device.type, enabled=False):
            queries = _queries(embeddings, prototypes, plan)
            target = score_pairs(queries, prototypes, _row_numbers(labels), labels)
            total, best = target + plan.log_q, torch.full_like(target, -math.inf)
            for _, scores in score_chunks(queries, prototypes, labels, plan):
                total = torch.logaddexp(total, scores.flatten(0, 1).logsumexp(0))
                best = torch.maximum(best, scores.amax((0, 1)))
        loss = total - (target + plan.log_q)
        ctx.save_for_backward(embeddings, prototypes, labels, total, loss)
        ctx.plan = plan
        support = loss.isfinite() * len(prototypes)
        statistics = support, support > 1, target > best
        ctx.mark_non_differentiable(*statistics)
        return loss, *statistics, 0

    @staticmethod
    def backward(ctx, grad_loss, *_):
        _check_first_derivative()
        embeddings, prototypes, labels, total, loss = ctx.saved_tensors
        with torch.autocast(embeddings.device.type, enabled=False):
            queries, own = _queries(embeddings, prototypes, ctx.plan), _row_numbers(labels)
            grad, full = torch.zeros_like(queries), torch.empty_like(prototypes)
            for start, scores in score_chunks(queries, prototypes, labels, ctx.plan):
                chunk = prototypes[start : start + ctx.plan.chunk_size].to(queries.dtype)
                slope = scores.flatten(0, 1)[: len(chunk)].sub_(total).exp_()
                here = ((labels >= start) & (labels < start + len(chunk))).nonzero().squeeze(1)
                slope[labels[here] - start, own[here]] = (-loss[here]).expm1()
                slope.mul_(grad_loss)
                length = norm(chunk)
                grad.addmm_(slope.t(), chunk / length, alpha=ctx.plan.scale)
                full[start : start + len(chunk)] = _through_norm(slope @ queries, chunk, length)
            embeddings = embeddings.to(queries.dtype)
            return _through_norm(grad, embeddings, norm(embeddings)), full, None, None


def solve_pairs(target, pairs, plan):
    """Return (loss, (support, active, correct), slope) of targets (B,) and their rivals.

    slope (B + N,): d loss / d score, p - e_y, of the targets, then of the pairs.
    """
    size = len(target)
    loss, slope = torch.empty_like(target), target.new_zeros(size + len(pairs.rows))
    support = torch.empty(size, dtype=torch.long, device=target.device)
    active, correct = (torch.empty_like(support, dtype=torch.bool) for _ in range(2))
    for members, index, valid in by_length(pairs.rows, size):
        own = target[members].unsqueeze(1)
        rivals = pairs.scores[index].where(valid, -math.inf)
        with torch.enable_grad():
            table = torch.cat([own, rivals], 1).requires_grad_()
            value, support[members], active[members] = q_margin_per_sample(
                table, torch.zeros_like(members), alpha=plan.alpha, log_q_target=plan.log_q
            )
            (grad,) = torch.autograd.grad(value.sum(), table)
        loss[members] = value.detach()
        correct[members] = value.detach().isfinite() & (own > rivals).all(1)
        slope[members] = grad[:, 0]
        slope[size + index[valid]] = grad[:, 1:][valid]
    return loss, (support, active, correct), slope


def pair_gradients(embeddings, prototypes, rows, classes, weights):
    """Return the gradient of sum_n weights_n cos(embeddings[rows_n], prototypes[classes_n]).

    (grad, index, values): grad (B, d) of the embeddings; values (U, d) of the prototypes at
    ``index`` (U,), sorted; all others have none.
    """
    dtype = weights.dtype
    index, place = classes.unique(return_inverse=True)
    # one copy of the active prototypes, worked on in place: fresh memory costs more than the sums
    units, embeddings = prototypes[index].to(dtype), embeddings.to(dtype)
    length, own_length = norm(units), norm(embeddings)
    units.div_(length)
    own_units = embeddings / own_length
    grad = _weighted_sums(units, place, weights, rows, len(embeddings))
    values = _weighted_sums(own_units, rows, weights, place, len(index))
    grad = _off_units(grad, own_units, own_length)
    return grad, index, _off_units(values, units, length).to(prototypes.dtype)


def _weighted_sums(vectors, source, weights, target, size):
    """Return (size, d): sums of weights_n vectors[source_n] over the n of each target_n."""
    order = target.argsort(stable=True)
    first = torch.searchsorted(target[order], torch.arange(size, device=target.device))
    return F.embedding_bag(
        source[order], vectors, first, mode="sum", per_sample_weights=weights[order]
    )


def _through_norm(grad, vectors, length):
    """Return the gradient of vectors from ``grad``, that of vectors / length (`norm`)."""
    return _off_units(grad.clone(), vectors / length, length)


def _off_units(grad, units, length):
    """Turn ``grad``, that of units = vectors / length, into that of the vectors, in place."""
    with torch.autocast(grad.device.type, enabled=False):  # backward may be called under it
        along = torch.bmm(units.unsqueeze(1), grad.unsqueeze(2)).squeeze(2)
    along.masked_fill_(length <= EPS, 0)  # F.normalize divides these by a constant
    return grad.addcmul_(units, along, value=-1).div_(length)


def _queries(embeddings, prototypes, plan):
    """Return scale * unit embeddings, in the dtype of loss and scores."""
    queries = embeddings.to(_work_dtype(embeddings, prototypes))
    return queries * (plan.scale / norm(queries))


def _row_numbers(labels):
    return torch.arange(len(labels), device=labels.device)


def _work_dtype(embeddings, prototypes):
    dtype = torch.promote_types(embeddings.dtype, prototypes.dtype)
    return torch.promote_types(dtype, torch.float32)


def _compute_dtype(dtype, default):
    if dtype is None:
        return default
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"compute_dtype must be a floating-point torch dtype, got {dtype!r}")
    return dtype


def _count(name, number, most):
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be an integer >= 1 or None, got {number!r}")
    return min(number, most)


def _check_inputs(embeddings, prototypes, labels):
    for name, x in (("embeddings (B, d)", embeddings), ("prototypes (C, d)", prototypes)):
        if x.dim() != 2 or not x.is_floating_point() or x.shape[1] == 0:
            raise ValueError(f"expected floating-point {name}, got {x.dtype} {tuple(x.shape)}")
    if len(prototypes) == 0:
        raise ValueError("expected prototypes (C, d) of at least one class, got none")
    if embeddings.shape[1] != prototypes.shape[1]:
        found = f"{tuple(embeddings.shape)} and {tuple(prototypes.shape)}"
        raise ValueError(f"embeddings and prototypes must have the same d, got {found}")
    _check_labels(embeddings.new_empty(()).expand(len(embeddings), len(prototypes)), labels)
