"""The head with its classes spread over the ranks of a process group, and what a trainer needs.

head = ClassParallelQMargin(...)    on every rank, after init_process_group, with one seed
keep_from_ddp(module)               before DistributedDataParallel gets the module
head.loss(input, label)             collective; 8 exchanges for a step (`sharded`, and one more
                                    to agree on it), 5 for alpha = 1
total_norm(parameters, sharded)     collective, to clip gradients
full_weight, head.gather_rows       collective, to save; head.own_rows to load
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from wespeaker_qmargin.functional import _as_log_q
from wespeaker_qmargin.head import QMarginProduct
from wespeaker_qmargin.ranks import Ranks
from wespeaker_qmargin.screen import Plan, default_chunk
from wespeaker_qmargin.sharded import ShardedQMargin, ShardedSoftmax, Share
from wespeaker_qmargin.sparse import Statistics, _check_inputs, _work_dtype

_DRAWN = 2**22  # elements of the initial prototypes at a time


class ClassParallelQMargin(QMarginProduct):
    """`QMarginProduct` whose prototypes are spread over the ranks of a process group.

    ``weight`` is (C_r, D), the rows of ``classes``, a range. All ranks together hold the rows that
    a QMarginProduct draws on the CPU for the same seed, whatever the number of ranks. In one
    process, or without torch.distributed, it is a QMarginProduct.

    A step's loss is the mean over the ranks of ``loss``, each the mean over the rank's own samples,
    as DistributedDataParallel has it (over the same group; see `keep_from_ddp`). So W ranks with
    batches of one size equal one process with all the samples, in loss and in gradients.

    ``state_dict`` holds the own rows. A checkpoint of one ``weight`` (C, D) comes from
    `full_weight`; ``load_state_dict`` picks the own rows out of it, under any number of ranks.

    Args:
        group: a process group of torch.distributed; None: the default one.
        shares: how many classes each rank holds, a list of numbers >= 1 of sum C, the same on every
            rank; None: as even as can be.
        in_features, out_features, options: as of QMarginProduct; ``out_features`` is C. Over
            several ranks "auto" is "streaming", and "dense" is refused.

    Raises:
        ValueError: as QMarginProduct; shares that do not fit; fewer classes than ranks.

    Reference: An et al., Partial FC, ICCV Workshops 2021, for the softmax over classes that are
    spread over devices.
    """

    def __init__(self, in_features, out_features, *, group=None, shares=None, **options):
        # plain attributes, and before the base class: it calls `_init_weight`, which needs them
        self.ranks = Ranks(group)
        self.shares = _shares(shares, out_features, self.ranks.size)
        start = sum(self.shares[: self.ranks.rank])
        self.classes = range(start, start + self.shares[self.ranks.rank])
        super().__init__(in_features, out_features, **options)
        if self.ranks.size > 1 and self.impl == "dense":
            raise ValueError('impl "dense" holds all scores: over several ranks use "auto"')

    def _init_weight(self) -> None:
        """Draw all rows, some at a time, and keep the own ones."""
        num_class, dim = self.out_features, self.in_features
        self.weight = nn.Parameter(torch.empty(len(self.classes), dim))
        bound = math.sqrt(3) * math.sqrt(2 / (num_class + dim))  # rounds as in xavier_uniform_
        step = max(1, _DRAWN // dim)
        for start in range(0, num_class, step):
            rows = torch.empty(min(step, num_class - start), dim, device="cpu")
            rows.uniform_(-bound, bound)
            own = range(max(start, self.classes.start), min(start + len(rows), self.classes.stop))
            if own:
                place = own.start - self.classes.start
                self.weight.data[place : place + len(own)] = rows[own.start - start :][: len(own)]

    def forward(self, input: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """In one process as QMarginProduct; NotImplementedError over several: call ``loss``.

        WeSpeaker's scores (B_r, C) are what no rank is to hold, and would have to travel. What they
        are for, accuracy, is in the statistics of ``loss``.
        """
        if self.ranks.size > 1:
            raise NotImplementedError(
                "over several ranks there are no scores of all classes: call loss(input, label), "
                "whose statistics have the accuracy"
            )
        return super().forward(input, label)

    def loss(self, input: Tensor, label: Tensor) -> tuple[Tensor, Statistics]:
        """Return ``(loss, statistics)`` of this rank's embeddings (B_r, D) and labels (B_r,).

        Collective, as is its backward: all ranks call it, or none. The B_r may differ; without any
        sample ``loss`` is 0. Labels are in [0, C). A loss of NaN is that of the rank whose sample
        it is; a prototype with NaN or inf makes it NaN on every rank.

        Raises:
            ValueError: the same one on every rank, if one has bad input, or they differ in what
                must be the same.
            RuntimeError: another rank was lost, or did not answer in time (`Ranks`).
        """
        size = Ranks(self.ranks.group).size
        if size != self.ranks.size:
            raise ValueError(
                f"the head was built for {self.ranks.size} ranks, and there are {size} now: build "
                "it after init_process_group"
            )
        if size == 1:
            return super().loss(input, label)
        function = ShardedSoftmax if self.alpha == 1 else ShardedQMargin
        share = self._agree(input, label)
        loss, *statistics = function.apply(input, self.weight, label.long(), share)
        statistics = Statistics(*statistics)
        if self.training:
            self._count(statistics)
        return loss.sum() / max(len(loss), 1), statistics

    def _agree(self, input: Tensor, label: Tensor) -> Share:
        """Return this rank's share of the step, after all ranks found that they fit together."""
        problem, dtype = None, _work_dtype(input, self.weight)
        try:
            whole = self.weight.new_empty(()).expand(self.out_features, self.in_features)
            _check_inputs(input, whole, label)
            _as_log_q(-self.scale * self.margin, None, self.alpha - 1)
        except ValueError as error:
            problem = str(error)
        learns = input.requires_grad or self.weight.requires_grad
        same = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "alpha": self.alpha,
            "scale": self.scale,
            "margin": self.margin,
            "bytes of a score": dtype.itemsize,
            "requires_grad": torch.is_grad_enabled() and learns,
        }
        own = 0 if problem else len(label), self.classes.start, self.classes.stop
        table = self.ranks.agree(same, own, problem, self.weight.device)
        counts, starts, stops = ([int(x) for x in column] for column in zip(*table))
        if [*starts, self.out_features] != [0, *stops]:
            found = ", ".join(f"[{start}, {stop})" for start, stop in zip(starts, stops))
            raise ValueError(f"shares: the ranks must hold every class once, got {found}")
        plan = self._plan(sum(counts), dtype)
        return Share(plan, self.ranks, counts, stops[-1], self.classes.start, self.sparse_grad)

    def _plan(self, rows: int, dtype: torch.dtype) -> Plan:
        (num_class, dim), device = self.weight.shape, self.weight.device
        return Plan(
            alpha=self.alpha,
            scale=self.scale,
            log_q=-self.scale * self.margin,
            chunk_size=min(default_chunk(rows, dim, dtype, device), num_class),
            compute_dtype=self._compute_dtype(device) or dtype,
            top_k=min(self.top_k, num_class) if self.impl == "top_k" else None,
        )

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Return a copy of this rank's rows (C_r, ...) of a tensor (C, ...), such as a momentum."""
        if tensor.dim() == 0 or len(tensor) != self.out_features:
            found = f"expected ({self.out_features}, ...), a row a class, got {tuple(tensor.shape)}"
            raise ValueError(found)
        return tensor[self.classes.start : self.classes.stop].clone()

    def gather_rows(self, tensor: Tensor) -> Tensor | None:
        """Return (C, ...) on the CPU of rank 0, None elsewhere, of every rank's (C_r, ...).

        For what an optimiser holds of the shape of ``weight``; the weight itself: `full_weight`.
        Collective; errors as those of ``loss``.
        """
        tensor, problem = tensor.detach().to(self.weight.device), None
        if tensor.dim() == 0 or len(tensor) != len(self.classes):
            problem = f"expected ({len(self.classes)}, ...), its rows, got {tuple(tensor.shape)}"
        same = {"elements of a row": tensor[:1].numel() if problem is None else 0}
        same["bytes of an element"] = tensor.itemsize
        self.ranks.agree(same, (), problem, tensor.device)
        return self.ranks.collect(tensor, self.shares, "collecting rows")

    def _load_from_state_dict(self, state_dict, prefix, *args):
        whole = state_dict.get(f"{prefix}weight")
        if whole is not None and whole.shape[:1] == (self.out_features,):
            state_dict = {**state_dict, f"{prefix}weight": self.own_rows(whole)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        own, ranks = self.classes, self.ranks
        place = f"classes={own.start}..{own.stop - 1}, rank={ranks.rank} of {ranks.size}"
        return f"{super().extra_repr()}, {place}"


def full_weight(head: ClassParallelQMargin) -> Tensor | None:
    """Return all prototypes (C, D) on the CPU of rank 0, None elsewhere. Collective.

    They are those of ``state_dict``, so that an optimiser which defers steps has caught up.
    """
    return head.gather_rows(head.state_dict()["weight"])


def keep_from_ddp(module: nn.Module) -> None:
    """Have DistributedDataParallel leave the prototypes of class-parallel heads alone.

    For the very ``module`` that is to be wrapped, and before it is: otherwise rank 0's prototypes
    would be copied to all ranks, and gradients of different classes averaged.
    """
    heads = [m for m in module.modules() if isinstance(m, ClassParallelQMargin)]
    sharded = {id(head.weight) for head in heads}
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names |= {name for name, x in module.named_parameters() if id(x) in sharded}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(names))


