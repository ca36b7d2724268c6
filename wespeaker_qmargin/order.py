"""Which item comes when: the order of an epoch and its batches, as a function of (seed, epoch)."""

from collections.abc import Iterator, Sequence

import numpy as np

# keeps the order's random numbers apart from those of the items
_DOMAIN = 0
# shards read in turns: enough to mix speakers, few enough to stay in the cache
_SHARDS_MIXED = 8


def epoch_order(
    num_items: int, *, seed: int, epoch: int, turn: int = 0, block: Sequence[int] | None = None
) -> np.ndarray:
    """Return a permutation of ``range(num_items)``, int64; another one for each ``turn``.

    With ``block``, the number of items in each shard, the shards are permuted, and items are mixed
    only within groups of 8 shards, so that reads stay within a few files.

    Raises:
        ValueError: ``block`` does not add up to ``num_items``.
    """
    rng = np.random.default_rng([_DOMAIN, seed, epoch, turn])
    if block is None:
        return rng.permutation(num_items)
    if sum(block) != num_items:
        raise ValueError(f"expected shards of {num_items} items in all, found {sum(block)}")
    stops = np.cumsum(block)
    shards = [np.arange(stop - size, stop) for size, stop in zip(block, stops)]
    shards = [shards[i] for i in rng.permutation(len(shards))]
    groups = [shards[i : i + _SHARDS_MIXED] for i in range(0, len(shards), _SHARDS_MIXED)]
    return np.concatenate([rng.permutation(np.concatenate(group)) for group in groups])


class EpochBatches:
    """The batches of one epoch on one process: lists of (epoch, index).

    Batch k of the whole job is ``order[k * W * b : (k + 1) * W * b]`` and rank r has the r-th part
    of it, so that one process with batches of 2 b sees what two with b see. An epoch longer than
    the set goes on with a further permutation; a set is never read past ``num_batches``.

    Args:
        num_items: ``len(train_set)``.
        batch_size: b, on each process.
        num_batches: in the whole epoch.
        rank, world_size: r, W.
        start: batches to leave out (of a resumed epoch); nothing is read for them.
        block: see `epoch_order`.
        shuffle: False takes the items as they are listed.
    """

    def __init__(
        self,
        num_items: int,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        num_batches: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        block: Sequence[int] | None = None,
        shuffle: bool = True,
    ):
        if num_items < 1 or batch_size < 1:
            raise ValueError(
                f"expected num_items and batch_size >= 1, found {num_items} and {batch_size}"
            )
        self._num_items, self._batch_size = num_items, batch_size
        self._seed, self._epoch, self._block, self._shuffle = seed, epoch, block, shuffle
        self._batches = range(start, num_batches)
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        turn, order = None, None
        for k in self._batches:
            first = (k * self._world_size + self._rank) * self._batch_size
            batch = []
            for position in range(first, first + self._batch_size):
                if position // self._num_items != turn:
                    turn = position // self._num_items
                    order = self._order(turn)
                batch.append((self._epoch, int(order[position % self._num_items])))
            yield batch

    def _order(self, turn: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_items)
        return epoch_order(
            self._num_items, seed=self._seed, epoch=self._epoch, turn=turn, block=self._block
        )
