"""The processes that share a batch or a weight: what they tell each other, and what if one fails.

All methods but ``__init__`` are collective: every rank of the group calls them, in the same order,
with tensors on the device that the group's backend serves (nccl: of the GPU).
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

_MESSAGE_BYTES = 400


class Ranks:
    """A process group of torch.distributed; one process where that is not initialised.

    ``rank`` is this process's number in the group, ``size`` the number of processes.

    Every collective raises a RuntimeError that says in which step another rank was lost or did not
    answer. It comes within the timeout of the group (``init_process_group(timeout=...)``); the
    group is then of no more use. nccl works while the CPU runs on, so that there torch's watchdog
    may end the process instead, within the same timeout.

    Args:
        group: a ``ProcessGroup``, or None: the default group.

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(self, group=None):
        self.group = group
        ready = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if ready else 0
        self.size = dist.get_world_size(group) if ready else 1
        if self.rank < 0:
            raise ValueError("this process is not in the process group that it was given")

    def __deepcopy__(self, memo):
        return self  # a group has no copy

    def agree(self, same, own, problem, device):
        """Return ``own`` of every rank, if no rank has a problem and all are the same in ``same``.

        One exchange of a few numbers; if it finds a problem, a second one of its text.

        Args:
            same: dict, name -> number.  own: numbers, as many on every rank.
            problem: what is wrong here, or None.

        Raises:
            ValueError: the same one on every rank, with the ranks that have a problem, or what each
                rank has of the first entry of ``same`` that differs.
        """
        numbers = [problem is not None, *same.values(), *own]
        numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        table = self.stack(numbers, "agreeing on what to do").tolist()
        if any(row[0] for row in table):
            raise ValueError(self._problems(problem, device))
        for place, name in enumerate(same, 1):
            found = [row[place] for row in table]
            if len(set(found)) > 1:
                found = ", ".join(f"{x:.17g} on rank {rank}" for rank, x in enumerate(found))
                raise ValueError(f"{name} must be the same on every rank, got {found}")
        return [row[1 + len(same) :] for row in table]

    def stack(self, tensor, step):
        """Return (size, ...), the tensors of all ranks, which have one shape."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = tensor.new_empty(self.size, *tensor.shape)
        if parts.numel():
            with self._naming(step):
                dist.all_gather(list(parts), tensor.contiguous(), group=self.group)
        return parts

    def gather(self, tensor, counts, step):
        """Return (sum of counts, ...), the (counts[rank], ...) of all ranks behind one another."""
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = self.stack(padded, step)
        return torch.cat([part[:count] for part, count in zip(parts, counts)])

    def add(self, tensor, step):
        """Add the tensors of all ranks up, in place; return it. NaN and inf add up as well."""
        return self._reduce(tensor, dist.ReduceOp.SUM, step)

    def maximum(self, tensor, step):
        """Take the maximum over all ranks, in place; return it. No NaN, which backends ignore."""
        return self._reduce(tensor, dist.ReduceOp.MAX, step)

    def collect(self, tensor, counts, step):
        """Return (sum of counts, ...) as `gather`, on the CPU of rank 0; None on all others.

        Rank 0 holds one part more than the result, the others nothing new.
        """
        if self.rank > 0:
            with self._naming(step):
                dist.send(tensor.contiguous(), self._global(0), group=self.group)
            return None
        whole = torch.empty(sum(counts), *tensor.shape[1:], dtype=tensor.dtype, device="cpu")
        for rank, part in enumerate(whole.split(counts)):
            received = tensor
            if rank > 0:
                received = torch.empty_like(part, device=tensor.device)
                with self._naming(f"{step} from rank {rank}"):
                    dist.recv(received, self._global(rank), group=self.group)
            part.copy_(received)
        return whole

    def _reduce(self, tensor, operation, step):
        if tensor.numel() and self.size > 1:
            with self._naming(step):
                dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def _problems(self, problem, device):
        text = (problem or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        texts = self.stack(torch.tensor(list(text), dtype=torch.uint8, device=device), "an error")
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in texts.tolist()]
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)

    def _global(self, rank):
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @contextmanager
    def _naming(self, step):
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size}, {step}: another rank was lost, or did not "
                f"answer within the timeout of the process group; see its log ({error})"
            ) from error
