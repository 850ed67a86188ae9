"""How many KV blocks: from the workload or an explicit budget, never from a fraction of the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlt_train.attention.contract import AttentionGroup


@dataclass(frozen=True, slots=True)
class Workload:
    """What the cache must hold.

    Attributes:
        rollouts_in_flight: sequences at once.
        max_length: tokens of a sequence at most.
        max_tokens_per_step: tokens that one forward adds at most, over all sequences.
        block_size: tokens a block.
    """

    rollouts_in_flight: int
    max_length: int
    max_tokens_per_step: int
    block_size: int

    def blocks_for(self, group: AttentionGroup) -> int:
        """Blocks of a group with which all sequences fit at once."""
        seen = group.spec.sliding_window or group.spec.chunk or self.max_length
        # Between steps a sequence keeps what its next token sees besides itself (its ends may lie inside
        # blocks), and a step adds its tokens and begins a block in each sequence.
        kept = self.rollouts_in_flight * (-(-(seen - 1) // self.block_size) + 2)
        added = -(-self.max_tokens_per_step // self.block_size)
        return min(self.rollouts_in_flight * self.blocks_of_one, kept + added)

    @property
    def blocks_of_one(self) -> int:
        """Blocks of one sequence of full length in a group that sees everything."""
        return -(-self.max_length // self.block_size)


def bytes_per_block(group: AttentionGroup, block_size: int) -> int:
    """Bytes that one block takes over all layers of a group, keys and values together."""
    spec = group.spec
    return 2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize * block_size * len(group.layers)


def blocks_for_workload(groups: Sequence[AttentionGroup], workload: Workload) -> list[int]:
    """Blocks of each group with which the whole workload fits at once."""
    return [workload.blocks_for(group) for group in groups]


def blocks_for_budget(kv_cache_gib: float, groups: Sequence[AttentionGroup], workload: Workload) -> list[int]:
    """Blocks of each group that fit in ``kv_cache_gib`` GiB together: as many for each, but for windowed
    groups no more than the workload can use.

    Raises:
        ValueError: the budget cannot hold even one sequence of ``max_length`` tokens.
    """
    sizes = [bytes_per_block(group, workload.block_size) for group in groups]
    windowed = [g.spec.sliding_window is not None or g.spec.chunk is not None for g in groups]
    most = [workload.blocks_for(g) if w else None for g, w in zip(groups, windowed, strict=True)]

    def counts(blocks: int) -> list[int]:
        return [blocks if limit is None else min(blocks, limit) for limit in most]

    def nbytes(blocks: int) -> int:
        return sum(size * count for size, count in zip(sizes, counts(blocks), strict=True))

    budget = int(kv_cache_gib * 2**30)
    needed = workload.blocks_of_one
    if nbytes(needed) > budget:
        raise ValueError(
            f"kv_cache_gib={kv_cache_gib} cannot hold one sequence of {workload.max_length} tokens "
            f"({needed} blocks of {workload.block_size} tokens): give at least "
            f"{nbytes(needed) / 2**30:.3g} GiB, or lower the maximum length."
        )
    low, high = needed, max(needed, budget // min(sizes))
    while low < high:  # the largest count whose bytes fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if nbytes(middle) <= budget else (low, middle - 1)
    return counts(low)
