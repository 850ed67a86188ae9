"""Which attention layers a model has, found by running it once and watching, not by reading its config."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from rlt_train.attention.contract import LayerSpec
from rlt_train.attention.dispatch import placeholder_mask
from rlt_train.errors import UnsupportedModelError
from rlt_train.weights.view import GenerationView


class _RecordingCall:
    """Records the spec of each layer and answers with zeros of the right shape."""

    def __init__(self, config: Any) -> None:
        self.layers: dict[tuple[nn.Module, int], LayerSpec] = {}
        self.calls: Counter[nn.Module] = Counter()
        self._config = config

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
        name, kind = type(module).__name__, _kind_of(self._config, module)
        if key.shape[-1] != value.shape[-1]:
            raise UnsupportedModelError(
                f"{name} has key heads of {key.shape[-1]} and value heads of {value.shape[-1]} numbers, as "
                f"multi-head latent attention (DeepSeek) has; the paged KV cache serves one size for both."
            )
        if kind == "sliding_attention" and sliding_window is None:
            raise UnsupportedModelError(
                f"{name} gives its sliding window to the mask only, and a paged call has no mask. Use a "
                f"model whose attention passes sliding_window, or a config without windows."
            )
        self.layers[module, self.calls[module]] = LayerSpec(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=key.shape[2],
            scale=float(scale),
            sliding_window=sliding_window,
            softcap=softcap,
            has_sinks=sinks is not None,
            dtype=key.dtype,
            # transformers gives the chunk to the mask only, and a paged call has no mask.
            chunk=self._config.attention_chunk_size if kind == "chunked_attention" else None,
        )
        self.calls[module] += 1
        return torch.zeros_like(query)


def _kind_of(config: Any, module: nn.Module) -> str | None:
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[index] if kinds and index is not None and index < len(kinds) else None


def discover_layers(view: GenerationView) -> dict[tuple[nn.Module, int], LayerSpec]:
    """Run two tokens through the view and return its layers in call order: each attention module, and how
    often it ran before in that forward (a looped model runs the same modules several times a token).

    Raises:
        UnsupportedModelError: fewer calls than hidden layers go through transformers' attention interface
            (own-attention models, state-space and linear-attention layers), an attention layer is of a kind
            that cannot be paged, or the forward refuses a paged call.
    """
    name = type(view.model).__name__
    call = _RecordingCall(view.config.get_text_config())
    tokens = torch.zeros((1, 2), dtype=torch.long, device=view.device)
    try:
        with torch.inference_mode(), view.autocast():
            view.model(
                input_ids=tokens,
                position_ids=torch.arange(2, device=view.device).unsqueeze(0),
                attention_mask=placeholder_mask(view.device),
                use_cache=False,
                paged_call=call,
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot run a paged forward: {type(error).__name__}: {error}"
        ) from error
    expected = view.config.get_text_config().num_hidden_layers
    if len(call.layers) < expected:
        raise UnsupportedModelError(
            f"{name} has {expected} hidden layers but {len(call.layers)} attention calls went through "
            f"transformers' attention interface. What the other layers remember (attention of their own, "
            f"recurrent state) is not in the paged KV cache, so the model is refused."
        )
    return call.layers
