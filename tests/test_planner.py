"""The step planner against a token-by-token model of what it packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlt_train.attention.contract import FREED, SequenceSpan
from rlt_train.attention.planner import Planner

CPU = torch.device("cpu")


def test_tables_contexts_and_slots_of_every_group() -> None:
    spans = [
        SequenceSpan([[5, 6, 7], [2, FREED, 9]], start=8, length=1),
        SequenceSpan([[1], [3]], start=0, length=1),
        SequenceSpan([[4, 0], [8, 1]], start=2, length=5),
    ]
    first, second = Planner(2, 4, CPU).plan(spans)
    assert first.decodes == second.decodes == 2
    assert first.starts.tolist() == [8, 0, 2] and first.lengths.tolist() == [1, 1, 5]
    assert first.contexts.tolist() == first.host_contexts.tolist() == [9, 1, 7]
    assert first.query_starts.tolist() == [0, 1, 2, 7] and first.key_starts.tolist() == [0, 9, 10, 17]
    assert first.tables.tolist() == [[5, 6, 7], [1, 0, 0], [4, 0, 0]]
    assert second.tables.tolist() == [[2, 0, 9], [3, 0, 0], [8, 1, 0]]
    assert first.most_queries == 5 and first.most_keys == 9
    for batch, group in ((first, 0), (second, 1)):
        expected = [
            span.tables[group][position // 4] * 4 + position % 4
            for span in spans
            for position in range(span.start, span.context)
        ]
        assert batch.slots.tolist() == expected and batch.slots.dtype == torch.int64
        assert batch.tables.dtype == batch.contexts.dtype == batch.query_starts.dtype == torch.int32


def test_what_was_planned_survives_one_more_plan() -> None:
    planner = Planner(1, 4, CPU)
    batch = planner.plan([SequenceSpan([[3]], 1, 1)])[0]
    planner.plan([SequenceSpan([[i]], 0, 1) for i in range(50)])
    assert batch.slots.tolist() == [13] and np.array_equal(batch.host_tables, [[3]])


def test_the_two_host_buffers_are_used_in_turn_and_not_made_anew() -> None:
    planner = Planner(1, 4, CPU)
    spans = [SequenceSpan([[3]], 1, 1)]
    places = [planner.plan(spans)[0].slots.data_ptr() for _ in range(6)]
    assert places[0] != places[1] and places[:2] * 3 == places


def test_an_empty_step_has_empty_metadata() -> None:
    (batch,) = Planner(1, 4, CPU).plan([])
    assert batch.slots.shape == (0,) and batch.tables.shape == (0, 0) and batch.query_starts.tolist() == [0]
    assert batch.most_keys == batch.most_queries == batch.decodes == 0


def test_a_decode_after_a_prefill_is_an_error() -> None:
    with pytest.raises(ValueError, match="decodes .* must be packed before prefills"):
        Planner(1, 4, CPU).plan([SequenceSpan([[0]], 0, 2), SequenceSpan([[1]], 0, 1)])
