"""What the adapters over flash-attn's paged entry points share.

The paged cache is read in place: ``[kv_heads, blocks, block_size, head_dim]`` goes in as a permuted view
``[blocks, block_size, kv_heads, head_dim]``, since every generation of the library takes any strides of the
cache whose last is 1. Decodes and longer spans go in two calls: the library chooses its tiles, and whether it
splits long contexts, by the longest query of a call.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rlt_train.attention.contract import AttentionBackend, AttentionGroup, PagedBatch

EntryPoint = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """Consecutive sequences of a batch that one call attends.

    Attributes:
        rows: their packed rows.
        tables: int32 ``[n, width]``, block tables.
        contexts: int32 ``[n]``, keys of each sequence, its own rows included.
        query_starts, key_starts: int32 ``[n + 1]``, running sums of rows and of contexts, from 0.
        most_queries, most_keys: rows of the longest span, keys of the longest context.
    """

    rows: slice
    tables: torch.Tensor
    contexts: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int


class FlashBackend(AttentionBackend):
    """See the module docstring."""

    reads_whole_tiles: ClassVar[bool]
    """Whether a tile of keys may begin in a block before the first that a row sees. What is read there is
    weighted with 0, but 0 times a NaN is NaN, so a freed block's place in the table must not be another
    sequence's block."""

    def __init__(self, group: AttentionGroup, block_size: int, device: torch.device) -> None:
        super().__init__(group, block_size, device)
        self._function = self.entry_point()

    @classmethod
    @abstractmethod
    def entry_point(cls) -> EntryPoint:
        """The library's function.

        Raises:
            ImportError, OSError: it is missing, broken, or of a version without the parameters we need.
        """

    @classmethod
    def load(cls) -> None:
        """See ``AttentionBackend.load``."""
        cls.entry_point()

    @abstractmethod
    def _call(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        spans: PackedSpans,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One call with ``query [rows, query_heads, head_dim]`` and pages
        ``[blocks, block_size, kv_heads, head_dim]``; a ``softcap`` of 0 is none."""

    def plan(self, batch: PagedBatch) -> list[PackedSpans]:
        """Decodes, then longer spans, as far as there are any."""
        tables = self._tables(batch)
        parts = (0, batch.decodes), (batch.decodes, len(batch.lengths))
        return [_pack(batch, tables, first, end) for first, end in parts if first < end]

    def _tables(self, batch: PagedBatch) -> torch.Tensor:
        """The block tables; where blocks were freed, with a sequence's first visible block in their place."""
        window = self.group.spec.sliding_window
        if window is None or not self.reads_whole_tiles:
            return batch.tables
        starts = batch.contexts - batch.query_starts.diff()
        first = ((starts - (window - 1)).clamp(min=0) // self.block_size).unsqueeze(1)
        columns = torch.arange(batch.tables.shape[1], dtype=torch.int32, device=self.device)
        return torch.where(columns < first, batch.tables.gather(1, first.long()), batch.tables)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: list[PackedSpans],
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        pages = [store.permute(1, 2, 0, 3) for store in (keys, values)]
        rows = query.to(keys.dtype)
        results = [
            self._call(rows[spans.rows], *pages, spans, scale, softcap or 0.0, sinks) for spans in plan
        ]
        if not results:
            return torch.empty_like(query)
        return (results[0] if len(results) == 1 else torch.cat(results)).to(query.dtype)


def _pack(batch: PagedBatch, tables: torch.Tensor, first: int, end: int) -> PackedSpans:
    """Sequences ``first .. end``; those before them are decodes, and own a row each."""
    key_starts = batch.key_starts[first : end + 1]
    return PackedSpans(
        rows=slice(first, first + int(batch.lengths[first:end].sum())),
        tables=tables[first:end],
        contexts=batch.contexts[first:end],
        query_starts=batch.query_starts[first : end + 1] - first,
        key_starts=key_starts - key_starts[:1],
        most_queries=int(batch.lengths[first:end].max()),
        most_keys=int(batch.host_contexts[first:end].max()),
    )


def with_parameters(function: EntryPoint, *names: str) -> EntryPoint:
    """``function`` itself, if it takes parameters of these names.

    Raises:
        ImportError: it does not; the library was found in a version that this adapter cannot drive.
    """
    missing = [name for name in names if name not in inspect.signature(function).parameters]
    if missing:
        name = f"{function.__module__}.{function.__name__}"
        raise ImportError(f"{name} takes no {', '.join(missing)}: install a newer version")
    return function
