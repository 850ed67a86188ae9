"""What the engine and an attention backend promise each other.

Terms, after vLLM: a *block* is a fixed run of KV slots, a *block table* a sequence's blocks in order, a
*slot* is ``block * block_size + offset``, and a *group* is the set of layers that share block tables and one
plan a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer, as observed in a forward (never inferred from an architecture's name).

    Attributes:
        query_heads, kv_heads: head counts; ``query_heads`` is a multiple of ``kv_heads``.
        head_dim: size of a key and of a value head.
        scale: factor on the query-key product.
        sliding_window: a query sees this many last tokens, itself included; ``None`` is no window.
        softcap: ``softcap * tanh(score / softcap)`` on the scaled scores (Gemma 2); ``None`` is off.
        has_sinks: one learned sink logit a query head joins the softmax (gpt-oss).
        dtype: dtype of the keys and values as they reach attention (under autocast, the autocast dtype).
        chunk: a query sees back to the last multiple of this position (Llama 4); ``None`` is no chunking.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool
    dtype: torch.dtype
    chunk: int | None = None

    def first_visible(self, position: int) -> int:
        """The first key position that a query at ``position`` sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        if self.sliding_window is not None:
            return max(0, position - self.sliding_window + 1)
        return 0


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers of one shape and visibility: they share block tables and one plan a step (after vLLM).

    Attributes:
        spec: what the layers have in common; ``scale`` alone may differ between them and comes with a call.
        layers: indices of the layers, in call order.
    """

    spec: LayerSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The part of one sequence that a forward computes: tokens ``start .. start + length`` of it.

    ``tables`` has one block table a group, each covering at least ``start + length`` tokens; the blocks that
    no token from ``start`` on can see may be gone from it (``FREED``). ``length == 1`` is a decode, more is a
    (chunked) prefill.
    """

    tables: Sequence[Sequence[int]]
    start: int
    length: int

    @property
    def context(self) -> int:
        """Keys up to and including the last token of the span."""
        return self.start + self.length


FREED = -1  # in a block table: the block fell out of the window and was given back


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One group's metadata for one forward of ``n`` sequences and ``t`` packed rows.

    Sequences of one row (decodes) come first: sequence ``i < decodes`` owns row ``i``. The NumPy arrays are
    on the host and the tensors on the engine's device; on a CPU both are the same memory. Valid until the
    second next plan is made. Entries of ``tables`` for freed blocks and beyond a sequence's own are 0 and
    must
    not be read: start at ``LayerSpec.first_visible`` of a row's position.

    Attributes:
        starts, lengths: host int32 ``[n]``, the span of each sequence.
        host_tables, tables: int32 ``[n, width]``, block tables.
        host_contexts, contexts: int32 ``[n]``, ``starts + lengths``: the keys of a sequence, its own
        included.
        query_starts: int32 ``[n + 1]``, first packed row of each sequence, then ``t``.
        key_starts: int32 ``[n + 1]``, running sum of ``contexts``.
        slots: int64 ``[t]``, the KV slot of each row's key and value.
        decodes: number of sequences of one row.
    """

    starts: np.ndarray
    lengths: np.ndarray
    host_tables: np.ndarray
    host_contexts: np.ndarray
    tables: torch.Tensor
    contexts: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    slots: torch.Tensor
    decodes: int

    @property
    def most_queries(self) -> int:
        """Rows of the longest span."""
        return int(self.lengths.max(initial=0))

    @property
    def most_keys(self) -> int:
        """Keys of the longest context."""
        return int(self.host_contexts.max(initial=0))


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The paged keys and values of one layer, ``[kv_heads, blocks, block_size, head_dim]`` each, its spec,
    and the index of its group."""

    spec: LayerSpec
    group: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, declared by it and never inferred.

    Attributes:
        devices: kinds of device, of "cpu", "cuda", "rocm", "mps".
        dtypes: dtypes of keys and values.
        head_dims: (least, most, multiple of).
        block_sizes: (least, most, multiple of).
        compute_capability: (least, most) CUDA compute capability, both included; ``None`` is any.
        sliding_window, chunked, softcap, sinks: the kinds of layer it serves.
        packed_prefill: it attends several prefill chunks in one call.
        cuda_graphs: its ``attend`` may be captured.
        exact: a row's result does not depend on what else is in the batch (row-invariant).
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_dims: tuple[int, int, int] = (1, 1 << 16, 1)
    block_sizes: tuple[int, int, int] = (1, 1 << 16, 1)
    compute_capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    sliding_window: bool = False
    chunked: bool = False
    softcap: bool = False
    sinks: bool = False
    packed_prefill: bool = False
    cuda_graphs: bool = False
    exact: bool = False


class AttentionBackend(ABC):
    """One way to run paged attention for the layers of one group.

    ``plan`` is called once a step, ``write`` and ``attend`` once a layer. An error in any of them ends the
    engine; no other backend takes over.

    Args:
        group: the layers it serves.
        block_size: tokens a KV block.
        device: where keys, values and queries live.

    Attributes:
        warmup_report: what ``warmup`` came to, in words; ``None`` if there is nothing to say.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, group: AttentionGroup, block_size: int, device: torch.device) -> None:
        self.group = group
        self.block_size = block_size
        self.device = device
        self.warmup_report: str | None = None

    @classmethod  # noqa: B027
    def load(cls) -> None:
        """Import what the backend needs.

        Raises:
            ImportError, OSError: it is missing or broken; the text becomes the reason to skip this backend.
        """

    def warmup(self, keys: torch.Tensor, values: torch.Tensor, most_sequences: int) -> None:  # noqa: B027
        """Compile what serves layers with ``keys`` and ``values`` of this shape, dtype and strides
        ``[kv_heads, blocks, block_size, head_dim]`` (read at most: they may be in use) and steps of up to
        ``most_sequences`` sequences.

        The one place for it: a compiler may save and restore global state, such as the random stream that
        training draws from. It is called while neither the engine nor training runs, on another thread than
        the engine's, and may be called again.
        """

    @abstractmethod
    def plan(self, batch: PagedBatch) -> Any:
        """Build what every layer of the group needs for one forward."""

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store ``key``/``value [t, kv_heads, head_dim]`` at ``batch.slots`` of a layer's paged ``keys`` and
        ``values`` ``[kv_heads, blocks, block_size, head_dim]``."""
        for store, new in ((keys, key), (values, value)):
            store.flatten(1, 2).index_copy_(1, batch.slots, new.transpose(0, 1).to(store.dtype))

    @abstractmethod
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
        """Attend ``query [t, query_heads, head_dim]`` (any strides, last dimension contiguous) to a layer's
        paged ``keys`` and ``values`` ``[kv_heads, blocks, block_size, head_dim]``, which already hold the
        step's own tokens. ``sinks`` is ``[query_heads]``. Returns ``[t, query_heads, head_dim]`` in the
        query's dtype."""
