"""Paged caches in which everything that a kernel must not read is NaN, and the float64 answer beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlt_kernels.reference import first_visible, paged_attention

HEADS = {"MHA": (2, 2), "MQA": (3, 1), "groups of 3": (6, 2), "groups of 5": (5, 1), "groups of 7": (7, 1)}
VISIBILITIES: dict[str, dict[str, int]] = {
    "all": {},
    "window within a block": {"window": 5},
    "window over blocks": {"window": 41},
    "small chunks": {"chunk": 24},
    "chunks of blocks": {"chunk": 64},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a layer and what its rows see; ``heads`` is (query heads, KV heads)."""

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    visibility: str = "all"
    softcap: float | None = None
    sinks: bool = False


@dataclass(slots=True)
class Problem:
    """One launch: ``arguments`` are query, keys, values, tables, contexts; ``options`` the keywords."""

    shape: Shape
    arguments: tuple[torch.Tensor, ...]
    query_starts: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def query(self) -> torch.Tensor:
        return self.arguments[0]

    @property
    def contexts(self) -> torch.Tensor:
        return self.arguments[4]

    @property
    def most_keys(self) -> int:
        return max(self.contexts.tolist(), default=1)

    @property
    def most_queries(self) -> int:
        return int(self.query_starts.diff().max())

    def poisoned_output(self) -> torch.Tensor:
        """NaN ``[t, query_heads, head_dim]`` with gaps between rows and heads."""
        t, heads, dim = self.query.shape
        return torch.full((t, heads + 1, dim + 5), torch.nan, dtype=self.query.dtype)[:, :heads, :dim]

    def answer(self) -> torch.Tensor:
        """The float64 reference."""
        return paged_attention(*self.arguments, self.query_starts, **self.options)

    def sequence(self, index: int) -> Problem:
        """Sequence ``index`` alone, over the same cache."""
        query, keys, values, tables, contexts = self.arguments
        begin, end = self.query_starts[index : index + 2].tolist()
        alone = (query[begin:end], keys, values, tables[index : index + 1], contexts[index : index + 1])
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        return Problem(self.shape, alone, starts, self.options)


def spread(shape: Sequence[int], dtype: torch.dtype, padding: Sequence[int]) -> torch.Tensor:
    """NaN of ``shape``, cut out of a larger tensor, so that no stride is a round number."""
    whole = torch.full([size + pad for size, pad in zip(shape, padding, strict=True)], torch.nan, dtype=dtype)
    return whole[tuple(slice(size) for size in shape)]


def problem(shape: Shape, spans: Sequence[tuple[int, int]]) -> Problem:
    """Sequences given as ``(start, length)``; start -1 and length 1 is a row without any key. Only
    cache slots that some row sees are numbers; the table points at a NaN block where nothing is seen."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(shape.dtype)

    visible = VISIBILITIES[shape.visibility]
    contexts = [start + length for start, length in spans]
    width = max((-(-context // shape.block_size) for context in contexts), default=0)
    free = (1 + torch.randperm(len(spans) * width, generator=generator)).tolist()  # block 0 stays NaN
    query_heads, kv_heads = shape.heads
    size = (kv_heads, len(spans) * width + 1, shape.block_size, shape.head_dim)
    keys, values = (spread(size, shape.dtype, padding) for padding in ((0, 0, 1, 3), (1, 0, 0, 1)))
    tables = spread((len(spans), width), torch.float32, (0, 3)).nan_to_num(0).to(torch.int32)
    for table, (start, _), context in zip(tables, spans, contexts, strict=True):
        seen = torch.arange(first_visible(start, visible.get("window"), visible.get("chunk")), context)
        for block in (seen // shape.block_size).unique().tolist():
            table[block] = free.pop()
        blocks, slots = table[seen // shape.block_size].long(), seen % shape.block_size
        for store in (keys, values):
            store[:, blocks, slots] = normal(kv_heads, len(seen), shape.head_dim)
    lengths = torch.tensor([0, *(length for _, length in spans)])
    rows = int(lengths.sum())
    query = spread((rows, query_heads, shape.head_dim), shape.dtype, (0, 2, 1))
    query.copy_(normal(rows, query_heads, shape.head_dim))
    options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "softcap": shape.softcap, **visible}
    if shape.sinks:
        options["sinks"] = normal(query_heads)
    arguments = (query, keys, values, tables, torch.tensor(contexts, dtype=torch.int32))
    return Problem(shape, arguments, lengths.cumsum(0).to(torch.int32), options)


def assert_close(output: torch.Tensor, given: Problem) -> None:
    """``output`` is the reference up to the rounding that a kernel cannot avoid: of the weights before they
    meet the values, and of the result. float32 arithmetic in between is given a hundred roundings."""
    answer = given.answer()
    assert output.isfinite().all(), "NaN leaked into the output"
    values = given.arguments[2].double()
    largest = values[values.isfinite()].abs().max()
    rounding = torch.finfo(given.shape.dtype).eps / 2 + 100 * torch.finfo(torch.float32).eps / 2
    excess = (output.double() - answer).abs() - rounding * (answer.abs() + largest)
    assert excess.max() <= 0, f"off by {(output.double() - answer).abs().max():.2e}"
