"""Which classes can be active for which row: exact, without ever holding B x C scores.

    queries (B, d) = scale * unit embeddings     prototypes (C, d), of any length     labels (B,)

The prototypes pass once, a chunk at a time. p_j > 0 needs a score above tau - 1 / (alpha - 1), and
tau over the classes seen so far is a lower bound of the final tau, for adding a class only raises
it. So a pair (row, class) under the bound is dropped for good. Products of less than full precision
only decide what is kept, with their rounding allowed for: the kept pairs are scored again, one by
one. So neither that precision nor the chunk size reaches the result.

`screen` and `screen_top_k` return rivals only: the target has a measure of its own and is always
kept. ``labels`` outside [0, C) are of classes that live elsewhere, and mask nothing here.
"""

import math
from typing import NamedTuple

import torch

from wespeaker_qmargin.functional import _MAX_STEPS, _climb, _place_target

EPS = 1e-12  # F.normalize's
_BLOCK = 32  # classes whose best score stands for them
_ROOM = 64  # pairs a row that are collected, at least, before the threshold is raised again
_PAIR_BYTES = 2**20  # of prototypes gathered at a time


class Plan(NamedTuple):
    """How to screen; log_q is the target's log reference measure, -scale * margin."""

    alpha: float
    scale: float
    log_q: float
    chunk_size: int
    compute_dtype: torch.dtype
    top_k: int | None = None


class Pairs(NamedTuple):
    """Scores of single (row, class) pairs; each (N,)."""

    rows: torch.Tensor
    classes: torch.Tensor
    scores: torch.Tensor

    def pick(self, index):
        return Pairs(*(x[index] for x in self))

    @staticmethod
    def join(parts):
        return Pairs(*(torch.cat(x) for x in zip(*parts)))


def screen(queries, prototypes, labels, target, plan):
    """Return (pairs, floor, 0): every rival that may be active, and the bound that says so.

    target (B,): the targets' exact scores.  floor (B,): tau - 1 / (alpha - 1) or a little less;
    NaN in a row that has a score that is not finite, and whose pairs are then incomplete.
    """
    error, parts, size = _product_error(queries, plan), [], 0
    limit = _ROOM * len(target)
    floor = _lower_bound(target, target.new_empty(len(target), 0), plan)
    for start, scores in score_chunks(queries, prototypes, labels, plan):
        peaks = scores.amax(1)
        floor = torch.maximum(floor, _lowered(peaks.amax(0) - error, plan))  # NaN stays
        if start == 0:
            floor = torch.maximum(floor, _lower_bound(target, peaks.t() - error, plan))
        parts.append(_reaching(floor - error, scores, peaks, start))
        size += len(parts[-1].rows)
        if size > limit:  # doubled, so that the solver runs a few times, not at every chunk
            pairs, floor = _prune(Pairs.join(parts), floor, target, error, plan)
            parts, size = [pairs], len(pairs.rows)
            limit = max(limit, 2 * size)
    pairs, floor = _prune(Pairs.join(parts), floor, target, error, plan)
    return _refine(pairs, queries, prototypes, error), floor, 0


def screen_top_k(queries, prototypes, labels, target, plan):
    """Return (pairs, floor, doublings) as `screen` does: the ``top_k`` best rivals of every row.

    Certificate: all that was left out scores no higher than the K-th kept one, so that it is
    inactive if that one is. Rows whose K-th rival may be active are screened again with twice K.
    """
    error, floor = _product_error(queries, plan), torch.empty_like(target)
    rows, k, found = torch.arange(len(labels), device=labels.device), plan.top_k, []
    elsewhere = (labels < 0) | (labels >= len(prototypes))
    rivals = len(prototypes) - 1 + elsewhere.long()  # all of them need no certificate
    while True:
        best, classes = _highest(queries[rows], prototypes, labels[rows], k, plan)
        own, place = best.isfinite().nonzero().unbind(1)
        pairs = Pairs(own, classes[own, place], best[own, place])
        pairs = _refine(pairs, queries[rows], prototypes, error)
        bound = _raise(best[:, 0] - math.inf, pairs, target[rows], 0.0, plan)  # NaN comes first
        failed = (best[:, -1] + error > bound) & (k < rivals[rows])
        good = pairs.pick(~failed[pairs.rows])
        found.append(good._replace(rows=rows[good.rows]))
        floor[rows], rows = bound, rows[failed]
        if len(rows) == 0:
            return Pairs.join(found), floor, len(found) - 1
        k = min(2 * k, len(prototypes))


