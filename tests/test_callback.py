"""The rollout callback on an ordinary ``Trainer``: there while it trains, and no trace of it afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt, smaller
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from rlt_train import EngineStoppedError, RolloutManager, SamplingParams
from rlt_train.callback import RolloutCallback, RolloutSession
from rlt_train.handle import RolloutHandle
from rlt_train.weights.fingerprint import fingerprint

SIZES: dict[str, Any] = {"rollouts_in_flight": 4, "max_length": 64, "engine_threads": 1}
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
WAIT = 20.0
STOPS_WITHIN = 2.0


class Injected(Exception):
    """The fault of these tests."""


def rows(count: int = 16) -> list[dict[str, Any]]:
    """Sequences to imitate, random and of one length."""
    return [{"input_ids": prompt(12, seed=i), "labels": prompt(12, seed=i)} for i in range(count)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_strategy": "no",
    }
    return TrainingArguments(**(values | changes))


def rollout_callback(**changes: Any) -> RolloutCallback:
    return RolloutCallback(training_threads=1, **(SIZES | changes))


class Feeder(TrainerCallback):
    """Keeps the engine busy: submits a few requests before every step, and reads a result after it."""

    def __init__(self, rollouts: RolloutCallback) -> None:
        self.rollouts = rollouts
        self.handles: list[RolloutHandle] = []
        self.versions: list[int] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        manager = self.rollouts.manager
        assert manager is not None
        self.handles += [manager.submit(prompt(6, seed=len(self.handles)), PARAMS) for _ in range(2)]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.rollouts.manager is not None
        self.versions.append(self.rollouts.manager.policy_version)
        self.handles[-1].result(WAIT)


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name in ("rlt-rollouts", "rlt-training-watch")]


def wait_until_gone(limit: float = STOPS_WITHIN) -> None:
    deadline = time.monotonic() + limit
    while engine_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine_threads(), f"still alive {limit} s after the end of training: {engine_threads()}"


def assert_no_fence(optimizer: Any, model: nn.Module) -> None:
    inner = getattr(optimizer, "optimizer", optimizer)
    assert not inner._optimizer_step_pre_hooks and not inner._optimizer_step_post_hooks
    for layer in {optimizer, inner}:
        step: Any = layer.step
        while step is not None:
            assert not getattr(step, "__code__", rows.__code__).co_filename.endswith("fence.py")
            step = getattr(step, "__wrapped__", None)
    assert not model._load_state_dict_pre_hooks and not model._load_state_dict_post_hooks


def test_the_manager_is_usable_while_training_and_gone_afterwards(tmp_path: Path) -> None:
    rollouts = rollout_callback()
    feeder = Feeder(rollouts)
    trainer = Trainer(smaller(), arguments(tmp_path), train_dataset=rows(), callbacks=[rollouts, feeder])
    assert rollouts.manager is None
    trainer.train()
    manager = rollouts.manager
    assert manager is not None and not manager.running
    assert feeder.versions == [1, 2, 3, 4]
    outputs = [handle.result(WAIT) for handle in feeder.handles]
    finished = [output for output in outputs if output.finish_reason == "length"]
    assert len(finished) >= 4
    assert {version for output in outputs for version in output.policy_versions} > {0, 1}
    assert manager.stats()["overlapping_forwards"] > 0
    with pytest.raises(EngineStoppedError):
        manager.submit(prompt(5), PARAMS)
    wait_until_gone()
    assert_no_fence(trainer.optimizer, trainer.model)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_training_leaves_the_same_weights_with_and_without_the_callback(tmp_path: Path, optim: str) -> None:
    prints = []
    for callbacks in ([], [rollouts := rollout_callback(), Feeder(rollouts)]):
        model = smaller(attention="eager", attention_dropout=0.2)
        before = fingerprint(model)
        trainer = Trainer(model, arguments(tmp_path, optim=optim), train_dataset=rows(), callbacks=callbacks)
        trainer.train()
        assert fingerprint(model) != before
        prints.append(fingerprint(model))
    assert rollouts.manager is not None and rollouts.manager.stats()["tokens_generated"] > 40
    assert prints[0] == prints[1]


class FailingData(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = rows()
        self.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if self.reads > 5:
            raise Injected("in the data")
        return self.rows[index]


class FailingCallback(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise Injected("in another callback")


class FailingOptimizer(torch.optim.SGD):
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise Injected("in the optimizer")
        return super().step(closure)


def failing_forward(model: nn.Module) -> None:
    calls = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Injected("in the forward")

    model.model.register_forward_pre_hook(count)


@pytest.mark.parametrize("where", ["forward", "data", "callback", "optimizer"])
def test_everything_comes_down_when_training_fails(tmp_path: Path, where: str) -> None:
    model = smaller()
    rollouts = rollout_callback()
    callbacks: list[TrainerCallback] = [rollouts, Feeder(rollouts)]
    optimizer: Any = FailingOptimizer(model.parameters(), lr=1e-3) if where == "optimizer" else None
    if where == "forward":
        failing_forward(model)
    if where == "callback":
        callbacks.append(FailingCallback())
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=FailingData() if where == "data" else rows(),
        callbacks=callbacks,
        optimizers=(optimizer, None),
    )
    with pytest.raises(Injected):
        trainer.train()
    wait_until_gone()
    assert rollouts.manager is not None and not rollouts.manager.running
    assert_no_fence(trainer.optimizer, model)
    with pytest.raises(EngineStoppedError):
        rollouts.manager.submit(prompt(5), PARAMS)


def test_training_again_before_the_failed_run_has_been_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch of the failed run looks twice a second; it must not end the next run."""
    noticed: list[Callable[[], None]] = []
    monkeypatch.setattr("rlt_train.callback._watch_frame", lambda frame, gone: noticed.append(gone))
    rollouts = rollout_callback()
    fault = FailingCallback()

    class NoticeLate(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            noticed[0]()
            assert rollouts.manager is not None
            rollouts.manager.submit(prompt(5), PARAMS).result(WAIT)

    trainer = Trainer(smaller(), arguments(tmp_path), train_dataset=rows(), callbacks=[rollouts, fault])
    with pytest.raises(Injected):
        trainer.train()
    trainer.remove_callback(fault)
    trainer.add_callback(NoticeLate())
    trainer.train()
    assert trainer.state.global_step == 4 and len(noticed) == 2
    wait_until_gone()
    assert_no_fence(trainer.optimizer, trainer.model)


def test_two_runs_of_one_trainer(tmp_path: Path) -> None:
    rollouts = rollout_callback()
    feeder = Feeder(rollouts)
    trainer = Trainer(smaller(), arguments(tmp_path), train_dataset=rows(), callbacks=[rollouts, feeder])
    for run in (1, 2):
        trainer.train()
        assert rollouts.manager is not None and not rollouts.manager.running
        assert len(feeder.versions) == 4 * run
    assert feeder.versions == sorted(feeder.versions) and feeder.versions[-1] >= 8
    wait_until_gone()
    assert_no_fence(trainer.optimizer, trainer.model)


def test_the_best_model_is_loaded_inside_the_fence(tmp_path: Path) -> None:
    rollouts = rollout_callback()
    trainer = Trainer(
        smaller(),
        arguments(
            tmp_path,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # the first step is then the best, not the last
            max_steps=2,
            learning_rate=1.0,
        ),
        train_dataset=rows(),
        eval_dataset=rows(2),
        callbacks=[rollouts, Feeder(rollouts)],
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert rollouts.manager is not None and rollouts.manager.policy_version == 3  # 2 steps and the load
    assert not rollouts.manager.running
    wait_until_gone()


def test_a_given_manager_is_used(tmp_path: Path) -> None:
    model = smaller()
    manager = RolloutManager(model, **SIZES)
    rollouts = RolloutCallback(manager, training_threads=1)
    feeder = Feeder(rollouts)
    Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[rollouts, feeder]).train()
    assert rollouts.manager is manager and not manager.running
    assert feeder.versions == [1, 2, 3, 4]


def test_options_beside_a_manager_are_refused() -> None:
    manager = RolloutManager(smaller(), **SIZES)
    with pytest.raises(ValueError, match=r"\['max_length'\] have no effect beside a manager"):
        RolloutCallback(manager, max_length=32)


def test_the_number_of_training_threads_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = smaller()
    manager = RolloutManager(model, **SIZES)
    monkeypatch.setattr(manager, "start", lambda: None)  # nothing is computed with several threads here
    session = RolloutSession(manager, training_threads=2)
    torch.set_num_threads(3)
    try:
        session.open(torch.optim.SGD(model.parameters(), lr=1e-3), arguments(tmp_path))
        assert torch.get_num_threads() == 2
        session.close()
        assert torch.get_num_threads() == 3
    finally:
        session.close()
        torch.set_num_threads(1)
