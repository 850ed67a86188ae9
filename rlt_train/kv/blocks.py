"""Reference-counted KV blocks, and the prefix index that finds computed ones again.

The index is a tree of full blocks: an entry's key is (id of the parent entry, the block's tokens), so a hit
is verified by the tokens themselves all the way to the root and never rests on a hash (the idea of hashed
prefix blocks is vLLM's). A block whose last reference is dropped stays indexed until its memory is needed,
oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[int, tuple[int, ...]]


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` slots. Invariant: free + referenced = ``num_blocks`` at all
    times."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(num_blocks)
        )  # least recently freed first
        self._key_of: dict[int, _Key] = {}
        self._entries: dict[_Key, tuple[int, int]] = {}  # key -> (entry id, block)
        self._next_entry = 1

    @property
    def num_free(self) -> int:
        """Blocks nobody references, whether or not the prefix index still knows them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks with one reference each.

        Raises:
            RuntimeError: fewer are free; callers ask ``num_free`` first, so this is a scheduling bug.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block, taking it off the free list if the prefix index revived it."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block. Deepest first, so that an evicted prefix loses its tail before
        its head.

        Raises:
            RuntimeError: a block has no reference to drop (a double free).
        """
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise RuntimeError(f"KV block {block} was released twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def references(self, block: int) -> int:
        """References held on ``block``."""
        return self._references[block]

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The longest run of indexed full blocks that spells the start of ``tokens``; takes no reference."""
        blocks: list[int] = []
        parent = 0
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            entry = self._entries.get((parent, tuple(tokens[start : start + self.block_size])))
            if entry is None:
                break
            parent, block = entry
            blocks.append(block)
        return blocks

    def index_prefix(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Make the full blocks of a computed sequence findable. A block that is already indexed elsewhere
        stays so."""
        parent = 0
        for position in range(len(tokens) // self.block_size):
            start = position * self.block_size
            key = (parent, tuple(tokens[start : start + self.block_size]))
            if key not in self._entries:
                block = blocks[position]
                if block in self._key_of:
                    return
                self._entries[key] = (self._next_entry, block)
                self._key_of[block] = key
                self._next_entry += 1
            parent = self._entries[key][0]

    def invalidate_prefixes(self) -> None:
        """Forget every prefix: after a weight update cached keys and values belong to no present policy."""
        self._entries.clear()
        self._key_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._entries[key]
