"""The block tables of sequences: one table a group, over one pool a group and a common prefix index."""

from __future__ import annotations

from collections.abc import Sequence

from rlt_train.attention.contract import FREED, AttentionGroup
from rlt_train.kv.blocks import BlockPool
from rlt_train.kv.prefix import PrefixIndex

Tables = list[list[int]]
"""One block table a group; ``FREED`` marks blocks that were given back because no later token sees them."""


class TableAllocator:
    """Owns every block reference.

    Args:
        groups: the attention groups.
        num_blocks: blocks of each group's pool.
        block_size: tokens a block.
    """

    def __init__(self, groups: Sequence[AttentionGroup], num_blocks: Sequence[int], block_size: int) -> None:
        self.block_size = block_size
        self._groups = groups
        self._index = PrefixIndex(len(groups), block_size)
        self.pools = [
            BlockPool(count, on_reuse=lambda block, group=group: self._index.forget(group, block))
            for group, count in enumerate(num_blocks)
        ]
        self._whole = [g.spec.sliding_window is None and g.spec.chunk is None for g in groups]

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Blocks of all pools with at least one reference."""
        return sum(pool.num_used for pool in self.pools)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def new_tables(self) -> Tables:
        """Empty tables."""
        return [[] for _ in self.pools]

    def cover(self, tables: Tables, tokens: int, whole: int = 0, spare: int = 0) -> bool:
        """Extend every table to hold ``tokens`` tokens, those of groups that see everything to hold ``whole``
        if that is more, and leave ``spare`` blocks free in each pool that is taken from; all or nothing."""
        missing = [
            max(0, self.blocks_for(max(tokens, whole) if sees_all else tokens) - len(table))
            for table, sees_all in zip(tables, self._whole, strict=True)
        ]
        if any(
            count and count + spare > pool.num_free for count, pool in zip(missing, self.pools, strict=True)
        ):
            return False
        for table, count, pool in zip(tables, missing, self.pools, strict=True):
            if count:
                table += pool.allocate(count)
        return True

    def drop_unseen(self, tables: Tables, position: int) -> None:
        """Give back the blocks that no token from ``position`` on sees."""
        for group, table, pool in zip(self._groups, tables, self.pools, strict=True):
            end = group.spec.first_visible(position) // self.block_size
            while end and table[end - 1] != FREED:  # what is before a freed block is freed
                end -= 1
                pool.release([table[end]])
                table[end] = FREED

    def share(self, tables: Tables) -> None:
        """Add a reference to every block."""
        for table, pool in zip(tables, self.pools, strict=True):
            pool.share(block for block in table if block != FREED)

    def release(self, tables: Tables) -> None:
        """Drop a reference from every block, the deepest first: an evicted prefix loses its tail before its
        head."""
        for table, pool in zip(tables, self.pools, strict=True):
            pool.release(block for block in reversed(table) if block != FREED)

    def match_prefix(self, tokens: Sequence[int]) -> Tables:
        """Tables of the longest indexed start of ``tokens`` (in full blocks) after which a forward can go on:
        every block that the next token sees is there. Takes no reference."""
        nodes = list(self._index.walk(tokens))
        runs = [0] * len(self.pools)  # blocks without a gap that end at this node
        best, depths = 0, [0] * len(self.pools)
        for depth, node in enumerate(nodes, start=1):
            runs = [run + 1 if block != FREED else 0 for run, block in zip(runs, node.blocks, strict=True)]
            seen = [
                depth - group.spec.first_visible(depth * self.block_size) // self.block_size
                for group in self._groups
            ]
            if all(run >= needed for run, needed in zip(runs, seen, strict=True)):
                best, depths = depth, seen
        return [
            [FREED] * (best - seen) + [node.blocks[group] for node in nodes[best - seen : best]]
            for group, seen in enumerate(depths)
        ]

    def index_prefix(self, tokens: Sequence[int], tables: Tables) -> None:
        """Make the full blocks of a computed sequence findable."""
        self._index.add(tokens, tables)

    def invalidate_prefixes(self) -> None:
        """Forget every prefix: after a weight update cached keys and values belong to no present policy."""
        self._index.clear()
