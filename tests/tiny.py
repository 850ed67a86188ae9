"""Tiny random models, prompts and reference computations that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlt_train.engine.engine import Engine
from rlt_train.engine.params import BUILT_IN, SamplingParams
from rlt_train.engine.request import PromptGroup, Request
from rlt_train.engine.request import Sequence as RolloutSequence
from rlt_train.engine.sizes import EngineConfig
from rlt_train.weights.view import GenerationView

VOCAB = 300
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    # Far larger than the default 0.02, with which attention is almost uniform and no mask error would show.
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(model_class: Any, config: Any, seed: int = 0, attention: str = "sdpa") -> Any:
    """A random model in eval mode; the global random stream stays where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class._from_config(config, attn_implementation=attention).eval()


def llama(seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**{**_SHARED, **changes}), seed, attention)


def qwen3(seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    return build(Qwen3ForCausalLM, Qwen3Config(**{**_SHARED, **changes}), seed, attention)


def qwen3_moe(seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**_SHARED, **experts, **changes}), seed, attention)


def gemma2(seed: int = 0, attention: str = "eager", **changes: Any) -> Any:
    window = {"sliding_window": 24, "query_pre_attn_scalar": 16}
    return build(Gemma2ForCausalLM, Gemma2Config(**{**_SHARED, **window, **changes}), seed, attention)


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gemma2": gemma2,
}


def smaller(**changes: Any) -> Any:
    """The cheapest model that still has everything: two layers, grouped heads."""
    return llama(num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=8, **changes)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def ordinary_logprobs(
    model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of ``token_ids`` after ``prompt_ids`` by one ordinary forward: float32 ``[tokens]``."""
    tokens = torch.tensor([[*prompt_ids, *token_ids]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def largest_error(model: Any, output: Any, temperature: float = 1.0) -> float:
    """Largest difference in nats between an output's log-probs and an ordinary forward's."""
    expected = ordinary_logprobs(model, output.prompt_ids, output.token_ids, temperature)
    return (expected - torch.tensor(output.logprobs)).abs().max().item()


def generate_greedy(model: Any, prompt_ids: Sequence[int], tokens: int) -> list[int]:
    """What ``model.generate`` gives for one prompt alone."""
    ids = torch.tensor([list(prompt_ids)])
    full = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return full[0, len(prompt_ids) :].tolist()


def new_engine(model: Any, **sizes: Any) -> Engine:
    defaults: dict[str, Any] = {"rollouts_in_flight": 8, "max_length": 128, "block_size": 4}
    return Engine(GenerationView(model), EngineConfig(**{**defaults, **sizes}))


def sampling(**values: Any) -> SamplingParams:
    """Resolved parameters, as the engine takes them."""
    return SamplingParams(**values).over(BUILT_IN)


def request(
    name: str,
    prompt_ids: list[int],
    params: SamplingParams = GREEDY,
    seed: int = 0,
    group: PromptGroup | None = None,
    eos: Sequence[int] = (),
) -> Request:
    return Request(
        name, list(prompt_ids), params.over(BUILT_IN), seed=seed, eos_token_ids=frozenset(eos), group=group
    )


def drive(engine: Engine, limit: int = 2000) -> dict[str, RolloutSequence]:
    """Step until nothing is left; finished sequences by request id."""
    finished: dict[str, RolloutSequence] = {}
    for _ in range(limit):
        if not engine.unfinished:
            return finished
        finished |= {sequence.request.request_id: sequence for sequence in engine.step().finished}
    raise AssertionError(f"{engine.unfinished} requests are still unfinished after {limit} steps")


def generated(sequence: RolloutSequence) -> list[int]:
    return sequence.tokens[len(sequence.request.prompt_ids) :]
