"""A small random model of a given model's class, on which an architecture can be tried out cheaply.

Whatever an architecture does differently from layer to layer stays (windows, chunks, layers without RoPE,
shared keys and values, head counts of their own), at sizes that take milliseconds and limits that a short
prompt crosses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_HEAD_DIM = 16  # at most
_LIMITS = {
    "sliding_window": 8,
    "attention_chunk_size": 16,
    "max_position_embeddings": 64,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "laurel_rank": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_layers_per_stack": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
}
_SHALLOW_TOWER = {
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_blocks": 1,
    "depth": 1,
    "intermediate_size": 64,
}
_NARROW_TOWER = {
    **_SHALLOW_TOWER,
    "hidden_size": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "num_attention_heads": 2,
    "num_heads": 2,
}


def shrunken_model(model: nn.Module) -> nn.Module | None:
    """A small float32 model of the same class on the CPU, or ``None`` where the class does not take a
    shrunken config. The global random stream is left alone."""
    with torch.random.fork_rng(devices=[]):  # modules draw their first weights from the global stream
        for tower_limits in (_NARROW_TOWER, _SHALLOW_TOWER):  # a tower's widths may hang together
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every accelerator too
            config = copy.deepcopy(model.config)
            try:
                shrink_config(config, tower_limits)
                return _build(type(model), config)
            except Exception:
                continue
    return None


def _build(model_class: Any, config: Any) -> nn.Module:
    implementation = config.get_text_config()._attn_implementation
    small = model_class._from_config(
        config,
        dtype=torch.float32,
        attn_implementation=implementation if implementation in ("eager", "sdpa") else "eager",
    ).eval()
    _roughen(small)
    with torch.inference_mode():  # a config can be taken and still not run
        small(input_ids=torch.zeros((1, 2), dtype=torch.long), use_cache=False)
    return small


def _roughen(model: nn.Module) -> None:
    """Weights far larger than any usual initialisation, so that attention is far from uniform and errors
    show."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=1.5 / math.sqrt(parameter.shape[-1]))
        else:  # norms, biases, sinks
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)


def shrink_config(config: Any, tower_limits: Mapping[str, int] = _SHALLOW_TOWER) -> None:
    """Lower sizes and limits in place, keeping every kind of layer and the ratio of query to key heads. Of a
    nested config the text part is shrunk so, and every other part (no text runs through it) to
    ``tower_limits``."""
    text = config.get_text_config()
    for name in getattr(config, "sub_configs", None) or {}:
        tower = getattr(config, name, None)
        if tower is not None and tower is not text:
            _lower(tower, tower_limits)
    _shrink_text(text)
    for part in (config, text):
        _lower(part, dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), text.vocab_size - 1))


def _shrink_text(config: Any) -> None:
    overrides = _take_overrides(config)
    full = {name: _integer(config, name) for name in ("num_key_value_heads", "head_dim")}
    ratio = max(1, config.num_attention_heads // (full["num_key_value_heads"] or config.num_attention_heads))
    kv_heads = 1 if ratio > 4 else 2
    query_heads = kv_heads * min(ratio, 4)
    head_dim = min(_HEAD_DIM, full["head_dim"] or _HEAD_DIM)
    exact = {
        "hidden_size": query_heads * head_dim,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "rotary_dim": head_dim // 2,
        "word_embed_proj_dim": query_heads * head_dim,
        # Llama 4 counts rows where it should count positions, which is harmless below this limit: the sizes
        # of an engine are checked against the model's own limit (``refuse_unservable``), not the probe's.
        "floor_scale": 1 << 20,
    }
    kept = _kept_layers(config, overrides)
    _keep_layers(config, kept)
    _lower(config, _LIMITS)
    for name, value in exact.items():
        if _integer(config, name) is not None:
            setattr(config, name, value)
    for parameters in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        _shrink_rope(parameters, head_dim)
    if overrides:
        shrunk = {
            at: _shrink_override(overrides.get(layer, {}), full, exact) for at, layer in enumerate(kept)
        }
        config.per_layer_config = shrunk


def _kept_layers(config: Any, overrides: Mapping[int, Any]) -> list[int]:
    """The first layer of each kind, and at least two."""
    count = config.num_hidden_layers
    settings = {name: v for name, v in _per_layer(config).items() if name not in _LIMITS}
    owners = count - (getattr(config, "num_kv_shared_layers", None) or 0)  # later layers use another's KV
    kinds = [
        (*(repr(v[layer]) for v in settings.values()), layer >= owners, repr(overrides.get(layer)))
        for layer in range(count)
    ]
    first = {kinds.index(kind) for kind in kinds}
    return sorted(first | set(range(min(2, count)))) if len(first) < 2 else sorted(first)


def _keep_layers(config: Any, kept: list[int]) -> None:
    count = config.num_hidden_layers
    for name, values in _per_layer(config).items():
        setattr(config, name, [values[layer] for layer in kept])
    if getattr(config, "moe_layers", None):
        config.moe_layers = [at for at, layer in enumerate(kept) if layer in config.moe_layers]
    if shared := getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = sum(layer >= count - shared for layer in kept)
    config.num_hidden_layers = len(kept)


def _per_layer(config: Any) -> dict[str, list[Any]]:
    """The settings that are lists with an entry for each layer; lists of layers' indices are none."""
    count = config.num_hidden_layers
    return {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and name != "moe_layers"
    }


def _take_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Settings of single layers that differ from the config's own (transformers' heterogeneous configs), by
    layer; the config is left without them, because it refuses to be read where they differ."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    overrides = {int(layer): dict(own) for layer, own in config.to_dict()["per_layer_config"].items()}
    config.per_layer_config = None
    return overrides


def _shrink_override(
    own: Mapping[str, Any], full: Mapping[str, int | None], exact: Mapping[str, int]
) -> dict[str, Any]:
    """A layer's own settings at the shrunken size: what was more or less than the config's stays so."""
    shrunk = dict(own)
    if own.get("head_dim"):
        shrunk["head_dim"] = exact["head_dim"] * (2 if own["head_dim"] > (full["head_dim"] or 0) else 1)
    if own.get("num_key_value_heads"):
        fewer = own["num_key_value_heads"] < (full["num_key_value_heads"] or own["num_key_value_heads"])
        shrunk["num_key_value_heads"] = 1 if fewer else exact["num_attention_heads"]
    for name in _LIMITS.keys() & own.keys():
        if isinstance(own[name], int):
            shrunk[name] = min(own[name], _LIMITS[name])
    return shrunk


def _lower(config: Any, limits: Mapping[str, int]) -> None:
    for name, limit in limits.items():
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(config, name, min(value, limit))
        elif isinstance(value, list) and all(isinstance(entry, int) for entry in value):
            setattr(config, name, [min(entry, limit) for entry in value])


def _shrink_rope(parameters: Any, head_dim: int) -> None:
    if not isinstance(parameters, dict):
        return
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 16
    if sections := parameters.get("mrope_section"):  # frequencies of time, height and width
        half = head_dim // 2
        smaller = [section * half // sum(sections) for section in sections]
        parameters["mrope_section"] = [half - sum(smaller[1:]), *smaller[1:]]
    for value in parameters.values():
        _shrink_rope(value, head_dim)


def _integer(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None
