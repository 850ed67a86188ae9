"""The numba backend against paged attention in float64, over a cache in which whatever must not be read is
NaN."""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from rlt_kernels.reference import paged_attention
from rlt_train.attention.backends import numba_decode
from rlt_train.attention.backends.numba_paged import NumbaBackend
from rlt_train.attention.backends.torch_paged import TorchBackend
from rlt_train.attention.contract import FREED, AttentionGroup, LayerSpec, PagedBatch, SequenceSpan
from rlt_train.attention.planner import Planner

CPU = torch.device("cpu")
SPEC = LayerSpec(
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    scale=0.25,
    sliding_window=None,
    softcap=None,
    has_sinks=False,
    dtype=torch.float32,
)
HEADS = {
    "GQA": {},
    "MQA, odd head": {"query_heads": 3, "kv_heads": 1, "head_dim": 21},
    "MHA, wide head": {"query_heads": 2, "head_dim": 64},
}
VISIBILITIES: dict[str, dict[str, int]] = {
    "all": {},
    "window of one": {"sliding_window": 1},
    "window within a block": {"sliding_window": 5},
    "window over blocks": {"sliding_window": 41},
    "small chunks": {"chunk": 24},
    "chunks of blocks": {"chunk": 64},
}


class Case:
    """A planned batch over blocks in random order, and its layer's cache. With ``poison`` the cache is NaN
    but for the keys and values that some row sees, else (Torch reads whole blocks) in blocks of nobody."""

    def __init__(
        self, spec: LayerSpec, block_size: int, spans: list[tuple[int, int]], poison: bool = True
    ) -> None:
        self.spec, self.block_size = spec, block_size
        torch.manual_seed(0)
        counts = [-(-(start + length) // block_size) for start, length in spans]
        free = iter(torch.randperm(sum(counts) + 2).tolist())
        tables = [[next(free) for _ in range(count)] for count in counts]
        size = (spec.kv_heads, sum(counts) + 2, block_size, spec.head_dim)
        self.keys, self.values = (torch.full(size, torch.nan) for _ in range(2))
        for table, (start, length) in zip(tables, spans, strict=True):
            first = spec.first_visible(start) if poison else 0
            end = start + length if poison else len(table) * block_size
            for position in range(first, end):
                block, offset = table[position // block_size], position % block_size
                self.keys[:, block, offset] = torch.randn(spec.kv_heads, spec.head_dim)
                self.values[:, block, offset] = torch.randn(spec.kv_heads, spec.head_dim)
            freed = spec.first_visible(start) // block_size
            table[:freed] = [FREED] * freed
        sequences = [SequenceSpan([table], *span) for table, span in zip(tables, spans, strict=True)]
        self.batch: PagedBatch = Planner(1, block_size, CPU).plan(sequences)[0]
        self.rows = len(self.batch.slots)
        # As a model passes them: heads before rows, seen transposed.
        self.query = torch.randn(spec.query_heads, self.rows, spec.head_dim).transpose(0, 1)
        self.sinks = torch.randn(spec.query_heads) if spec.has_sinks else None

    def backend(self) -> NumbaBackend:
        return NumbaBackend(AttentionGroup(self.spec, (0,)), self.block_size, CPU)

    def attend(self, query: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
        backend = self.backend()
        return backend.attend(
            self.query if query is None else query,
            self.keys,
            self.values,
            backend.plan(self.batch),
            scale=self.spec.scale if scale is None else scale,
            softcap=self.spec.softcap,
            sinks=self.sinks,
        )

    def expected(self, scale: float | None = None) -> torch.Tensor:
        return paged_attention(
            self.query,
            self.keys,
            self.values,
            self.batch.tables,
            self.batch.contexts,
            self.batch.query_starts,
            scale=self.spec.scale if scale is None else scale,
            window=self.spec.sliding_window,
            chunk=self.spec.chunk,
            softcap=self.spec.softcap,
            sinks=self.sinks,
        )

    def check(self, tolerance: float = 1e-5) -> None:
        torch.testing.assert_close(self.attend().double(), self.expected(), atol=tolerance, rtol=tolerance)


def decodes(*contexts: int) -> list[tuple[int, int]]:
    return [(context - 1, 1) for context in contexts]


# -- the kernel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 8, 16, 48])
@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("heads", HEADS)
def test_decodes(heads: str, visibility: str, block_size: int) -> None:
    spec = replace(SPEC, **HEADS[heads], **VISIBILITIES[visibility])
    edges = {1, block_size, block_size + 1, 2 * block_size, 23, 24, 25, 64, 65, 130} | {
        max(block_size - 1, 1)
    }
    for softcap, sinks in itertools.product((None, 1.5), (False, True)):
        Case(replace(spec, softcap=softcap, has_sinks=sinks), block_size, decodes(*edges)).check()


def test_a_long_context() -> None:
    Case(SPEC, 16, decodes(5000, 3)).check()


def test_scale_is_of_the_call() -> None:
    case = Case(SPEC, 16, decodes(40))
    torch.testing.assert_close(
        case.attend(scale=1.0).double(), case.expected(scale=1.0), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_large_scores_stay_finite_and_small_ones_count(softcap: float | None) -> None:
    case = Case(replace(SPEC, softcap=softcap), 16, decodes(100))
    for scale in (1e-3, 30.0):
        expected = case.expected(scale=scale)
        torch.testing.assert_close(case.attend(scale=scale).double(), expected, atol=1e-4, rtol=1e-4)
    case.keys, case.query = case.keys.abs(), -case.query.abs()  # all far below 0
    expected = case.expected(scale=30.0)
    torch.testing.assert_close(case.attend(scale=30.0).double(), expected, atol=1e-4, rtol=1e-4)


def test_a_sink_that_outweighs_every_key_leaves_nothing() -> None:
    case = Case(replace(SPEC, has_sinks=True), 16, decodes(20))
    case.sinks = torch.tensor([200.0, 0.0, 0.0, 0.0])
    output = case.attend()
    assert (output[0, 0].abs() < 1e-30).all() and (output[0, 1:] != 0).any()


def test_a_visible_nan_reaches_its_own_sequence_and_no_other() -> None:
    case = Case(SPEC, 16, decodes(20, 30))
    block = int(case.batch.tables[1, 1])
    case.keys[:, block, 3] = torch.nan
    output = case.attend()
    assert output[1].isnan().all() and output[0].isfinite().all()
    case.keys[:, block, 3], case.values[:, block, 3] = 0.0, torch.nan
    output = case.attend()
    assert output[1].isnan().all() and output[0].isfinite().all()


def test_a_row_does_not_depend_on_the_others() -> None:
    together = Case(SPEC, 16, decodes(33, 70, 5))
    output = together.attend()
    together.query, together.batch = together.query[1:2], _second(together.batch)
    assert torch.equal(together.attend(), output[1:2])


def _second(batch: PagedBatch) -> PagedBatch:
    table = batch.tables[1].tolist()
    return Planner(1, 16, CPU).plan([SequenceSpan([table], int(batch.starts[1]), 1)])[0]


# -- the adapter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("visibility", ["all", "window within a block", "small chunks"])
def test_decodes_and_prefills_in_one_batch(visibility: str) -> None:
    spec = replace(SPEC, softcap=3.0, has_sinks=True, **VISIBILITIES[visibility])
    Case(spec, 16, [*decodes(5, 90), (0, 20), (33, 7)], poison=False).check()
    Case(spec, 16, [(0, 20), (33, 7)], poison=False).check()


def test_a_prompt_of_one_token() -> None:
    Case(SPEC, 16, [(0, 1)]).check()


def test_an_empty_batch() -> None:
    case = Case(SPEC, 16, [])
    assert case.attend().shape == (0, 4, 16)


def test_queries_of_any_strides_and_of_another_dtype() -> None:
    case = Case(SPEC, 16, decodes(40, 3))
    contiguous = case.attend(case.query.contiguous())
    wide = torch.full((2, 7, 40), torch.nan)[:, 2:6, 5:21]
    wide.copy_(case.query)
    assert torch.equal(case.attend(), contiguous) and torch.equal(case.attend(wide), contiguous)
    narrow = case.attend(case.query.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), contiguous, atol=3e-2, rtol=3e-2)


def test_writes_the_batchs_slots_and_nothing_else() -> None:
    case = Case(SPEC, 16, [*decodes(5, 17), (3, 20)])
    new = [torch.randn(2, case.rows, 16).transpose(0, 1) for _ in range(2)]
    stores = {}
    for kind in (NumbaBackend, TorchBackend):
        stores[kind] = [torch.zeros_like(case.keys) for _ in range(2)]
        kind(AttentionGroup(SPEC, (0,)), 16, CPU).write(*stores[kind], case.batch, *new)
    assert all(map(torch.equal, stores[NumbaBackend], stores[TorchBackend]))
    assert stores[NumbaBackend][0].count_nonzero() == new[0].numel()


# -- compiling and threads -----------------------------------------------------------------------------------


def test_everything_is_compiled_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SPEC, 16, [*decodes(30), (0, 5)], poison=False)
    numba_decode.build_decode.cache_clear()
    numba_decode.build_write.cache_clear()
    backend = case.backend()

    def compile(*_: Any) -> None:
        raise AssertionError("compiled (or loaded) in a forward")

    monkeypatch.setattr(numba.core.dispatcher.Dispatcher, "compile", compile)
    plan = backend.plan(case.batch)
    new = torch.randn(2, case.rows, 16).transpose(0, 1)
    for rows in (new, new.contiguous()):
        backend.write(case.keys, case.values, case.batch, rows, rows)
    for query in (case.query, case.query.contiguous()):
        backend.attend(query, case.keys, case.values, plan, scale=1.0, softcap=None, sinks=None)


def test_other_threads_run_beside_the_kernel() -> None:
    case = Case(SPEC, 16, decodes(4000))
    table = case.batch.tables[0].tolist()
    case.batch = Planner(1, 16, CPU).plan([SequenceSpan([table], 3999, 1)] * 800)[0]
    case.query = case.query.expand(800, -1, -1)
    case.backend()
    worker = threading.Thread(target=case.attend)
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the kernels in a folder in which numba cannot make ``__pycache__``; returns the path of the
    user's cache, which does not exist yet."""
    shutil.copy(numba_decode.__file__, tmp_path / "kernels_read_only.py")
    (tmp_path / "__pycache__").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user"


def _write_one() -> None:
    module = importlib.import_module("kernels_read_only")
    del sys.modules["kernels_read_only"]
    store, new = torch.zeros(1, 2, 4, 3), torch.randn(1, 1, 3)
    module.build_write()(new.numpy(), torch.tensor([6]).numpy(), store.numpy())
    assert torch.equal(store[0, 1, 2], new[0, 0]) and store.count_nonzero() == 3


def test_installed_read_only_it_uses_the_users_cache(read_only: Path) -> None:
    _write_one()
    assert list(read_only.rglob("*.nbc"))


def test_with_no_folder_for_a_cache_it_compiles_all_the_same(read_only: Path) -> None:
    read_only.touch()
    _write_one()
    assert not list(read_only.parent.rglob("*.nbc"))


def test_a_missing_numba_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    NumbaBackend.load()
    monkeypatch.delitem(sys.modules, "rlt_train.attention.backends.numba_decode")
    monkeypatch.delattr("rlt_train.attention.backends.numba_decode")
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match="numba"):
        NumbaBackend.load()
