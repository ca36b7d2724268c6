"""The loss of a cosine head whose classes, and whose batch, are spread over ranks; exact.

    embeddings (B_r, d)  labels (B_r,)     this rank's samples, B in all
    prototypes (C_r, d)                    this rank's classes, C in all

    forward     1  gather the queries and labels of all samples          (B, d) and (B,)
                2  add up the targets' scores, of which a rank has its own          (B,)
                   screen the own classes
                3  take the highest threshold, drop the pairs under it              (B,)
                4  gather how many are left                                  (ranks, B)
                5  gather their scores; every rank solves the same small problem
    backward    6  gather the gradients of the losses                               (B,)
                7  add up the gradients of the embeddings                         (B, d)

Each number is one collective. For alpha = 1 a streamed log-sum-exp takes the place of 2 to 5, with
one collective. No prototype leaves its rank, nor does the number of a class: a pair is one score.

The gradients are those that DistributedDataParallel expects: of the embeddings, that of this rank's
own loss; of the prototypes, that of the mean over the ranks.
"""

import math
from typing import NamedTuple

import torch

from wespeaker_qmargin.functional import _check_first_derivative
from wespeaker_qmargin.ranks import Ranks
from wespeaker_qmargin.screen import (
    Pairs,
    Plan,
    norm,
    score_chunks,
    score_pairs,
    screen,
    screen_top_k,
)
from wespeaker_qmargin.sparse import _queries, _through_norm, _weighted_sums, solve_pairs


class Share(NamedTuple):
    """What a rank has of the work; ``counts``: how many samples every rank has."""

    plan: Plan
    ranks: Ranks
    counts: list[int]
    num_class: int
    first_class: int
    sparse_grad: bool

    @property
    def samples(self):
        """Return where this rank's samples are among all."""
        start = sum(self.counts[: self.ranks.rank])
        return slice(start, start + self.counts[self.ranks.rank])


class ShardedQMargin(torch.autograd.Function):
    """(loss, *`Statistics`) of this rank's samples for alpha > 1, as `SparseQMargin`."""

    @staticmethod
    def forward(ctx, embeddings, prototypes, labels, share):
        ranks, plan = share.ranks, share.plan
        with torch.autocast(embeddings.device.type, enabled=False):
            queries, labels = _gather_samples(embeddings, prototypes, labels, share)
            here = _targets_here(labels, prototypes)
            target = _own_targets(queries, prototypes, labels, here)
            target = ranks.add(target, "adding up the targets' scores")
            select = screen if plan.top_k is None else screen_top_k
            pairs, floor, doublings = select(queries, prototypes, labels, target, plan)
            floor, doublings = _highest_floor(floor, doublings, ranks)
            pairs = pairs.pick(pairs.scores >= floor[pairs.rows])
            pairs = pairs.pick(pairs.rows.argsort(stable=True))
            everyones, own = _exchange(pairs, len(target), ranks)
            target = target + floor * 0  # a NaN that some rank saw reaches the loss
            loss, statistics, slope = solve_pairs(target, everyones, plan)
        rows, classes = torch.cat([here, pairs.rows]), torch.cat([labels[here], pairs.classes])
        slope = torch.cat([slope[here], slope[len(target) :][own]])
        kept = slope.nonzero().squeeze(1)
        ctx.save_for_backward(
            embeddings, prototypes, queries, rows[kept], classes[kept], slope[kept]
        )
        ctx.share = share
        return _own_results(ctx, loss, statistics, doublings)

    @staticmethod
    def backward(ctx, grad_loss, *_):
        _check_first_derivative()
        embeddings, prototypes, queries, rows, classes, slope = ctx.saved_tensors
        share, full = ctx.share, None
        upstream = _upstream(grad_loss, share)
        index, place = classes.unique(return_inverse=True)
        vectors = prototypes[index].to(slope.dtype)
        length = norm(vectors)
        weights = slope * share.plan.scale  # which the queries have in them
        grad = _weighted_sums(vectors / length, place, weights, rows, len(queries))
        if ctx.needs_input_grad[1]:
            values = _weighted_sums(queries, rows, slope * upstream[rows], place, len(index))
            values = _through_norm(values, vectors, length).to(prototypes.dtype)
            if share.sparse_grad:
                full = torch.sparse_coo_tensor(
                    index[None], values, prototypes.shape, is_coalesced=True, check_invariants=False
                )
            else:
                full = torch.zeros_like(prototypes).index_copy_(0, index, values)
        return _own_gradient(grad, grad_loss, embeddings, share), full, None, None


