"""Architectures that are refused by name, before anything is built, because paged attention would get them
wrong.

What this list does not know, the parity probe finds out (``rlt_train.engine.probe``).
"""

from __future__ import annotations

from typing import Any

from rlt_train.engine.sizes import EngineConfig
from rlt_train.errors import UnsupportedModelError

_PAGED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def refuse_unservable(model: Any, sizes: EngineConfig) -> None:
    """Refuse what is known not to work.

    Args:
        model: the causal language model of a generation view.
        sizes: of the engine that would serve it.

    Raises:
        UnsupportedModelError: ALiBi, recurrent state, attention of its own, RoPE that depends on batch-mates,
        or
            queries scaled by their row.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    _refuse_alibi(name, config)
    _refuse_state(name, model, config)
    if not getattr(model, "_supports_attention_backend", True):
        raise UnsupportedModelError(
            f"{name} computes its attention itself instead of through transformers' attention interface, so "
            f"it "
            f"cannot be given paged attention. (A class that does use the interface says so by "
            f"_supports_attention_backend = True.)"
        )
    _refuse_batch_dependent_rope(name, config)
    _refuse_scale_by_row(name, config, sizes)


def _refuse_alibi(name: str, config: Any) -> None:
    nested = getattr(config, "attn_config", None)
    if (
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or getattr(nested, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    ):
        raise UnsupportedModelError(
            f"{name} uses ALiBi: it adds a bias for each distance to the attention scores, which paged "
            f"attention does not carry. Use a model with rotary or learned positions."
        )


def _refuse_state(name: str, model: Any, config: Any) -> None:
    kinds = getattr(config, "layer_types", None) or []
    others = sorted(set(kinds) - _PAGED_LAYERS)
    # A hybrid's class is stateful even where its config has attention layers only.
    if others or (getattr(model, "_is_stateful", False) and not kinds):
        has = f"{', '.join(others)} layers" if others else "state-space or linear-attention layers"
        raise UnsupportedModelError(
            f"{name} has {has}. The paged KV cache serves full, sliding-window and chunked attention; it "
            f"holds no recurrent state (state-space and linear-attention layers, convolutions) and no index "
            f"of sparse attention. Use a model whose layers are all attention of those kinds."
        )


def _refuse_batch_dependent_rope(name: str, config: Any) -> None:
    for kind in _rope_types(
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    ):
        if "dynamic" in kind or kind == "longrope":
            raise UnsupportedModelError(
                f"{name} uses {kind!r} RoPE scaling, whose table depends on the longest sequence in the "
                f"batch: a long request would change a short one's tokens. Set a fixed scaling ('linear', "
                f"'yarn', 'llama3') or none."
            )


def _rope_types(parameters: Any) -> list[str]:
    if not isinstance(parameters, dict):
        return []
    nested = [kind for value in parameters.values() for kind in _rope_types(value)]
    return nested + [parameters[key] for key in ("rope_type", "type") if isinstance(parameters.get(key), str)]


def _refuse_scale_by_row(name: str, config: Any, sizes: EngineConfig) -> None:
    # Llama 4 scales the queries of layers without RoPE by a step function of the position, but counts the row
    # instead of reading position_ids. Below the first step the factor is 1 whatever it counts.
    if not (getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale")):
        return
    if all(getattr(config, "no_rope_layers", None) or [False]):  # 1 is a layer with RoPE
        return
    longest = max(sizes.max_length, sizes.tokens_per_step)
    if longest >= config.floor_scale:
        raise UnsupportedModelError(
            f"{name} scales attention by how often a token's row passes floor_scale={config.floor_scale}, "
            f"and "
            f"counts rows of the packed batch instead of positions: with max_length={sizes.max_length} and "
            f"{sizes.tokens_per_step} tokens a forward its tokens would be wrong. Keep both below "
            f"floor_scale, "
            f"or set attn_temperature_tuning to False if the model was trained so."
        )
