"""Paged attention in float64 and plain torch, one query row at a time: what the kernels are compared with."""

from __future__ import annotations

import torch


def first_visible(position: int, window: int | None, chunk: int | None) -> int:
    """The first key position that a query at ``position`` sees (a chunk takes precedence over a window)."""
    if chunk is not None:
        return position // chunk * chunk
    if window is not None:
        return max(0, position - window + 1)
    return 0


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed query rows to their sequences' paged keys and values.

    Args:
        query: ``[t, query_heads, head_dim]``; the rows of a sequence are the last of its context.
        keys, values: ``[kv_heads, blocks, block_size, head_dim]``.
        tables: ``[n, width]``, block tables.
        contexts: ``[n]``, keys of each sequence, those of its own rows included.
        query_starts: ``[n + 1]``, first packed row of each sequence, then ``t``.
        scale: factor on the query-key product.
        window: a row sees this many last tokens, itself included.
        chunk: a row sees back to the last multiple of this position.
        softcap: ``softcap * tanh(score / softcap)`` on the scaled scores.
        sinks: ``[query_heads]``, a logit that joins each head's softmax and brings no value.

    Returns:
        float64 ``[t, query_heads, head_dim]``. A row that sees no key is zero.
    """
    block_size = keys.shape[2]
    group = query.shape[1] // keys.shape[0]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for sequence, context in enumerate(contexts.tolist()):
        first_row, end_row = query_starts[sequence : sequence + 2].tolist()
        for row in range(first_row, end_row):
            position = context - (end_row - row)
            seen = torch.arange(first_visible(position, window, chunk), position + 1)
            blocks = tables[sequence, seen // block_size].long()
            key = keys[:, blocks, seen % block_size].double().repeat_interleave(group, dim=0)
            value = values[:, blocks, seen % block_size].double().repeat_interleave(group, dim=0)
            scores = (key @ query[row].double().unsqueeze(2)).squeeze(2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().unsqueeze(1)], dim=1)
            probabilities = scores.softmax(dim=1)[:, : len(seen)]
            output[row] = (probabilities.unsqueeze(1) @ value).squeeze(1)
    return output