def default_chunk(rows, dim, dtype, device):
    """Return how many classes fit into the work space of a chunk.

    8 MiB on a CPU, for its cache; elsewhere 256 MiB, but at most an eighth of what a GPU has free.
    """
    space = 2**23 if device.type == "cpu" else 2**28
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        space = min(space, (torch.cuda.mem_get_info(device)[0] + unused) // 8)
    of_a_class = dtype.itemsize * (rows + 2 * dim)  # its scores, two copies of its prototype
    return max(space // of_a_class, _BLOCK)


def score_pairs(queries, prototypes, rows, classes):
    """Return (N,), scale * cosine of ``rows`` of queries with ``classes``, one dot product each."""
    scores, step = queries.new_empty(len(rows)), max(1, _PAIR_BYTES // (4 * prototypes.shape[1]))
    for i in range(0, len(rows), step):
        vectors = prototypes[classes[i : i + step]].to(queries.dtype)
        length = norm(vectors).squeeze(1)
        scores[i : i + step] = vectors.mul_(queries[rows[i : i + step]]).sum(1) / length
    return scores


def score_chunks(queries, prototypes, labels, plan):
    """Yield (start, scores): scores (blocks, block, B) of the classes from ``start`` on.

    -inf for a row's target and past the chunk's last class. The next chunk overwrites the last.
    """
    num_class, dtype = len(prototypes), queries.dtype
    padded = -(-min(plan.chunk_size, num_class) // _BLOCK) * _BLOCK
    buffer = queries.new_empty(padded + 1, len(queries))  # one row takes targets that are elsewhere
    columns = queries.t().to(plan.compute_dtype).contiguous()
    for start in range(0, num_class, plan.chunk_size):
        chunk = prototypes[start : start + plan.chunk_size].to(dtype)
        count = len(chunk)
        if plan.compute_dtype == dtype:
            torch.mm(chunk, columns, out=buffer[:count]).div_(norm(chunk))
        else:
            buffer[:count] = (chunk / norm(chunk)).to(plan.compute_dtype) @ columns
        buffer[count:] = -math.inf
        place = labels - start
        place = place.where((place >= 0) & (place < count), padded)
        buffer.scatter_(0, place.unsqueeze(0), -math.inf)
        yield start, buffer[:padded].view(padded // _BLOCK, _BLOCK, len(queries))


def by_length(rows, num_rows):
    """Yield (members, index, valid): pairs as tables, for rows with about as many of them.

    members (G,) row numbers;  index (G, width) positions in ``rows``, of which ``valid`` count.
    One row with a pair for every class (an embedding of zeros) must not make a B x C table.
    """
    order = rows.argsort(stable=True)
    counts = rows.bincount(minlength=num_rows)
    first = counts.cumsum(0) - counts
    level = (counts + _ROOM).log2() // 2  # up to 4 times as many
    for same in level.unique():
        members = (level == same).nonzero().squeeze(1)
        column = torch.arange(int(counts[members].max()), device=rows.device)
        valid = column < counts[members].unsqueeze(1)
        index = (first[members].unsqueeze(1) + column).clamp_(max=len(rows) - 1)
        yield members, order[index], valid


def norm(vectors):
    """Return F.normalize's divisor, (N, 1)."""
    return torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(EPS)


def _refine(pairs, queries, prototypes, error):
    """Return the pairs with their exact scores, if those of the products are not."""
    if error == 0:
        return pairs
    return pairs._replace(scores=score_pairs(queries, prototypes, pairs.rows, pairs.classes))


def _reaching(threshold, scores, peaks, start):
    """Return the pairs of a chunk at or above their row's threshold; most blocks have none."""
    block, row = (peaks >= threshold).nonzero().unbind(1)  # GPU: waits
    inside = scores[block, :, row]
    hit, place = (inside >= threshold[row].unsqueeze(1)).nonzero().unbind(1)
    return Pairs(row[hit], start + block[hit] * _BLOCK + place, inside[hit, place])


def _highest(queries, prototypes, labels, k, plan):
    """Return (scores, classes), each (B, k): the best rivals of every row, the best first."""
    best = queries.new_full((len(queries), k), -math.inf)
    classes = torch.zeros_like(best, dtype=torch.long)
    for start, scores in score_chunks(queries, prototypes, labels, plan):
        best, index = torch.cat([best, scores.flatten(0, 1).t()], 1).topk(k)
        old = classes.gather(1, index.clamp(max=k - 1))
        classes = torch.where(index < k, old, index + (start - k))
    return best, classes


def _prune(pairs, floor, target, error, plan):
    """Return (pairs, floor), the floor raised by what was found, and the pairs that reach it."""
    floor = _raise(floor, pairs, target, error, plan)
    return pairs.pick(pairs.scores >= (floor - error)[pairs.rows]), floor


def _raise(floor, pairs, target, error, plan):
    floor = floor.clone()
    for members, index, valid in by_length(pairs.rows, len(target)):
        rivals = (pairs.scores[index] - error).where(valid, -math.inf)
        bound = _lower_bound(target[members], rivals, plan)
        floor[members] = torch.maximum(floor[members], bound)
    return floor


def _lower_bound(target, rivals, plan):
    """Return (G,), tau - 1 / (alpha - 1) or a little less, over the target and (G, n) rivals.

    The same for scores that are too low is lower still: the norm of the posterior's mass, whose
    root tau is, grows with every score.
    """
    h = plan.alpha - 1
    inv_y = math.exp(h * plan.log_q)
    c_y = target.unsqueeze(1) - math.expm1(-h * plan.log_q) / h
    place = torch.zeros(len(target), 1, dtype=torch.long, device=target.device)
    top, c, inv = _place_target(torch.cat([c_y, rivals], 1), place, c_y, inv_y, h)
    shift = _climb(c, inv, torch.zeros_like(top), h, _MAX_STEPS)
    return _lowered((top + shift / h).squeeze(1), plan)


def _lowered(tau, plan):
    """Return tau - 1 / (alpha - 1), and so much less that rounding does not lift it above."""
    reach = 1 / (plan.alpha - 1)
    return tau - reach - 8 * torch.finfo(tau.dtype).eps * (tau.abs() + reach)


def _product_error(queries, plan):
    """Return a bound of |score in a chunk - score of the pair|; 0 in full precision."""
    exact, eps = torch.finfo(queries.dtype).eps, torch.finfo(plan.compute_dtype).eps
    if plan.compute_dtype == torch.float32:
        eps = max(eps, _leave_to_round())
    if eps <= exact:
        return 0.0
    # both operands and the result are rounded; and a sum of d terms of vectors of length 1
    return plan.scale * (2 * eps + queries.shape[1] * exact)


def _leave_to_round():
    """Return the eps of TF32 or bfloat16, if torch may use them for float32 products, else 0."""
    try:
        return {"highest": 0.0, "high": 2.0**-10}.get(torch.get_float32_matmul_precision(), 2.0**-7)
    except RuntimeError:  # set through one of its newer interfaces, for some backend
        return 2.0**-7
