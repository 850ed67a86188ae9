"""The parity probe refuses, by name and with the reason, every model that paged attention would get wrong."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import FAMILIES, build, gemma2, largest_error, llama, prompt, qwen3
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from rlt_train import RolloutManager, SamplingParams, UnsupportedModelError
from rlt_train.attention.contract import AttentionGroup
from rlt_train.engine import probe
from rlt_train.engine.probe import TOLERANCE, probe_architecture
from rlt_train.engine.refusals import refuse_unservable
from rlt_train.engine.shrink import shrunken_model
from rlt_train.engine.sizes import EngineConfig
from rlt_train.weights.view import GenerationView

SIZES: dict[str, Any] = {"rollouts_in_flight": 2, "max_length": 32, "engine_threads": 1}


def refuse(model: Any, *messages: str) -> None:
    """Creating or starting a manager must raise with all of ``messages``, and leave nothing running."""
    with pytest.raises(UnsupportedModelError) as raised:
        RolloutManager(model, **SIZES).start()
    for message in messages:
        assert message in str(raised.value), str(raised.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_far_below_the_tolerance(family: str) -> None:
    assert probe_architecture(GenerationView(FAMILIES[family]())) < TOLERANCE / 10


def test_alibi_is_refused() -> None:
    config = BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)
    refuse(build(BloomForCausalLM, config, attention="eager"), "BloomForCausalLM", "ALiBi")


@pytest.mark.parametrize("alibi", [True, False])
def test_falcon_is_refused_for_its_positions_or_its_own_attention(alibi: bool) -> None:
    config = FalconConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=alibi
    )
    reason = "ALiBi" if alibi else "attention interface"
    refuse(build(FalconForCausalLM, config, attention="eager"), "FalconForCausalLM", reason)


def test_linear_attention_layers_are_refused_by_their_kind() -> None:
    config = Qwen3NextConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    model = build(Qwen3NextForCausalLM, config, attention="eager")
    refuse(model, "Qwen3NextForCausalLM", "linear_attention layers", "recurrent state")


def test_attention_outside_the_interface_is_refused() -> None:
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": 64}
    config = GPTNeoConfig(vocab_size=100, hidden_size=32, num_layers=2, num_heads=4, **kinds)
    refuse(build(GPTNeoForCausalLM, config, attention="eager"), "GPTNeoForCausalLM", "attention interface")


def test_state_space_models_are_refused() -> None:
    config = MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4)
    refuse(build(MambaForCausalLM, config, attention="eager"), "MambaForCausalLM", "recurrent state")


def test_a_hybrid_class_without_recurrent_layers_is_served() -> None:
    """The dense Granite 4 models are of a class that keeps state in other models."""
    config = GraniteMoeHybridConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["full_attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        eos_token_id=None,
    )
    model = build(GraniteMoeHybridForCausalLM, config)
    refuse_unservable(model, EngineConfig())
    assert probe_architecture(GenerationView(model)) < TOLERANCE / 10
    model.config.layer_types = ["full_attention", "linear_attention"]
    refuse(model, "GraniteMoeHybridForCausalLM", "linear_attention layers")


def test_gpt_j_is_refused_or_served_right() -> None:
    """Its attention was its own before transformers 5.24 and goes through the interface since."""
    config = GPTJConfig(vocab_size=300, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, bos_token_id=None)
    config.eos_token_id = None
    model = build(GPTJForCausalLM, config, attention="eager")
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(type(model.transformer.h[0].attn)):
        return refuse(model, "GPTJForCausalLM", "attention interface")
    with RolloutManager(model, **SIZES) as manager:
        handles = [manager.submit(prompt(length), SamplingParams(max_new_tokens=8)) for length in (1, 7, 20)]
        assert max(largest_error(model, handle.result(30)) for handle in handles) < 1e-4


def test_encoder_decoders_are_refused() -> None:
    config = T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    refuse(
        build(T5ForConditionalGeneration, config, attention="eager"),
        "T5ForConditionalGeneration",
        "encoder-decoder",
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(kind: str) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        parameters |= {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        }
    refuse(
        llama(rope_parameters=parameters), "LlamaForCausalLM", f"'{kind}' RoPE", "longest sequence", "'yarn'"
    )


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_fixed_rope_scaling_is_served(kind: str) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind != "linear":
        parameters["original_max_position_embeddings"] = 128
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert probe_architecture(GenerationView(llama(rope_parameters=parameters))) < TOLERANCE


# -- models that only a run can find out -----------------------------------------------------------------


class RecencyLlama(LlamaForCausalLM):
    """Adds a bias to the logits that depends on where a token stands in its row."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        ramp = torch.linspace(0, 1, output.logits.shape[-1])
        rows = torch.arange(output.logits.shape[1]).unsqueeze(1)
        output.logits = output.logits + 0.1 * ramp * rows
        return output


