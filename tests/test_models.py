"""Every family through the whole engine against ``model.generate``, and through the manager's start-up probe;
and the families that are refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import drive, generated, llama, new_engine, prompt, request
from tiny_models import CHUNK, FAMILIES, OURS, REFUSED, WINDOW

from rlt_train import RolloutManager, SamplingParams, UnsupportedModelError
from rlt_train.attention.contract import LayerSpec
from rlt_train.engine import probe
from rlt_train.engine.engine import Engine
from rlt_train.engine.probe import TOLERANCE, largest_difference
from rlt_train.engine.shrink import shrunken_model
from rlt_train.weights.view import GenerationView

LENGTHS = (1, 7, 18, 37)  # one token, an odd end in a block, prefills of two and of three chunks
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
CLOSE = 1e-4  # on logits whose standard deviation is about 1
SIZES: dict[str, Any] = {"rollouts_in_flight": 2, "max_length": 48, "block_size": 4, "engine_threads": 1}

USUAL = LayerSpec(4, 2, 8, 8**-0.5, None, None, False, torch.float32)
SLIDING = replace(USUAL, sliding_window=WINDOW)
SINKS = replace(USUAL, has_sinks=True)
CAPPED = replace(USUAL, softcap=50.0)
EVERY_HEAD = replace(USUAL, kv_heads=4)
# What the groups of a family must be, with the number of layers in each; else four usual layers.
GROUPS: dict[str, list[tuple[LayerSpec, int]]] = {
    "mistral": [(SLIDING, 4)],
    "gemma2": [(replace(CAPPED, sliding_window=WINDOW), 2), (CAPPED, 2)],
    "gpt_oss": [(replace(SINKS, sliding_window=WINDOW), 2), (SINKS, 2)],
    "gemma3": [(SLIDING, 5), (USUAL, 1)],
    "gemma3 vision": [(SLIDING, 5), (USUAL, 1)],
    "phi3": [(SLIDING, 4)],
    "cohere2": [(SLIDING, 3), (USUAL, 1)],
    "llama4": [(replace(USUAL, chunk=CHUNK), 3), (USUAL, 1)],
    "gpt2": [(EVERY_HEAD, 4)],
    "opt": [(EVERY_HEAD, 4)],
    "gpt_neox": [(EVERY_HEAD, 4)],
    "gptj": [(EVERY_HEAD, 4)],
    "codegen": [(EVERY_HEAD, 4)],
    "gpt_bigcode": [(replace(USUAL, kv_heads=1), 4)],
    "starcoder2": [(SLIDING, 4)],
    "olmo3": [(SLIDING, 3), (USUAL, 1)],
    "gemma3n": [(SLIDING, 4), (USUAL, 2)],
    "gemma4": [(SLIDING, 4), (replace(USUAL, kv_heads=1, head_dim=16), 2)],
    "looped": [(USUAL, 6)],  # two modules, three times each
    "mixed heads": [(USUAL, 2), (EVERY_HEAD, 1), (replace(USUAL, kv_heads=1), 1)],
}


@torch.no_grad()
def generate(model: Any, prompt_ids: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """``model.generate`` on one prompt alone: greedy tokens, and the logits ``[tokens, vocab]`` of each."""
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt_ids) :].tolist(), torch.cat(output.logits).float()


class Recorder:
    """Records the logits of each request and how the engine's forwards were packed."""

    def __init__(self, engine: Engine) -> None:
        self.logits: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.chunked = self.packed = 0
        self._run = engine._runner.run
        engine._runner.run = self  # type: ignore[method-assign, assignment]

    def __call__(self, step: Any) -> torch.Tensor:
        logits = self._run(step)
        for row, span in enumerate(span for span in step.spans if span.samples):
            self.logits[span.sequence.request.request_id].append(logits[row].float().clone())
        self.chunked += sum(span.length > 1 and span.start > 0 for span in step.spans)
        self.packed += len({min(span.length, 2) for span in step.spans}) == 2
        return logits


