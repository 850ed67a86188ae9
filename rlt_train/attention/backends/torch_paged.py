"""Paged attention in plain PyTorch: the reference, on every device, at a cost linear in the context that is
read.

Sequences are bucketed by length, so padding at most doubles what is read and no mask ever spans two
sequences. The query heads of one KV head are folded into the query rows, so that keys and values are gathered
once a KV head and never repeated. Blocks outside a window are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlt_train.attention.contract import AttentionBackend, Capabilities, LayerSpec, PagedBatch

_GATHER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar query and context length, padded to common sizes: ``n`` sequences, ``q`` rows,
    ``b`` blocks.

    Attributes:
        rows: int64 ``[n * q]``, packed query rows (padding repeats a sequence's last row), or ``None`` for
            all in order.
        valid: int64 ``[tokens]``, which of the ``n * q`` results are real, or ``None`` for all.
        blocks: int64 ``[n * b]``, the visible part of the block tables (padding repeats a sequence's first
            visible block, which the bias hides; another's might hold NaN, and a masked NaN is still a NaN).
        bias: ``[n, q, b * block_size]`` float32, 0 where a query may look and -inf elsewhere.
    """

    rows: torch.Tensor | None
    valid: torch.Tensor | None
    blocks: torch.Tensor
    bias: torch.Tensor