def total_norm(parameters, sharded, *, group=None) -> Tensor:
    """Return the 2-norm of all gradients, the sharded ones of every rank included. Collective.

    Equals, in one process, ``get_total_norm`` of torch.nn.utils; sparse gradients count too. Made
    for ``torch.nn.utils.clip_grads_with_norm_``, whose result then is one process's as well.

    Args:
        parameters: all, or all but ``sharded``; their gradients are the same on every rank.
        sharded: those of which every rank has its own rows; without any, nothing is exchanged.
        group: the head's.
    """
    sharded = list(sharded)
    if not sharded:
        return get_total_norm([_values(x.grad) for x in parameters if x.grad is not None])
    own = {id(x) for x in sharded}
    squares = [
        get_total_norm([_values(x.grad) for x in part if x.grad is not None])
        .to(sharded[0].device, torch.float64)
        .square()
        for part in ([x for x in parameters if id(x) not in own], sharded)
    ]
    total = squares[0] + Ranks(group).add(squares[1], "adding up the gradient norm")
    return total.sqrt().to(sharded[0].dtype)


def _values(grad):
    return grad.coalesce().values() if grad.is_sparse else grad


def _shares(shares, num_class, size):
    if num_class < size:
        raise ValueError(f"every rank must hold a class, got {num_class} for {size} ranks")
    if shares is None:
        return [num_class // size + (rank < num_class % size) for rank in range(size)]
    shares = list(shares)
    if len(shares) != size or sum(shares) != num_class or min(shares) < 1:
        raise ValueError(
            f"shares must be {size} numbers >= 1, one a rank, of sum {num_class}, got {shares}"
        )
    return shares
