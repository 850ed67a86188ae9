"""The block pool against a simple model of it, under any order of operations that hypothesis thinks of."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from rlt_train.kv.blocks import BlockPool

BLOCKS, SIZE = 12, 3
TOKENS = st.lists(st.integers(0, 1), max_size=4 * SIZE)  # two token ids, so that prefixes often agree


class PoolMachine(RuleBasedStateMachine):
    """Tables are what sequences hold. The model: who holds each block, and for what it was computed."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.held: Counter[int] = Counter()
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, as computed
        self.indexed: set[tuple[int, ...]] = set()  # every prefix ever made findable in this version

    @rule(target=tables, tokens=TOKENS)
    def start(self, tokens: list[int]) -> object:
        """What an admission does: match, share, allocate the rest, compute, index."""
        matched = self.pool.match_prefix(tokens)
        spelled = [self.content[block] for block in matched]
        assert spelled == [tuple(tokens[: (i + 1) * SIZE]) for i in range(len(matched))]
        assert all(prefix in self.indexed for prefix in spelled)
        revived = sum(self.pool.references(block) == 0 for block in matched)
        needed = self.pool.blocks_for(len(tokens)) - len(matched)
        if needed + revived > self.pool.num_free:
            return multiple()
        self.pool.share(matched)
        fresh = self.pool.allocate(needed)
        assert not any(self.held[block] for block in fresh), "allocated a block that somebody holds"
        assert len(set(matched + fresh)) == len(matched) + needed
        table = matched + fresh
        self.held.update(table)
        for position in range(len(matched), len(table)):
            self.content[table[position]] = tuple(tokens[: (position + 1) * SIZE])
        self.pool.index_prefix(tokens, table)
        self.indexed |= {tuple(tokens[: (i + 1) * SIZE]) for i in range(len(tokens) // SIZE)}
        return table

    @rule(target=tables, table=tables)
    def fork(self, table: list[int]) -> list[int]:
        if not all(self.held[block] for block in table):
            return []
        self.pool.share(table)
        self.held.update(table)
        return list(table)

    @rule(table=consumes(tables))
    def finish(self, table: list[int]) -> None:
        self.pool.release(table)
        self.held.subtract(table)

    @rule()
    def new_policy_version(self) -> None:
        self.pool.invalidate_prefixes()
        self.indexed.clear()
        for size in (SIZE, 2 * SIZE):
            assert self.pool.match_prefix([0] * size) == self.pool.match_prefix([1] * size) == []

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pool.references(block) for block in range(BLOCKS)] == [
            self.held[b] for b in range(BLOCKS)
        ]
        assert self.pool.num_used == sum(count > 0 for count in self.held.values())
        assert self.pool.num_free + self.pool.num_used == BLOCKS

    def teardown(self) -> None:
        for block, count in self.held.items():
            self.pool.release([block] * count)
        assert self.pool.num_free == BLOCKS
        assert sorted(self.pool.allocate(BLOCKS)) == list(range(BLOCKS))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_a_double_free_and_an_overdraft_are_errors() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(2)
    with pytest.raises(RuntimeError, match="1 KV blocks wanted, 0 of 2"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released twice"):
        pool.release(blocks[:1])


def test_blocks_for_rounds_up() -> None:
    assert [BlockPool(1, 4).blocks_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_freed_prefix_stays_findable_until_its_memory_is_needed_oldest_first() -> None:
    pool = BlockPool(3, 1)
    old, young = [7], [8]
    for tokens in (old, young):
        blocks = pool.allocate(1)
        pool.index_prefix(tokens, blocks)
        pool.release(blocks)
    assert pool.match_prefix(old) and pool.match_prefix(young)
    pool.allocate(2)  # the block never used, then the oldest
    assert not pool.match_prefix(old) and pool.match_prefix(young)


def test_an_evicted_prefix_loses_its_tail_first_and_a_reused_head_does_not_revive_the_old_tail() -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(3)
    pool.index_prefix([1, 2, 3], blocks)
    pool.release(blocks)
    pool.allocate(2)  # the untouched block and the tail
    assert pool.match_prefix([1, 2, 3]) == blocks[:2]
    pool.allocate(1)
    assert pool.match_prefix([1, 2, 3]) == blocks[:1]


def test_a_match_needs_the_same_tokens_all_the_way_to_the_root() -> None:
    pool = BlockPool(8, 2)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.index_prefix([1, 1, 5, 5], first)
    pool.index_prefix([2, 2, 6, 6], second)
    assert pool.match_prefix([1, 1, 6, 6]) == first[:1]
    assert pool.match_prefix([2, 2, 6, 6, 9]) == second
    assert pool.match_prefix([5, 5]) == []
    assert pool.match_prefix([1]) == []
