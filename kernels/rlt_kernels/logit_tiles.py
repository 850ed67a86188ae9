"""Tiles of the language-model head's output, as the kernels that never hold all of it compute them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program's work and how it is compiled.

    Attributes:
        rows, columns: tokens and vocabulary entries in a tile.
        width: hidden dimensions a step of the product's loop.
        warps, stages: warps a program, and depth of the load pipeline.
    """

    rows: int
    columns: int
    width: int
    warps: int
    stages: int


def tile_for(dtype: torch.dtype) -> Tile:
    """The tile for hidden states of ``dtype``. Exact float32 products have no tensor cores, hence smaller
    tiles. Both fit in 64 KiB of shared memory where a chip has no more."""
    return Tile(64, 64, 32, 4, 2) if dtype == torch.float32 else Tile(128, 128, 64, 8, 3)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What turns the head's output into scaled logits, in this order.

    Attributes:
        logit_scale: factor on the head's output (Cohere, Granite).
        softcap: c in ``c * tanh(logits / c)`` (Gemma 2), or ``None``.
        temperature: divisor of the result, above 0.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


def operands(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transform: LogitTransform
) -> tuple[torch.Tensor | int | float, ...]:
    """The first arguments of every kernel that computes tiles."""
    return (
        hidden,
        weight,
        weight if bias is None else bias,
        *hidden.stride(),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        *hidden.shape,
        weight.shape[0],
        transform.logit_scale,
        1.0 if transform.softcap is None else transform.softcap,
        transform.temperature,
    )


def constants(bias: torch.Tensor | None, transform: LogitTransform, tile: Tile) -> dict[str, int | bool]:
    """The constants of every kernel that computes tiles, and how it is compiled."""
    return {
        "BIAS": bias is not None,
        "SOFTCAP": transform.softcap is not None,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "WIDTH": tile.width,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def rounded(value, like):
    """A float32 value rounded to the dtype that ``like`` points to."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def tile_logits(
    hidden,
    weight,
    bias,
    row,
    column,
    row_stride,
    hidden_stride,
    column_stride,
    weight_stride,
    bias_stride,
    tokens,
    width,
    vocab,
    logit_scale,
    softcap,
    temperature,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Transformed logits ``[ROWS, COLUMNS]``, -inf beyond the vocabulary, and their derivative by the head's
    output."""
    in_row = row < tokens
    in_column = column < vocab
    dims = tl.arange(0, WIDTH).to(tl.int64)
    rows = hidden + row.to(tl.int64)[:, None] * row_stride
    columns = weight + column.to(tl.int64)[None, :] * column_stride
    logits = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, WIDTH):
        dim = start + dims
        in_width = dim < width
        left = tl.load(
            rows + dim[None, :] * hidden_stride, mask=in_row[:, None] & in_width[None, :], other=0.0
        )
        right = tl.load(
            columns + dim[:, None] * weight_stride, mask=in_width[:, None] & in_column[None, :], other=0.0
        )
        logits = tl.dot(left, right, logits, input_precision="ieee")
    if BIAS:
        logits += tl.load(bias + column * bias_stride, mask=in_column, other=0.0).to(tl.float32)[None, :]
    logits = rounded(rounded(logits, hidden) * logit_scale, hidden)
    slope = tl.full([ROWS, COLUMNS], logit_scale / temperature, tl.float32)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) holds at both infinities too.
        capped = rounded(1.0 - 2.0 / (tl.exp(2.0 * rounded(logits / softcap, hidden)) + 1.0), hidden)
        logits = rounded(capped * softcap, hidden)
        slope *= 1.0 - capped * capped
    return tl.where(in_column[None, :], logits / temperature, float("-inf")), slope
