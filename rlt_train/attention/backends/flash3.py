"""Paged attention by FlashAttention-3 (Shah et al. 2407.08608), package ``flash_attn_3``."""

from __future__ import annotations

import torch

from rlt_train.attention.backends.flash import EntryPoint, FlashBackend, PackedSpans, with_parameters
from rlt_train.attention.contract import Capabilities


class Flash3Backend(FlashBackend):
    """``flash_attn_with_kvcache`` with a ``page_table``; its variable-length function takes none."""

    name = "flash3"
    reads_whole_tiles = True
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=(8, 256, 8),
        # Hopper's instructions; builds with kernels for Ampere exist but are not the rule.
        compute_capability=((9, 0), (9, 0)),
        sliding_window=True,
        softcap=True,
        packed_prefill=True,
    )

    @classmethod
    def entry_point(cls) -> EntryPoint:
        """See ``FlashBackend.entry_point``."""
        try:
            from flash_attn_3.flash_attn_interface import flash_attn_with_kvcache
        except ModuleNotFoundError as error:
            if error.name not in ("flash_attn_3", "flash_attn_3.flash_attn_interface"):
                raise
            # Where older builds put it.
            from flash_attn_interface import flash_attn_with_kvcache

        return with_parameters(flash_attn_with_kvcache, "page_table", "cu_seqlens_q", "softcap")

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
            cache_seqlens=spans.contexts,
            page_table=spans.tables,
            cu_seqlens_q=spans.query_starts,
            max_seqlen_q=spans.most_queries,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap,
        )
