"""What the engine and an attention backend promise each other.

Terms, after vLLM: a *block* is a fixed run of KV slots, a *block table* a sequence's blocks in order, a
*slot* is ``block * block_size + offset``, and a *group* is the set of layers that share one plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer, as observed in a forward (never inferred from an architecture's name).

    Attributes:
        query_heads, kv_heads: head counts; ``query_heads`` is a multiple of ``kv_heads``.
        head_dim: size of a key and of a value head.
        scale: factor on the query-key product.
        sliding_window: a query sees this many last tokens, itself included; ``None`` is full attention.
        softcap: ``softcap * tanh(score / softcap)`` on the scaled scores (Gemma 2); ``None`` is off.
        has_sinks: one learned sink logit a query head joins the softmax (gpt-oss).
        dtype: dtype of the keys and values as they reach attention (under autocast, the autocast dtype).
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The part of one sequence that a forward computes: tokens ``start .. start + length`` of it.

    ``block_table`` covers at least ``start + length`` tokens. ``length == 1`` is a decode, more is a
    (chunked) prefill.
    """

    block_table: list[int]
    start: int
    length: int

    @property
    def context(self) -> int:
        """Keys that the last token of the span sees: all tokens up to and including it."""
        return self.start + self.length


class LayerCache(Protocol):
    """The paged tensors as a forward sees them (``rlt_train.kv.cache.PagedCache``)."""

    block_size: int
    device: torch.device
    windows: list[int | None]

    def write(
        self, module: nn.Module, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new keys and values at ``slots``; returns the layer's whole key and value
        tensors."""
        ...


class AttentionBackend(Protocol):
    """One way to run paged attention. ``plan`` is called once a step and group, ``attend`` once a layer."""

    name: str

    def plan(self, spans: list[SequenceSpan], sliding_window: int | None) -> Any:
        """Build what every layer of a group needs for one forward over the packed ``spans``."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Any,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend ``query [tokens, query_heads, head_dim]`` to a layer's paged ``keys`` and ``values``.

        ``keys``/``values`` are ``[kv_heads, blocks, block_size, head_dim]`` and already hold the step's own
        tokens.
        Returns ``[tokens, query_heads, head_dim]``.
        """
        ...
