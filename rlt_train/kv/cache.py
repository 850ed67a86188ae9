"""The paged KV tensors: one pair a layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rlt_train.attention.contract import LayerSpec
from rlt_train.kv.groups import group_layers


class PagedCache:
    """Keys and values of every layer, ``[kv_heads, blocks, block_size, head_dim]`` each.

    Heads come first so that a block of one head is one contiguous run of ``block_size * head_dim`` numbers: a
    gather through the block table is a few large copies, and an in-place kernel reads linearly.
    """

    def __init__(
        self, layers: Mapping[nn.Module, LayerSpec], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.groups = group_layers(layers.values())
        self.windows = [group.sliding_window for group in self.groups]
        self._tensors = {module: self._allocate(spec) for module, spec in layers.items()}

    def _allocate(self, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (spec.kv_heads, self.num_blocks, self.block_size, spec.head_dim)
        # Zeros, not empty: a padded table entry may point at a block never written, and a masked NaN is still
        # a NaN.
        return (
            torch.zeros(shape, dtype=spec.dtype, device=self.device),
            torch.zeros(shape, dtype=spec.dtype, device=self.device),
        )

    def write(
        self, module: nn.Module, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``key``/``value [tokens, kv_heads, head_dim]`` at ``slots [tokens]``; returns the layer's
        tensors."""
        keys, values = self._tensors[module]
        for store, new in ((keys, key), (values, value)):
            store.flatten(1, 2).index_copy_(1, slots, new.transpose(0, 1).to(store.dtype))
        return keys, values

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, target)`` in every layer: copy-on-write of a shared last block."""
        if not pairs:
            return
        sources, targets = (torch.tensor(side, device=self.device) for side in zip(*pairs, strict=True))
        for keys, values in self._tensors.values():
            for store in (keys, values):
                store.index_copy_(1, targets, store.index_select(1, sources))

    def clear(self, slots: list[int]) -> None:
        """Zero slots that are masked but read: a former owner may have left NaN there, and 0 * NaN is NaN."""
        if not slots:
            return
        index = torch.tensor(slots, device=self.device)
        for keys, values in self._tensors.values():
            for store in (keys, values):
                store.flatten(1, 2).index_fill_(1, index, 0)

    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(tensor.nbytes for pair in self._tensors.values() for tensor in pair)
