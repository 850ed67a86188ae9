"""Stand-ins for flash-attn's paged entry points: the real functions' parameters, and what their documentation
promises, in float64 and plain torch. What the library's tiles read beside what a row sees is read here too
and weighted with 0, so a NaN in another sequence's block shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE = {"flash2": 64, "flash3": 80, "flash4": 128}  # keys that the library reads at a time


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    contexts: list[int],
    scale: float,
    left: int | None,
    softcap: float,
    sinks: Tensor | None,
    tile: int,
) -> Tensor:
    """Causal attention aligned to the bottom right, with ``left`` more keys before a row's own. Keys are read
    from the start of a tile to the end of a page."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert all(t.stride(-1) == 1 for t in (q, k, v, tables))
    assert tables.dtype == query_starts.dtype == torch.int32 and tables.shape[0] == len(contexts) > 0
    assert query_starts[0] == 0 and query_starts[-1] == len(q)
    output = torch.empty_like(q)
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    for i, context in enumerate(contexts):
        begin, end = query_starts[i : i + 2].tolist()
        position = torch.arange(context - (end - begin), context)[:, None]
        first = 0 if left is None else max(0, int(position[0]) - left) // tile * tile
        key = torch.arange(first, -(-context // page) * page)
        hidden = key > position if left is None else (key > position) | (key < position - left)
        rows = tables[i, key // page].long(), key % page
        keys, values = (store[rows].double().repeat_interleave(group, dim=1) for store in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = torch.where(hidden, -torch.inf, scores)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, end - begin, 1)], dim=2)
        weights = scores.softmax(dim=2)[:, :, : len(key)]
        output[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return output


def left_of(window_size: tuple[int | None, int | None], none: int | None) -> int | None:
    left, right = window_size
    assert right in (0, none)
    return None if left == none else left


def flash2_function(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert causal and dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs
    assert k.shape[1] % 256 == 0 and cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k[0] == 0
    contexts = cu_seqlens_k.diff().tolist()
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == max(contexts)
    left = left_of(window_size, -1)
    return attend(
        q, k, v, block_table, cu_seqlens_q, contexts, softmax_scale, left, softcap, None, TILE["flash2"]
    )


def flash3_function(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    assert causal and k is v is qv is cache_batch_idx is cache_leftpad is None and not attention_chunk
    assert cache_seqlens.dtype == torch.int32 and max_seqlen_q == cu_seqlens_q.diff().max()
    left, contexts = left_of(window_size, -1), cache_seqlens.tolist()
    tile = TILE["flash3"]
    return attend(
        q, k_cache, v_cache, page_table, cu_seqlens_q, contexts, softmax_scale, left, softcap, None, tile
    )


def flash4_function(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    return_lse=False,
):
    assert causal and qv is cu_seqlens_k is seqused_q is gather_kv_indices is None
    contexts = seqused_k.tolist()
    assert seqused_k.dtype == torch.int32 and max_seqlen_k == max(contexts)
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    sinks = learnable_sink
    assert sinks is None or (sinks.shape == q.shape[1:2] and not sinks.requires_grad)
    left, tile = left_of(window_size, None), TILE["flash4"]
    out = attend(q, k, v, page_table, cu_seqlens_q, contexts, softmax_scale, left, softcap, sinks, tile)
    return out, None


FUNCTIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "flash2": ("flash_attn", "flash_attn_varlen_func", flash2_function),
    "flash3": ("flash_attn_3.flash_attn_interface", "flash_attn_with_kvcache", flash3_function),
    "flash4": ("flash_attn.cute", "flash_attn_varlen_func", flash4_function),
}
