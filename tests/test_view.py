"""The generation view leaks nothing into training and takes nothing from it but the weights."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny import gemma2, largest_error, new_engine, ordinary_logprobs, prompt, qwen3, smaller
from torch import nn

from rlt_train import RolloutManager, SamplingParams, SharedWeightsError, UnsupportedModelError
from rlt_train.weights.view import GenerationView

SIZES: dict[str, Any] = {"rollouts_in_flight": 4, "max_length": 64, "engine_threads": 1}
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3)
ENDLESS = SamplingParams(max_new_tokens=3900, ignore_eos=True)


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits


def lora(model: Any) -> Any:
    """The model under a LoRA adapter that changes it much."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3)
    return peft_model.eval()


# -- what is shared and what is not ----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_persistent_buffers_are_the_same_objects(tied: bool) -> None:
    model = qwen3(tie_word_embeddings=tied)
    model.model.layers[0].register_buffer("kept", torch.ones(2))
    view = GenerationView(model)
    theirs, ours = dict(model.named_parameters()), dict(view.module.named_parameters())
    assert list(theirs) == list(ours) and all(theirs[name] is ours[name] for name in theirs)
    assert view.module.model.layers[0].kept is model.model.layers[0].kept
    embeddings_shared = view.module.lm_head.weight is view.module.model.embed_tokens.weight
    assert embeddings_shared is tied
    assert not set(model.modules()) & set(view.module.modules())


def test_nonpersistent_buffers_are_the_views_own() -> None:
    model = smaller()
    view = GenerationView(model)
    ours, theirs = view.module.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq
    assert ours is not theirs and torch.equal(ours, theirs)
    before = theirs.clone()
    ours.zero_()
    assert torch.equal(theirs, before)


def test_configs_are_separate_in_both_directions() -> None:
    model = smaller()
    view = GenerationView(model)
    attention, own = model.model.layers[0].self_attn, view.module.model.layers[0].self_attn
    view.config.is_causal = False
    view.config._attn_implementation = "eager"
    assert not hasattr(attention.config, "is_causal") and model.config._attn_implementation == "sdpa"
    model.config.use_cache = not own.config.use_cache
    assert own.config.use_cache is not model.config.use_cache
    assert own.config is view.config and view.module.generation_config is not model.generation_config


def test_starting_and_generating_leaves_the_training_config_as_it_was() -> None:
    model = smaller()
    before, implementation = model.config.to_dict(), model.config._attn_implementation
    with RolloutManager(model, **SIZES) as manager:
        handle = manager.submit(prompt(5), SAMPLED)
        while not handle.done:
            assert not hasattr(model.config, "is_causal")
        handle.result(30)
    assert model.config.to_dict() == before and model.config._attn_implementation == implementation


def test_train_and_eval_mode_are_separate() -> None:
    model = smaller().train()
    view = GenerationView(model)
    assert not any(module.training for module in view.module.modules())
    assert all(module.training for module in model.modules())
    model.eval()
    view.module.train()
    assert not any(module.training for module in model.modules())


def test_training_hooks_do_not_fire_on_the_view() -> None:
    model = smaller()
    calls: list[str] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("post"))
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("kwargs"), with_kwargs=True)
    view = GenerationView(model)
    model.lm_head.register_forward_hook(lambda *_: calls.append("later"))
    logits_of(view.module, prompt(4))
    assert calls == []
    logits_of(model, prompt(4))
    assert sorted(calls) == ["kwargs", "later", "post", "pre"]


def test_an_instance_level_forward_patch_is_dropped() -> None:
    model = smaller()
    plain = logits_of(model, prompt(6))

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = type(self).forward(self, *args, **kwargs)
        output.logits = output.logits * 0
        return output

    model.forward = types.MethodType(patched, model)
    layer = model.model.layers[0].mlp
    layer.forward = types.MethodType(lambda self, hidden: hidden * 0, layer)
    assert logits_of(model, prompt(6)).abs().max() == 0
    assert torch.equal(logits_of(GenerationView(model).module, prompt(6)), plain)


def test_attributes_that_point_into_the_tree_point_into_the_view() -> None:
    model = smaller()
    model.model.first_layers = [model.model.layers[0]]
    model.model.bound = model.model.layers[0].extra_repr
    view = GenerationView(model)
    assert view.module.model.first_layers[0] is view.module.model.layers[0]
    assert view.module.model.bound.__self__ is view.module.model.layers[0]


# -- PEFT ------------------------------------------------------------------------------------------------


