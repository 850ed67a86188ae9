"""The prefix index: which computed blocks spell the start of a sequence of tokens.

A tree of full blocks: a node's key is (its parent, the block's tokens), so a hit is verified by the tokens
themselves all the way to the root and never rests on a hash (the idea of hashed prefix blocks is vLLM's). A
node names one block in each attention group, or none where that group's block was reused for something else:
a prefix of a sliding group is worth having as long as its last window is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlt_train.attention.contract import FREED


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One full block of tokens after its parent's. ``blocks`` has a block or ``FREED`` for each group."""

    parent: PrefixNode | None
    tokens: tuple[int, ...]
    blocks: list[int]
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)


class PrefixIndex:
    """Nodes of ``groups`` attention groups. Knows blocks but holds no reference on them."""

    def __init__(self, groups: int, block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size
        self._root = PrefixNode(None, (), [])
        self._node_of: list[dict[int, PrefixNode]] = [{} for _ in range(groups)]

    def walk(self, tokens: Sequence[int]) -> Iterator[PrefixNode]:
        """The nodes that spell the start of ``tokens``, first block first."""
        node: PrefixNode | None = self._root
        for chunk in self._chunks(tokens):
            assert node is not None
            node = node.children.get(chunk)
            if node is None:
                return
            yield node

    def add(self, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Make the full blocks of a computed sequence findable. Where a node already names a block of a
        group, that one stays."""
        node = self._root
        for position, chunk in enumerate(self._chunks(tokens)):
            child = node.children.get(chunk)
            if child is None:
                child = node.children[chunk] = PrefixNode(node, chunk, [FREED] * self._groups)
            for group, table in enumerate(tables):
                block = table[position]
                if child.blocks[group] == FREED and block != FREED and block not in self._node_of[group]:
                    child.blocks[group] = block
                    self._node_of[group][block] = child
            node = child
        self._prune(node)

    def forget(self, group: int, block: int) -> None:
        """``block`` of ``group`` is about to hold something else."""
        node = self._node_of[group].pop(block, None)
        if node is not None:
            node.blocks[group] = FREED
            self._prune(node)

    def clear(self) -> None:
        """Forget everything."""
        self._root = PrefixNode(None, (), [])
        self._node_of = [{} for _ in range(self._groups)]

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            yield tuple(tokens[start : start + self._block_size])

    def _prune(self, node: PrefixNode) -> None:
        """Remove a node, and then its ancestors, that name no block and lead nowhere."""
        while node.parent is not None and not node.children and all(b == FREED for b in node.blocks):
            del node.parent.children[node.tokens]
            node = node.parent
