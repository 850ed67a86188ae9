"""From whatever a trainer holds to the plain ``transformers`` module tree, and who is refused on the way."""

from __future__ import annotations

import torch
from torch import nn

from rlt_train.errors import UnsupportedModelError

_SHARDING_WRAPPERS = {
    "FullyShardedDataParallel": "FSDP shards every parameter",
    "FSDPModule": "FSDP2 shards every parameter",
    "DeepSpeedEngine": "DeepSpeed partitions or replaces parameters",
}


def unwrap_model(model: nn.Module) -> nn.Module:
    """Strip ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` wrappers, however they are
    nested.

    Raises:
        UnsupportedModelError: the model is wrapped by FSDP or DeepSpeed.
    """
    while True:
        refuse_sharded(model)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def refuse_sharded(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` if ``model`` itself is an FSDP or DeepSpeed wrapper."""
    for cls in type(model).__mro__:
        if cls.__name__ in _SHARDING_WRAPPERS:
            raise UnsupportedModelError(
                f"{cls.__name__} is not supported yet: {_SHARDING_WRAPPERS[cls.__name__]}, so there is no "
                f"single copy of the weights to generate from. Use plain data parallel (accelerate launch "
                f"--num_processes N)."
            )


def causal_lm_of(model: nn.Module) -> nn.Module:
    """The causal language model inside an unwrapped model: a PEFT model's base model, else the model
    itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse, by name and with the reason, an unwrapped model that one shared copy of the weights cannot
    serve.

    Raises:
        UnsupportedModelError: encoder-decoder, quantised in place, spread by ``device_map``, prompt-learning
        PEFT,
            or without a language-model head.
    """
    name = type(causal_lm_of(model)).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"{name} is not a transformers model: it has no PreTrainedConfig in .config."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoder-only language models are served."
        )
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{name} is quantised in place; its linear layers own packed weights. Load it unquantised (for a "
            f"GGUF file: drop config.quantization_config after loading and rebuild the model from its state "
            f"dict)."
        )
    for path, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise UnsupportedModelError(
                f"{name} was loaded with device_map (module {path or '<root>'!r} carries a device hook); "
                "load it on one device."
            )
        refuse_sharded(module)
    for adapter, peft_config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(peft_config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {adapter!r} is prompt learning ({peft_config.peft_type}); use LoRA or another "
                f"adapter that lives inside the layers."
            )
    if causal_lm_of(model).get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head; pass an AutoModelForCausalLM.")
