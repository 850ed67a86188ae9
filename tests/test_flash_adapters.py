"""The flash-attn adapters, against stand-ins for the library (``flash_stand_ins.py``)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_stand_ins import FUNCTIONS, flash3_function
from torch import Tensor

from rlt_kernels.reference import paged_attention
from rlt_train.attention.backends.flash import FlashBackend
from rlt_train.attention.contract import FREED, AttentionGroup, LayerSpec, PagedBatch, SequenceSpan
from rlt_train.attention.planner import Planner
from rlt_train.attention.selection import find_backend, import_problem

CPU = torch.device("cpu")
NAMES = ("flash2", "flash3", "flash4")
BLOCK_SIZE = {"flash2": 256, "flash3": 16, "flash4": 48}
MODULES = (
    "flash_attn",
    "flash_attn.cute",
    "flash_attn_3",
    "flash_attn_3.flash_attn_interface",
    "flash_attn_interface",
)


class Calls(list[dict[str, Any]]):
    """The arguments of each call of the library, by name."""


def install(monkeypatch: pytest.MonkeyPatch, place: str, name: str, function: Any) -> Calls:
    """Put ``function`` where the adapter imports it from."""
    calls = Calls()

    def recording(*args: Any, **options: Any) -> Any:
        calls.append(inspect.signature(function).bind(*args, **options).arguments)
        return function(*args, **options)

    recording.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    recording.__name__, recording.__module__ = name, place
    for parent in {place.split(".")[0], place}:
        module = ModuleType(parent)
        module.__path__ = []  # a package
        monkeypatch.setitem(sys.modules, parent, module)
    setattr(sys.modules[place], name, recording)
    return calls


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


@pytest.fixture
def calls(name: str, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return install(monkeypatch, *FUNCTIONS[name])


SPEC = LayerSpec(
    query_heads=6,
    kv_heads=2,
    head_dim=24,
    scale=0.3,
    sliding_window=None,
    softcap=None,
    has_sinks=False,
    dtype=torch.bfloat16,
)
LAYERS = {
    "full": {},
    "one KV head": {"kv_heads": 1},
    "fp16": {"dtype": torch.float16},
    "window of 1": {"sliding_window": 1},
    "window within a block": {"sliding_window": 5},
    "window over blocks": {"sliding_window": 300},
    "softcap": {"softcap": 2.0},
    "window and softcap": {"sliding_window": 37, "softcap": 2.0},
}
# (start, length) of each sequence: contexts of 1, around a block and over several.
BATCHES = {
    "mixed": [(0, 1), (255, 1), (300, 1), (0, 7), (250, 9), (600, 20)],
    "decodes": [(256, 1), (15, 1), (700, 1)],
    "prefills": [(0, 2), (511, 30)],
    "one": [(90, 1)],
}


class Problem:
    """A batch over a cache in which every block that is not the sequence's own is NaN, block 0 too."""

    def __init__(self, spec: LayerSpec, block_size: int, spans: list[tuple[int, int]]) -> None:
        self.spec, self.block_size = spec, block_size
        generator = torch.Generator().manual_seed(len(spans))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(spec.dtype)

        counts = [-(-(start + length) // block_size) for start, length in spans]
        blocks = 2 + torch.randperm(sum(counts), generator=generator)
        shape = (spec.kv_heads, sum(counts) + 2, block_size, spec.head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=spec.dtype) for _ in range(2))
        planned = []
        for own, (start, length) in zip(blocks.split(counts), spans, strict=True):
            freed = spec.first_visible(start) // block_size
            planned.append(SequenceSpan([[FREED] * freed + own[freed:].tolist()], start, length))
            for store in (self.keys, self.values):
                store[:, own[freed:]] = normal(spec.kv_heads, len(own) - freed, block_size, spec.head_dim)
        self.batch: PagedBatch = Planner(1, block_size, CPU).plan(planned)[0]
        rows = sum(length for _, length in spans)
        # A query cut out of a larger projection, as attention layers give it.
        self.query = normal(rows, spec.query_heads + 3, spec.head_dim)[:, : spec.query_heads]
        self.sinks = normal(spec.query_heads) if spec.has_sinks else None

    def run(self, name: str) -> Tensor:
        spec = self.spec
        backend = find_backend(name)(AttentionGroup(spec, (0,)), self.block_size, CPU)
        plan = backend.plan(self.batch)
        return backend.attend(
            self.query, self.keys, self.values, plan, scale=spec.scale, softcap=spec.softcap, sinks=self.sinks
        )

    def expected(self) -> Tensor:
        spec, batch = self.spec, self.batch
        return paged_attention(
            self.query,
            self.keys,
            self.values,
            batch.tables,
            batch.contexts,
            batch.query_starts,
            scale=spec.scale,
            window=spec.sliding_window,
            softcap=spec.softcap,
            sinks=self.sinks,
        )


def assert_right(problem: Problem, name: str) -> None:
    output = problem.run(name)
    assert output.dtype == problem.query.dtype
    # The stand-in is exact but for rounding its result.
    tolerance = 2 ** (-8 if problem.spec.dtype == torch.bfloat16 else -11)
    torch.testing.assert_close(output.double(), problem.expected(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_attends_as_the_reference(name: str, calls: Calls, layer: str, batch: str) -> None:
    assert_right(Problem(replace(SPEC, **LAYERS[layer]), BLOCK_SIZE[name], BATCHES[batch]), name)
    parts = {"mixed": [1, 20], "decodes": [1], "prefills": [30], "one": [1]}
    assert [call["max_seqlen_q"] for call in calls] == parts[batch]


@pytest.mark.parametrize("layer", ["full", "window over blocks"])
def test_sinks_go_to_flash4(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    install(monkeypatch, *FUNCTIONS["flash4"])
    problem = Problem(replace(SPEC, has_sinks=True, **LAYERS[layer]), 16, BATCHES["mixed"])
    assert problem.sinks is not None
    problem.sinks.requires_grad_()
    assert_right(problem, "flash4")


@pytest.mark.parametrize("sinks", [False, True])
def test_flash4_compiles_for_decodes_and_prefills_in_warmup(
    monkeypatch: pytest.MonkeyPatch, sinks: bool
) -> None:
    calls = install(monkeypatch, *FUNCTIONS["flash4"])
    spec = replace(SPEC, has_sinks=sinks, softcap=2.0, sliding_window=9)
    problem = Problem(spec, 48, BATCHES["mixed"])
    keys, values = problem.keys.clone(), problem.values.clone()
    find_backend("flash4")(AttentionGroup(spec, (0,)), 48, CPU).warmup(problem.keys, problem.values, 64)
    assert [call["max_seqlen_q"] for call in calls] == [1, 512]
    assert all((call["learnable_sink"] is not None) == sinks for call in calls)
    for store, before in ((problem.keys, keys), (problem.values, values)):
        assert torch.equal(store.view(torch.int16), before.view(torch.int16))
    calls.clear()
    assert_right(problem, "flash4")
    assert {call["softcap"] for call in calls} == {2.0}


def test_the_cache_is_not_copied(name: str, calls: Calls) -> None:
    problem = Problem(SPEC, BLOCK_SIZE[name], BATCHES["mixed"])
    problem.run(name)
    keys, values = ("k_cache", "v_cache") if name == "flash3" else ("k", "v")
    for call in calls:
        assert call[keys].data_ptr() == problem.keys.data_ptr()
        assert call[values].data_ptr() == problem.values.data_ptr()


def test_a_query_of_another_dtype_comes_back_in_it(name: str, calls: Calls) -> None:
    problem = Problem(SPEC, BLOCK_SIZE[name], BATCHES["one"])
    problem.query = problem.query.float()
    assert_right(problem, name)
    assert calls[0]["q"].dtype == torch.bfloat16


def test_an_empty_batch_calls_nothing(name: str, calls: Calls) -> None:
    backend = find_backend(name)(AttentionGroup(SPEC, (0,)), BLOCK_SIZE[name], CPU)
    plan = backend.plan(Planner(1, BLOCK_SIZE[name], CPU).plan([])[0])
    query = torch.empty(0, 6, 24, dtype=SPEC.dtype)
    store = torch.zeros(2, 1, BLOCK_SIZE[name], 24, dtype=SPEC.dtype)
    assert backend.attend(query, store, store, plan, scale=1.0, softcap=None, sinks=None).shape == (0, 6, 24)
    assert not calls


def test_flash3_is_also_found_where_older_builds_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, "flash_attn_interface", "flash_attn_with_kvcache", flash3_function)
    assert_right(Problem(SPEC, 16, BATCHES["one"]), "flash3")
    assert len(calls) == 1


def test_a_missing_package_is_the_reason(name: str) -> None:
    problem = import_problem(find_backend(name))
    assert problem is not None and "ModuleNotFoundError" in problem and "flash_attn" in problem


class Broken:
    """A finder whose modules fail to load."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in MODULES:
            raise self._error


@pytest.mark.parametrize(
    "error",
    [
        ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"),
        OSError("libcudart.so.12: cannot open shared object file"),
        ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_binary_propagates_with_its_words(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in MODULES:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(error), *sys.meta_path])
    with pytest.raises(type(error)) as raised:
        find_backend(name).load()
    assert raised.value is error
    assert str(error) in str(import_problem(find_backend(name)))


def test_a_version_without_paging_counts_as_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, function, _ = FUNCTIONS[name]
    install(monkeypatch, place, function, lambda q, k, v, softcap=0.0, window_size=(-1, -1): q)
    with pytest.raises(ImportError, match=f"{function} takes no .*(block_table|page_table).*newer version"):
        find_backend(name).load()


def test_flash4_refuses_the_early_version_that_flash2_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, page_table=None, learnable_sink=None
    ):
        return q

    install(monkeypatch, "flash_attn.cute", "flash_attn_varlen_func", early)
    with pytest.raises(ImportError, match="takes no max_seqlen_q"):
        find_backend("flash4").load()


def test_what_they_declare() -> None:
    flash2, flash3, flash4 = (find_backend(name) for name in NAMES)
    for backend in (flash2, flash3, flash4):
        assert issubclass(backend, FlashBackend)
        limits = backend.capabilities
        assert limits.devices == {"cuda"} and limits.dtypes == {torch.float16, torch.bfloat16}
        assert limits.sliding_window and limits.softcap and limits.packed_prefill
        assert not (limits.chunked or limits.exact or limits.cuda_graphs)
        assert limits.sinks == (backend is flash4)
    assert flash2.capabilities.block_sizes[2] == 256
    head_dims = [backend.capabilities.head_dims for backend in (flash2, flash3, flash4)]
    assert head_dims == [(8, 256, 8), (8, 256, 8), (8, 128, 8)]
