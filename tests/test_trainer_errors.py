"""What ``GRPOTrainer`` refuses before anything starts, and how failures of a run reach ``train()``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from grpo_runs import arithmetic_trainer, config
from transformers import T5Config, T5ForConditionalGeneration, TrainerCallback

from rlt_train import EngineDeadError, RequestError, UnsupportedModelError
from rlt_train.embedded import exact_match_reward, load_policy, load_tokenizer
from rlt_train.grpo import GRPOTrainer


def assert_nothing_runs() -> None:
    deadline = time.monotonic() + 2
    while any(t.name.startswith("rlt-") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rlt-")]


# -- refused before anything starts --------------------------------------------------------------------------

BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": (
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "num_generations": 4},
        r"6 \* 3 = 18 completions, which is not a multiple of num_generations=4.*\[2, 3, 6, 9, 18\]",
    ),
    "one generation": ({"num_generations": 1}, "num_generations=1 must be at least 2"),
    "temperature": ({"temperature": 0.0}, r"temperature=0\.0 must be above 0"),
    "loss type": ({"loss_type": "ppo"}, "loss_type='ppo' is not valid; choose from 'grpo', 'bnpo'"),
    "level": ({"importance_sampling_level": "word"}, "importance_sampling_level='word' is not valid"),
    "scale": ({"scale_rewards": "all"}, "scale_rewards='all' is not valid; choose from 'group', 'batch'"),
    "backend": ({"attention_backend": "flash"}, "attention_backend='flash' is not valid; choose from 'auto'"),
    "in flight": ({"in_flight": "drop"}, "in_flight='drop' is not valid; choose from 'keep', 'recompute'"),
    "abort": ({"in_flight": "abort"}, "in_flight='abort' is not valid"),
    "staleness": ({"max_staleness": -1}, "max_staleness=-1 must be at least 0"),
    "length": ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1"),
    "slots": ({"rollouts_in_flight": 0}, "rollouts_in_flight=0 must be at least 1"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_out_of_range(tmp_path: Path, name: str) -> None:
    options, message = BAD_OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


BAD_DATA: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no prompt": (
        lambda: Dataset.from_list([{"question": "1+1=", "answer": "2"}]),
        ValueError,
        r"train_dataset has no column 'prompt'; its columns are \['answer', 'question'\]",
    ),
    "no rows": (lambda: Dataset.from_dict({"prompt": []}), ValueError, "train_dataset is empty"),
    "empty text": (
        lambda: Dataset.from_list([{"prompt": "1+1="}, {"prompt": ""}]),
        ValueError,
        "train_dataset row 1: the prompt is empty",
    ),
    "no messages": (
        lambda: [{"prompt": []}],
        ValueError,
        "train_dataset row 0: the prompt is an empty list of messages",
    ),
    "a number": (lambda: Dataset.from_list([{"prompt": 7}]), TypeError, "row 0: a prompt is text or a list"),
    "streaming": (
        lambda: IterableDataset.from_generator(lambda: iter([{"prompt": "1+1="}])),
        TypeError,
        r"train_dataset is a streaming dataset.*take\(n\)",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_datasets_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    data, kind, message = BAD_DATA[name]
    with pytest.raises(kind, match=message):
        arithmetic_trainer(tmp_path, dataset=data())


def test_a_prompt_over_the_limit_is_named(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "1+1="}, {"prompt": "11+111="}])
    with pytest.raises(ValueError, match="row 1: the prompt has 8 tokens, more than max_prompt_length=6"):
        arithmetic_trainer(tmp_path, dataset=rows, max_prompt_length=6)


def test_a_bad_evaluation_dataset_is_named(tmp_path: Path) -> None:
    extra = {"eval_dataset": {"good": Dataset.from_list([{"prompt": "1"}]), "bad": Dataset.from_list([])}}
    with pytest.raises(ValueError, match="eval_dataset bad is empty"):
        arithmetic_trainer(tmp_path, extra=extra)
    with pytest.raises(ValueError, match="evaluate.* needs an eval_dataset"):
        arithmetic_trainer(tmp_path).evaluate()
    assert_nothing_runs()


def test_a_tokenizer_without_a_pad_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no pad token.*tokenizer.pad_token = tokenizer.eos_token"):
        arithmetic_trainer(tmp_path, tokenizer=tokenizer)


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    sizes = {"vocab_size": 17, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        arithmetic_trainer(tmp_path, model=T5ForConditionalGeneration(T5Config(**sizes)))
    quantised = load_policy()
    quantised.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM is quantised in place"):
        arithmetic_trainer(tmp_path, model=quantised)
    assert_nothing_runs()


def test_arguments_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward_weights has 2 entries for 1 reward functions"):
        arithmetic_trainer(tmp_path, reward_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        arithmetic_trainer(tmp_path, reward=[])
    with pytest.raises(TypeError, match="reward models are not supported yet"):
        arithmetic_trainer(tmp_path, reward="some/reward-model")
    with pytest.raises(ValueError, match="model_init_kwargs has no effect"):
        arithmetic_trainer(tmp_path, model_init_kwargs={"dtype": "float32"})
    with pytest.raises(ValueError, match="max_tokens_per_step=4 cannot decode rollouts_in_flight=8"):
        arithmetic_trainer(tmp_path, max_tokens_per_step=4).train()
    assert_nothing_runs()


# -- failures of a run ---------------------------------------------------------------------------------------


def too_few(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def words(completions: list[str], **kwargs: Any) -> list[Any]:
    return ["good"] * len(completions)


def not_a_number(completions: list[str], **kwargs: Any) -> list[float]:
    return [float("nan")] * len(completions)


def raising(completions: list[str], **kwargs: Any) -> list[float]:
    raise KeyError("no such answer")


BAD_REWARDS: list[tuple[Any, type[Exception], str]] = [
    (
        too_few,
        ValueError,
        r"'too_few' returned 3 rewards; expected 4|'too_few' returned 7 rewards; expected 8",
    ),
    (words, TypeError, r"'words' returned 'good' \(str\) for completion 0"),
    (not_a_number, ValueError, r"'not_a_number' returned nan"),
    (lambda completions: [0.0], TypeError, r"'<lambda>'.*cannot be called with.*\*\*kwargs"),
    (raising, KeyError, "no such answer"),
]


@pytest.mark.parametrize("function, kind, message", BAD_REWARDS)
def test_a_bad_reward_function_is_named_by_train(
    tmp_path: Path, function: Any, kind: type[Exception], message: str
) -> None:
    trainer = arithmetic_trainer(tmp_path, reward=function)
    with pytest.raises(kind, match=message) as caught:
        trainer.train()
    if function is raising:
        assert "raised by the reward function 'raising'" in caught.value.__notes__
    assert_nothing_runs()
    assert not trainer.manager.running


class AtStep(TrainerCallback):
    """Does something once, after a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def test_nan_weights_reach_train_with_the_requests_message(tmp_path: Path) -> None:
    trainer = arithmetic_trainer(tmp_path, max_steps=6, max_staleness=0)

    def ruin() -> None:
        with trainer.manager.weight_update(), torch.no_grad():
            trainer.model.model.norm.weight.fill_(float("nan"))

    trainer.add_callback(AtStep(2, ruin))
    with pytest.raises(RequestError, match=r"request 'group-\d+-\d' got NaN or infinite logits at token \d"):
        trainer.train()
    assert 2 <= trainer.state.global_step <= 3
    assert_nothing_runs()


