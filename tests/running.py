"""Helpers of the manager tests: a manager that is kept busy, and ways to see whether its engine runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny import prompt

from rlt_train import RolloutManager, SamplingParams

SIZES: dict[str, Any] = {"rollouts_in_flight": 8, "max_length": 64, "block_size": 4, "engine_threads": 1}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3)
LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=3900, ignore_eos=True)
ENOUGH_FOR_ENDLESS = {"max_length": 4000, "rollouts_in_flight": 2}
WAIT = 30.0


@contextlib.contextmanager
def busy(model: Any, **changes: Any) -> Iterator[RolloutManager]:
    """A manager whose engine generates for as long as the block lasts."""
    with RolloutManager(model, **{**SIZES, **ENOUGH_FOR_ENDLESS, **changes}) as started:
        started.submit(prompt(5), ENDLESS, request_id="endless")
        until(lambda: started.stats()["tokens_generated"] > 2)
        yield started


def until(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not predicate():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def advances(manager: RolloutManager) -> bool:
    """Does the engine make tokens now? Looks for a while when it does not."""
    before = manager.stats()["tokens_generated"]
    deadline = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        if manager.stats()["tokens_generated"] > before + 1:
            return True
        time.sleep(0.002)
    return False


def goes_on(manager: RolloutManager) -> bool:
    before = manager.stats()["tokens_generated"]
    until(lambda: manager.stats()["tokens_generated"] > before + 1)
    return True


def shift(model: Any, amount: float = 0.5) -> None:
    """Change the policy much."""
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(amount)
        model.lm_head.weight.mul_(-1)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run ``function`` on a thread; what it returned or raised ends up in the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
