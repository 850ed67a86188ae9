"""Tiny random models of each family that is served, one builder a family; two that no library has (a looped
one, and one whose layers differ in their heads); and families that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from tiny import VOCAB, build
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention

Builder = Callable[..., Any]

WINDOW = 10  # tokens of a sliding window: inside a block, and far shorter than the longest prompt
CHUNK = 12  # tokens of a chunk of Llama 4
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # Ten times the usual, so that attention is far from uniform and an error shows.
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {**_SHARED, "num_key_value_heads": 2, "intermediate_size": 64}
_HEAD_DIM = {**_GROUPED, "head_dim": 8}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LLAMA4 = {
    "attention_chunk_size": CHUNK,
    "num_local_experts": 4,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_WINDOWS = {"sliding_window": WINDOW}
_FIVE_TO_ONE = {**_WINDOWS, "num_hidden_layers": 6, "query_pre_attn_scalar": 8}
# Half of the layers use the keys and values of another; each layer mixes in an embedding of its own.
_SHARED_KV = {
    **_WINDOWS,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}


def _family(
    model: str, config: str, settings: Mapping[str, Any], attention: str = "sdpa", **own: Any
) -> Builder:
    """Builder of a transformers class, by name."""

    def family(seed: int = 0, **changes: Any) -> Any:
        made = getattr(transformers, config)(**{**settings, **own, **changes})
        return roughen(build(getattr(transformers, model), made, seed, attention), seed)

    return family


def _vision_language(model: str, config: str, text: Mapping[str, Any], **own: Any) -> Builder:
    """Builder of a vision-language class: the same nested in ``text_config``, beside a tower for images."""

    def family(seed: int = 0, **changes: Any) -> Any:
        made = getattr(transformers, config)(text_config={**text, **changes}, **own)
        return roughen(build(getattr(transformers, model), made, seed), seed)

    return family


def roughen(model: Any, seed: int) -> Any:
    """Move what is initialised to all zeros or all ones (biases, norms), and give sinks weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                size = 1.0 if name.endswith("sinks") else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model


# -- models that are nobody's ------------------------------------------------------------------------------


class LoopedModel(LlamaModel):
    """Runs its layers ``config.loops`` times over (recurrent depth), each time on keys of its own."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        for key in ("cache", "past_key_values", "inputs_embeds", "use_cache"):
            kwargs.pop(key, None)
        embedded = hidden = self.embed_tokens(input_ids)
        rows = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(rows).unsqueeze(0)
        if attention_mask is None or attention_mask.ndim != 4:
            attention_mask = torch.full((1, 1, rows, rows), -torch.inf).triu(1)
        angles = self.rotary_emb(hidden, position_ids)
        for _ in range(self.config.loops):
            for layer in self.layers:
                hidden = layer(hidden, attention_mask, position_embeddings=angles, **kwargs)
            hidden = hidden + embedded
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class LoopedLlama(LlamaForCausalLM):
    _supports_attention_backend = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LoopedModel(config)
        self.post_init()


class MixedHeadsLlama(LlamaForCausalLM):
    """Its second layer has a key head for each query head, its last has one for all."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        last = config.num_hidden_layers - 1
        for index, kv_heads in ((1, config.num_attention_heads), (last, 1)):
            own = copy.deepcopy(config)
            own.num_key_value_heads = kv_heads
            attention = self.model.layers[index].self_attn = LlamaAttention(own, index)
            attention.config = config
        self.post_init()


def looped(seed: int = 0, loops: int = 3, **changes: Any) -> Any:
    config = LlamaConfig(**{**_HEAD_DIM, "num_hidden_layers": 2, "loops": loops, **changes})
    model = roughen(build(LoopedLlama, config, seed), seed)
    model.generation_config.use_cache = False
    return model


def mixed_heads(seed: int = 0, **changes: Any) -> Any:
    return roughen(build(MixedHeadsLlama, LlamaConfig(**{**_HEAD_DIM, **changes}), seed), seed)


# -- families ----------------------------------------------------------------------------------------------

