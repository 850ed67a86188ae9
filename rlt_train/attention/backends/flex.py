"""Paged decode by PyTorch's FlexAttention: one compiled kernel that reads the paged cache in place.

The cache of a layer is one long key sequence to it, and a ``BlockMask`` written straight from the block
tables lists each sequence's blocks, so that nothing is gathered and blocks outside a window or chunk are not
visited (the idea of vLLM's FlexAttention backend). Only the first and the last block of a sequence can be
visible in part; a mask is evaluated for those two alone.

Compiling rewinds the global random stream that training draws from, so it happens in ``warmup`` and nowhere
else: the kernel is compiled ahead of time and called directly, with no guard that could compile again. Its
shapes are fixed, and a batch is padded to the most sequences there can be; a padded row lists no block and
costs next to nothing. Prefills, and whatever no kernel was compiled for, go through the Torch backend.

Sinks are left out: they need the log-sum-exp, which FlexAttention does not return on a CPU. On CUDA this has
not run yet.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from rlt_train.attention.backends.torch_paged import Bucket, TorchBackend, first_visible
from rlt_train.attention.contract import AttentionBackend, AttentionGroup, Capabilities, LayerSpec, PagedBatch

logger = logging.getLogger(__name__)


class FlexBackend(AttentionBackend):
    """See the module docstring.

    Attributes:
        warmup_report: what ``warmup`` came to, in words.
    """

    name = "flex"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        # On CUDA a block is a tile of a tensor-core product, with sides of 16 at least. On a CPU with AVX2,
        # PyTorch 2.13 gives wrong results where half a tile of 16 is left over and head_dim is below 24.
        head_dims=(16, 256, 1),
        block_sizes=(16, 256, 16),
        sliding_window=True,
        chunked=True,
        softcap=True,
        packed_prefill=True,
    )

    def __init__(self, group: AttentionGroup, block_size: int, device: torch.device) -> None:
        super().__init__(group, block_size, device)
        self._torch = TorchBackend(group, block_size, device)
        self._kernel: DecodeKernel | None = None
        self.warmup_report = "not compiled yet: Torch serves"

    @classmethod
    def load(cls) -> None:
        """Look for the C++ compiler that FlexAttention is compiled with.

        Raises:
            ImportError: there is none.
        """
        from torch._inductor import config, cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            tried = ", ".join(name for name in config.cpp.cxx if name)
            raise ImportError(
                f"FlexAttention is compiled when the engine starts, and no C++ compiler works here (tried "
                f"{tried}): install g++, or name a compiler in the environment variable CXX"
            ) from error

    def warmup(self, keys: torch.Tensor, values: torch.Tensor, most_sequences: int) -> None:
        """See ``AttentionBackend.warmup``. A compile that fails is logged and told in ``warmup_report``, and
        Torch serves."""
        self._kernel = None
        started = time.perf_counter()
        try:
            self._kernel = DecodeKernel(self.group.spec, keys, values, most_sequences)
        except Exception as error:  # the compiler's own, of many kinds: none may end the engine
            reason = str(error).strip().partition("\n")[0]
            self.warmup_report = f"did not compile ({type(error).__name__}: {reason}): Torch serves"
            logger.warning("FlexAttention for layers %s %s", list(self.group.layers), self.warmup_report)
        else:
            seconds = time.perf_counter() - started
            self.warmup_report = f"compiled for {most_sequences} decodes in {seconds:.1f} s"

    def plan(self, batch: PagedBatch) -> FlexPlan:
        """Write the block mask of the decodes, if the kernel can take them, and bucket the rest for Torch.

        The mask is the kernel's own memory: a plan is good until the next one is made.
        """
        kernel = self._kernel
        if kernel is None or not kernel.takes(batch.decodes):
            return FlexPlan(self._torch, batch, None)
        kernel.write_mask(batch)
        return FlexPlan(self._torch, batch, kernel)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: FlexPlan,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        options = {"scale": scale, "softcap": softcap, "sinks": sinks}
        kernel, decodes = plan.kernel, plan.batch.decodes
        if kernel is None or sinks is not None or not kernel.serves(keys, values, softcap):
            return self._torch.attend(query, keys, values, plan.everything, **options)
        output = kernel(query[:decodes], keys, values, scale)
        if not plan.prefills:
            return output
        rest = self._torch.attend(query[decodes:], keys, values, plan.prefills, **options)
        return torch.cat([output, rest])


class FlexPlan:
    """One forward of one group.

    Attributes:
        batch: the group's metadata.
        kernel: serves the decodes; ``None`` if Torch does.
        prefills: what is left to Torch beside the kernel.
    """

    def __init__(self, backend: TorchBackend, batch: PagedBatch, kernel: DecodeKernel | None) -> None:
        self._backend = backend
        self.batch = batch
        self.kernel = kernel
        self.prefills = backend.plan(batch, first=batch.decodes) if kernel is not None else []

    @cached_property
    def everything(self) -> list[Bucket]:
        """The whole batch, for Torch."""
        return self._backend.plan(self.batch)


class DecodeKernel:
    """Compiled attention of up to ``most_sequences`` rows, one a sequence, and its block mask.

    Args:
        spec: the layers.
        keys, values: ``[kv_heads, blocks, block_size, head_dim]``; every layer that is served has this shape.
        most_sequences: rows of one call at most.

    Raises:
        Exception: whatever stands in the compiler's way.
    """

    def __init__(
        self, spec: LayerSpec, keys: torch.Tensor, values: torch.Tensor, most_sequences: int
    ) -> None:
        kv_heads, blocks, self._block_size, head_dim = keys.shape
        device = keys.device
        self._spec = spec
        self._layout = _layout(keys, values)
        self._most_sequences = most_sequences
        self._folded = spec.query_heads // kv_heads
        self._query = torch.zeros(
            (most_sequences, kv_heads, self._folded, head_dim), dtype=keys.dtype, device=device
        )
        # As wide as the pool, which FlexAttention insists on; only what is listed is ever touched.
        shape = (most_sequences, 1, 1, blocks)
        self._partial, self._full = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        self._counts = torch.zeros((2, most_sequences, 1, 1), dtype=torch.int32, device=device)
        self._edges = torch.zeros((4, most_sequences), dtype=torch.int32, device=device)
        # The kernel's scratch memory is for the threads of the thread that compiles it, the engine's may have
        # more.
        self._threads = max(os.cpu_count() or 1, torch.get_num_threads())
        self._call = self._compile(*self._arguments(keys, values))

    def takes(self, decodes: int) -> bool:
        """Whether it can attend so many on this thread, whose intra-op threads need scratch memory."""
        return 0 < decodes <= self._most_sequences and torch.get_num_threads() <= self._threads

    def serves(self, keys: torch.Tensor, values: torch.Tensor, softcap: float | None) -> bool:
        """Whether it was compiled for such a call."""
        return _layout(keys, values) == self._layout and softcap == self._spec.softcap

    def write_mask(self, batch: PagedBatch) -> None:
        """List the visible blocks of each decode of a batch."""
        lists = list_blocks(self._spec, self._block_size, batch)
        self._counts.zero_()
        for store, rows in (
            (self._counts[:, : batch.decodes, 0, 0], np.stack([lists.partial_counts, lists.full_counts])),
            (self._edges[:, : batch.decodes], lists.edges),
            (self._partial[: batch.decodes, 0, 0, : lists.partial.shape[1]], lists.partial),
            (self._full[: batch.decodes, 0, 0, : lists.full.shape[1]], lists.full),
        ):
            store.copy_(torch.from_numpy(rows[..., : store.shape[-1]]))

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend the decodes of the last ``write_mask``, ``query [decodes, query_heads, head_dim]``; returns
        the same shape and dtype."""
        rows = self._query[: len(query)].view(query.shape).copy_(query)
        if scale != self._spec.scale:  # layers of one group may differ in scale, and the kernel knows one
            rows.mul_(scale / self._spec.scale)
        output = self._call(*self._arguments(keys, values))
        return output[: len(query)].reshape(query.shape).to(query.dtype)

    def _arguments(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sequences = (keys.flatten(1, 2).unsqueeze(0), values.flatten(1, 2).unsqueeze(0))
        return (self._query, *sequences, *self._counts, self._partial, self._full, *self._edges)

    def _compile(self, *example: torch.Tensor) -> Callable[..., torch.Tensor]:
        function = decode_function(self._spec, self._folded, self._block_size)
        compiling = torch.compile(
            function, dynamic=False, fullgraph=True, options={"cpp.threads": self._threads}
        )
        device = example[0].device
        # No draw of the compiler's reaches training, nor does an autocast around this call reach the kernel.
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            compiled = compiling.aot_compile((example, {}))
        # The shapes are held fixed here; what is left of the guards is the caller's global state (grad mode,
        # number of threads), and the result does not depend on it.
        compiled.disable_guard_check()
        return compiled


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The visible blocks of ``n`` decodes, all int32.

    Attributes:
        partial_counts, partial: ``[n]`` and ``[n, 2]``, the blocks that are visible in part: a sequence's
            first or last.
        full_counts, full: ``[n]`` and ``[n, widest]``, the blocks that are visible as a whole.
        edges: ``[4, n]``, the visible slots of the first and of the last block:
            ``edges[0] <= slot < edges[1]`` or ``edges[2] <= slot < edges[3]``.
    """

    partial_counts: np.ndarray
    partial: np.ndarray
    full_counts: np.ndarray
    full: np.ndarray
    edges: np.ndarray


def list_blocks(spec: LayerSpec, block_size: int, batch: PagedBatch) -> BlockLists:
    """Turn the block tables of a batch's decodes into the lists of a block mask."""
    position = batch.starts[: batch.decodes]
    tables = batch.host_tables[: batch.decodes]
    first, first_offset = np.divmod(first_visible(spec, position), block_size)
    last, last_offset = np.divmod(position, block_size)
    last_offset = last_offset + 1
    first_cut, last_cut, one = first_offset > 0, last_offset < block_size, first == last
    rows = np.arange(batch.decodes)
    first_id, last_id = tables[rows, first], tables[rows, last]
    full_begin = first + first_cut
    full_counts = np.maximum(last + 1 - last_cut - full_begin, 0).astype(np.int32)
    # Beyond a sequence's count stands anything; where a window leaves few blocks, few are copied.
    columns = np.minimum(full_begin[:, None] + np.arange(full_counts.max()), tables.shape[1] - 1)
    edges = (
        first_id * block_size + first_offset,
        first_id * block_size + np.where(one, last_offset, block_size),
        last_id * block_size + np.where(one, first_offset, 0),
        last_id * block_size + last_offset,
    )
    return BlockLists(
        partial_counts=(first_cut + last_cut.astype(np.int32) - (one & first_cut & last_cut)),
        partial=np.stack([np.where(first_cut, first_id, last_id), last_id], axis=1),
        full_counts=full_counts,
        full=tables[rows[:, None], columns],
        edges=np.stack(edges).astype(np.int32),
    )


def decode_function(spec: LayerSpec, folded: int, block_size: int) -> Callable[..., torch.Tensor]:
    """What is compiled. The query heads of one KV head are folded into query rows, so that a block is read
    once a KV head."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    softcap = spec.softcap
    # Rows of a tile: a power of two from 16 on, as tensor cores want them; a CPU cuts it to the real rows.
    tile = max(16, 1 << (folded - 1).bit_length())

    def cap(score, batch, head, row, slot):  # type: ignore[no-untyped-def]
        return softcap * torch.tanh(score / softcap)

    def decode(  # type: ignore[no-untyped-def]
        query, keys, values, partial_counts, full_counts, partial, full, begin0, end0, begin1, end1
    ):
        def visible(batch, head, row, slot):  # type: ignore[no-untyped-def]
            in_first = (begin0[batch] <= slot) & (slot < end0[batch])
            return in_first | ((begin1[batch] <= slot) & (slot < end1[batch]))

        mask = BlockMask.from_kv_blocks(
            partial_counts,
            partial,
            full_counts,
            full,
            BLOCK_SIZE=(tile, block_size),
            mask_mod=visible,
            seq_lengths=(folded, keys.shape[2]),
            compute_q_blocks=False,
        )
        # On a CPU a single query row would go through a split kernel that walks the whole pool once a
        # sequence: no part is large enough for it.
        options = {"PARTITION_SIZE": 1 << 30} if query.device.type == "cpu" else None
        return flex_attention(
            query,
            keys,
            values,
            score_mod=None if softcap is None else cap,
            block_mask=mask,
            scale=spec.scale,
            kernel_options=options,
        )

    return decode


def _layout(*stores: torch.Tensor) -> tuple[object, ...]:
    return tuple((store.shape, store.stride(), store.dtype, store.device) for store in stores)
