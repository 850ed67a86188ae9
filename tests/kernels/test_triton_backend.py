"""The adapter of the kernels to the attention contract, in Triton's interpreter."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from rlt_kernels.reference import paged_attention
from rlt_train.attention.backends.triton_paged import TritonBackend
from rlt_train.attention.contract import AttentionGroup, LayerSpec, PagedBatch, SequenceSpan
from rlt_train.attention.planner import Planner

CPU = torch.device("cpu")
BLOCK = 16
SPEC = LayerSpec(
    query_heads=6,
    kv_heads=2,
    head_dim=24,
    scale=0.2,
    sliding_window=None,
    softcap=None,
    has_sinks=False,
    dtype=torch.bfloat16,
)


def planned(spans: list[tuple[int, int]]) -> PagedBatch:
    """A batch over distinct blocks, in an order that is not ascending."""
    tables, block = [], 1
    for start, length in spans:
        count = -(-(start + length) // BLOCK)
        tables.append(list(range(block, block + count))[::-1])
        block += count
    sequences = [SequenceSpan([table], *span) for table, span in zip(tables, spans, strict=True)]
    return Planner(1, BLOCK, CPU).plan(sequences)[0]


def cache(spec: LayerSpec, batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every token before the batch's own; whatever else there is, is NaN."""
    size = (spec.kv_heads, int(batch.tables.max()) + 1, BLOCK, spec.head_dim)
    keys, values = (torch.full(size, torch.nan, dtype=spec.dtype) for _ in range(2))
    for table, start in zip(batch.tables, batch.starts.tolist(), strict=True):
        past = torch.arange(start)
        for store in (keys, values):
            new = torch.randn(spec.kv_heads, start, spec.head_dim).to(spec.dtype)
            store[:, table[past // BLOCK].long(), past % BLOCK] = new
    return keys, values


def rows(spec: LayerSpec, batch: PagedBatch) -> list[torch.Tensor]:
    """Query, key and value of a forward, as a model passes them: heads before rows, seen transposed."""
    t = len(batch.slots)
    heads = (spec.query_heads, spec.kv_heads, spec.kv_heads)
    return [torch.randn(n, t, spec.head_dim).to(spec.dtype).transpose(0, 1) for n in heads]


def check(spec: LayerSpec, spans: list[tuple[int, int]], sinks: torch.Tensor | None = None) -> None:
    torch.manual_seed(0)
    batch = planned(spans)
    backend = TritonBackend(AttentionGroup(spec, (0,)), BLOCK, CPU)
    plan = backend.plan(batch)
    for scale in (spec.scale, 1.0):  # two layers of a group may differ in the scale, and share the plan
        keys, values = cache(spec, batch)
        query, key, value = rows(spec, batch)
        backend.write(keys, values, batch, key, value)
        options = {"scale": scale, "softcap": spec.softcap, "sinks": sinks}
        output = backend.attend(query, keys, values, plan, **options)
        expected = paged_attention(
            query,
            keys,
            values,
            batch.tables,
            batch.contexts,
            batch.query_starts,
            window=spec.sliding_window,
            chunk=spec.chunk,
            **options,
        )
        assert output.dtype == query.dtype and output.shape == query.shape
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2**-8)


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        ({}, [(4, 1), (300, 1), (0, 20), (33, 7)]),
        ({"sliding_window": 20}, [(4, 1), (300, 1), (0, 20), (33, 7)]),
        ({"chunk": 32, "softcap": 5.0}, [(63, 1), (64, 1), (60, 9)]),
        ({"dtype": torch.float16}, [(0, 1)]),
        ({"dtype": torch.float32}, [(0, 18)]),
    ],
    ids=["mixed", "window", "chunk and softcap", "decodes only", "prefill only"],
)
def test_writes_then_attends_like_the_reference(changes: dict, spans: list[tuple[int, int]]) -> None:
    check(replace(SPEC, **changes), spans)


def test_sinks_reach_both_kernels() -> None:
    check(replace(SPEC, has_sinks=True), [(40, 1), (2, 5)], sinks=torch.randn(6))


def test_an_empty_batch() -> None:
    backend = TritonBackend(AttentionGroup(SPEC, (0,)), BLOCK, CPU)
    batch = planned([])
    store = torch.zeros(2, 1, BLOCK, 24, dtype=SPEC.dtype)
    query, key, value = rows(SPEC, batch)
    backend.write(store, store, batch, key, value)
    output = backend.attend(query, store, store, backend.plan(batch), scale=1.0, softcap=None, sinks=None)
    assert output.shape == (0, 6, 24)


def test_a_captured_launch_serves_later_batches() -> None:
    """A CUDA graph replays the launches of one plan over what its tensors hold by then: other blocks, shorter
    contexts, and rows of padding with none."""
    torch.manual_seed(0)
    backend = TritonBackend(AttentionGroup(SPEC, (0,)), BLOCK, CPU)
    captured, later = planned([(600, 1), (5, 1), (9, 1)]), planned([(70, 1), (299, 1), (0, 1)])
    plan = backend.plan(captured)
    keys, values = cache(SPEC, later)
    query, key, value = rows(SPEC, later)
    backend.write(keys, values, later, key, value)
    captured.tables[:, : later.tables.shape[1]] = later.tables
    captured.contexts.copy_(later.contexts)
    captured.contexts[2] = 0
    output = backend.attend(query, keys, values, plan, scale=0.2, softcap=None, sinks=None)
    expected = paged_attention(
        query, keys, values, later.tables, captured.contexts, later.query_starts, scale=0.2
    )
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2**-8)
    assert (output[2] == 0).all()


def test_a_missing_kernel_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    TritonBackend.load()
    monkeypatch.setitem(sys.modules, "rlt_kernels.paged_decode", None)
    with pytest.raises(ImportError, match="rlt_kernels.paged_decode"):
        TritonBackend.load()
