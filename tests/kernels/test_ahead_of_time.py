"""Every kernel compiles to machine code for the chips it is declared for, as the adapter launches it, within
their shared memory. Needs no GPU.

The suite compiles a few layers; ``RLT_COMPILE_ALL=1`` compiles pairs of all settings, every kind of layer for
every chip (about ten minutes on one core).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_of_time import TARGETS, Launch, recorded
from pairwise import label, pairwise

from rlt_train.attention.backends.triton_paged import TritonBackend
from rlt_train.attention.contract import AttentionGroup, LayerSpec, SequenceSpan
from rlt_train.attention.planner import Planner

CPU = torch.device("cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SPEC = LayerSpec(8, 2, 128, 0.1, None, None, False, BF16)
_FLAGS = {
    "visible": [{}, {"sliding_window": 128}, {"chunk": 8192}],
    "softcap": [None, 30.0],
    "has_sinks": [False, True],
    "heads": [(8, 8), (8, 2), (7, 1), (71, 1), (128, 2)],
    "block_size": [16, 32, 48, 256],
}
# The largest tiles of a dtype, a padded head dimension, and every chip that the project promises.
SOME = [
    {"target": "sm_80", "dtype": BF16, "head_dim": 256, "block_size": 16},
    {"target": "sm_80", "dtype": FP32, "head_dim": 80, "heads": (7, 1), "softcap": 30.0},
    {
        "target": "sm_90",
        "dtype": BF16,
        "head_dim": 128,
        "visible": {"sliding_window": 128},
        "has_sinks": True,
    },
    {"target": "sm_90", "dtype": FP32, "head_dim": 256, "block_size": 32},
    {"target": "sm_100", "dtype": FP16, "head_dim": 96, "heads": (71, 1), "visible": {"chunk": 8192}},
    {"target": "sm_100", "dtype": BF16, "head_dim": 256, "softcap": 50.0, "heads": (8, 8)},
    {"target": "gfx942", "dtype": BF16, "head_dim": 128, "block_size": 256},
]
_KINDS = [(BF16, size) for size in (16, 20, 24, 64, 80, 96, 128, 256)]
_KINDS += [(FP32, size) for size in (16, 64, 96, 128, 256)] + [(FP16, size) for size in (24, 128, 256)]
ALL = pairwise({"target": list(TARGETS), "kind": _KINDS} | _FLAGS)
CASES = ALL if os.environ.get("RLT_COMPILE_ALL") == "1" else SOME


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile for real, whatever an earlier run left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def launches(spec: LayerSpec, block_size: int, *spans: tuple[int, int]) -> list[Launch]:
    """What one layer launches in a forward of ``(start, length)`` spans: two decodes and a prefill, if none
    are given."""
    spans = spans or ((2 * block_size, 1), (5, 1), (3, 20))
    tables = [[[0] * -(-(start + length) // block_size)] for start, length in spans]
    sequences = [SequenceSpan(table, *span) for table, span in zip(tables, spans, strict=True)]
    batch = Planner(1, block_size, CPU).plan(sequences)[0]
    backend = TritonBackend(AttentionGroup(spec, (0,)), block_size, CPU)
    keys, values = (
        torch.zeros(spec.kv_heads, 4, block_size, spec.head_dim, dtype=spec.dtype) for _ in range(2)
    )
    query = torch.zeros(len(batch.slots), spec.query_heads, spec.head_dim, dtype=spec.dtype)
    key = value = query[:, : spec.kv_heads]
    sinks = torch.zeros(spec.query_heads, dtype=spec.dtype) if spec.has_sinks else None
    with recorded() as found:
        backend.write(keys, values, batch, key, value)
        backend.attend(query, keys, values, backend.plan(batch), scale=0.1, softcap=spec.softcap, sinks=sinks)
    return found


@pytest.mark.parametrize("case", CASES, ids=label)
def test_compiles_within_shared_memory(case: dict[str, Any]) -> None:
    case = dict(case)
    dtype, head_dim = case.pop("kind", None) or (case.pop("dtype"), case.pop("head_dim"))
    query_heads, kv_heads = case.pop("heads", (8, 2))
    block_size = case.pop("block_size", 16)
    target, limit = TARGETS[case.pop("target")]
    visible = case.pop("visible", {})
    spec = replace(
        SPEC, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, **visible, **case
    )
    found = launches(spec, block_size)
    assert [launch.kernel.__name__ for launch in found] == [
        "_write_row",
        "_attend_split",
        "_join_splits",
        "_attend_chunk",
    ]
    for launch in found:
        compiled = launch.compile(target)
        assert compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
        assert compiled.metadata.shared <= limit, (launch.kernel.__name__, compiled.metadata.shared)


@pytest.mark.parametrize(
    "spans", [[(0, 1), (0, 2)], [(600, 1), (7, 1), (7, 1), (1600, 90)]], ids=["one block", "long"]
)
def test_a_step_makes_no_new_variant(spans: list[tuple[int, int]]) -> None:
    """Widths of tables, numbers of splits and places in a staging buffer vary from step to step; compiling
    for each would stall the engine."""
    first, later = launches(SPEC, 16), launches(SPEC, 16, *spans)
    assert [launch.variant() for launch in later] == [launch.variant() for launch in first]


def test_kernels_package_imports_only_torch_and_triton() -> None:
    import ast

    import rlt_kernels

    for path in Path(rlt_kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            roots = {name.split(".")[0] for name in names}
            assert roots <= {"__future__", "dataclasses", "math", "torch", "triton", "rlt_kernels"}, path