def test_a_dead_engine_reaches_train_with_its_cause(tmp_path: Path) -> None:
    trainer = arithmetic_trainer(tmp_path, max_steps=50)

    def fail(*_: Any) -> None:
        raise OSError("the memory is on fire")

    trainer.add_callback(AtStep(2, lambda: setattr(trainer.manager._engine._runner, "run", fail)))
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="died of OSError: the memory is on fire") as caught:
        trainer.train()
    assert time.monotonic() - started < 30
    assert isinstance(caught.value.__cause__, OSError)
    assert trainer.state.global_step < 6
    assert_nothing_runs()
    with pytest.raises(EngineDeadError):
        trainer.evaluate(Dataset.from_list([{"prompt": "1+1=", "answer": "2"}]))


def test_an_unfenced_write_reaches_train_and_names_the_weight(tmp_path: Path) -> None:
    trainer = arithmetic_trainer(tmp_path, max_steps=50)

    def write() -> None:
        with torch.no_grad():
            trainer.model.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(1.0)

    trainer.add_callback(AtStep(2, write))
    with pytest.raises(EngineDeadError, match=r"UnfencedWriteError: model\.layers\.0\.mlp\.up_proj\.weight"):
        trainer.train()
    assert_nothing_runs()


def test_an_interrupt_in_a_reward_function_leaves_no_thread(tmp_path: Path) -> None:
    calls = []

    def interrupted(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return exact_match_reward(completions, completions, answer)

    trainer = arithmetic_trainer(tmp_path, reward=interrupted, max_steps=10)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert_nothing_runs()
    inner = trainer.optimizer.optimizer
    assert not inner._optimizer_step_pre_hooks and not inner._optimizer_step_post_hooks


def test_a_prompt_that_does_not_fit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Only evaluation with a dataset that the trainer was not made for can meet this."""
    trainer = arithmetic_trainer(tmp_path)
    with pytest.raises(RequestError, match="needs .* tokens, but max_length is"):
        trainer.evaluate([{"prompt": "1+" * 20, "answer": "2"}])
    assert_nothing_runs()


def test_training_without_a_dataset(tmp_path: Path) -> None:
    trainer = GRPOTrainer(
        load_policy(), exact_match_reward, config(tmp_path), processing_class=load_tokenizer()
    )
    with pytest.raises(ValueError, match="needs a train_dataset"):
        trainer.train()
    assert_nothing_runs()