class LeakyAttention(LlamaAttention):
    """Mixes in the mean of the row outside the attention interface: packed, other sequences."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        output, weights = super().forward(hidden_states=hidden_states, **kwargs)
        return output + 0.1 * hidden_states.cumsum(1), weights


class HonestAttention(LlamaAttention):
    """A subclass in a file of its own that changes nothing: eager attention must still be found."""


class CustomLlama(LlamaForCausalLM):
    attention: type[LlamaAttention] = HonestAttention

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = self.attention(config, index)


class LeakyLlama(CustomLlama):
    attention = LeakyAttention


class LateNanLlama(LlamaForCausalLM):
    """NaN for one token of long sequences only: one request among several."""

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, position_ids=position_ids, **kwargs)
        if position_ids is not None and position_ids.max() >= 40:
            output.logits = output.logits * math.nan
        return output


CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("wrong", [RecencyLlama, LeakyLlama, LateNanLlama])
def test_a_model_that_works_around_the_interface_is_caught(wrong: Any) -> None:
    refuse(build(wrong, CONFIG), wrong.__name__, "cannot be served", "nats")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_honest_subclass_is_served(attention: str) -> None:
    model = build(CustomLlama, CONFIG, attention=attention)
    with RolloutManager(model, **SIZES) as manager:
        assert len(manager.submit(prompt(5), SamplingParams(max_new_tokens=4)).result(30).token_ids) == 4
        ids = torch.tensor([prompt(6)])
        with torch.no_grad():
            assert torch.equal(manager.view.model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("skipped", ["window", "softcap", "scale"])
def test_a_backend_that_forgot_something_would_be_caught(
    skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shrunken model crosses its window and has large scores, so that each of these shows."""
    from rlt_train.attention.backends.torch_paged import TorchBackend

    plan, attend = TorchBackend.plan, TorchBackend.attend
    if skipped == "window":

        def plan_without_window(self: TorchBackend, batch: Any, first: int = 0) -> Any:
            group = AttentionGroup(replace(self.group.spec, sliding_window=None), self.group.layers)
            return plan(TorchBackend(group, self.block_size, self.device), batch, first)

        monkeypatch.setattr(TorchBackend, "plan", plan_without_window)
    else:
        wrong = {"softcap": None} if skipped == "softcap" else {"scale": 0.2}
        monkeypatch.setattr(
            TorchBackend, "attend", lambda self, *args, **kwargs: attend(self, *args, **{**kwargs, **wrong})
        )
    with pytest.raises(UnsupportedModelError, match="Gemma2ForCausalLM.*nats"):
        probe_architecture(GenerationView(gemma2(sliding_window=4096)))


# -- side effects ----------------------------------------------------------------------------------------


def test_the_probe_leaves_the_global_random_streams_and_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = qwen3()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(3)
    seeded.clear()
    before = torch.get_rng_state()
    probe_architecture(GenerationView(model))
    assert torch.equal(torch.get_rng_state(), before) and seeded == []
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.hidden_size == 64


def test_the_shrunken_model_is_the_same_class_and_small_whatever_the_model() -> None:
    model = gemma2(hidden_size=128, num_hidden_layers=6, sliding_window=4096)
    small = shrunken_model(model)
    assert type(small) is type(model)
    assert sum(parameter.numel() for parameter in small.parameters()) < 100_000
    assert set(small.config.layer_types) == set(model.config.layer_types)
    assert small.config.sliding_window < max(probe._PROMPT_LENGTHS)


class PickyLlama(LlamaForCausalLM):
    """Takes any config but runs with 300 tokens only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.config.vocab_size == 300
        return super().forward(*args, **kwargs)


def test_a_model_that_cannot_be_shrunken_is_probed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = build(PickyLlama, CONFIG)
    assert shrunken_model(picky) is None
    assert probe_architecture(GenerationView(picky)) < TOLERANCE
    monkeypatch.setattr(probe, "shrunken_model", lambda _: None)
    with pytest.raises(UnsupportedModelError, match="LeakyLlama"):
        probe_architecture(GenerationView(build(LeakyLlama, CONFIG)))


@pytest.mark.parametrize("autocast", [True, False])
def test_real_weights_in_half_precision_are_allowed_its_rounding(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "shrunken_model", lambda _: None)

    def view(model: Any) -> GenerationView:
        return GenerationView(model, torch.bfloat16) if autocast else GenerationView(model.bfloat16())

    assert TOLERANCE < probe_architecture(view(llama())) < probe.HALF_TOLERANCE
    with pytest.raises(UnsupportedModelError, match="RecencyLlama.*allowed: 0.5"):
        probe_architecture(view(build(RecencyLlama, CONFIG)))
