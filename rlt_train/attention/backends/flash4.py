"""Paged attention by FlashAttention-4, package ``flash-attn-4`` (CuTe kernels, compiled on first use)."""

from __future__ import annotations

import torch

from rlt_train.attention.backends.flash import EntryPoint, FlashBackend, PackedSpans, with_parameters
from rlt_train.attention.contract import Capabilities

_LONG = 512  # rows; more than any tile of queries


class Flash4Backend(FlashBackend):
    """``flash_attn_varlen_func`` of ``flash_attn.cute`` with a ``page_table``."""

    name = "flash4"
    reads_whole_tiles = True
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        # Hopper has up to 256 and Blackwell 256 too, but nothing between 128 and 256.
        head_dims=(8, 128, 8),
        # The kernels for 8.x and 12.x do not page.
        compute_capability=((9, 0), (11, 0)),
        sliding_window=True,
        softcap=True,
        sinks=True,
        packed_prefill=True,
    )

    @classmethod
    def entry_point(cls) -> EntryPoint:
        """See ``FlashBackend.entry_point``. flash-attn 2 brings an early ``flash_attn.cute`` that pages on
        neither chip as we need it; it has no ``max_seqlen_q``."""
        from flash_attn.cute import flash_attn_varlen_func

        return with_parameters(
            flash_attn_varlen_func, "page_table", "seqused_k", "max_seqlen_q", "learnable_sink"
        )

    def warmup(self, keys: torch.Tensor, values: torch.Tensor, most_sequences: int) -> None:
        """Compile the kernels of decodes and of longer spans, which differ in how they tile the queries."""
        spec, device = self.group.spec, self.device
        sinks = torch.zeros(spec.query_heads, dtype=spec.dtype, device=device) if spec.has_sinks else None
        for rows in (1, _LONG):
            query = torch.zeros(rows, spec.query_heads, spec.head_dim, dtype=keys.dtype, device=device)
            starts = torch.tensor([0, rows], dtype=torch.int32, device=device)
            blocks = -(-rows // self.block_size)
            spans = PackedSpans(
                rows=slice(0, rows),
                tables=torch.zeros(1, blocks, dtype=torch.int32, device=device),
                contexts=starts[1:],
                query_starts=starts,
                key_starts=starts,
                most_queries=rows,
                most_keys=rows,
            )
            self.attend(query, keys, values, [spans], scale=spec.scale, softcap=spec.softcap, sinks=sinks)

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
        result = self._function(
            query,
            keys,
            values,
            cu_seqlens_q=spans.query_starts,
            max_seqlen_q=spans.most_queries,
            max_seqlen_k=spans.most_keys,
            seqused_k=spans.contexts,
            page_table=spans.tables,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            learnable_sink=None if sinks is None else sinks.detach(),
            softcap=softcap,
        )
        return result[0] if isinstance(result, tuple) else result  # with the log-sum-exp, or alone
