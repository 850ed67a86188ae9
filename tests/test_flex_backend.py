"""FlexAttention over the paged cache against plain attention in float64, and its compiling: when it happens,
what it leaves alone, and what serves where it cannot."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import generate_greedy, llama, prompt

from rlt_train import RolloutManager, SamplingParams
from rlt_train.attention.backends import flex
from rlt_train.attention.backends.flex import FlexBackend
from rlt_train.attention.contract import FREED, AttentionGroup, LayerSpec, SequenceSpan
from rlt_train.attention.planner import Planner
from rlt_train.attention.selection import import_problem, select_backend
from rlt_train.errors import BackendSelectionError

CPU = torch.device("cpu")
BLOCK, BLOCKS, MOST = 16, 32, 8  # the manager's below, too: equal kernels share what the compiler caches
PLAIN = LayerSpec(4, 2, 16, 16**-0.5, None, None, False, torch.float32)


def changed(**changes: Any) -> LayerSpec:
    return LayerSpec(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__} | changes)


# Window and chunk are no part of what is compiled, only of the block lists, which are tested by themselves.
SPECS = {
    "plain": PLAIN,
    "chunk": changed(chunk=24),
    "soft-cap, window, one head a group": changed(query_heads=2, softcap=2.0, sliding_window=20),
}


@pytest.fixture(scope="module")
def compiled() -> Callable[[LayerSpec], FlexBackend]:
    """Backends that are warmed up, each spec once."""
    problem = import_problem(FlexBackend)
    if problem is not None:
        pytest.skip(problem)
    made: dict[LayerSpec, FlexBackend] = {}

    def make(spec: LayerSpec) -> FlexBackend:
        if spec not in made:
            made[spec] = new_backend(spec)
            made[spec].warmup(*stores(spec), MOST)
        return made[spec]

    return make


def new_backend(spec: LayerSpec) -> FlexBackend:
    return FlexBackend(AttentionGroup(spec, (0,)), BLOCK, CPU)


def stores(spec: LayerSpec, blocks: int = BLOCKS) -> list[torch.Tensor]:
    shape = (spec.kv_heads, blocks, BLOCK, spec.head_dim)
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]


def poisoned(spec: LayerSpec, spans: Sequence[SequenceSpan]) -> list[torch.Tensor]:
    """Keys and values with NaN in every block that no span sees, and 1000 in the slots after a sequence's end
    (the engine clears those: where a masked slot is read, a NaN in it would count)."""
    keep = torch.zeros(BLOCKS, dtype=torch.bool)
    cached = stores(spec)
    for span in spans:
        first, last = spec.first_visible(span.start) // BLOCK, (span.context - 1) // BLOCK
        keep[list(span.tables[0][first : last + 1])] = True
        for store in cached:
            store[:, span.tables[0][last], (span.context - 1) % BLOCK + 1 :] = 1000.0
    for store in cached:
        store[:, ~keep] = torch.nan
    return cached


def spans_of(spec: LayerSpec, contexts: Sequence[int], length: int = 1, seed: int = 0) -> list[SequenceSpan]:
    """One span a context, in blocks drawn without order; what fell out of the window is ``FREED``."""
    blocks = np.random.default_rng(seed).permutation(BLOCKS).tolist()
    spans = []
    for context in contexts:
        table = [blocks.pop() for _ in range(-(-context // BLOCK))]
        seen = spec.first_visible(context - length) // BLOCK
        spans.append(SequenceSpan([[FREED] * seen + table[seen:]], context - length, length))
    return spans


def reference(
    spec: LayerSpec,
    query: torch.Tensor,
    cached: Sequence[torch.Tensor],
    spans: Sequence[SequenceSpan],
    scale: float,
) -> torch.Tensor:
    """Attention of each row by itself, in float64."""
    rows = iter(query.double())
    outputs = []
    for span in spans:
        for position in range(span.start, span.context):
            seen = range(spec.first_visible(position), position + 1)
            slots = [span.tables[0][at // BLOCK] * BLOCK + at % BLOCK for at in seen]
            keys, values = (store.flatten(1, 2)[:, slots].double() for store in cached)
            row = next(rows).view(spec.kv_heads, -1, 1, spec.head_dim)
            scores = (row * keys.unsqueeze(1)).sum(-1) * scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            outputs.append((scores.softmax(-1) @ values).flatten(0, 1))
    return torch.stack(outputs)


def attend(
    backend: FlexBackend, spans: list[SequenceSpan], cached: Sequence[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and output, as the engine calls it: in inference mode, with the query's heads outermost."""
    spec = backend.group.spec
    (batch,) = Planner(1, BLOCK, CPU).plan(spans)
    rows = int(batch.lengths.sum())
    generator = torch.Generator().manual_seed(rows)
    with torch.inference_mode():
        query = torch.randn((spec.query_heads, rows, spec.head_dim), generator=generator).transpose(0, 1)
        output = backend.attend(
            query, *cached, backend.plan(batch), scale=scale, softcap=spec.softcap, sinks=None
        )
    return query, output


