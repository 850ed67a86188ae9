"""Reference-counted KV blocks of one attention group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """``num_blocks`` blocks. Invariant: free + referenced = ``num_blocks`` at all times.

    A block whose last reference is dropped keeps its contents, and whoever knows it may revive it with
    ``share``, until its memory is needed: the least recently freed block is taken first.

    Args:
        num_blocks: blocks of the pool.
        on_reuse: called with each block whose old contents are about to be lost.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] = lambda block: None) -> None:
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody references, whether or not their contents are still known."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks with one reference each.

        Raises:
            RuntimeError: fewer are free; callers ask ``num_free`` first, so this is a scheduling bug.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._on_reuse(block)
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, taking it off the free list if it had none."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference from each block, in the given order.

        Raises:
            RuntimeError: a block has no reference to drop (a double free).
        """
        for block in blocks:
            if self._references[block] == 0:
                raise RuntimeError(f"KV block {block} was released twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def references(self, block: int) -> int:
        """References held on ``block``."""
        return self._references[block]