def test_the_view_keeps_its_adapter_while_training_disables_its_own() -> None:
    base = smaller()
    plain = logits_of(base, prompt(9))
    model = lora(base)
    view = GenerationView(model)
    adapted = logits_of(model, prompt(9))
    assert (adapted - plain).abs().max() > 0.1
    assert torch.equal(logits_of(view.module, prompt(9)), adapted)
    with model.disable_adapter():
        assert torch.equal(logits_of(model, prompt(9)), plain)
        assert torch.equal(logits_of(view.module, prompt(9)), adapted)
    with view.module.disable_adapter():
        assert torch.equal(logits_of(model, prompt(9)), adapted)


def test_rollouts_of_a_lora_model_are_the_lora_models() -> None:
    model = lora(smaller())
    with RolloutManager(model, **SIZES) as manager, model.disable_adapter():
        output = manager.submit(prompt(9), SAMPLED).result(30)
    assert largest_error(model, output) < 1e-4
    with model.disable_adapter():
        assert largest_error(model, output) > 1e-2


def test_prompt_learning_is_refused_by_name() -> None:
    from peft import PromptTuningConfig

    model = get_peft_model(smaller(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match="'default' is prompt learning.*LoRA"):
        GenerationView(model)


# -- global random stream and dropout --------------------------------------------------------------------


def test_the_global_random_stream_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    model = smaller()
    torch.manual_seed(11)
    before = torch.get_rng_state()

    def untouched() -> bool:
        return torch.equal(torch.get_rng_state(), before)

    seeded.clear()
    manager = RolloutManager(model, **SIZES)
    assert untouched()
    manager.start()
    assert untouched()
    for params in (SAMPLED, SamplingParams(max_new_tokens=5, top_k=5, top_p=0.9, min_p=0.01)):
        manager.submit(prompt(5), params).result(30)
        for handle in manager.submit_group(prompt(6), 3, params):
            handle.result(30)
    with manager.weight_update():
        pass
    assert untouched()
    manager.stop()
    assert untouched() and seeded == []


def train_two_steps(model: Any, manager: RolloutManager | None) -> list[torch.Tensor]:
    """Gradients of two backward passes with dropout, drawing from the global stream; rollouts run beside."""
    torch.manual_seed(7)
    ids = torch.tensor([prompt(24, 5)])
    gradients = []
    for _ in range(2):
        if manager is not None:
            manager.submit_group(prompt(5), 4, SamplingParams(max_new_tokens=40, ignore_eos=True))
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    return gradients


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_is_trainings_alone(attention: str) -> None:
    model = smaller(attention=attention, attention_dropout=0.5).train()
    alone = train_two_steps(model, None)
    with RolloutManager(model, **SIZES) as manager:
        beside = train_two_steps(model, manager)
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
        first, second = (manager.submit(prompt(9), SAMPLED).result(30) for _ in range(2))
    assert first.token_ids == second.token_ids and first.logprobs == second.logprobs
    assert model.training
    assert largest_error(model, first) > 1e-3, "dropout does nothing here, so the test could not fail"
    assert largest_error(model.eval(), first) < 1e-4


# -- verify_shared ---------------------------------------------------------------------------------------


def test_verify_shared_accepts_what_is_in_place() -> None:
    model = smaller()
    view = GenerationView(model)
    view.verify_shared()
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.load_state_dict(model.state_dict())
    view.verify_shared()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (
            lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.detach().clone())),
            "lm_head.weight",
        ),
        (
            lambda m: m.model.layers[1].mlp.up_proj.register_parameter("bias", nn.Parameter(torch.zeros(64))),
            "model.layers.1.mlp.up_proj.bias",
        ),
        (lambda m: delattr(m.model.norm, "weight"), "model.norm.weight"),
        (lambda m: m.model.layers[0].register_buffer("extra", torch.ones(1)), "model.layers.0.extra"),
        (
            lambda m: m.model.layers[0].mlp.add_module("adapter", nn.Linear(2, 2)),
            "model.layers.0.mlp.adapter",
        ),
        (lambda m: setattr(m.model.layers[1], "mlp", nn.Identity()), "model.layers.1.mlp"),
        (lambda m: delattr(m.model.layers[1], "mlp"), "model.layers.1.mlp"),
    ],
)
def test_verify_shared_names_what_was_replaced_added_or_removed(change: Any, name: str) -> None:
    model = smaller()
    view = GenerationView(model)
    change(model)
    with pytest.raises(SharedWeightsError) as raised:
        view.verify_shared()
    assert name in str(raised.value)


