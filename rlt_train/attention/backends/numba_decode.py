"""The CPU decode kernel: one query row a sequence against its paged keys and values, read in place.

Head size and query heads a KV head are constants of the compiled code, so that LLVM unrolls and vectorises
over them; everything else (sequences, contexts, blocks, block size) is free. All query heads of a KV head use
a block while it is in the cache. A decode is bound by how fast memory delivers blocks that lie scattered, a
page or so each, where a processor's own prefetcher starts anew: the kernel therefore asks for the next block
while it computes on this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

# Sums may be reordered. Flags that assume no NaN or infinity are left out: a NaN must reach the output.
_REORDER = {"reassoc", "contract"}
_LOWEST = np.float32(-3.4e38)
_CACHE_LINE = 16  # floats
_PAGES_AHEAD = 3  # blocks: whose page the processor should have looked up by then


@intrinsic
def _prefetch(_typing: Any, array: types.Array, offset: types.Type) -> Any:
    """Start loading the cache line of the item at ``offset`` of a contiguous array."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        first = context.make_array(array)(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(first, [arguments[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        read, keep, data = ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@numba.njit(fastmath={"contract"})
def _power(x: float) -> tuple[float, float]:
    """``(p, two)`` with ``exp(x) = two * (1 + p)`` for ``x <= 0``; below -87 as for -87.

    ``x = n log 2 + r`` with ``|r| <= log(2) / 2``, and a Taylor polynomial of ``exp(r) - 1`` to ``r**7``. No
    branch and no library call, so that it vectorises (``np.exp`` needs SVML for that). Reordering would break
    it.
    """
    x = np.float32(-87) if x < np.float32(-87) else x
    # At 1.5 * 2**23 floats are whole numbers: adding it rounds, and leaves n in the lowest bits.
    shifted = np.float32(x * np.float32(1.44269504) + np.float32(12582912))
    n = shifted - np.float32(12582912)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(1 / 2)
    p = p * r + np.float32(1)
    exponent = np.int32((np.int32(shifted.view(np.int32)) << np.int32(23)) + np.int32(127 << 23))
    return p * r, exponent.view(np.float32)


@numba.njit(fastmath={"contract"})
def _exp(x: float) -> float:
    p, two = _power(x)
    return two * p + two


@numba.njit(fastmath={"contract"})
def _tanh(x: float) -> float:
    """By ``exp(-2 |x|) - 1``, which keeps its digits near 0."""
    p, two = _power(np.float32(-2) * (x if x >= 0 else -x))
    less_one = two * p + (two - np.float32(1))
    size = -less_one / (less_one + np.float32(2))
    return size if x >= 0 else -size


@numba.njit(fastmath=_REORDER, forceinline=True)
def _rows_of(block, row, stop):
    """Four rows from ``row`` on; the last before ``stop`` again instead of what may not be read."""
    last = stop - 1
    return block[row], block[min(row + 1, last)], block[min(row + 2, last)], block[min(row + 3, last)]


@numba.njit(fastmath=_REORDER, forceinline=True)
def _score(q, store, table, skip, end, scores, highest, following, folded, head_dim):
    """``scores[g, j] = q[g] . key j`` and their maxima, over the keys ``skip .. end`` of the blocks of
    ``table``; ``following`` is the block that is read next. Up to three scores beyond are written too."""
    block_size = store.shape[1]
    for i in range(table.shape[0]):
        block = store[table[i]]
        ahead = store[table[i + 1]] if i + 1 < table.shape[0] else following
        if i + _PAGES_AHEAD < table.shape[0]:
            _prefetch(store[table[i + _PAGES_AHEAD]], 0)
        base = i * block_size - skip
        stop = min(block_size, end - i * block_size)
        for row in range(max(-base, 0), stop, 4):  # four at once: a query is loaded once in four
            for item in range(0, 4 * head_dim, _CACHE_LINE):
                _prefetch(ahead, row * head_dim + item)
            k0, k1, k2, k3 = _rows_of(block, row, stop)
            for g in range(folded):
                s0 = s1 = s2 = s3 = np.float32(0)
                for d in range(head_dim):
                    s0 += q[g, d] * k0[d]
                    s1 += q[g, d] * k1[d]
                    s2 += q[g, d] * k2[d]
                    s3 += q[g, d] * k3[d]
                four = scores[g, base + row : base + row + 4]
                four[0], four[1], four[2], four[3] = s0, s1, s2, s3
                highest[g] = max(highest[g], max(max(s0, s1), max(s2, s3)))


@numba.njit(fastmath=_REORDER, forceinline=True)
def _softmax(scores, highest, softcap, sink):
    """Scores to weights that are not yet normalised; returns the factor that normalises them."""
    top = highest
    if softcap > 0:
        for j in range(scores.shape[0]):
            scores[j] = softcap * _tanh(scores[j] / softcap)
        top = softcap * _tanh(top / softcap)
    top = max(top, sink)
    total = _exp(sink - top)
    for j in range(scores.shape[0]):
        weight = _exp(scores[j] - top)
        scores[j] = weight
        total += weight
    return np.float32(1) / total


