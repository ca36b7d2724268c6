"""SGD at the cost of the rows that move, for the prototypes of a cosine head.

FOR LOSSES THAT SEE THE DIRECTION OF EACH ROW, NOT ITS LENGTH. Between two steps the rows in memory
have another length: ``catch_up`` comes before anybody else reads or writes the weight.

Adam and AdamW have no such form (`lazy_rows` has that of SGD). Their second moment makes the step
of an idle row depend on that row's own history, element by element, so the rows share no map; and
to leave idle rows out, as SparseAdam does, is another algorithm.
"""

import torch
from torch.optim import SGD

from wespeaker_qmargin.lazy_rows import LazyRows, Motion
from wespeaker_qmargin.screen import norm

_LEAST_SHRINK = 0.5  # of a weight, in a step
_ALONG = 0.01  # cosine of gradient and row: 1e-6 from a cosine head, about 1 / sqrt(d) from others
_ONLY = {
    "dampening": (0,),
    "maximize": (False,),
    "differentiable": (False,),
    "fused": (None, False),
}


class LazySGD(SGD):
    """torch.optim.SGD that leaves alone the rows that don't turn, where the gradient is row-sparse.

    Equals ``torch.optim.SGD`` with the same arguments. A parameter (C, d) whose ``grad`` is COO of
    ``sparse_dim`` 1 (`sparse_q_margin` with ``sparse_grad=True``) is stepped lazily from then on:
    its rows have the right direction at any time, and are equal after ``catch_up()``. NEITHER LOSS
    NOR REGULARISER MAY DEPEND ON THEIR LENGTH, as in a cosine head; a gradient that shows that one
    does is refused where lazy stepping begins. ``grad`` is the true one in spite of the length in
    memory, for whatever clips, sums or logs it: a hook of the parameter sees to that in backward.

    torch.optim.SGD does nothing to a parameter without ``grad``; a lazily stepped one takes None
    for zero, and moves on. A dense gradient ends lazy stepping.

    Call ``catch_up()`` before the weight or ``state`` is read or written. ``state_dict`` does, and
    `keep_current` makes a module's own ``state_dict`` do so. A saved state is one of
    torch.optim.SGD, with a number more; each can load the other's. A run that resumes equals the
    one that saved, bit for bit.

    Cost: of the rows with a gradient, and of those that still turn (some 90 steps long, with
    momentum 0.9 in float32). Beyond a quarter of all it is one pass over the tensor, 3 reads and
    writes of it; torch.optim.SGD has 11 or 14, or 5 with ``fused=True``, and a dense gradient.

    F.normalize has no direction for a row of zeros: such a row starts off in the right direction
    with another length. NaN and inf in the gradient of a row spoil that row, and no other.

    Args:
        params, lr, momentum, weight_decay, nesterov: as torch.optim.SGD; a group's may change at
            every step.
        foreach: of the other parameters.
        dampening, maximize, differentiable, fused: their defaults only.

    Raises:
        ValueError: other values of those; a sparse gradient of another form, of another dtype than
            float32 and float64, or with a part along the rows; lr and weight_decay that halve the
            weights in a step.

    Reference: the scaled weight vector of Shalev-Shwartz, Singer, Srebro, Pegasos, ICML 2007, here
    with momentum.
    """

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    @torch.no_grad()
    def catch_up(self):
        """Make every row of the weights, and its momentum, what torch.optim.SGD would have."""
        for state in self.state.values():
            _catch_up(state)

    def keep_current(self, module):
        """Let ``module``, the owner of the weight, call ``catch_up`` when it is saved or loaded.

        Then its ``state_dict``, and that of a module around it, holds the true weight.
        """
        module.register_state_dict_pre_hook(lambda *_: self.catch_up())
        module.register_load_state_dict_pre_hook(lambda *_: self.catch_up())

    def state_dict(self):
        """As torch.optim.SGD, after ``catch_up``."""
        self.catch_up()
        return super().state_dict()

    def load_state_dict(self, state_dict):
        """As torch.optim.SGD; the weights must be those of the same moment."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            _check_group(group)

    def __getstate__(self):
        self.catch_up()
        return super().__getstate__()

    def _init_group(self, group, params, grads, momentum_buffer_list):
        """Step the lazy parameters; torch's SGD collects the others here, to step them."""
        others = [p for p in group["params"] if not self._step_lazily(p, group)]
        group = {**group, "params": others}
        return super()._init_group(group, params, grads, momentum_buffer_list)

    def _step_lazily(self, weight, group):
        """Return whether ``weight`` is to be stepped lazily, and was."""
        grad, state = weight.grad, self.state.get(weight, {})
        if grad is None:
            if "slope" not in state or not weight.requires_grad:
                return False
            rows, values = _no_rows(weight)
        elif grad.is_sparse:
            rows, values = _rows_of(grad)
            if "lazy" not in state:
                _check_direction_only(weight, rows, values)
        else:
            _catch_up(state)
            state.pop("slope", None)
            return False
        lazy, motion = self._frame(weight, group)
        lazy.step(motion, rows, values)
        self.state[weight]["slope"] = motion.slope
        return True

    def _frame(self, weight, group):
        """Return the weight's `LazyRows` and the `Motion` of this step.

        Any slope is exact; one that is not that of the idle rows gives them a turn along
        themselves. Where it runs away, for decay so strong that idle rows oscillate, it starts
        again from 0.
        """
        state, has_momentum = self.state[weight], group["momentum"] != 0
        motion = Motion.of(group, state.get("slope", 0.0))
        if not motion.shrink >= _LEAST_SHRINK:
            _catch_up(state)
            state["slope"] = 0.0
            motion = Motion.of(group, 0.0)
            if not motion.shrink >= _LEAST_SHRINK:
                raise ValueError(
                    f"lr {group['lr']} and weight_decay {group['weight_decay']} leave "
                    f"{motion.shrink:.3g} of a weight after one step: lower one of them"
                )
        if "lazy" in state and not state["lazy"].takes(motion, has_momentum):
            _catch_up(state)
        if "lazy" not in state:
            if has_momentum and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momentum = state["momentum_buffer"] if has_momentum else None
            state["lazy"] = LazyRows(weight, momentum, state.get("slope", 0.0))
        return state["lazy"], motion


