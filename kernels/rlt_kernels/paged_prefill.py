"""Paged attention of prefill chunks: packed rows of several sequences, each after the tokens it has computed.

FlashAttention (Dao et al. 2022) over paged keys and values, causal by absolute position. A tile's rows are
the query heads of one KV head at consecutive tokens (GQA packing), so keys and values are read once for all.
A row's result depends on its own sequence and position alone: neither on the rest of the batch nor on how its
prompt was cut into chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlt_kernels.paging import (
    LOG2E,
    Tile,
    attend_range,
    finite_or_zero,
    first_visible,
    padded,
    require_dense_heads,
    score_factors,
    split_heads,
)

_LOG2E = tl.constexpr(LOG2E)
_TILE_BYTES = 16 * 1024  # of keys in one step of the loop; as much again of values


def prefill_tile(group: int, head_dim: int, itemsize: int) -> Tile:
    """The tile of a layer with ``group`` query heads a KV head and keys of ``itemsize`` bytes a number."""
    dim = padded(head_dim)
    rows = 64 if itemsize == 2 else 32
    heads = split_heads(group, rows)
    keys = min(128, max(16, _TILE_BYTES // (dim * itemsize)))
    return Tile(heads, rows // heads, rows, keys, dim, warps=8 if dim == 256 else 4, stages=3)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    query_starts: torch.Tensor,
    most_queries: int,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    output: torch.Tensor,
) -> None:
    """Attend the packed rows of ``n`` sequences to their own contexts; writes their rows of ``output``.

    Args:
        query: ``[t, query_heads, head_dim]``, last dimension contiguous.
        keys, values: ``[kv_heads, blocks, block_size, head_dim]``, last dimension contiguous.
        tables: int32 ``[n, width]``. Entries of blocks that no row of a sequence sees are not read.
        contexts: int32 ``[n]``, keys of each sequence; its rows are at the last positions.
        query_starts: int32 ``[n + 1]``, first row of each sequence, then the end of the last; other rows of
            ``query`` and ``output`` are left alone.
        most_queries: rows of the longest sequence, or more.
        scale, window, chunk, softcap, sinks: as in ``rlt_kernels.reference.paged_attention``.
        output: ``[t, query_heads, head_dim]``, any dtype, last dimension contiguous.

    Raises:
        ValueError: the last dimension of a tensor is not contiguous.
    """
    require_dense_heads(query=query, keys=keys, values=values, tables=tables, output=output)
    sequences = contexts.shape[0]
    if sequences == 0 or most_queries == 0:
        return
    _, query_heads, head_dim = query.shape
    kv_heads, _, block_size, _ = keys.shape
    group = query_heads // kv_heads
    tile = prefill_tile(group, head_dim, keys.element_size())
    factor, cap = score_factors(scale, softcap)
    grid = (
        triton.cdiv(most_queries, tile.tokens),
        sequences,
        kv_heads * triton.cdiv(group, tile.heads),
    )
    with torch.cuda.device_of(query):
        _attend_chunk[grid](
            query, keys, values, tables, contexts, query_starts, query if sinks is None else sinks, output,
            *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables.stride(0),
            *output.stride()[:2],
            factor, cap,
            SINKS=sinks is not None, WINDOW=window or 0, CHUNK=chunk or 0, SOFTCAP=softcap is not None,
            BLOCK_SIZE=block_size, HEAD_DIM=head_dim, GROUP=group, HEADS=tile.heads, TOKENS=tile.tokens,
            ROWS=tile.rows, KEYS=tile.keys, DIM=tile.dim, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


# What changes from step to step must not make a new variant of the kernel, that is, a compilation while
# serving.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "contexts", "query_starts"],
)
def _attend_chunk(
    query, keys, values, tables, contexts, query_starts, sinks, output,
    query_row_stride, query_head_stride, key_head_stride, key_block_stride, key_slot_stride,
    value_head_stride, value_block_stride, value_slot_stride, table_stride, output_row_stride,
    output_head_stride,
    factor, cap,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program: ``TOKENS`` consecutive tokens of one sequence, the heads of one tile."""
    sequence = tl.program_id(1).to(tl.int64)
    first_row = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - first_row
    # The last tokens see the most keys: begin with them, so that the longest programs do not end the launch.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    if first_token >= length:
        return
    head_tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = (tl.program_id(2) // head_tiles).to(tl.int64)
    row = tl.arange(0, ROWS)
    token = first_token + row // HEADS
    group_head = tl.program_id(2) % head_tiles * HEADS + row % HEADS
    valid = (row < TOKENS * HEADS) & (group_head < GROUP) & (token < length)
    head = kv_head * GROUP + group_head
    start = tl.load(contexts + sequence) - length
    last_token = tl.minimum(first_token + TOKENS, length) - 1
    dims = tl.arange(0, DIM)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    packed_row = (first_row + token).to(tl.int64)
    queries = query + packed_row * query_row_stride + head * query_head_stride
    tile = tl.load(queries[:, None] + dims[None, :], mask=mask, other=0.0).to(keys.dtype.element_ty)
    result, maximum, total = attend_range(
        tile, start + tl.minimum(token, last_token), first_visible(start + first_token, WINDOW, CHUNK),
        start + last_token + 1,
        keys + kv_head * key_head_stride, values + kv_head * value_head_stride,
        tables + sequence * table_stride, key_block_stride, key_slot_stride, value_block_stride,
        value_slot_stride,
        factor, cap,
        WINDOW, CHUNK, SOFTCAP,
        BLOCK_SIZE, HEAD_DIM,
        ROWS, KEYS, DIM,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2E
        shift = finite_or_zero(tl.maximum(maximum, sink))
        keep = tl.exp2(maximum - shift)
        result = result * keep[:, None]
        total = total * keep + tl.exp2(sink - shift)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    rows = output + packed_row * output_row_stride + head * output_head_stride
    tl.store(rows[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=mask)
