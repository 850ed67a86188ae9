"""Paged attention of decode rows: one query row a sequence, keys and values read through block tables.

Split-KV (Flash-Decoding, Dao et al. 2023): the keys that a row sees are cut into splits, a program attends to
one split, and a second kernel joins a row's splits in order. No atomics. Where the cuts are depends only on
the row's own context, so a row's result does not depend on what else is in the batch. The query heads of one
KV head are the rows of one tile (GQA packing), so keys and values are read once.
"""

from __future__ import annotations

from dataclasses import dataclass

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

SPLIT_TOKENS = 256  # the shortest split, and a multiple of every tile's keys
MOST_SPLITS = 32  # a longer context gets longer splits instead
_SPLIT_TOKENS = tl.constexpr(SPLIT_TOKENS)
_MOST_SPLITS = tl.constexpr(MOST_SPLITS)
_LOG2E = tl.constexpr(LOG2E)
_TILE_BYTES = 16 * 1024  # of keys in one step of the loop; as much again of values


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where splits wait to be joined, all float32.

    Attributes:
        output: ``[decodes, query_heads, splits, head_dim]``, weighted sums of values.
        maximum, total: ``[decodes, query_heads, splits]``, softmax maximum (base 2) and denominator.
    """

    output: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(
        cls, decodes: int, query_heads: int, splits: int, head_dim: int, device: torch.device
    ) -> Workspace:
        """An uninitialised workspace; a launch writes all that it reads."""
        shape = (decodes, query_heads, splits)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def decode_tile(group: int, head_dim: int, itemsize: int) -> Tile:
    """The tile of a layer with ``group`` query heads a KV head and keys of ``itemsize`` bytes a number."""
    dim = padded(head_dim)
    # Products of float32 keep their operands in registers: smaller tiles.
    heads = split_heads(group, 64 if itemsize == 2 else 32)
    keys = min(128, max(16, _TILE_BYTES // (dim * itemsize)))
    return Tile(heads, 1, padded(heads), keys, dim, warps=4, stages=3)


def most_splits(most_keys: int, window: int | None = None, chunk: int | None = None) -> int:
    """An upper bound of the splits of any row whose context is at most ``most_keys``."""
    visible = min(most_keys, window or most_keys, chunk or most_keys)
    # A window may start anywhere in a tile and a split starts with a tile, so up to one tile more is read.
    reach = visible if window is None and chunk is None else visible + 127
    return max(1, min(MOST_SPLITS, triton.cdiv(reach, SPLIT_TOKENS)))


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    workspace: Workspace,
    output: torch.Tensor,
) -> None:
    """Attend each of ``n`` rows to its own sequence; writes ``output``.

    Args:
        query: ``[n, query_heads, head_dim]``, last dimension contiguous.
        keys, values: ``[kv_heads, blocks, block_size, head_dim]``, last dimension contiguous.
        tables: int32 ``[n, width]``. Entries of blocks that a row does not see are not read.
        contexts: int32 ``[n]``, keys of each sequence; the row is at the last position. A row with no key
            gets zeros.
        scale, window, chunk, softcap, sinks: as in ``rlt_kernels.reference.paged_attention``.
        workspace: room for ``most_splits`` of the longest context.
        output: ``[n, query_heads, head_dim]``, any dtype, last dimension contiguous.

    Raises:
        ValueError: the last dimension of a tensor is not contiguous.
    """
    require_dense_heads(query=query, keys=keys, values=values, tables=tables, output=output)
    rows, query_heads, head_dim = query.shape
    if rows == 0:
        return
    kv_heads, _, block_size, _ = keys.shape
    group = query_heads // kv_heads
    tile = decode_tile(group, head_dim, keys.element_size())
    splits = workspace.maximum.shape[2]
    factor, cap = score_factors(scale, softcap)
    visibility = {"WINDOW": window or 0, "CHUNK": chunk or 0, "KEYS": tile.keys}
    with torch.cuda.device_of(query):
        _attend_split[(rows, kv_heads * triton.cdiv(group, tile.heads), splits)](
            query, keys, values, tables, contexts, workspace.output, workspace.maximum, workspace.total,
            *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables.stride(0),
            query_heads, splits, factor, cap,
            SOFTCAP=softcap is not None, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, GROUP=group,
            HEADS=tile.heads, ROWS=tile.rows, DIM=tile.dim, **visibility, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        _join_splits[(rows, query_heads)](
            workspace.output, workspace.maximum, workspace.total, contexts,
            workspace.maximum if sinks is None else sinks, output,
            *output.stride()[:2],
            query_heads, splits,
            SINKS=sinks is not None, HEAD_DIM=head_dim, DIM=tile.dim, **visibility, num_warps=1,
        )  # fmt: skip


@triton.jit
def _split_layout(context, WINDOW: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr):
    """``(begin, origin, length)``: the first key the last row sees, where its first split starts (at a tile),
    and how many tokens a split has."""
    begin = first_visible(tl.maximum(context - 1, 0), WINDOW, CHUNK)
    origin = begin // KEYS * KEYS
    tiles = tl.cdiv(context - origin, KEYS)
    length = tl.maximum(tl.cdiv(tiles, _MOST_SPLITS) * KEYS, _SPLIT_TOKENS)
    return begin, origin, length


# What changes from step to step must not make a new variant of the kernel, that is, a compilation while
# serving.
@triton.jit(
    do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=["tables", "contexts"]
)
def _attend_split(
    query, keys, values, tables, contexts, split_output, split_maximum, split_total,
    query_row_stride, query_head_stride, key_head_stride, key_block_stride, key_slot_stride,
    value_head_stride, value_block_stride, value_slot_stride, table_stride,
    query_heads, splits, factor, cap,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program: the heads of one tile of one sequence over one split."""
    sequence = tl.program_id(0).to(tl.int64)
    head_tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = (tl.program_id(1) // head_tiles).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence)
    begin, origin, length = _split_layout(context, WINDOW, CHUNK, KEYS)
    begin = tl.maximum(begin, origin + split * length)
    end = tl.minimum(context, origin + (split + 1) * length)
    if begin >= end:
        return
    row = tl.arange(0, ROWS)
    group_head = tl.program_id(1) % head_tiles * HEADS + row
    valid = (row < HEADS) & (group_head < GROUP)
    head = kv_head * GROUP + group_head
    dims = tl.arange(0, DIM)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    queries = query + sequence * query_row_stride + head * query_head_stride
    tile = tl.load(queries[:, None] + dims[None, :], mask=mask, other=0.0).to(keys.dtype.element_ty)
    output, maximum, total = attend_range(
        tile, row * 0 + (context - 1), begin, end,
        keys + kv_head * key_head_stride, values + kv_head * value_head_stride,
        tables + sequence * table_stride, key_block_stride, key_slot_stride, value_block_stride,
        value_slot_stride,
        factor, cap,
        WINDOW, CHUNK, SOFTCAP,
        BLOCK_SIZE, HEAD_DIM,
        ROWS, KEYS, DIM,
    )  # fmt: skip
    index = (sequence * query_heads + head) * splits + split
    tl.store(split_output + index[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)
    tl.store(split_maximum + index, maximum, mask=valid)
    tl.store(split_total + index, total, mask=valid)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["contexts"])
def _join_splits(
    split_output, split_maximum, split_total, contexts, sinks, output,
    output_row_stride, output_head_stride,
    query_heads, splits,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program: the splits of one row and head, first to last."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(contexts + sequence)
    begin, origin, length = _split_layout(context, WINDOW, CHUNK, KEYS)
    if SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * _LOG2E
        total = tl.full((), 1.0, tl.float32)
    else:
        maximum = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    joined = tl.zeros([DIM], tl.float32)
    first = (sequence * query_heads + head) * splits
    for index in range(first, first + tl.cdiv(context - origin, length)):
        here = tl.load(split_maximum + index)
        new_maximum = tl.maximum(maximum, here)
        shift = finite_or_zero(new_maximum)
        keep = tl.exp2(maximum - shift)
        weight = tl.exp2(here - shift)
        part = tl.load(split_output + index * HEAD_DIM + dims, mask=in_head, other=0.0)
        joined = joined * keep + part * weight
        total = total * keep + tl.load(split_total + index) * weight
        maximum = new_maximum
    joined = joined / tl.where(total == 0.0, 1.0, total)
    rows = output + sequence * output_row_stride + head * output_head_stride
    tl.store(rows + dims, joined.to(output.dtype.element_ty), mask=in_head)
