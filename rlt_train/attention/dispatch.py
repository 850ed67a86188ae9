"""The attention function that a generation view runs, registered with transformers' ``AttentionInterface``.

Paged-ness is a property of the *call*: a forward that carries ``paged_call=...`` runs paged attention, any
other forward on the same module runs the implementation the model was loaded with. One name is registered for
each such implementation, so that transformers builds that implementation's mask for ordinary calls; a paged
call brings its own 4-D placeholder mask, which transformers passes through untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlt_train.errors import UnsupportedModelError

_PREFIX = "rlt_paged_over_"
# Arguments of transformers' attention functions that change which keys count, or how much.
_CHANGES_SCORES = ("position_bias", "indices", "block_indices")


class AttentionCall(Protocol):
    """What a forward passes as ``paged_call``: it sees each attention layer of that forward once, in
    order."""

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
        """Attend packed ``query/key/value [tokens, heads, head_dim]``; returns ``[tokens, query_heads,
        head_dim]``."""
        ...


def placeholder_mask(device: torch.device) -> torch.Tensor:
    """The 4-D mask a paged call passes: transformers takes any 4-D mask as already prepared and builds
    none."""
    return torch.ones((1, 1, 1, 1), device=device)


def install(config: Any) -> None:
    """Point a view's own ``config`` (and its sub-configs) at the paged function over its present
    implementation.

    Raises:
        UnsupportedModelError: the config names an implementation this transformers does not know.
    """
    implementation = config._attn_implementation or "eager"
    if implementation.startswith(_PREFIX):
        return
    if implementation not in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()):
        raise UnsupportedModelError(
            f"attention implementation {implementation!r} is not registered with transformers."
        )
    name = _PREFIX + implementation
    AttentionInterface.register(name, _paged_or(implementation))
    masks = AttentionMaskInterface()
    if implementation in masks.valid_keys():
        AttentionMaskInterface.register(name, masks[implementation])
    config._attn_implementation = name


def _paged_or(implementation: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        paged_call: AttentionCall | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if paged_call is None:
            ordinary = _ordinary_function(module, implementation)
            return ordinary(module, query, key, value, attention_mask, *args, **kwargs)
        for name in _CHANGES_SCORES:
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} passes {name} to attention, and paged attention does not "
                    f"carry it"
                )
        scaling = kwargs.get("scaling", args[0] if args else None)
        output = paged_call.attend(
            module,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        return output.unsqueeze(0), None

    return attention


def _ordinary_function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    # Eager attention is not in transformers' registry: each modelling file has its own.
    # A subclass of an attention module, in a file of its own, uses its parent's.
    if implementation == "eager":
        files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
        return next(f.eager_attention_forward for f in files if hasattr(f, "eager_attention_forward"))
    return ALL_ATTENTION_FUNCTIONS[implementation]
