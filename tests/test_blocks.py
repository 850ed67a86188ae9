"""Block tables over two attention groups against a simple model of them, under any order of operations that
hypothesis thinks of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from rlt_train.attention.contract import FREED, AttentionGroup, LayerSpec
from rlt_train.kv.blocks import BlockPool
from rlt_train.kv.tables import TableAllocator

BLOCKS, SIZE, WINDOW, CHUNK = 12, 3, 5, 7
TOKENS = st.lists(st.integers(0, 1), max_size=5 * SIZE)  # two token ids, so that prefixes often agree


def group(**changes: Any) -> AttentionGroup:
    fields: dict[str, Any] = {
        "query_heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "scale": 1.0,
        "sliding_window": None,
        "softcap": None,
        "has_sinks": False,
        "dtype": torch.float32,
    }
    return AttentionGroup(LayerSpec(**{**fields, **changes}), (0,))


def one_pool(blocks: int, size: int = 1) -> TableAllocator:
    return TableAllocator([group()], [blocks], size)


class TablesMachine(RuleBasedStateMachine):
    """Three groups: one sees everything, one a window, one its chunk. The model: who holds each block, and
    for which tokens it was computed."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.groups = [group(), group(sliding_window=WINDOW), group(chunk=CHUNK)]
        self.blocks = TableAllocator(self.groups, [BLOCKS] * 3, SIZE)
        self.held: list[Counter[int]] = [Counter() for _ in self.groups]
        self.content: list[dict[int, tuple[int, ...]]] = [{} for _ in self.groups]
        self.indexed: set[tuple[int, ...]] = set()  # every prefix ever made findable in this version

    def hold(self, tables: list[list[int]], sign: int = 1) -> None:
        for held, table in zip(self.held, tables, strict=True):
            for block in table:
                if block != FREED:
                    held[block] += sign

    def check_match(self, tokens: list[int], tables: list[list[int]]) -> int:
        """A hit spells the tokens, and has every block that the next token sees."""
        (length,) = {len(table) for table in tables}
        for number, table in enumerate(tables):
            first = self.groups[number].spec.first_visible(length * SIZE) // SIZE
            assert all((block == FREED) == (at < first) for at, block in enumerate(table))
            for at in range(first, length):
                assert self.content[number][table[at]] == tuple(tokens[: (at + 1) * SIZE])
        assert not length or tuple(tokens[: length * SIZE]) in self.indexed
        return length

    @rule(target=sequences, tokens=TOKENS)
    def start(self, tokens: list[int]) -> object:
        """What an admission and its prefill do: match, share, allocate, compute, index, drop."""
        tables = self.blocks.match_prefix(tokens)
        matched = self.check_match(tokens, tables)
        self.blocks.share(tables)
        free = [pool.num_free for pool in self.blocks.pools]
        if not self.blocks.cover(tables, len(tokens)):
            assert min(free) < self.blocks.blocks_for(len(tokens)) - matched, (
                "refused although there was room"
            )
            assert free == [pool.num_free for pool in self.blocks.pools], "took some of what it could not use"
            self.blocks.release(tables)
            return multiple()
        for number, table in enumerate(tables):
            fresh = table[matched:]
            assert not any(self.held[number][block] for block in fresh), "allocated a block that is held"
            assert len(set(fresh)) == len(fresh)
            for at in range(matched, len(table)):
                self.content[number][table[at]] = tuple(tokens[: (at + 1) * SIZE])
        self.blocks.index_prefix(tokens, tables)
        self.indexed |= {tuple(tokens[: (i + 1) * SIZE]) for i in range(len(tokens) // SIZE)}
        before = [list(table) for table in tables]
        self.blocks.drop_unseen(tables, len(tokens))
        for spec, table, was in zip((g.spec for g in self.groups), tables, before, strict=True):
            seen = spec.first_visible(len(tokens)) // SIZE
            assert table[seen:] == was[seen:] and set(table[:seen]) <= {FREED}
        self.hold(tables)
        return tables

    @rule(target=sequences, tables=sequences)
    def fork(self, tables: list[list[int]]) -> object:
        held = zip(self.held, tables, strict=True)
        if not all(counts[b] for counts, table in held for b in table if b != FREED):
            return multiple()  # already finished
        self.blocks.share(tables)
        self.hold(tables)
        return [list(table) for table in tables]

    @rule(tables=consumes(sequences))
    def finish(self, tables: list[list[int]]) -> None:
        self.blocks.release(tables)
        self.hold(tables, -1)

    @rule()
    def new_policy_version(self) -> None:
        self.blocks.invalidate_prefixes()
        self.indexed.clear()
        for token in (0, 1):
            assert self.blocks.match_prefix([token] * 2 * SIZE) == [[], [], []]

    @invariant()
    def counts_agree(self) -> None:
        for pool, held in zip(self.blocks.pools, self.held, strict=True):
            assert [pool.references(block) for block in range(BLOCKS)] == [held[b] for b in range(BLOCKS)]
            assert pool.num_used == sum(count > 0 for count in held.values())
            assert pool.num_free + pool.num_used == BLOCKS

    def teardown(self) -> None:
        for pool, held in zip(self.blocks.pools, self.held, strict=True):
            for block, count in held.items():
                pool.release([block] * count)
            assert pool.num_free == BLOCKS
            assert sorted(pool.allocate(BLOCKS)) == list(range(BLOCKS))
        assert self.blocks._index._root.children == {}, "the index kept nodes that name no block"


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_a_double_free_and_an_overdraft_are_errors() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    with pytest.raises(RuntimeError, match="1 KV blocks wanted, 0 of 2"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released twice"):
        pool.release(blocks[:1])


def test_blocks_for_rounds_up() -> None:
    assert [one_pool(1, 4).blocks_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def computed(blocks: TableAllocator, tokens: list[int], release: bool = True) -> list[list[int]]:
    tables = blocks.new_tables()
    assert blocks.cover(tables, len(tokens))
    blocks.index_prefix(tokens, tables)
    if release:
        blocks.release(tables)
    return tables


def test_a_freed_prefix_stays_findable_until_its_memory_is_needed_oldest_first() -> None:
    blocks = one_pool(3)
    computed(blocks, [7])
    computed(blocks, [8])
    assert blocks.match_prefix([7])[0] and blocks.match_prefix([8])[0]
    blocks.pools[0].allocate(2)  # the block never used, then the oldest
    assert not blocks.match_prefix([7])[0] and blocks.match_prefix([8])[0]


def test_an_evicted_prefix_loses_its_tail_first_and_a_reused_head_does_not_revive_the_old_tail() -> None:
    blocks = one_pool(4)
    ((*table,),) = computed(blocks, [1, 2, 3])
    blocks.pools[0].allocate(2)  # the untouched block and the tail
    assert blocks.match_prefix([1, 2, 3])[0] == table[:2]
    blocks.pools[0].allocate(1)
    assert blocks.match_prefix([1, 2, 3])[0] == table[:1]


def test_a_match_needs_the_same_tokens_all_the_way_to_the_root() -> None:
    blocks = one_pool(8, 2)
    (first,) = computed(blocks, [1, 1, 5, 5], release=False)
    (second,) = computed(blocks, [2, 2, 6, 6], release=False)
    assert blocks.match_prefix([1, 1, 6, 6])[0] == first[:1]
    assert blocks.match_prefix([2, 2, 6, 6, 9])[0] == second
    assert blocks.match_prefix([5, 5])[0] == []
    assert blocks.match_prefix([1])[0] == []


def test_a_windowed_group_needs_only_its_last_window_for_a_hit() -> None:
    blocks = TableAllocator([group(), group(sliding_window=3)], [8, 8], 2)
    tables = blocks.new_tables()
    tokens = [1, 1, 2, 2, 3, 3, 4, 4]
    assert blocks.cover(tables, len(tokens))
    blocks.index_prefix(tokens, tables)
    blocks.drop_unseen(tables, len(tokens))
    assert tables[1] == [FREED, FREED, FREED, tables[1][3]]
    blocks.release(tables)
    blocks.pools[1].allocate(7)  # everything but the last window, which was given back last
    assert blocks.match_prefix(tokens)[0] == tables[0]
    assert blocks.match_prefix(tokens)[1] == tables[1]
    assert blocks.match_prefix(tokens[:-1]) == [[], []], "a shorter prefix has lost its window"


def test_cover_takes_all_or_nothing_and_leaves_the_spare() -> None:
    blocks = TableAllocator([group(), group(sliding_window=2)], [4, 2], 1)
    tables = blocks.new_tables()
    assert not blocks.cover(tables, 3) and tables == [[], []] and blocks.num_used == 0
    assert blocks.cover(tables, 1, whole=3) and [len(table) for table in tables] == [3, 1]
    assert not blocks.cover(tables, 2, spare=1)
    assert blocks.cover(tables, 2)
