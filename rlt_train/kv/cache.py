"""The paged KV tensors: one pair a layer, and for a looped model one a depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rlt_train.attention.contract import AttentionGroup, LayerCache, LayerSpec


class PagedCache:
    """Keys and values of every layer, ``[kv_heads, blocks, block_size, head_dim]`` each.

    Heads come first so that a block of one head is one contiguous run of ``block_size * head_dim`` numbers: a
    gather through the block table is a few large copies, and an in-place kernel reads linearly.

    Args:
        specs: the layer of each (attention module, depth), in call order.
        groups: the groups of those layers.
        num_blocks: blocks of each group.
        block_size: tokens a block.
        device: where the tensors live.
    """

    def __init__(
        self,
        specs: Mapping[tuple[nn.Module, int], LayerSpec],
        groups: Sequence[AttentionGroup],
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.device = device
        group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self.layers: dict[tuple[nn.Module, int], LayerCache] = {}
        for index, (place, spec) in enumerate(specs.items()):
            group = group_of[index]
            shape = (spec.kv_heads, num_blocks[group], block_size, spec.head_dim)
            # Zeros, not empty: a masked NaN is still a NaN where a backend reads more than it uses.
            keys, values = (torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(2))
            self.layers[place] = LayerCache(spec, group, keys, values)

    def _stores(self, group: int) -> list[torch.Tensor]:
        return [
            store
            for layer in self.layers.values()
            if layer.group == group
            for store in (layer.keys, layer.values)
        ]

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, target)`` in every layer of a group: copy-on-write of a shared last
        block."""
        if not pairs:
            return
        sources, targets = (torch.tensor(side, device=self.device) for side in zip(*pairs, strict=True))
        for store in self._stores(group):
            store.index_copy_(1, targets, store.index_select(1, sources))

    def clear(self, group: int, slots: Sequence[int]) -> None:
        """Zero slots that are masked but read: a former owner may have left NaN there, and 0 * NaN is NaN."""
        if not slots:
            return
        index = torch.tensor(slots, device=self.device)
        for store in self._stores(group):
            store.flatten(1, 2).index_fill_(1, index, 0)

    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())
