"""What the paged attention kernels share: visibility, and online softmax over a range of paged keys.

The softmax is FlashAttention's (Dao et al. 2022), in base 2; keys are found through block tables as in
PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program's work and how it is compiled. It depends on the layer alone, never on the
    batch, so that a row's arithmetic does not change with what else is in the batch.

    Attributes:
        heads: query heads of one KV head in a tile.
        tokens: query tokens in a tile.
        rows: ``tokens * heads`` or more, a power of two and at least 16, the least a tensor core takes.
        keys: keys a step of the loop.
        dim: the head dimension, padded to a power of two and at least 16.
        warps, stages: warps a program, and depth of the load pipeline.
    """

    heads: int
    tokens: int
    rows: int
    keys: int
    dim: int
    warps: int
    stages: int


def split_heads(group: int, most: int) -> int:
    """Query heads in a tile, when the ``group`` query heads of a KV head are spread evenly over as few tiles
    of up to ``most`` rows as hold them."""
    return triton.cdiv(group, triton.cdiv(group, most))


def padded(size: int) -> int:
    """The least power of two from 16 on that holds ``size``."""
    return max(16, triton.next_power_of_2(size))


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The factors ``score`` takes: on the query-key product, and the cap (1.0 without soft-cap)."""
    if softcap is None:
        return scale * LOG2E, 1.0
    return 2 * scale / softcap * LOG2E, softcap * LOG2E


def require_dense_heads(**tensors: torch.Tensor) -> None:
    """Raise ``ValueError`` for a tensor whose last dimension is not contiguous: kernels assume stride 1."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; the last must be 1: pass {name}.contiguous()."
            )


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at ``position >= 0`` sees; 0 stands for no window and no chunk."""
    if CHUNK > 0:
        first = position // CHUNK * CHUNK
    elif WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    else:
        first = position * 0
    return first


@triton.jit
def score(product, factor, cap, SOFTCAP: tl.constexpr):
    """Scores in base 2 of query-key products; the factors are those of ``score_factors``."""
    scaled = product * factor
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) holds at both infinities too.
        scaled = cap * (1.0 - 2.0 / (tl.exp2(scaled) + 1.0))
    return scaled


@triton.jit
def finite_or_zero(maximum):
    """A maximum that can be subtracted: with no key seen yet it is -inf, and -inf minus -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def attend_range(
    query, position, begin, end, keys, values, table,
    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
    factor, cap,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Online softmax of ``query [ROWS, DIM]``, at ``position [ROWS]``, over those keys of ``begin .. end``
    that each row sees, of one sequence and KV head. No other slots are read.

    Tiles start at multiples of ``KEYS`` from position 0, and a tile of which a row sees nothing leaves the
    row's numbers as they are, so a row's result does not depend on the rows beside it.

    Returns ``(output [ROWS, DIM], maximum [ROWS], total [ROWS])``: the sum of values weighted by
    ``2 ** (score - maximum)``, the largest score in base 2 (-inf where nothing was seen), and the sum of the
    weights.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DIM], tl.float32)
    first = first_visible(position, WINDOW, CHUNK)
    dims = tl.arange(0, DIM)
    for tile in range(begin // KEYS * KEYS, end, KEYS):
        key_position = tile + tl.arange(0, KEYS)
        stored = (key_position >= begin) & (key_position < end)
        # A slot outside the range may hold NaN, and 0 * NaN is NaN: it is not read, and counts as zeros.
        block = tl.load(table + key_position // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        slot = key_position % BLOCK_SIZE
        mask = stored[:, None] & (dims < HEAD_DIM)[None, :]
        key_row = block * key_block_stride + slot * key_slot_stride
        key = tl.load(keys + key_row[:, None] + dims[None, :], mask=mask, other=0.0)
        scores = score(tl.dot(query, tl.trans(key), input_precision="ieee"), factor, cap, SOFTCAP)
        seen = (key_position[None, :] <= position[:, None]) & (key_position[None, :] >= first[:, None])
        scores = tl.where(seen & stored[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shift = finite_or_zero(new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(maximum - shift)
        value_row = block * value_block_stride + slot * value_slot_stride
        value = tl.load(values + value_row[:, None] + dims[None, :], mask=mask, other=0.0)
        output = tl.dot(weights.to(value.dtype), value, output * keep[:, None], input_precision="ieee")
        total = total * keep + tl.sum(weights, 1)
        maximum = new_maximum
    return output, maximum, total
