"""Paged attention by FlashAttention-2 (Dao 2307.08691), package ``flash-attn``."""

from __future__ import annotations

import torch

from rlt_train.attention.backends.flash import EntryPoint, FlashBackend, PackedSpans, with_parameters
from rlt_train.attention.contract import Capabilities


class Flash2Backend(FlashBackend):
    """``flash_attn_varlen_func`` with a ``block_table``."""

    name = "flash2"
    # Blocks are multiples of every tile, so a tile never begins in a block of which no row sees anything.
    reads_whole_tiles = False
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=(8, 256, 8),
        block_sizes=(256, 1 << 16, 256),
        compute_capability=((8, 0), (12, 1)),
        sliding_window=True,
        softcap=True,
        packed_prefill=True,
    )

    @classmethod
    def entry_point(cls) -> EntryPoint:
        """See ``FlashBackend.entry_point``."""
        from flash_attn import flash_attn_varlen_func

        return with_parameters(flash_attn_varlen_func, "block_table", "softcap", "window_size")

    def _call(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        spans: PackedSpans,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        window = self.group.spec.sliding_window
        return self._function(
            query,
            keys,
            values,
            cu_seqlens_q=spans.query_starts,
            cu_seqlens_k=spans.key_starts,
            max_seqlen_q=spans.most_queries,
            max_seqlen_k=spans.most_keys,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap,
            block_table=spans.tables,
        )
