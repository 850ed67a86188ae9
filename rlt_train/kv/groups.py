"""Layers that share one attention plan (after vLLM's attention groups)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlt_train.attention.contract import LayerSpec


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers with equal visibility: one block table and one plan a step serve them all."""

    sliding_window: int | None
    layers: tuple[int, ...]


def group_layers(specs: Iterable[LayerSpec]) -> list[AttentionGroup]:
    """Group layer indices by sliding window, in order of first appearance."""
    members: dict[int | None, list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault(spec.sliding_window, []).append(index)
    return [AttentionGroup(window, tuple(layers)) for window, layers in members.items()]
