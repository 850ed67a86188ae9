"""Which layers share block tables and a plan (after vLLM's attention groups)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlt_train.attention.contract import AttentionGroup, LayerSpec


def group_layers(specs: Sequence[LayerSpec]) -> list[AttentionGroup]:
    """Group layers whose specs differ in nothing but the scale, in order of first appearance."""
    members: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault(replace(spec, scale=1.0), []).append(index)
    return [AttentionGroup(specs[layers[0]], tuple(layers)) for layers in members.values()]