def test_verify_shared_notices_a_merged_and_unloaded_adapter() -> None:
    model = lora(smaller())
    view = GenerationView(model)
    model.merge_and_unload()
    with pytest.raises(SharedWeightsError, match="q_proj.*Merge or unload adapters first"):
        view.verify_shared()


# -- wrappers --------------------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_is_seen_through(process_group: None) -> None:
    model = smaller()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with RolloutManager(wrapped, **SIZES) as manager:
        assert manager.view.training_model is model
        output = manager.submit(prompt(9), SAMPLED).result(30)
        ids = torch.tensor([prompt(9)])
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert largest_error(model, output) < 1e-4
    assert model.lm_head.weight.grad is not None


def test_torch_compile_is_seen_through_without_compiling() -> None:
    compiled_graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    model = smaller()
    wrapped = torch.compile(model, backend=backend)
    model.model.layers[0].mlp.compile(backend=backend)
    with RolloutManager(wrapped, **SIZES) as manager:
        assert manager.view.training_model is model
        assert largest_error(smaller(), manager.submit(prompt(9), SAMPLED).result(30)) < 1e-4
    assert compiled_graphs == []


def test_training_under_torch_compile_runs_beside_generation() -> None:
    model = smaller()
    ids = torch.tensor([prompt(12)])
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = model.lm_head.weight.grad.clone()
    for layer in model.model.layers:
        layer.compile(backend="eager")  # on the training thread, at its first forward below
    with RolloutManager(model, rollouts_in_flight=4, max_length=4000, engine_threads=1) as manager:
        handles = manager.submit_group(prompt(5), 2, ENDLESS)
        for _ in range(3):
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.testing.assert_close(model.lm_head.weight.grad, expected, atol=1e-5, rtol=1e-4)
        assert not all(handle.done for handle in handles), "nothing ran beside the compile"
        for handle in handles:
            handle.cancel()
        output = manager.submit(prompt(9), SAMPLED).result(30)
    assert largest_error(model, output) < 1e-4
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_sharded_wrappers_are_refused_by_name(name: str) -> None:
    wrapper = type(name, (nn.Module,), {})()
    wrapper.module = smaller()
    with pytest.raises(UnsupportedModelError, match=f"{name} is not supported yet.*plain data parallel"):
        GenerationView(wrapper)


def test_device_map_hooks_and_headless_models_are_refused() -> None:
    hooked = smaller()
    hooked.model.layers[1]._hf_hook = object()
    with pytest.raises(UnsupportedModelError, match="device_map.*model.layers.1"):
        GenerationView(hooked)
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no language-model head"):
        GenerationView(smaller().model)
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        GenerationView(nn.Linear(2, 2))


# -- forwards on the view --------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [smaller, qwen3])
def test_an_ordinary_call_on_the_view_is_the_training_models_padding_included(
    build: Any, attention: str
) -> None:
    model = build(attention=attention)
    engine = new_engine(model)
    ids = torch.tensor([prompt(12), prompt(12, 1)])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, 9:] = 0
    for given in (mask, None):
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=given, use_cache=False).logits
            result = engine.view.model(input_ids=ids, attention_mask=given, use_cache=False).logits
        assert torch.equal(result, expected)


def test_an_ordinary_call_keeps_soft_cap_and_window() -> None:
    model = gemma2()
    engine = new_engine(model)
    ids = torch.tensor([prompt(40)])
    with torch.no_grad():
        assert torch.equal(engine.view.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_autocast_sees_a_weight_update_at_once() -> None:
    model = smaller()
    view = GenerationView(model, autocast_dtype=torch.bfloat16)
    # The trainer may sit in an autocast block of its own, whose cache keeps cast weights.
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        with view.autocast():
            before = view.model(input_ids=torch.tensor([prompt(4)]), use_cache=False).logits
        model.model.layers[0].mlp.up_proj.weight.mul_(-3)
        with view.autocast():
            after = view.model(input_ids=torch.tensor([prompt(4)]), use_cache=False).logits
    assert before.dtype == torch.bfloat16
    assert (after - before).abs().max() > 0.05


def test_rollouts_under_autocast_follow_the_updated_weights() -> None:
    model = smaller()
    manager = RolloutManager(model, autocast_dtype=torch.bfloat16, **SIZES)
    with manager:
        first = manager.submit(prompt(4), SAMPLED).result(60)
        with manager.weight_update(), torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(-3)
        second = manager.submit(prompt(4), SAMPLED).result(60)
    for output, close in ((second, 0.2), (first, None)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = ordinary_logprobs(model, output.prompt_ids, output.token_ids)
        error = (expected - torch.tensor(output.logprobs)).abs().max().item()
        assert error < close if close is not None else error > 0.3