class TorchBackend(AttentionBackend):
    """See the module docstring."""

    name = "torch"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda", "rocm", "mps"}),
        dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        sliding_window=True,
        chunked=True,
        softcap=True,
        sinks=True,
        packed_prefill=True,
    )

    def plan(self, batch: PagedBatch, first: int = 0) -> list[Bucket]:
        """Bucket the sequences from index ``first`` on by (query length, visible blocks), each within a
        factor of two. Rows count from the first row of sequence ``first``."""
        starts, lengths = batch.starts[first:], batch.lengths[first:]
        if not len(starts):
            return []
        begin = first_visible(self.group.spec, starts) // self.block_size
        count = -(-batch.host_contexts[first:] // self.block_size) - begin
        first_row = np.cumsum(lengths) - lengths
        keys = np.stack([_bits(lengths), _bits(count)], axis=1)
        kinds, kind_of = np.unique(keys, axis=0, return_inverse=True)
        members = [np.flatnonzero(kind_of.reshape(-1) == kind) for kind in range(len(kinds))]
        pieces = [piece for chosen in members for piece in self._split(chosen, int(count[chosen].max()))]
        buckets = []
        for chosen in pieces:
            tables = batch.host_tables[first:][chosen]
            bucket = self._bucket(tables, starts[chosen], lengths[chosen], begin[chosen], count[chosen])
            buckets.append(self._locate(bucket, first_row[chosen], lengths[chosen], whole=len(pieces) == 1))
        return buckets

    def _split(self, chosen: np.ndarray, blocks: int) -> list[np.ndarray]:
        """Cut a bucket so that the keys it gathers stay in the caches; a large gather costs page faults."""
        spec = self.group.spec
        size = blocks * self.block_size * spec.kv_heads * spec.head_dim * spec.dtype.itemsize
        most = max(1, _GATHER_BYTES // size) if self.device.type == "cpu" else len(chosen)
        return np.array_split(chosen, -(-len(chosen) // most))

    def _bucket(
        self,
        tables: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        begin: np.ndarray,
        count: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Padded blocks ``[n, b]``, bias ``[n, q, keys]`` and each row's offset in its sequence ``[n,
        q]``."""
        column = np.arange(count.max())
        block = begin[:, None] + np.where(column < count[:, None], column, 0)
        blocks = np.take_along_axis(tables, block, axis=1).astype(np.int64)
        offset = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        position = (starts[:, None] + offset)[:, :, None]
        key_position = (begin[:, None] * self.block_size + np.arange(len(column) * self.block_size))[:, None]
        hidden = key_position > position
        if self.group.spec.sliding_window is not None or self.group.spec.chunk is not None:
            hidden |= key_position < first_visible(self.group.spec, position)
        bias = np.zeros(hidden.shape, np.float32)
        bias[hidden] = -np.inf
        return blocks, bias, offset

    def _locate(
        self,
        bucket: tuple[np.ndarray, np.ndarray, np.ndarray],
        first_row: np.ndarray,
        lengths: np.ndarray,
        whole: bool,
    ) -> Bucket:
        blocks, bias, offset = bucket
        uniform = bool((lengths == lengths[0]).all())
        rows = (first_row[:, None] + offset).reshape(-1)
        valid = np.flatnonzero(np.arange(offset.shape[1]) < lengths[:, None])
        return Bucket(
            rows=None if whole and uniform else self._to_device(rows),
            valid=None if uniform else self._to_device(valid),
            blocks=self._to_device(blocks.reshape(-1)),
            bias=self._to_device(bias),
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: list[Bucket],
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        if len(plan) == 1 and plan[0].rows is None:
            return attend_bucket(query, keys, values, plan[0], scale, softcap, sinks)
        output = torch.empty_like(query)
        for bucket in plan:
            result = attend_bucket(query, keys, values, bucket, scale, softcap, sinks)
            rows = bucket.rows
            assert rows is not None
            if bucket.valid is not None:
                result, rows = result.index_select(0, bucket.valid), rows.index_select(0, bucket.valid)
            output.index_copy_(0, rows, result)
        return output


def first_visible(spec: LayerSpec, positions: np.ndarray) -> np.ndarray:
    """``LayerSpec.first_visible`` of many positions."""
    if spec.chunk is not None:
        return positions // spec.chunk * spec.chunk
    if spec.sliding_window is not None:
        return np.maximum(positions - (spec.sliding_window - 1), 0)
    return np.zeros_like(positions)


def _bits(counts: np.ndarray) -> np.ndarray:
    """Bits of ``count - 1``: equal for counts within a factor of two (1, 2, 3-4, 5-8, ...)."""
    return np.frexp((counts - 1).astype(np.float64))[1]


def attend_bucket(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bucket: Bucket,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one bucket: ``[n * q, query_heads, head_dim]``, softmax in float32."""
    n, q, context = bucket.bias.shape
    kv_heads, head_dim = keys.shape[0], keys.shape[3]
    folded = query.shape[1] // kv_heads
    packed = query if bucket.rows is None else query.index_select(0, bucket.rows)
    packed = packed.view(n, q, kv_heads, folded, head_dim).permute(2, 0, 3, 1, 4)
    packed = packed.reshape(kv_heads * n, folded * q, head_dim).to(keys.dtype)

    def gather(store: torch.Tensor) -> torch.Tensor:
        chosen = store.flatten(2).index_select(1, bucket.blocks)
        return chosen.view(kv_heads * n, context, head_dim)

    sink = None if sinks is None else sinks.float().view(kv_heads, 1, folded, 1, 1)
    scores = torch.bmm(packed, gather(keys).transpose(1, 2)).float().mul_(scale)
    scores = scores.view(kv_heads, n, folded, q, context)
    probabilities = softmax(scores, bucket.bias.unsqueeze(1), softcap, sink)
    probabilities = probabilities.view(kv_heads * n, folded * q, context).to(values.dtype)
    output = torch.bmm(probabilities, gather(values)).view(kv_heads, n, folded, q, head_dim)
    if not torch.isfinite(output.sum()):
        shape = (kv_heads, n, -1, head_dim)
        packed, key, value = (t.view(shape) for t in (packed, gather(keys), gather(values)))
        _repair(output, packed, key, value, bucket.bias, scale, softcap, sink)
    return output.permute(1, 3, 0, 2, 4).reshape(n * q, kv_heads * folded, head_dim).to(query.dtype)


def softmax(
    scores: torch.Tensor, bias: torch.Tensor, softcap: float | None, sink: torch.Tensor | None
) -> torch.Tensor:
    """Softmax of float32 ``scores [kv_heads, n, folded, q, keys]`` (overwritten) after soft-cap and bias, a
    sink taking its share."""
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.add_(bias)
    if sink is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1].contiguous()


def _repair(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> None:
    """Compute the rows of ``output [kv_heads, n, folded, q, head_dim]`` that are not finite again, from the
    keys
    they see alone: a masked NaN is a NaN in the product, and a prompt's clean start must not suffer from it,
    since other requests reuse it."""
    kv_heads, n, folded, q, head_dim = output.shape
    spoiled = ~torch.isfinite(output).all(-1).all(2).all(0)  # [n, q]
    for sequence, row in spoiled.nonzero().tolist():
        seen = bias[sequence, row] == 0
        rows = query[:, sequence].view(kv_heads, folded, q, head_dim)[:, :, row]
        scores = torch.bmm(rows, key[:, sequence, seen].transpose(1, 2)).float().mul_(scale)
        scores = scores.view(kv_heads, 1, folded, 1, -1)
        weights = softmax(scores, torch.zeros((), device=scores.device), softcap, sink)
        weights = weights.view(kv_heads, folded, -1).to(value.dtype)
        output[:, sequence, :, row] = torch.bmm(weights, value[:, sequence, seen])
