"""One forward's attention plan: built once a step and group, then read by every layer of the group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlt_train.attention.contract import AttentionBackend, LayerCache, SequenceSpan


class PagedCall:
    """What a paged forward carries as ``paged_call``: the slots to write and each group's plan.

    Args:
        cache: the paged tensors.
        backend: the attention backend.
        spans: the packed sequences of this forward, in row order.
    """

    def __init__(self, cache: LayerCache, backend: AttentionBackend, spans: list[SequenceSpan]) -> None:
        self._cache = cache
        self._backend = backend
        self._slots = slot_mapping(spans, cache.block_size, cache.device)
        self._plans: Mapping[int | None, Any] = {
            window: backend.plan(spans, window) for window in cache.windows
        }

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write this layer's keys and values to their slots, then attend (see ``AttentionCall``)."""
        keys, values = self._cache.write(module, self._slots, key, value)
        plan = self._plans[sliding_window]
        return self._backend.attend(query, keys, values, plan, scale=scale, softcap=softcap, sinks=sinks)


def slot_mapping(spans: list[SequenceSpan], block_size: int, device: torch.device) -> torch.Tensor:
    """The cache slot of each packed token: int64 ``[tokens]``."""
    slots: list[int] = []
    for span in spans:
        table = span.block_table
        for position in range(span.start, span.context):
            slots.append(table[position // block_size] * block_size + position % block_size)
    return torch.tensor(slots, dtype=torch.long, device=device)
