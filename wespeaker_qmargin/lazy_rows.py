"""A weight and its momentum in a form that leaves alone the rows that don't turn: see `LazySGD`.

In a step of SGD with momentum mu, weight decay lam, learning rate eta and momentum buffer v, a row
without gradient goes

    v' = mu v + lam w,     w' = w - eta v'     (Nesterov: w' = w - eta (lam w + mu v'))

v = slope * w stays of that form, with one slope for all rows. Take it off: v = slope * w + left *
turn. Then, with shrink, pull and fade common to all rows again,

    w' = shrink * w - pull * left * turn,     left' = fade * left

So decay is one number, ``scale`` = the product of all shrinks, and memory holds w / scale. Only
``turn`` changes a direction, and it is constant until the row's next gradient: what a row has still
to move is one number a row, ``due``, and the row waits while that is less than its dtype can tell.
Nothing is approximated; only rounding happens elsewhere than in torch.optim.SGD.
"""

import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F

from wespeaker_qmargin.screen import norm

# shares of the rows from which the whole tensor is cheaper, measured: of those that move, of those
# with a gradient
_WHOLE, _CROWD = 0.25, 0.05
_BLOCK_BYTES = 2**21  # of rows in work at a time, for a CPU's cache
_LEAST_SCALE = 1e-3  # rows in memory stay far from overflow
_GONE = 1e-20  # of a turn: before it becomes denormal, and slow


class Motion(NamedTuple):
    """A step, the same for all rows: v' = decay w + momentum left turn + g,
    w' = shrink w - pull left turn - push g."""

    momentum: float
    decay: float
    shrink: float
    pull: float
    push: float

    @classmethod
    def of(cls, group, slope):
        """Return that of an optimiser's parameter group, for rows with this slope."""
        lr, mu, lam = (float(group[name]) for name in ("lr", "momentum", "weight_decay"))
        decay = mu * slope + lam
        if group["nesterov"]:
            return cls(mu, decay, 1 - lr * (lam + mu * decay), lr * mu * mu, lr * (1 + mu))
        return cls(mu, decay, 1 - lr * decay, lr * mu, lr)

    @property
    def slope(self):
        """v' / w' of a row without turn."""
        return self.decay / self.shrink

    @property
    def fade(self):
        return self.momentum + self.slope * self.pull

    @property
    def gain(self):
        """The gradient's factor in the turn."""
        return 1 + self.slope * self.push


class LazyRows:
    """The lazy form of a weight (C, d), over the same memory, until ``write_back``.

    ``weight`` becomes w / scale and ``momentum`` (C, d), or None, the turn. left, due, wait (C,):
    what is left of a row's turn; how much of it is due; how much may be and not be noticed.
    """

    def __init__(self, weight, momentum, slope):
        self.weight, self.turn, self.scale = weight, momentum, 1.0
        space = _BLOCK_BYTES if weight.device.type == "cpu" else 128 * _BLOCK_BYTES
        self._block = max(1, space // (weight.shape[1] * weight.element_size()))
        if momentum is not None:
            self.due, self.left = weight.new_zeros(len(weight)), weight.new_ones(len(weight))
            self.wait = None
            for w, turn in self._blocks(weight, momentum):
                turn.add_(w, alpha=-slope)
        me = weakref.ref(self)  # so that the hook ends with the optimiser
        self._hook = weight.register_hook(lambda grad: _true_gradient(grad, me()))

    def takes(self, motion, has_momentum):
        """Return whether this form can take that step."""
        roomy = self.scale * motion.shrink >= _LEAST_SCALE
        return roomy and has_momentum == (self.turn is not None)

    def step(self, motion, rows, values):
        """Take a step, with the gradient ``values`` of ``rows``, sorted and each once."""
        self.scale *= motion.shrink
        push, gain = -motion.push / self.scale, motion.gain
        if self.turn is None:
            self.weight.add_(self._sparse(rows, values), alpha=push)
            return
        self.due.add_(self.left, alpha=motion.pull / self.scale)
        F.threshold_(self.left.mul_(motion.fade), _GONE, 0.0)
        if len(rows) > _CROWD * len(self.due):
            self._step_all(self._sparse(rows, values), push, gain)
            return
        if self.wait is None:
            blocks = self._blocks(self.weight, self.turn)
            self.wait = torch.cat([_patience(w, turn) for w, turn in blocks])
        for part, grad in self._blocks(rows, values):
            self._step_rows(part, grad, push, gain)
        self._move()

    def write_back(self, slope):
        """Turn weight and momentum into the true ones: the end of this form."""
        self._hook.remove()
        if self.turn is None:
            self.weight.mul_(self.scale)
            return
        columns = self.due.unsqueeze(1), self.left.unsqueeze(1)
        for w, turn, due, left in self._blocks(self.weight, self.turn, *columns):
            w.addcmul_(turn, due, value=-1).mul_(self.scale)
            turn.mul_(left).add_(w, alpha=slope)

    def _step_all(self, grad, push, gain):
        columns = self.due.unsqueeze(1), self.left.unsqueeze(1)
        for w, turn, due, left in self._blocks(self.weight, self.turn, *columns):
            w.addcmul_(turn, due, value=-1)
            turn.mul_(left)
        self.weight.add_(grad, alpha=push)
        self.turn.add_(grad, alpha=gain)
        self.due.zero_()
        self.left.fill_(1.0)
        self.wait = None

    def _step_rows(self, rows, grad, push, gain):
        w, turn = self.weight.index_select(0, rows), self.turn.index_select(0, rows)
        w.addcmul_(turn, self.due[rows].unsqueeze(1), value=-1).add_(grad, alpha=push)
        turn.mul_(self.left[rows].unsqueeze(1)).add_(grad, alpha=gain)
        self.weight.index_copy_(0, rows, w)
        self.turn.index_copy_(0, rows, turn)
        self.due[rows], self.left[rows], self.wait[rows] = 0.0, 1.0, _patience(w, turn)

    def _move(self):
        """Move the rows that cannot wait."""
        ready = self.due > self.wait
        rows = ready.nonzero().squeeze(1)  # GPU: waits
        if len(rows) > _WHOLE * len(ready):
            self.weight.addcmul_(self.turn, self.due.unsqueeze(1), value=-1)
            self.due.zero_()
            return
        for part in rows.split(self._block):
            factor = self.due[part].neg_().unsqueeze(1)
            moves = F.embedding_bag(
                part.unsqueeze(1), self.turn, mode="sum", per_sample_weights=factor
            )
            self.weight.add_(self._sparse(part, moves))
        self.due[rows] = 0.0

    def _sparse(self, rows, values):
        return torch.sparse_coo_tensor(
            rows[None], values, self.weight.shape, is_coalesced=True, check_invariants=False
        )

    def _blocks(self, *tensors):
        return zip(*(x.split(self._block) for x in tensors))


def _true_gradient(grad, lazy):
    """Return the gradient at w, from that at w / scale: it is homogeneous of degree -1."""
    return None if lazy is None or lazy.scale == 1 else grad / lazy.scale


def _patience(weight, turn):
    """Return (N,), how much of its turn a row may lag behind; inf without a turn."""
    length = torch.linalg.vector_norm(turn, dim=1)
    return torch.finfo(weight.dtype).eps * norm(weight).squeeze(1) / length
