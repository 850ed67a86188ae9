"""Which attention backend is chosen, with hardware and packages simulated: no GPU and no wheel is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tiny import gemma2, prompt, smaller

from rlt_train import RolloutManager, SamplingParams
from rlt_train.attention.__main__ import main
from rlt_train.attention.contract import AttentionBackend, LayerSpec
from rlt_train.attention.hardware import Hardware
from rlt_train.attention.selection import AUTO_ORDER, BACKENDS, REQUIREMENTS, find_backend, select_backend
from rlt_train.errors import BackendSelectionError
from rlt_train.kv.cache import PagedCache

DEVICE = torch.device("cpu")  # never asked: the hardware is given
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SPEC = LayerSpec(
    query_heads=8,
    kv_heads=2,
    head_dim=128,
    scale=1.0,
    sliding_window=None,
    softcap=None,
    has_sinks=False,
    dtype=BF16,
)


def installed(*names: str, broken: dict[str, Exception] | None = None) -> Callable[[str], Any]:
    """A registry in which exactly ``names`` can be imported; the declared capabilities are the real ones."""

    def find(name: str) -> Any:
        real = find_backend(name)

        def load() -> None:
            if broken and name in broken:
                raise broken[name]
            if name not in names:
                raise ImportError(f"No module named {name!r}")

        return type(real.__name__, (real,), {"load": staticmethod(load)})

    return find


ALL = ("flash4", "flash3", "flash2", "triton", "numba", "flex", "torch")


@dataclass
class Case:
    kind: Any
    capability: tuple[int, int] | None
    expected: str
    dtype: torch.dtype = BF16
    head_dim: int = 128
    block_size: int = 256
    packages: tuple[str, ...] = ALL
    layer: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


ONLY_OLD = ("flash2", "triton", "torch")
CASES = {
    "ampere": Case("cuda", (8, 0), "flash2"),
    "ada": Case("cuda", (8, 9), "flash2"),
    "ampere, small blocks": Case("cuda", (8, 0), "triton", block_size=16),
    "ampere, float32": Case("cuda", (8, 0), "triton", dtype=FP32),
    "ampere, float32, no triton": Case("cuda", (8, 0), "torch", dtype=FP32, packages=("flash2", "torch")),
    "ampere, sinks": Case("cuda", (8, 0), "triton", layer={"has_sinks": True}),
    "ampere, chunks": Case("cuda", (8, 0), "triton", layer={"chunk": 64}),
    "ampere, window": Case("cuda", (8, 0), "flash2", layer={"sliding_window": 64}),
    "ampere, wide heads": Case("cuda", (8, 0), "torch", head_dim=512),
    "turing": Case("cuda", (7, 5), "torch", dtype=FP16),
    "hopper, old packages": Case("cuda", (9, 0), "flash2", packages=ONLY_OLD),
    "hopper, nothing installed": Case("cuda", (9, 0), "torch", packages=("torch",)),
    "hopper, float32": Case("cuda", (9, 0), "triton", dtype=FP32),
    "blackwell, no flash": Case("cuda", (10, 0), "triton", packages=("triton", "torch")),
    "rocm": Case("rocm", None, "triton"),
    "rocm, no triton": Case("rocm", None, "torch", packages=("torch",)),
    "cpu": Case("cpu", None, "numba", dtype=FP32, block_size=16),
    "cpu, no numba": Case("cpu", None, "torch", dtype=FP32, packages=("torch", "flex")),
    "cpu, bfloat16": Case("cpu", None, "torch", dtype=BF16, block_size=16),
    "mps": Case("mps", None, "torch", dtype=FP32),
    "graphs": Case("cuda", (8, 0), "triton", dtype=FP32, required=frozenset({"cuda_graphs"})),
}


def select(case: Case, requested: str = "auto", **overrides: Any) -> Any:
    find = installed(*case.packages)
    return select_backend(
        requested,
        DEVICE,
        case.dtype,
        [replace(SPEC, head_dim=case.head_dim, dtype=case.dtype, **case.layer)],
        case.block_size,
        case.required,
        **({"hardware": Hardware(case.kind, case.capability), "find": find} | overrides),
    )


@pytest.mark.parametrize("name", CASES)
def test_auto_takes_the_first_that_fits_and_says_why_it_skipped_the_others(name: str) -> None:
    case = CASES[name]
    selection = select(case)
    order = AUTO_ORDER[case.kind]
    assert selection.selected == case.expected and selection.requested == "auto"
    assert list(selection.skipped) == list(order[: order.index(case.expected)])
    assert all(selection.skipped.values()) and str(Hardware(case.kind, case.capability)) in selection.reason
    assert selection.backend.name == case.expected


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_newer_flash_comes_first_on_the_chips_it_was_made_for(capability: tuple[int, int]) -> None:
    selection = select(Case("cuda", capability, "", block_size=128))
    assert selection.selected in ("flash4", "flash3")
    without = tuple(name for name in ALL if name != selection.selected)
    assert select(Case("cuda", capability, "", block_size=256, packages=without)).selected in (
        "flash3",
        "flash2",
    )


def test_a_broken_binary_counts_as_missing_and_its_words_are_kept() -> None:
    broken: dict[str, Exception] = {
        "flash2": ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEa"),
        "triton": OSError("libcuda.so.1: cannot open shared object file"),
    }
    selection = select(Case("cuda", (8, 0), ""), find=installed("torch", broken=broken))
    assert selection.selected == "torch"
    assert "undefined symbol: _ZN3c104cuda9SetDeviceEa" in selection.skipped["flash2"]
    assert "libcuda.so.1" in selection.skipped["triton"]


def test_an_unexpected_error_of_an_implementation_surfaces() -> None:
    find = installed("torch", broken={"numba": RuntimeError("corrupt cache")})
    with pytest.raises(RuntimeError, match="corrupt cache"):
        select(CASES["cpu"], find=find)


@pytest.mark.parametrize(
    ("changes", "requested", "reason"),
    [
        ({"block_size": 16}, "flash2", "block_size .*256.*not 16"),
        ({"dtype": FP32}, "flash2", "not torch.float32"),
        ({"head_dim": 512}, "flash2", "head_dim .*not 512"),
        ({"layer": {"has_sinks": True}}, "flash2", "does not serve layers with attention sinks"),
        ({"layer": {"chunk": 8}}, "flash2", "does not serve chunked-attention layers"),
        ({"capability": (7, 5)}, "flash2", "compute capability 8.0.*7.5"),
        ({"packages": ("torch",)}, "flash2", "cannot be imported .ImportError: No module named 'flash2'"),
        ({"kind": "cpu", "capability": None}, "triton", "runs on cuda, rocm, not on cpu"),
        ({"kind": "cuda"}, "numba", "runs on cpu, not on cuda"),
        ({"required": frozenset({"exact"})}, "torch", "does not offer exact"),
        ({"required": frozenset({"cuda_graphs"})}, "torch", "does not offer cuda_graphs"),
    ],
)
def test_an_explicit_choice_never_falls_back(changes: dict[str, Any], requested: str, reason: str) -> None:
    case = replace(Case("cuda", (8, 0), ""), **changes)
    with pytest.raises(BackendSelectionError, match=reason) as raised:
        select(case, requested)
    assert f"attention_backend='{requested}'" in str(raised.value)
    assert "use attention_backend='auto'" in str(raised.value)


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_requirements_filter_the_candidates(requirement: str) -> None:
    """Each flag alone decides between two backends that differ in nothing else."""

    def find(name: str) -> type[AttentionBackend]:
        real = find_backend("torch")
        flags = {flag: name == "torch" and flag == requirement for flag in REQUIREMENTS}
        return type("Fake", (real,), {"name": name, "capabilities": replace(real.capabilities, **flags)})

    case = replace(CASES["cpu"], required=frozenset({requirement}))
    selection = select(case, find=find)
    assert selection.selected == "torch"
    assert selection.skipped == {"numba": f"does not offer {requirement}, which is required"}
    assert select(replace(case, required=frozenset()), find=find).selected == "numba"


def test_packed_prefill_is_offered_by_the_reference() -> None:
    assert (
        select(Case("mps", None, "", dtype=FP32, required=frozenset({"packed_prefill"}))).selected == "torch"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": FP64}, "not torch.float64"),
        ({"block_size": 0}, "block_size"),
        ({"head_dim": 1 << 17}, "head_dim"),
    ],
)
def test_when_nothing_fits_every_candidate_is_listed_with_its_reason(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BackendSelectionError) as raised:
        select(replace(CASES["cpu"], **changes))
    message = str(raised.value)
    for name in AUTO_ORDER["cpu"]:
        assert f"\n  {name}: " in message
    assert message.count(reason) >= 2, message


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="attention_backend='fa2'.*'flash2'"):
        select(CASES["cpu"], "fa2")
    with pytest.raises(ValueError, match="required='speed'.*'cuda_graphs'"):
        select(replace(CASES["cpu"], required=frozenset({"speed"})))


@pytest.mark.parametrize("name", BACKENDS[1:])
def test_every_adapter_declares_itself_without_its_package(name: str) -> None:
    backend = find_backend(name)
    assert backend.name == name and issubclass(backend, AttentionBackend)
    assert backend.capabilities.devices and backend.capabilities.dtypes


# -- in a manager ------------------------------------------------------------------------------------------


def test_the_choice_is_made_before_any_kv_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[Any] = []
    manager = RolloutManager(smaller(), attention_backend="flash2", rollouts_in_flight=2, max_length=32)
    init = PagedCache.__init__

    def watched(self: PagedCache, specs: Any, groups: Any, num_blocks: Any, size: int, device: Any) -> None:
        allocated.append(size)
        init(self, specs, groups, num_blocks, size, device)

    monkeypatch.setattr(PagedCache, "__init__", watched)
    with pytest.raises(BackendSelectionError, match="flash2: runs on cuda, not on cpu"):
        manager.start()
    assert allocated == [4]  # the start-up probe's own small cache
    assert not manager.running


def test_attention_info_and_one_log_line_carry_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="rlt_train"):
        manager = RolloutManager(gemma2(), attention_backend="torch", rollouts_in_flight=2, max_length=32)
        with manager:
            manager.submit(prompt(3), SamplingParams(max_new_tokens=2)).result(30)
    info = manager.attention_info
    assert (info["requested"], info["selected"], info["skipped"]) == ("torch", "torch", {})
    assert info["reason"] == "asked for by name"
    assert [(g["layers"], g["sliding_window"]) for g in info["groups"]] == [([0, 2], 24), ([1, 3], None)]
    lines = [record.message for record in caplog.records if "asked for by name" in record.message]
    assert len(lines) == 1


def test_the_table_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rlt_train.attention", "--device", "cpu", "--sinks"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu, torch.float32, head_dim 64")
    assert {line.split()[0] for line in lines[1:]} == set(BACKENDS[1:])
    by_name = {line.split()[0]: line for line in lines[1:]}
    assert by_name["torch"].endswith("usable")
    assert by_name["flash2"].endswith("runs on cuda, not on cpu")
