"""What the trainer is given, made into what it needs: model, tokenizer, reference model, reward functions,
checked first."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rlt_train.grpo.config import GRPOConfig
from rlt_train.grpo.rewards import RewardFunction
from rlt_train.weights.unwrap import causal_lm_of

RewardFunctions = Callable[..., Any] | Sequence[Callable[..., Any]]


def load_policy(model: str | nn.Module, args: GRPOConfig, peft_config: Any) -> nn.Module:
    """The policy: a path or hub id is loaded (float32 unless ``model_init_kwargs`` says otherwise), PEFT is
    applied.

    Raises:
        ValueError: ``model_init_kwargs`` beside a model that is loaded already.
    """
    kwargs = _dictionary("model_init_kwargs", args.model_init_kwargs)
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model, **({"dtype": torch.float32} | kwargs))
    elif kwargs:
        raise ValueError(
            "model_init_kwargs has no effect on a model that is loaded already; pass the model by name"
        )
    if peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config)
    if args.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def load_tokenizer(tokenizer: PreTrainedTokenizerBase | None, model: nn.Module) -> PreTrainedTokenizerBase:
    """The tokenizer, by default that of the model's own folder or hub id.

    Raises:
        ValueError: it has no pad token.
    """
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(causal_lm_of(model).config._name_or_path)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token, which padded training batches need. Set one that never occurs "
            "in text, or `tokenizer.pad_token = tokenizer.eos_token` (padding is masked by length, so "
            "sharing is safe here)."
        )
    return tokenizer


def load_reference(model: nn.Module, beta: float) -> nn.Module | None:
    """A frozen copy for the KL term; ``None`` when ``beta`` is 0 or the reference is the PEFT model without
    adapters."""
    if beta == 0.0 or hasattr(model, "disable_adapter"):
        return None
    reference = copy.deepcopy(model).eval()
    reference.requires_grad_(False)
    return reference


def reward_functions(functions: RewardFunctions, weights: Sequence[float] | None) -> list[RewardFunction]:
    """Wrap the reward functions; equal names get a number, so that each has its own metrics.

    Raises:
        ValueError: no function, or another number of weights than functions.
    """
    given = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    if not given:
        raise ValueError("reward_funcs is empty; give at least one reward function")
    if weights is not None and len(weights) != len(given):
        raise ValueError(f"reward_weights has {len(weights)} entries for {len(given)} reward functions")
    wrapped: list[RewardFunction] = []
    for index, function in enumerate(given):
        reward = RewardFunction(function, weight=1.0 if weights is None else weights[index])
        if any(other.name == reward.name for other in wrapped):
            reward.name = f"{reward.name}_{index}"
        wrapped.append(reward)
    return wrapped


def template_kwargs(args: GRPOConfig) -> dict[str, Any]:
    """``chat_template_kwargs`` as a dictionary."""
    return _dictionary("chat_template_kwargs", args.chat_template_kwargs)


def _dictionary(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    parsed = json.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must be a dictionary, got {value!r}")
    return parsed
