"""Which attention layers a model has, found by running it once and watching, not by reading its config."""

from __future__ import annotations

import torch
from torch import nn

from rlt_train.attention.contract import LayerSpec
from rlt_train.attention.dispatch import placeholder_mask
from rlt_train.errors import UnsupportedModelError
from rlt_train.weights.view import GenerationView


class _RecordingCall:
    """Records the spec of each layer and answers with zeros of the right shape."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, LayerSpec] = {}

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
        name = type(module).__name__
        if module in self.layers:
            raise UnsupportedModelError(
                f"{name} is called twice in one forward; looped models are not supported yet."
            )
        if key.shape[-1] != value.shape[-1]:
            raise UnsupportedModelError(
                f"{name} has key heads of {key.shape[-1]} and value heads of {value.shape[-1]}."
            )
        self.layers[module] = LayerSpec(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=key.shape[2],
            scale=float(scale),
            sliding_window=sliding_window,
            softcap=softcap,
            has_sinks=sinks is not None,
            dtype=key.dtype,
        )
        return torch.zeros_like(query)


def discover_layers(view: GenerationView) -> dict[nn.Module, LayerSpec]:
    """Run two tokens through the view and return its attention modules in call order.

    Raises:
        UnsupportedModelError: fewer modules than hidden layers go through transformers' attention interface
        (ALiBi
            and own-attention models, state-space and linear-attention layers), or the forward refuses a paged
            call.
    """
    name = type(view.model).__name__
    call = _RecordingCall()
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
    if len(call.layers) != expected:
        raise UnsupportedModelError(
            f"{name} has {expected} hidden layers but {len(call.layers)} attention calls went through "
            f"transformers' attention interface. Models with their own attention (ALiBi, GPT-J), state-space "
            f"or linear-attention layers keep state that the paged cache does not hold, so they are refused."
        )
    return call.layers
