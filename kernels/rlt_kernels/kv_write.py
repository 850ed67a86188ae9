"""Write packed keys and values to their slots in the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlt_kernels.paging import padded, require_dense_heads

_TILE_NUMBERS = 4096  # keys a program copies, and as many values


def write_reference(store: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """``kv_write`` for keys or values alone, in plain torch."""
    store.flatten(1, 2).index_copy_(1, slots, new.transpose(0, 1).to(store.dtype))


def kv_write(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Store row ``i`` of ``key`` and ``value`` at slot ``slots[i]`` of ``keys`` and ``values``, in theirs.

    Args:
        keys, values: ``[kv_heads, blocks, block_size, head_dim]``, any strides but the last, which is 1.
        slots: int64 ``[t]``, ``block * block_size + offset``, contiguous, no slot twice.
        key, value: ``[t, kv_heads, head_dim]``, any strides but the last, which is 1.

    Raises:
        ValueError: the last dimension of a tensor is not contiguous.
    """
    require_dense_heads(keys=keys, values=values, slots=slots, key=key, value=value)
    rows, kv_heads, head_dim = key.shape
    if rows == 0:
        return
    dim = padded(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), max(1, _TILE_NUMBERS // dim))
    with torch.cuda.device_of(keys):
        _write_row[(rows, triton.cdiv(kv_heads, heads))](
            keys, values, slots, key, value,
            *keys.stride()[:3], *values.stride()[:3], *key.stride()[:2], *value.stride()[:2],
            kv_heads,
            BLOCK_SIZE=keys.shape[2], HEAD_DIM=head_dim, HEADS=heads, DIM=dim, num_warps=4,
        )  # fmt: skip


# ``slots`` may start anywhere in a staging buffer; that must not make a new variant of the kernel.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_row(
    keys, values, slots, key, value,
    keys_head_stride, keys_block_stride, keys_slot_stride, values_head_stride, values_block_stride,
    values_slot_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program: ``HEADS`` heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    dims = tl.arange(0, DIM)[None, :]
    mask = (head < kv_heads) & (dims < HEAD_DIM)
    new_key = tl.load(key + row * key_row_stride + head * key_head_stride + dims, mask=mask)
    new_value = tl.load(value + row * value_row_stride + head * value_head_stride + dims, mask=mask)
    to_key = keys + block * keys_block_stride + offset * keys_slot_stride
    to_value = values + block * values_block_stride + offset * values_slot_stride
    tl.store(to_key + head * keys_head_stride + dims, new_key.to(keys.dtype.element_ty), mask=mask)
    tl.store(to_value + head * values_head_stride + dims, new_value.to(values.dtype.element_ty), mask=mask)