_SIGLIP = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8, "num_hidden_layers": 2}
_TOWER = {**_SIGLIP, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

FAMILIES: dict[str, Builder] = {
    "llama": _family("LlamaForCausalLM", "LlamaConfig", _HEAD_DIM),
    "llama tied": _family("LlamaForCausalLM", "LlamaConfig", _HEAD_DIM, tie_word_embeddings=True),
    "qwen2": _family("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": _family("Qwen3ForCausalLM", "Qwen3Config", _HEAD_DIM),
    "qwen3_moe": _family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _HEAD_DIM, **_EXPERTS),
    "mixtral": _family("MixtralForCausalLM", "MixtralConfig", _HEAD_DIM, **_LOCAL_EXPERTS),
    "mistral": _family("MistralForCausalLM", "MistralConfig", _HEAD_DIM, **_WINDOWS),
    # transformers' sdpa has no soft-cap and no sinks, so these two are loaded with eager attention.
    "gemma2": _family(
        "Gemma2ForCausalLM", "Gemma2Config", _HEAD_DIM, "eager", **_WINDOWS, query_pre_attn_scalar=8
    ),
    "gpt_oss": _family(
        "GptOssForCausalLM",
        "GptOssConfig",
        _HEAD_DIM,
        "eager",
        **_WINDOWS,
        **_LOCAL_EXPERTS,
        rope_parameters=_YARN,
    ),
    "gemma3": _family("Gemma3ForCausalLM", "Gemma3TextConfig", _HEAD_DIM, **_FIVE_TO_ONE),
    "olmo2": _family("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "phi3": _family("Phi3ForCausalLM", "Phi3Config", _GROUPED, **_WINDOWS),
    "smollm3": _family("SmolLM3ForCausalLM", "SmolLM3Config", _GROUPED),
    "cohere2": _family("Cohere2ForCausalLM", "Cohere2Config", _GROUPED, **_WINDOWS, logit_scale=1.0),
    "llama4": _family("Llama4ForCausalLM", "Llama4TextConfig", _HEAD_DIM, **_LLAMA4),
    "gpt2": _family("GPT2LMHeadModel", "GPT2Config", _SHARED),
    "opt": _family("OPTForCausalLM", "OPTConfig", _SHARED, ffn_dim=64, init_std=0.2),
    "gpt_neox": _family("GPTNeoXForCausalLM", "GPTNeoXConfig", _SHARED, intermediate_size=64),
    "gptj": _family("GPTJForCausalLM", "GPTJConfig", _SHARED, rotary_dim=4),
    "gpt_bigcode": _family("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _SHARED),
    "codegen": _family("CodeGenForCausalLM", "CodeGenConfig", _SHARED, rotary_dim=4),
    "phi": _family("PhiForCausalLM", "PhiConfig", _GROUPED),
    "starcoder2": _family("Starcoder2ForCausalLM", "Starcoder2Config", _GROUPED, **_WINDOWS),
    "glm4": _family("Glm4ForCausalLM", "Glm4Config", _HEAD_DIM),
    "olmo3": _family("Olmo3ForCausalLM", "Olmo3Config", _GROUPED, **_WINDOWS),
    "gemma3n": _family(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        _HEAD_DIM,
        **_SHARED_KV,
        laurel_rank=4,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    ),
    "gemma4": _family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        _HEAD_DIM,
        **_SHARED_KV,
        attention_k_eq_v=True,
        global_head_dim=16,
        num_global_key_value_heads=1,
    ),
    "gemma3 vision": _vision_language(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {**_HEAD_DIM, **_FIVE_TO_ONE, "model_type": "gemma3_text"},
        vision_config=_TOWER,
        mm_tokens_per_image=4,
        image_token_id=VOCAB - 1,
    ),
    "llava": _vision_language(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {**_GROUPED, "model_type": "llama"},
        vision_config=_TOWER,
        image_token_id=VOCAB - 1,
    ),
    "qwen2 vision": _vision_language(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {**_GROUPED, "model_type": "qwen2_vl_text", "rope_parameters": _MROPE},
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 8},
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
    ),
    "looped": looped,
    "mixed heads": mixed_heads,
}

OURS = ("looped", "mixed heads")

REFUSED: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "mpt": (
        _family("MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "eager"),
        ("MptForCausalLM", "ALiBi"),
    ),
    "jamba": (
        _family(
            "JambaForCausalLM",
            "JambaConfig",
            _GROUPED,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            mamba_d_state=4,
            use_mamba_kernels=False,
        ),
        ("JambaForCausalLM", "linear_attention layers", "recurrent state"),
    ),
    "bamba": (
        _family(
            "BambaForCausalLM",
            "BambaConfig",
            _GROUPED,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_state=4,
            mamba_d_head=16,
        ),
        ("BambaForCausalLM", "linear_attention layers", "recurrent state"),
    ),
    "lfm2": (
        _family("Lfm2ForCausalLM", "Lfm2Config", _GROUPED, full_attn_idxs=[1, 3]),
        ("Lfm2ForCausalLM", "conv layers", "recurrent state"),
    ),
    "deepseek_v3": (
        _family(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            {**_GROUPED, "num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
        ),
        ("DeepseekV3Attention", "key heads of 16 and value heads of 8", "latent attention"),
    ),
    "a window in the mask only": (
        _family(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            _GROUPED,
            **_WINDOWS,
            use_sliding_window=True,
            max_window_layers=2,
            **_EXPERTS,
            shared_expert_intermediate_size=16,
        ),
        ("Qwen2MoeAttention", "window to the mask only"),
    ),
    "a bidirectional prefix": (
        _vision_language(
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            {**_HEAD_DIM, "model_type": "gemma"},
            vision_config={**_TOWER, "projection_dim": 32},
            projection_dim=32,
            image_token_id=VOCAB - 1,
        ),
        ("PaliGemmaForConditionalGeneration", "nats"),
    ),
}