class ShardedSoftmax(torch.autograd.Function):
    """(loss, *`Statistics`) of this rank's samples for alpha = 1, as `StreamedSoftmax`."""

    @staticmethod
    def forward(ctx, embeddings, prototypes, labels, share):
        ranks, plan = share.ranks, share.plan
        with torch.autocast(embeddings.device.type, enabled=False):
            queries, labels = _gather_samples(embeddings, prototypes, labels, share)
            here = _targets_here(labels, prototypes)
            target = _own_targets(queries, prototypes, labels, here)
            total = torch.full_like(target, -math.inf)
            best = total
            for _, scores in score_chunks(queries, prototypes, labels, plan):
                total = torch.logaddexp(total, scores.flatten(0, 1).logsumexp(0))
                best = torch.maximum(best, scores.amax((0, 1)))
            parts = torch.stack([total, best, target])
            totals, bests, targets = ranks.stack(parts, "gathering sums of exponentials").unbind(1)
            best, target = bests.amax(0), targets.sum(0)
            total = torch.cat([totals, (target + plan.log_q)[None]]).logsumexp(0)
        loss = total - (target + plan.log_q)
        ctx.save_for_backward(embeddings, prototypes, queries, labels, total, loss)
        ctx.share = share
        support = loss.isfinite() * share.num_class
        return _own_results(ctx, loss, (support, support > 1, target > best), 0)

    @staticmethod
    def backward(ctx, grad_loss, *_):
        _check_first_derivative()
        embeddings, prototypes, queries, labels, total, loss = ctx.saved_tensors
        share = ctx.share
        upstream = _upstream(grad_loss, share)
        with torch.autocast(embeddings.device.type, enabled=False):
            grad, full = torch.zeros_like(queries), torch.empty_like(prototypes)
            for start, scores in score_chunks(queries, prototypes, labels, share.plan):
                chunk = prototypes[start : start + share.plan.chunk_size].to(queries.dtype)
                slope = scores.flatten(0, 1)[: len(chunk)].sub_(total).exp_()
                here = _targets_here(labels - start, chunk)
                slope[labels[here] - start, here] = (-loss[here]).expm1()
                length = norm(chunk)
                grad.addmm_(slope.t(), chunk / length, alpha=share.plan.scale)
                slope.mul_(upstream)
                full[start : start + len(chunk)] = _through_norm(slope @ queries, chunk, length)
            return _own_gradient(grad, grad_loss, embeddings, share), full, None, None


def _gather_samples(embeddings, prototypes, labels, share):
    """Return (queries, labels) of all ranks' samples; labels count from the first own class.

    One collective: a label travels in the bits of one or two more numbers of its query.
    """
    queries = _queries(embeddings, prototypes, share.plan)
    dtype, dim = queries.dtype, queries.shape[1]
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    packed = torch.cat([queries.view(bits), labels.contiguous().unsqueeze(1).view(bits)], 1)
    packed = share.ranks.gather(packed, share.counts, "gathering the batch")
    labels = packed[:, dim:].contiguous().view(torch.int64).squeeze(1)
    return packed[:, :dim].contiguous().view(dtype), labels - share.first_class


def _targets_here(labels, prototypes):
    return ((labels >= 0) & (labels < len(prototypes))).nonzero().squeeze(1)


def _own_targets(queries, prototypes, labels, here):
    """Return (B,), the scores of targets that are own classes; 0 for the others."""
    target = queries.new_zeros(len(queries))
    target[here] = score_pairs(queries, prototypes, here, labels[here])
    return target


def _highest_floor(floor, doublings, ranks):
    """Return (floor, doublings), the highest of all ranks; NaN where some rank has NaN."""
    found = torch.cat([floor, floor.new_tensor([doublings])])
    found = found.masked_fill(found.isnan(), math.inf)
    found = ranks.maximum(found, "raising the thresholds")
    found = found.masked_fill(found == math.inf, math.nan)
    return found[:-1], int(found[-1])


def _exchange(pairs, size, ranks):
    """Return (pairs, own): those of all ranks, without classes, and which of them are the own.

    ``pairs`` are in the order of their rows.
    """
    counts = pairs.rows.bincount(minlength=size).int()
    counts = ranks.stack(counts, "counting the kept pairs")
    sizes = counts.sum(1).tolist()
    scores = ranks.gather(pairs.scores, sizes, "gathering the kept pairs")
    rows = torch.arange(size, device=scores.device).repeat(ranks.size)
    rows = rows.repeat_interleave(counts.flatten(), output_size=len(scores))
    start = sum(sizes[: ranks.rank])
    return Pairs(rows, None, scores), slice(start, start + sizes[ranks.rank])


def _own_results(ctx, loss, statistics, doublings):
    own = ctx.share.samples
    statistics = [x[own] for x in statistics]
    ctx.mark_non_differentiable(*statistics)
    return loss[own], *statistics, doublings


def _upstream(grad_loss, share):
    """Return (B,), what the prototypes' gradient takes of each sample's slope."""
    upstream = share.ranks.gather(grad_loss, share.counts, "gathering the losses' gradients")
    return upstream / share.ranks.size


def _own_gradient(grad, grad_loss, embeddings, share):
    """Return the gradient of the embeddings (B_r, d) from this rank's part (B, d), by cosines."""
    grad = share.ranks.add(grad, "adding up the embeddings' gradients")[share.samples]
    vectors = embeddings.to(grad.dtype)
    return _through_norm(grad * grad_loss.unsqueeze(1), vectors, norm(vectors))