def check(backend: FlexBackend, spans: list[SequenceSpan], scale: float = PLAIN.scale) -> None:
    spec = backend.group.spec
    cached = poisoned(spec, spans)
    query, output = attend(backend, spans, cached, scale)
    assert output.shape == query.shape and output.dtype == query.dtype
    torch.testing.assert_close(
        output.double(), reference(spec, query, cached, spans, scale), rtol=0, atol=3e-6
    )


@pytest.fixture
def kernel_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(thread, rows) of every call of the compiled kernel from here on."""
    rows: list[tuple[str, int]] = []
    call = flex.DecodeKernel.__call__

    def counted(self: flex.DecodeKernel, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append((threading.current_thread().name, len(query)))
        return call(self, query, *rest)

    monkeypatch.setattr(flex.DecodeKernel, "__call__", counted)
    return rows


# -- what it computes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit",
    [{}]
    + [{"sliding_window": tokens} for tokens in (1, 5, BLOCK, BLOCK + 1, 2 * BLOCK, 40)]
    + [{"chunk": tokens} for tokens in (7, BLOCK, 24, 2 * BLOCK)],
)
def test_the_block_lists_hold_exactly_the_visible_slots(limit: dict[str, int]) -> None:
    spec = changed(**limit)
    contexts = range(1, 5 * BLOCK + 2)
    spans = [span for context in contexts for span in spans_of(spec, (context,), seed=context)]
    (batch,) = Planner(1, BLOCK, CPU).plan(spans)
    lists = flex.list_blocks(spec, BLOCK, batch)
    for i, span in enumerate(spans):
        partial, full = lists.partial[i, : lists.partial_counts[i]], lists.full[i, : lists.full_counts[i]]
        begin0, end0, begin1, end1 = lists.edges[:, i]
        seen = [block * BLOCK + at for block in full for at in range(BLOCK)]
        cut = [block * BLOCK + at for block in partial for at in range(BLOCK)]
        visible = [slot for slot in cut if begin0 <= slot < end0 or begin1 <= slot < end1]
        at = range(spec.first_visible(span.start), span.context)
        expected = [span.tables[0][p // BLOCK] * BLOCK + p % BLOCK for p in at]
        assert sorted(seen + visible) == sorted(expected)
        assert len(visible) < len(cut) or not cut, "a whole block is masked all the same"
        assert len(partial) + len(full) == len({slot // BLOCK for slot in expected}), (
            "a hidden block is listed"
        )


@pytest.mark.parametrize("name", SPECS)
def test_decodes_match_attention_in_float64(
    compiled: Callable[[LayerSpec], FlexBackend], kernel_rows: list[tuple[str, int]], name: str
) -> None:
    spec = SPECS[name]
    backend = compiled(spec)
    batches = [
        (1, BLOCK - 1, BLOCK, BLOCK + 1, 2, 2 * BLOCK, 3 * BLOCK - 1, 70),
        (41, 24, 25, 48),
        (5,),
        (70, 33, 47, 64, 20),
    ]
    for seed, contexts in enumerate(batches):  # a smaller batch after a larger one finds no trace of it
        check(backend, spans_of(spec, contexts, seed=seed))
    assert [rows for _, rows in kernel_rows] == [8, 4, 1, 5], "Torch served instead"


def test_sequences_may_share_blocks_and_layers_may_differ_in_scale(
    compiled: Callable[[LayerSpec], FlexBackend],
) -> None:
    spans = [SequenceSpan([[9, 4, 3]], 40, 1), SequenceSpan([[9, 4, 7]], 33, 1)]
    check(compiled(PLAIN), spans, scale=0.6)


def test_prefills_beside_decodes_and_alone_go_through_torch(
    compiled: Callable[[LayerSpec], FlexBackend], kernel_rows: list[tuple[str, int]]
) -> None:
    spec = SPECS["chunk"]
    blocks = iter(np.random.default_rng(0).permutation(BLOCKS).tolist())

    def span(context: int, length: int) -> SequenceSpan:
        return SequenceSpan([[next(blocks) for _ in range(-(-context // BLOCK))]], context - length, length)

    decodes, prefills = [span(17, 1), span(50, 1)], [span(45, 9), span(3, 3)]
    check(compiled(spec), decodes + prefills)
    check(compiled(spec), prefills)
    assert [rows for _, rows in kernel_rows] == [2]


def test_one_key_more_or_less_would_be_seen(compiled: Callable[[LayerSpec], FlexBackend]) -> None:
    spans = spans_of(PLAIN, (40,))
    cached = poisoned(PLAIN, spans)
    query, output = attend(compiled(PLAIN), spans, cached, PLAIN.scale)
    wrong = reference(changed(sliding_window=39), query, cached, spans, PLAIN.scale)
    assert (output - wrong).abs().max() > 1e-3


# -- what serves where nothing is compiled -------------------------------------------------------------------


def test_torch_serves_until_warmup_and_whatever_the_kernel_was_not_compiled_for(
    compiled: Callable[[LayerSpec], FlexBackend], kernel_rows: list[tuple[str, int]]
) -> None:
    spans = spans_of(PLAIN, (17, 50))
    fresh = new_backend(PLAIN)
    check(fresh, spans)
    assert fresh.warmup_report == "not compiled yet: Torch serves"
    check(compiled(PLAIN), spans_of(PLAIN, [20] * (MOST + 1)))  # more sequences
    cached = [store[:, : BLOCKS - 1] for store in stores(PLAIN)]  # another pool, other strides
    few = [SequenceSpan([[3, 8]], 20, 1)]
    query, output = attend(compiled(PLAIN), few, cached, PLAIN.scale)
    torch.testing.assert_close(
        output.double(), reference(PLAIN, query, cached, few, PLAIN.scale), rtol=0, atol=3e-6
    )
    assert kernel_rows == []


def test_more_threads_than_the_kernel_has_memory_for_are_left_to_torch(
    compiled: Callable[[LayerSpec], FlexBackend],
    kernel_rows: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    check(compiled(PLAIN), spans_of(PLAIN, (17, 50)))
    assert kernel_rows == []


def test_without_a_compiler_it_is_not_selected_and_says_so(tmp_path: Path) -> None:
    from torch._inductor import config

    missing = str(tmp_path / "no-such-compiler")
    with (
        config.patch({"cpp.cxx": (None, missing)}),
        pytest.raises(BackendSelectionError, match=f"flex: .*no C\\+\\+ compiler.*{missing}.*CXX"),
    ):
        select_backend("flex", CPU, torch.float32, [PLAIN], BLOCK)


def test_a_compile_that_fails_is_reported_and_torch_serves(
    compiled: Callable[[LayerSpec], FlexBackend],
    kernel_rows: list[tuple[str, int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from torch._inductor import config, cpp_builder

    compiled(PLAIN)  # PyTorch examines the processor by compiling, once, and keeps the answer
    broken = tmp_path / "c++"
    broken.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {cpp_builder.get_cpp_compiler()} --version\n'
        f"echo no luck today >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    backend = new_backend(PLAIN)
    with config.patch({"cpp.cxx": (None, str(broken))}):
        backend.warmup(*stores(PLAIN, blocks=5), MOST)
    assert backend.warmup_report.startswith("did not compile (") and "Torch serves" in backend.warmup_report
    assert backend.warmup_report in caplog.text
    check(backend, spans_of(PLAIN, (17, 50)))
    assert kernel_rows == []


@pytest.mark.parametrize(
    ("spec", "block_size", "why"),
    [
        (changed(has_sinks=True), 16, "does not serve layers with attention sinks"),
        (changed(head_dim=8), 16, "takes head_dim 16 to 256, not 8"),
        (PLAIN, 24, "takes block_size 16 to 256 in multiples of 16, not 24"),
    ],
)
def test_what_it_does_not_serve_is_refused_by_name(spec: LayerSpec, block_size: int, why: str) -> None:
    with pytest.raises(BackendSelectionError, match=why):
        select_backend("flex", CPU, torch.float32, [spec], block_size)


# -- compiling, in a manager ---------------------------------------------------------------------------------


def random_states() -> tuple[Any, ...]:
    _, numbers, position, *_ = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers.tolist(), position


def test_only_start_and_warmup_compile_and_they_leave_the_random_streams_alone(
    compiled: Callable[[LayerSpec], FlexBackend],
    kernel_rows: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.output_graph import OutputGraph

    compiling: list[str] = []
    compile_graph = OutputGraph.call_user_compiler

    def recorded(self: Any, *arguments: Any, **keywords: Any) -> Any:
        compiling.append(threading.current_thread().name)
        return compile_graph(self, *arguments, **keywords)

    monkeypatch.setattr(OutputGraph, "call_user_compiler", recorded)
    model = llama(num_hidden_layers=2)
    here = threading.current_thread().name
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [prompt(length, seed=length) for length in (1, 16, 30, 33, 47)]
    manager = RolloutManager(
        model,
        attention_backend="flex",
        rollouts_in_flight=MOST,
        max_length=BLOCKS // MOST * BLOCK,
        max_tokens_per_step=64,
        engine_threads=1,
    )
    before = random_states()
    with manager:
        assert compiling == [here] and random_states() == before
        assert manager.attention_info["groups"][0]["warmup"].startswith(f"compiled for {MOST} decodes in ")
        handles = [manager.submit(ids, params) for ids in prompts]
        handles[0].result(timeout=60)
        manager.warmup()
        assert compiling == [here, here] and random_states() == before
        handles += [manager.submit(ids, params) for ids in prompts]
        outputs = [handle.result(timeout=60).token_ids for handle in handles]
    assert compiling == [here, here], "the engine thread compiled"
    assert outputs == 2 * [generate_greedy(model, ids, 12) for ids in prompts]
    assert len(kernel_rows) > 2 * 2 * 11 and {thread for thread, _ in kernel_rows} == {"rlt-rollouts"}
