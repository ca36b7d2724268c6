"""The order of an epoch: a permutation, given by seed and epoch, whatever the number of ranks."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wespeaker_qmargin.order import EpochBatches, epoch_order


def batches(num_items, batch_size, **options):
    options = {"seed": 3, "epoch": 2, "num_batches": 6, **options}
    return list(EpochBatches(num_items, batch_size, **options))


def indices(lists):
    return [index for batch in lists for _, index in batch]


def test_order_is_a_permutation_of_its_own_for_each_seed_epoch_and_turn():
    orders = [
        epoch_order(100, seed=seed, epoch=epoch, turn=turn)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
        for turn in (0, 1)
    ]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({order.tobytes() for order in orders}) == len(orders)
    again = epoch_order(100, seed=1, epoch=2, turn=1)
    assert np.array_equal(again, orders[-1])


def test_shards_are_permuted_and_mixed_within_groups_of_eight():
    block = list(range(1, 41))  # 40 shards of 1 to 40 items
    order = epoch_order(820, seed=0, epoch=0, block=block)
    assert sorted(order) == list(range(820))
    shards = np.repeat(np.arange(40), block)[order].tolist()
    appearance = list(dict.fromkeys(shards))
    assert appearance[:8] != sorted(appearance)[:8]
    position = 0
    for first in range(0, 40, 8):
        group = appearance[first : first + 8]
        size = sum(block[shard] for shard in group)
        inside = shards[position : position + size]
        assert set(inside) == set(group)
        assert sum(a != b for a, b in pairwise(inside)) > 16  # they take turns
        position += size
    with pytest.raises(ValueError, match="expected shards of 821 items in all, found 820"):
        epoch_order(821, seed=0, epoch=0, block=block)


@given(
    num_items=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 4),
    num_batches=st.integers(0, 12),
)
def test_ranks_together_see_what_one_process_sees(num_items, batch_size, world_size, num_batches):
    options = {"num_batches": num_batches}
    one = batches(num_items, batch_size * world_size, **options)
    ranks = [
        batches(num_items, batch_size, rank=r, world_size=world_size, **options)
        for r in range(world_size)
    ]
    assert one == [list(chain(*parts)) for parts in zip(*ranks)]
    assert len(one) == num_batches
    # every turn through the set is a permutation of it
    seen = indices(one)
    for turn in range(len(seen) // num_items):
        assert sorted(seen[turn * num_items : (turn + 1) * num_items]) == list(range(num_items))


@given(start=st.integers(0, 7), world_size=st.integers(1, 3))
def test_start_skips_batches_and_changes_none(start, world_size):
    options = {"rank": world_size - 1, "world_size": world_size}
    whole = batches(10, 4, **options)
    resumed = EpochBatches(10, 4, seed=3, epoch=2, num_batches=6, start=start, **options)
    assert list(resumed) == whole[start:]
    assert len(resumed) == len(whole[start:])


def test_further_turns_are_other_permutations():
    seen = indices(batches(8, 4, num_batches=4))
    assert seen[:8] != seen[8:]
    assert seen == [*epoch_order(8, seed=3, epoch=2), *epoch_order(8, seed=3, epoch=2, turn=1)]


def test_seed_epoch_shuffle_and_block_count():
    base = batches(50, 5)
    assert all(epoch == 2 for batch in base for epoch, _ in batch)
    assert indices(batches(50, 5, seed=4)) != indices(base)
    assert indices(batches(50, 5, epoch=3)) != indices(base)
    assert indices(batches(50, 5, block=[25, 25])) != indices(base)
    assert indices(batches(12, 5, shuffle=False)) == [*range(12), *range(12), *range(6)]


def test_nothing_to_draw_from():
    with pytest.raises(ValueError, match="found 0 and 4"):
        batches(0, 4)
    with pytest.raises(ValueError, match="found 4 and 0"):
        batches(4, 0)
