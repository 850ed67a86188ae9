"""Paged attention in plain PyTorch: the reference, on every device, at a cost linear in the context that is
read.

Sequences are bucketed by length, so padding at most doubles what is read and no mask ever spans two
sequences. The query heads of one KV head are folded into the query rows, so that keys and values are gathered
once a KV head and never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlt_train.attention.contract import SequenceSpan


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar query and context length, padded to common sizes: ``n`` sequences, ``q`` rows,
    ``b`` blocks.

    Attributes:
        rows: int64 ``[n * q]``, packed query rows (padding repeats a sequence's last row), or ``None`` for
        all in order.
        valid: int64 ``[tokens]``, which of the ``n * q`` results are real, or ``None`` for all.
        blocks: int64 ``[n * b]``, the block tables (padding repeats a sequence's first block, which
        the bias hides; another's might hold NaN, and a masked NaN is still a NaN).
        bias: ``[n, q, b * block_size]`` float32, 0 where a query may look and -inf elsewhere.
    """

    rows: torch.Tensor | None
    valid: torch.Tensor | None
    blocks: torch.Tensor
    bias: torch.Tensor


class TorchBackend:
    """See the module docstring. ``block_size`` and ``device`` are those of the cache."""

    name = "torch"

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def plan(self, spans: list[SequenceSpan], sliding_window: int | None) -> list[Bucket]:
        """Bucket the spans by (query length, block count), each within a factor of two."""
        members: dict[tuple[int, int], list[tuple[SequenceSpan, int]]] = {}
        row = 0
        for span in spans:
            key = ((span.length - 1).bit_length(), (self._blocks(span) - 1).bit_length())
            members.setdefault(key, []).append((span, row))
            row += span.length
        return [self._bucket(bucket, sliding_window, whole=len(members) == 1) for bucket in members.values()]

    def _blocks(self, span: SequenceSpan) -> int:
        return -(-span.context // self._block_size)

    def _bucket(self, members: list[tuple[SequenceSpan, int]], window: int | None, whole: bool) -> Bucket:
        queries = max(span.length for span, _ in members)
        width = max(self._blocks(span) for span, _ in members)
        tables = [span.block_table[: self._blocks(span)] for span, _ in members]
        blocks = (
            torch.tensor([table + table[:1] * (width - len(table)) for table in tables])
            .flatten()
            .to(self._device)
        )
        start, length, first_row = torch.tensor([(s.start, s.length, row) for s, row in members]).unbind(1)
        offset = torch.minimum(torch.arange(queries), length.unsqueeze(1) - 1)  # [n, q]
        position = (start.unsqueeze(1) + offset).unsqueeze(2)
        key_position = torch.arange(width * self._block_size)
        hidden = key_position > position
        if window is not None:
            hidden |= key_position <= position - window
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).to(self._device)
        uniform = all(span.length == queries for span, _ in members)
        rows = (first_row.unsqueeze(1) + offset).flatten().to(self._device)
        valid = (torch.arange(queries) < length.unsqueeze(1)).flatten().nonzero().squeeze(1).to(self._device)
        return Bucket(None if whole and uniform else rows, None if uniform else valid, blocks, bias)

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

    scores = torch.bmm(packed, gather(keys).transpose(1, 2)).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(kv_heads, n, folded, q, context).add_(bucket.bias.unsqueeze(1))
    if sinks is not None:
        sink = sinks.float().view(kv_heads, 1, folded, 1, 1).expand(-1, n, -1, q, 1)
        probabilities = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    probabilities = probabilities.reshape(kv_heads * n, folded * q, context).to(values.dtype)
    output = torch.bmm(probabilities, gather(values)).view(kv_heads, n, folded, q, head_dim)
    return output.permute(1, 3, 0, 2, 4).reshape(n * q, kv_heads * folded, head_dim).to(query.dtype)