@numba.njit(fastmath=_REORDER, forceinline=True)
def _weigh(weights, store, table, skip, end, sums, following, folded, head_dim):
    """``sums[g] += weights[g, j] * value j`` over the same keys as ``_score``."""
    block_size = store.shape[1]
    for i in range(table.shape[0]):
        block = store[table[i]]
        ahead = store[table[i + 1]] if i + 1 < table.shape[0] else following
        if i + _PAGES_AHEAD < table.shape[0]:
            _prefetch(store[table[i + _PAGES_AHEAD]], 0)
        base = i * block_size - skip
        stop = min(block_size, end - i * block_size)
        for row in range(max(-base, 0), stop, 4):  # four at once: a sum is loaded and stored once in four
            for item in range(0, 4 * head_dim, _CACHE_LINE):
                _prefetch(ahead, row * head_dim + item)
            v0, v1, v2, v3 = _rows_of(block, row, stop)
            for g in range(folded):
                w = weights[g, base + row : base + row + 4]
                w0 = w[0]
                w1 = w[1] if row + 1 < stop else np.float32(0)
                w2 = w[2] if row + 2 < stop else np.float32(0)
                w3 = w[3] if row + 3 < stop else np.float32(0)
                for d in range(head_dim):
                    sums[g, d] = sums[g, d] + w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@functools.cache
def build_decode(folded: int, head_dim: int) -> Callable[..., None]:
    """Compile the kernel for ``folded`` query heads a KV head: some seconds, or none where numba's cache on
    disk has it (beside this file or, where that is read-only, in the user's cache).

    The kernel's arguments, all of a CPU and float32 or int32, for ``n`` sequences:
        query ``[n, query_heads, head_dim]``, any strides; keys, values ``[kv_heads, blocks, block_size,
        head_dim]``; tables ``[n, width]``; first ``[n]``, the first visible key; contexts ``[n]``, the end of
        the visible keys; scale; softcap, 0 for none; sinks ``[query_heads]``, -inf for none; output ``[n,
        query_heads, head_dim]``. All but query are contiguous. Only visible keys and values are read.
    """

    def decode(query, keys, values, tables, first, contexts, scale, softcap, sinks, output):
        block_size = keys.shape[2]
        q = np.empty((folded, head_dim), np.float32)
        sums = np.empty((folded, head_dim), np.float32)
        scores = np.empty((folded, tables.shape[1] * block_size + 3), np.float32)
        highest = np.empty(folded, np.float32)
        for s in range(query.shape[0]):
            begin = first[s] // block_size
            table = tables[s, begin : (contexts[s] + block_size - 1) // block_size]
            skip, end = first[s] - begin * block_size, contexts[s] - begin * block_size
            for h in range(keys.shape[0]):
                for g in range(folded):
                    highest[g] = _LOWEST
                    for d in range(head_dim):
                        q[g, d] = query[s, h * folded + g, d] * scale
                        sums[g, d] = 0
                following = values[h, table[0]]
                _score(q, keys[h], table, skip, end, scores, highest, following, folded, head_dim)
                for g in range(folded):
                    sink = sinks[h * folded + g]
                    highest[g] = _softmax(scores[g, : end - skip], highest[g], softcap, sink)
                following = keys[min(h + 1, keys.shape[0] - 1), table[0]]
                _weigh(scores, values[h], table, skip, end, sums, following, folded, head_dim)
                for g in range(folded):
                    for d in range(head_dim):
                        output[s, h * folded + g, d] = sums[g, d] * highest[g]

    number, integers = types.float32, types.int32
    store = types.Array(number, 4, "C")
    signature = types.void(
        types.Array(number, 3, "A"),
        store,
        store,
        types.Array(integers, 2, "C"),
        types.Array(integers, 1, "C"),
        types.Array(integers, 1, "C"),
        number,
        number,
        types.Array(number, 1, "C"),
        types.Array(number, 3, "C"),
    )
    return _compile(decode, signature, fastmath=_REORDER)


@functools.cache
def build_write() -> Callable[..., None]:
    """Compile ``write(rows, slots, store)``: ``rows [t, kv_heads, head_dim]`` float32 of any strides go to
    the slots ``[t]`` int64 of ``store [kv_heads, blocks, block_size, head_dim]``."""

    def write(rows, slots, store):
        block_size = store.shape[2]
        for i in range(slots.shape[0]):
            block, offset = slots[i] // block_size, slots[i] % block_size
            for h in range(store.shape[0]):
                for d in range(store.shape[3]):
                    store[h, block, offset, d] = rows[i, h, d]

    rows, store = types.Array(types.float32, 3, "A"), types.Array(types.float32, 4, "C")
    return _compile(write, types.void(rows, types.Array(types.int64, 1, "C"), store))


def _compile(function: Callable[..., None], signature: Any, **options: Any) -> Callable[..., None]:
    """Compile now, to code that runs without the GIL; uncached where no folder for the cache is writable."""
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit([signature], cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        return numba.njit([signature], **options)(function)
