"""What a paged forward carries as ``paged_call``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlt_train.attention.contract import AttentionBackend, LayerCache, PagedBatch


class PagedCall:
    """One paged forward. A module that runs several times (a looped model) has a layer for each depth.

    Args:
        layers: the layer of each (attention module, how often it ran before in this forward).
        backends: one a group.
        batches: this forward's metadata, one a group.
    """

    def __init__(
        self,
        layers: Mapping[tuple[nn.Module, int], LayerCache],
        backends: Sequence[AttentionBackend],
        batches: Sequence[PagedBatch],
    ) -> None:
        self._layers = layers
        self._backends = backends
        self._batches = batches
        self._plans: list[Any] = [
            backend.plan(batch) for backend, batch in zip(backends, batches, strict=True)
        ]
        self._calls: Counter[nn.Module] = Counter()

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write this layer's keys and values to their slots, then attend (see ``AttentionCall``).

        Raises:
            RuntimeError: the module attends otherwise than it did when the model was examined.
        """
        layer = self._layers.get((module, self._calls[module]))
        self._calls[module] += 1
        if layer is None or layer.spec.sliding_window != sliding_window:
            raise RuntimeError(
                f"{type(module).__name__} ran {self._calls[module]} time(s) with a window of "
                f"{sliding_window}, "
                f"unlike in the forward by which its layers were found: a model whose attention changes from "
                f"call to call cannot be served"
            )
        backend, group = self._backends[layer.group], layer.group
        backend.write(layer.keys, layer.values, self._batches[group], key, value)
        return backend.attend(
            query, layer.keys, layer.values, self._plans[group], scale=scale, softcap=softcap, sinks=sinks
        )
