"""Paged attention on a CPU: decodes by a kernel that numba compiles, in place in the paged cache, with no
gather copy; longer spans by the Torch backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlt_train.attention.backends.torch_paged import Bucket, TorchBackend, first_visible
from rlt_train.attention.contract import AttentionBackend, AttentionGroup, Capabilities, PagedBatch


@dataclass(frozen=True, slots=True)
class NumbaPlan:
    """One forward of one group.

    Attributes:
        decodes: sequences of one row; they come first.
        tables: int32 ``[decodes, width]``, their block tables.
        first, contexts: int32 ``[decodes]``, the first visible key and the end of the visible keys.
        prefills: Torch's plan for the other sequences.
    """

    decodes: int
    tables: np.ndarray
    first: np.ndarray
    contexts: np.ndarray
    prefills: list[Bucket]


class NumbaBackend(AttentionBackend):
    """See the module docstring.

    The kernel is compiled here, in the constructor, for as long as a few seconds in which the GIL is held;
    later processes take it from numba's cache. It runs in the calling thread alone, whatever torch's thread
    count, and without the GIL. A decode's result depends on its own sequence alone, but a prompt's chunk does
    not take the same path, so the backend is not ``exact``.
    """

    name = "numba"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        head_dims=(1, 512, 1),
        sliding_window=True,
        chunked=True,
        softcap=True,
        sinks=True,
        packed_prefill=True,
    )

    def __init__(self, group: AttentionGroup, block_size: int, device: torch.device) -> None:
        super().__init__(group, block_size, device)
        from rlt_train.attention.backends import numba_decode

        spec = group.spec
        self._decode = numba_decode.build_decode(spec.query_heads // spec.kv_heads, spec.head_dim)
        self._write = numba_decode.build_write()
        self._no_sinks = np.full(spec.query_heads, -np.inf, np.float32)
        self._torch = TorchBackend(group, block_size, device)

    @classmethod
    def load(cls) -> None:
        """Import numba and the kernel; see ``AttentionBackend.load``."""
        import rlt_train.attention.backends.numba_decode  # noqa: F401

    def plan(self, batch: PagedBatch) -> NumbaPlan:
        """Cut the decodes out of the batch; Torch plans the rest."""
        decodes = batch.decodes
        return NumbaPlan(
            decodes=decodes,
            tables=batch.host_tables[:decodes],
            first=first_visible(self.group.spec, batch.starts[:decodes]),
            contexts=batch.host_contexts[:decodes],
            prefills=self._torch.plan(batch, first=decodes),
        )

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend.write``; twice as fast as ``index_copy_``."""
        slots = batch.slots.numpy()
        for store, new in ((keys, key), (values, value)):
            self._write(new.to(store.dtype).numpy(), slots, store.numpy())

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: NumbaPlan,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        options = {"scale": scale, "softcap": softcap, "sinks": sinks}
        if plan.decodes == 0:
            return self._torch.attend(query, keys, values, plan.prefills, **options)
        output = torch.empty(query.shape, dtype=keys.dtype)
        self._decode(
            query[: plan.decodes].to(keys.dtype).numpy(),
            keys.numpy(),
            values.numpy(),
            plan.tables,
            plan.first,
            plan.contexts,
            scale,
            softcap or 0.0,
            self._no_sinks if sinks is None else sinks.detach().float().contiguous().numpy(),
            output.numpy(),
        )
        if plan.prefills:
            rest = query[plan.decodes :]
            output[plan.decodes :] = self._torch.attend(rest, keys, values, plan.prefills, **options)
        return output.to(query.dtype)