def largest_logit_difference(model: Any) -> tuple[float, Engine]:
    """Serve prompts of mixed lengths twice; the second time they hit the prefix index. The greedy tokens must
    be ``model.generate``'s."""
    engine = new_engine(model, rollouts_in_flight=3, max_tokens_per_step=15, max_length=48)
    recorder = Recorder(engine)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    served: dict[str, Any] = {}
    for again in ("first", "again"):
        reused = engine.scheduler.prompt_tokens_reused
        for index, ids in enumerate(prompts):
            engine.add(request(f"{again}-{index}", ids, GREEDY))
        served |= drive(engine)
    assert recorder.chunked and recorder.packed
    assert engine.scheduler.prompt_tokens_reused - reused >= 36  # the longest prompt's full blocks at least
    largest = 0.0
    for index, ids in enumerate(prompts):
        tokens, logits = generate(model, ids, GREEDY.max_new_tokens)
        assert 0.5 < logits.std() < 2.0
        for again in ("first", "again"):
            assert generated(served[f"{again}-{index}"]) == tokens, (again, len(ids))
            rows = torch.stack(recorder.logits[f"{again}-{index}"])
            largest = max(largest, (rows - logits).abs().max().item())
    return largest, engine


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_generates(family: str, record_property: Any) -> None:
    largest, engine = largest_logit_difference(FAMILIES[family]())
    record_property("largest_logit_difference", largest)
    print(f"{family}: largest |paged - generate| logit difference {largest:.2g}")
    assert largest <= CLOSE
    found = [(replace(group.spec, scale=USUAL.scale), len(group.layers)) for group in engine.groups]
    assert found == GROUPS.get(family, [(USUAL, 4)])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_manager_starts_after_a_probe_of_a_shrunken_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[family](seed=1)
    probed: list[Any] = []
    monkeypatch.setattr(probe, "shrunken_model", lambda m: probed.append(shrunken_model(m)) or probed[-1])
    ids = prompt(21)
    with RolloutManager(model, **SIZES) as manager:
        output = manager.submit(ids, GREEDY).result(30)
    assert output.token_ids == generate(model, ids, GREEDY.max_new_tokens)[0]
    assert [type(small) for small in probed] == [type(model)]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama tied", *OURS)])
def test_a_model_of_published_size_is_probed_at_a_small_one(family: str) -> None:
    """With the sizes, windows and layer pattern that the class has by default, as a checkpoint would."""
    model = FAMILIES[family]()
    model.config = type(model.config)()
    if family == "qwen2 vision":  # every checkpoint has them, the class has no default
        model.config.text_config.rope_parameters["mrope_section"] = [16, 24, 24]
    small = shrunken_model(model)
    assert small is not None and type(small) is type(model)
    assert sum(parameter.numel() for parameter in small.parameters()) < 600_000
    view = GenerationView(small)
    assert largest_difference(view) < TOLERANCE / 5
    kinds = len(GROUPS.get(family, [USUAL]))
    assert len(new_engine(small).groups) == kinds
    assert view.config.get_text_config().num_hidden_layers <= 4 * kinds


@pytest.mark.parametrize("family", REFUSED)
def test_refused_families_say_why(family: str) -> None:
    build, words = REFUSED[family]
    with pytest.raises(UnsupportedModelError) as raised:
        RolloutManager(build(), **SIZES).start()
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_a_lora_adapter_is_served() -> None:
    peft = pytest.importorskip("peft")
    base = llama(num_hidden_layers=2)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    largest, _ = largest_logit_difference(adapted.eval())
    assert largest <= CLOSE
    ids = prompt(9)
    with_adapter = generate(adapted, ids, 6)[0]
    with adapted.disable_adapter():
        assert generate(adapted, ids, 6)[0] != with_adapter  # else nothing was tested
    with RolloutManager(adapted, **SIZES) as manager:
        assert manager.submit(ids, GREEDY).result(30).token_ids == with_adapter


# -- Llama 4 scales some queries by the row of a token, not by its position --------------------------------

LLAMA4_SIZES: dict[str, Any] = {**SIZES, "max_tokens_per_step": 16}


@pytest.mark.parametrize("floor_scale", [4, 48])
def test_llama4_is_refused_where_its_rows_would_be_wrong(floor_scale: int) -> None:
    model = FAMILIES["llama4"](floor_scale=floor_scale)
    with pytest.raises(UnsupportedModelError, match=f"Llama4ForCausalLM.*floor_scale={floor_scale}.*rows"):
        RolloutManager(model, **LLAMA4_SIZES).start()
    far = FAMILIES["llama4"](floor_scale=1000)
    with pytest.raises(UnsupportedModelError, match="floor_scale=1000"):  # a forward of many rows is enough
        RolloutManager(far, **{**SIZES, "max_tokens_per_step": 1000}).start()


def test_llama4_with_rows_for_positions_would_be_wrong() -> None:
    """What the refusal is for; and the probe does not stumble over it, whatever the model's own limit is."""
    model = FAMILIES["llama4"](floor_scale=4)
    assert largest_difference(GenerationView(model)) > 20 * TOLERANCE
    small = shrunken_model(model)
    assert small is not None and largest_difference(GenerationView(small)) < TOLERANCE / 5


@pytest.mark.parametrize(
    "changes",
    [
        {"floor_scale": 49},
        {"floor_scale": 4, "attn_temperature_tuning": False},
        {"floor_scale": 4, "no_rope_layers": [1, 1, 1, 1]},
    ],
    ids=["never reached", "switched off", "no layer scales"],
)
def test_llama4_is_served_right_where_nothing_is_scaled(changes: dict[str, Any]) -> None:
    model = FAMILIES["llama4"](**changes)
    with RolloutManager(model, **LLAMA4_SIZES) as manager:
        prompts = [prompt(length) for length in (37, 5, 42)]
        outputs = [handle.result(30) for handle in [manager.submit(ids, GREEDY) for ids in prompts]]
    for ids, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == generate(model, ids, GREEDY.max_new_tokens)[0]
