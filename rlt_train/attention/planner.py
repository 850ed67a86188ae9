"""One forward's attention metadata, built on the host once a step and group."""

from __future__ import annotations

import numpy as np
import torch

from rlt_train.attention.contract import PagedBatch, SequenceSpan
from rlt_train.attention.staging import StagedArray, StagingBuffers


class Planner:
    """Turns scheduled spans into one ``PagedBatch`` a group.

    Args:
        groups: number of attention groups.
        block_size: tokens a KV block.
        device: where the tensors of a batch go.
    """

    def __init__(self, groups: int, block_size: int, device: torch.device) -> None:
        self._groups = groups
        self._block_size = block_size
        self._staging = StagingBuffers(device)

    def plan(self, spans: list[SequenceSpan]) -> list[PagedBatch]:
        """Pack the spans in the given order.

        Raises:
            ValueError: a decode (length 1) comes after a prefill.
        """
        n, rows = len(spans), sum(span.length for span in spans)
        width = max((-(-span.context // self._block_size) for span in spans), default=0)
        self._staging.begin(5 * 4 * (n + 1) + self._groups * (4 * n * width + 8 * rows))
        starts, lengths, contexts = (self._staging.array((n,), np.int32) for _ in range(3))
        query_starts, key_starts = (self._staging.array((n + 1,), np.int32) for _ in range(2))
        starts.host[:] = [span.start for span in spans]
        lengths.host[:] = [span.length for span in spans]
        np.add(starts.host, lengths.host, out=contexts.host)
        for sums, terms in ((query_starts.host, lengths.host), (key_starts.host, contexts.host)):
            sums[0] = 0
            np.cumsum(terms, out=sums[1:])
        decodes = int((lengths.host == 1).sum())
        if (lengths.host[:decodes] != 1).any():
            raise ValueError("decodes (spans of length 1) must be packed before prefills")
        owner = np.repeat(np.arange(n), lengths.host)
        positions = np.arange(rows) - query_starts.host[owner] + starts.host[owner]
        staged = [self._stage_group(spans, group, width, owner, positions) for group in range(self._groups)]
        device = self._staging.commit()
        return [
            PagedBatch(
                starts=starts.host,
                lengths=lengths.host,
                host_tables=tables.host,
                host_contexts=contexts.host,
                tables=tables.on(device),
                contexts=contexts.on(device),
                query_starts=query_starts.on(device),
                key_starts=key_starts.on(device),
                slots=slots.on(device),
                decodes=decodes,
            )
            for tables, slots in staged
        ]

    def _stage_group(
        self, spans: list[SequenceSpan], group: int, width: int, owner: np.ndarray, positions: np.ndarray
    ) -> tuple[StagedArray, StagedArray]:
        """Block tables ``[n, width]`` and slots ``[rows]`` of one group."""
        tables = self._staging.array((len(spans), width), np.int32)
        tables.host[:] = 0
        for row, span in zip(tables.host, spans, strict=True):
            blocks = span.tables[group][: -(-span.context // self._block_size)]
            row[: len(blocks)] = blocks
        np.maximum(
            tables.host, 0, out=tables.host
        )  # FREED: an index all the same, should a kernel prefetch it
        slots = self._staging.array((len(owner),), np.int64)
        block, offset = np.divmod(positions, self._block_size)
        np.add(tables.host[owner, block].astype(np.int64) * self._block_size, offset, out=slots.host)
        return tables, slots