def _catch_up(state):
    lazy = state.pop("lazy", None)
    if lazy is not None:
        lazy.write_back(state["slope"])


def _rows_of(grad):
    """Return (rows, values) of a row-sparse gradient, sorted and each once."""
    dims = grad.sparse_dim(), grad.dense_dim()
    if dims != (1, 1):
        raise ValueError(
            f"expected a sparse gradient of rows (sparse_dim 1, dense_dim 1), got {dims}"
        )
    if grad.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected a sparse gradient of float32 or float64, got {grad.dtype}: keep the "
            "prototypes in float32, and use autocast"
        )
    rows = grad._indices()[0]  # autograd forgets that it is coalesced; to do that again is slow
    if (rows[1:] > rows[:-1]).all():
        return rows, grad._values()
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()


def _no_rows(weight):
    return weight.new_empty(0, dtype=torch.long), weight.new_empty(0, weight.shape[1])


def _check_direction_only(weight, rows, values):
    vectors = weight.index_select(0, rows)
    along = (vectors * values).sum(1).abs().sum()
    if along > _ALONG * (norm(vectors) * norm(values)).sum():  # not where there is NaN
        raise ValueError(
            "the gradient has a part along the rows, so the loss depends on their length: LazySGD "
            "is for cosine heads; use torch.optim.SGD, or a dense gradient"
        )


def _check_group(group):
    for name, allowed in _ONLY.items():
        if group[name] not in allowed:
            raise ValueError(f"{name} must be {allowed[0]} for LazySGD, got {group[name]}")
