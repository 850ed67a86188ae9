"""Paged attention by the Triton kernels of ``rlt_kernels``: decodes by split-KV, longer spans by a packed
prefill, both in place in the paged cache. Runs on NVIDIA and AMD GPUs, and anywhere in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlt_train.attention.contract import AttentionBackend, AttentionGroup, Capabilities, PagedBatch


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One forward of one group.

    Attributes:
        batch: the group's metadata.
        workspace: ``rlt_kernels.paged_decode.Workspace``, for all layers in turn; ``None`` without decodes.
        prefill_queries: rows of the longest span that is not a decode, 0 with none.
    """

    batch: PagedBatch
    workspace: object | None
    prefill_queries: int


class TritonBackend(AttentionBackend):
    """See the module docstring.

    Not ``exact``: a row's result depends on its own sequence alone, but a chunk of one row goes through
    another kernel than a longer chunk, and how a prompt is cut depends on what else waits.

    A captured ``attend`` of ``n`` decodes (after an ordinary call, which compiles) serves any ``n`` decodes
    that the batch's tensors hold later, if none has a longer context than the longest one captured. A context
    of 0 is padding: its row of the result is zeros.
    """

    name = "triton"
    capabilities = Capabilities(
        devices=frozenset({"cuda", "rocm"}),
        dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        head_dims=(16, 256, 1),
        block_sizes=(16, 256, 1),
        # The kernels are compiled ahead of time for 8.0 to 12.0; before 8.0 there is no bfloat16 arithmetic.
        compute_capability=((8, 0), (12, 1)),
        sliding_window=True,
        chunked=True,
        softcap=True,
        sinks=True,
        packed_prefill=True,
        cuda_graphs=True,
    )

    def __init__(self, group: AttentionGroup, block_size: int, device: torch.device) -> None:
        super().__init__(group, block_size, device)
        from rlt_kernels import kv_write, paged_decode, paged_prefill

        self._decode = paged_decode
        self._prefill = paged_prefill
        self._writer = kv_write

    @classmethod
    def load(cls) -> None:
        """Import triton and the kernels; see ``AttentionBackend.load``."""
        import rlt_kernels.kv_write
        import rlt_kernels.paged_decode
        import rlt_kernels.paged_prefill  # noqa: F401

    def plan(self, batch: PagedBatch) -> TritonPlan:
        """Choose the number of splits for the decodes and give them their workspace."""
        spec = self.group.spec
        workspace = None
        if batch.decodes:
            longest = int(batch.host_contexts[: batch.decodes].max())
            splits = self._decode.most_splits(longest, spec.sliding_window, spec.chunk)
            workspace = self._decode.Workspace.allocate(
                batch.decodes, spec.query_heads, splits, spec.head_dim, self.device
            )
        return TritonPlan(batch, workspace, int(batch.lengths[batch.decodes :].max(initial=0)))

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend.write``."""
        self._writer.kv_write(keys, values, batch.slots, key, value)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: TritonPlan,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        batch, spec = plan.batch, self.group.spec
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        options = {
            "scale": scale,
            "window": spec.sliding_window,
            "chunk": spec.chunk,
            "softcap": softcap,
            "sinks": sinks,
        }
        decodes = batch.decodes
        if plan.workspace is not None:
            self._decode.paged_decode(
                query[:decodes],
                keys,
                values,
                batch.tables[:decodes],
                batch.contexts[:decodes],
                workspace=plan.workspace,
                output=output[:decodes],
                **options,
            )
        if plan.prefill_queries:
            self._prefill.paged_prefill(
                query,
                keys,
                values,
                batch.tables[decodes:],
                batch.contexts[decodes:],
                batch.query_starts[decodes:],
                plan.prefill_queries,
                output=output,
                **options,
            )
        return output
