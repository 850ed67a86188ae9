"""The parity probe: before a model is served, its architecture must give the same log-probs paged as it does
ordinarily.

The probe builds a small random model of the same class whose window, chunk and RoPE limits are low enough to
be crossed, runs mixed-length requests through the whole engine (chunked prefill, prefix hits, decode), and
compares each generated token's log-prob with one ordinary forward. It catches what no list of architectures
knows.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from rlt_train.engine.engine import Engine, EngineConfig
from rlt_train.engine.request import Request, Sequence
from rlt_train.engine.sampling import SamplingParams
from rlt_train.errors import UnsupportedModelError
from rlt_train.weights.view import GenerationView

TOLERANCE = 5e-4  # nats; float32 rounding stays near 1e-5, a wrong mask or position is off by tenths
_PROMPT_LENGTHS = (1, 5, 21, 37)
_NEW_TOKENS = 6
_LONGEST = max(_PROMPT_LENGTHS) + _NEW_TOKENS
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def probe_architecture(view: GenerationView) -> float:
    """Compare paged with ordinary log-probs on a shrunken model of the view's class; returns the largest
    difference.

    Where no shrunken model can be built (nested or unusual configs), the real weights are probed at short
    lengths.

    Raises:
        UnsupportedModelError: names the architecture and how it differs.
    """
    name = type(view.model).__name__
    refuse_batch_dependent_rope(name, view.config.get_text_config())
    small = shrunken_model(view.model)
    probed = GenerationView(small) if small is not None else view
    difference = largest_difference(probed)
    if not difference <= TOLERANCE:  # NaN fails too
        lengths = ", ".join(map(str, _PROMPT_LENGTHS))
        raise UnsupportedModelError(
            f"{name} cannot be served: its paged log-probs differ from an ordinary forward's by "
            f"{difference:.3g} nats (allowed: {TOLERANCE:g}) on packed sequences of {lengths} prompt tokens. "
            "Its attention depends on something the paged cache does not carry (position biases, its own "
            "mask, recurrent state)."
        )
    return difference


def refuse_batch_dependent_rope(name: str, config: Any) -> None:
    """Refuse RoPE whose frequency table follows the longest sequence of a batch.

    Raises:
        UnsupportedModelError: for "dynamic" and "longrope" scaling.
    """
    for kind in _rope_types(
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    ):
        if kind in _BATCH_DEPENDENT_ROPE:
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


def shrunken_model(model: nn.Module) -> nn.Module | None:
    """A small float32 model of the same class on the CPU, or ``None`` where the class does not take a
    shrunken config."""
    config = copy.deepcopy(model.config)
    implementation = config._attn_implementation or "eager"
    if config.get_text_config() is not config:
        return None
    with torch.random.fork_rng(devices=[]):  # modules draw their first weights from the global stream
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every accelerator too
        try:
            shrink_config(config)
            small = type(model)._from_config(
                config,
                dtype=torch.float32,
                attn_implementation=implementation if implementation in ("eager", "sdpa") else "eager",
            )
        except Exception:
            return None
        for parameter in small.parameters():
            # Larger than any usual initialisation, so that attention is far from uniform and errors show.
            if parameter.ndim > 1:
                parameter.data.normal_(std=1.5 / math.sqrt(parameter.shape[-1]))
    return small.eval()


def shrink_config(config: Any) -> None:
    """Lower sizes and limits in place, keeping the ratio of query to key heads and every kind of layer."""
    ratio = max(
        1,
        config.num_attention_heads
        // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads),
    )
    kv_heads = 1 if ratio > 4 else 2
    query_heads = kv_heads * min(ratio, 4)
    head_dim = min(16, getattr(config, "head_dim", None) or 16)
    smaller = {
        "hidden_size": query_heads * head_dim,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "sliding_window": 8,
        "attention_chunk_size": 16,
        "query_pre_attn_scalar": head_dim,
    }
    layers = _enough_layers(config)
    for key, value in {**smaller, "num_hidden_layers": layers}.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, key, None)
    for parameters in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        _shrink_rope(parameters)


def _enough_layers(config: Any) -> int:
    kinds = getattr(config, "layer_types", None) or []
    needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    return max(min(2, config.num_hidden_layers), needed)


def _shrink_rope(parameters: Any) -> None:
    if isinstance(parameters, dict):
        if "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] = 16
        for value in parameters.values():
            _shrink_rope(value)


def largest_difference(view: GenerationView) -> float:
    """Largest |paged - ordinary| log-prob over the generated tokens of a mixed-length batch."""
    engine = Engine(
        view,
        EngineConfig(rollouts_in_flight=4, max_length=_LONGEST, block_size=4, max_tokens_per_step=16),
    )
    finished: list[Sequence] = []
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(engine.vocab_size, (max(_PROMPT_LENGTHS),), generator=generator).tolist()
    for index, length in enumerate(_PROMPT_LENGTHS):
        prompt = base[:length]  # each a prefix of the next: later ones hit the prefix index
        params = SamplingParams(max_new_tokens=_NEW_TOKENS, temperature=1.0)
        engine.add(Request(f"probe-{index}", prompt, params, seed=index, eos_token_ids=frozenset()))
    while engine.unfinished:
        finished += engine.step().finished
    # Not max() of Python: it drops a NaN that is not the first.
    return torch.tensor([_difference(view, sequence) for sequence in finished]).max().item()


@torch.inference_mode()
def _difference(view: GenerationView, sequence: Sequence) -> float:
    if sequence.error is not None:
        return math.nan
    start = len(sequence.request.prompt_ids)
    tokens = torch.tensor([sequence.tokens], device=view.device)
    with view.autocast():
        logits = view.model(input_ids=tokens, use_cache=False).logits[0, start - 1 : -1].float()
    ordinary = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, start:, None]).squeeze(1)
    return (ordinary.cpu() - torch.tensor(sequence.logprobs)).abs().max().item()
