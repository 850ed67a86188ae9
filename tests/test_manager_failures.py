"""What goes wrong: one bad request harms only itself, a dead engine says so everywhere, a process ends."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, generate_greedy, largest_error, prompt, smaller

from rlt_train import EngineDeadError, RequestError, RolloutManager, SamplingParams
from rlt_train.kv.blocks import BlockPool

SIZES: dict[str, Any] = {"rollouts_in_flight": 4, "max_length": 4000, "block_size": 4, "engine_threads": 1}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=3900, ignore_eos=True)
WAIT = 30.0
TESTS = Path(__file__).parent


class Injected(Exception):
    """The fault of these tests."""


def fail(*_: Any, **__: Any) -> Any:
    raise Injected("boom")


# -- a dead engine ---------------------------------------------------------------------------------------


def in_forward(manager: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(manager.view.model.model.layers[0]), "forward", fail)


def in_sampler(_: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlt_train.engine.engine.sample", fail)


def in_allocator(_: RolloutManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "allocate", fail)


def wait_in_threads(actions: dict[str, Callable[[], Any]]) -> tuple[list[threading.Thread], dict[str, Any]]:
    outcomes: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            outcomes[name] = actions[name]()
        except BaseException as error:
            outcomes[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in actions]
    for thread in threads:
        thread.start()
    return threads, outcomes


@pytest.mark.parametrize("fault", [in_forward, in_sampler, in_allocator])
def test_every_waiter_and_every_later_call_raises_from_the_cause(
    fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = RolloutManager(smaller(), **SIZES).start()
    hold = manager.pause(WAIT)
    handles = [manager.submit(prompt(5 + i), ENDLESS) for i in range(3)]
    threads, outcomes = wait_in_threads(
        {
            "result": handles[0].result,
            "stream": lambda: list(handles[1].stream()),
            "wait_for": lambda: manager.wait_for(lambda: False),
            "drain": lambda: manager.stop(drain=True),
        }
    )
    time.sleep(0.05)
    fault(manager, monkeypatch)
    hold.release()
    started = time.monotonic()
    for thread in threads:
        thread.join(WAIT)
    assert time.monotonic() - started < 2.0
    monkeypatch.undo()
    later: dict[str, Callable[[], Any]] = {
        "late result": handles[2].result,
        "late stream": lambda: next(handles[2].stream()),
        "submit": lambda: manager.submit(prompt(3)),
        "submit_group": lambda: manager.submit_group(prompt(3), 2),
        "late wait_for": lambda: manager.wait_for(lambda: False),
        "pause": manager.pause,
        "weight_update": lambda: manager.weight_update().__enter__(),
        "check_alive": manager.check_alive,
        "start": manager.start,
    }
    for name, action in later.items():
        with pytest.raises(EngineDeadError) as raised:
            action()
        outcomes[name] = raised.value
    for name, error in outcomes.items():
        assert isinstance(error, EngineDeadError), (name, error)
        assert isinstance(error.__cause__, Injected) and "Injected: boom" in str(error), name
    assert not manager.running
    manager.stop()
    with pytest.raises(EngineDeadError):
        manager.start()  # stopping does not bring it back to life
    with pytest.raises(EngineDeadError):
        handles[0].result()
    assert all(thread.name != "rlt-rollouts" for thread in threading.enumerate())


def test_a_pause_that_waits_for_the_boundary_learns_of_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = RolloutManager(smaller(), **SIZES).start()
    inside, proceed = threading.Event(), threading.Event()

    def slow_death(**_: Any) -> Any:
        inside.set()
        proceed.wait(WAIT)
        raise Injected("boom")

    assert manager._engine is not None
    monkeypatch.setattr(manager._engine, "step", slow_death)
    manager.submit(prompt(5), ENDLESS)
    inside.wait(WAIT)
    threads, outcomes = wait_in_threads({"pause": manager.pause, "update": manager.begin_update})
    time.sleep(0.05)
    proceed.set()
    for thread in threads:
        thread.join(WAIT)
    for name in ("pause", "update"):
        assert isinstance(outcomes[name], EngineDeadError), outcomes
        assert isinstance(outcomes[name].__cause__, Injected)
    manager.stop()


def test_a_finished_result_survives_the_engines_death(monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutManager(smaller(), **SIZES) as manager:
        done = manager.submit(prompt(5), GREEDY)
        expected = done.result(WAIT)
        in_sampler(manager, monkeypatch)
        with pytest.raises(EngineDeadError):
            manager.submit(prompt(5), GREEDY).result(WAIT)
        assert done.result(0) is expected and len(list(done.stream())) == 8


# -- one bad request -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([3, VOCAB], GREEDY, f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([3, -1], GREEDY, "token -1 is outside"),
        ([3, 1.0], GREEDY, "integer token ids"),
        ("hello", GREEDY, "integer token ids"),
        (torch.tensor([0.5]), GREEDY, "integer token ids"),
        (prompt(3993), GREEDY, "prompt of 3993 tokens with max_new_tokens=8 needs 4001.*max_length is 4000"),
        (prompt(3), SamplingParams(top_k=VOCAB + 1), f"top_k={VOCAB + 1}.*{VOCAB}"),
        (prompt(3), SamplingParams(temperature=math.nan), "temperature=nan"),
        (prompt(3), SamplingParams(temperature=-1.0), "temperature=-1.0"),
        (prompt(3), SamplingParams(max_new_tokens=0), "max_new_tokens=0"),
    ],
)
def test_a_bad_request_is_refused_at_submit_and_the_others_are_unharmed(
    ids: Any, params: SamplingParams, message: str
) -> None:
    model = smaller()
    with RolloutManager(model, **SIZES) as manager:
        good = manager.submit(prompt(9), GREEDY)
        for submit in (
            manager.submit,
            lambda *arguments: manager.submit_group(arguments[0], 2, arguments[1]),
        ):
            with pytest.raises(RequestError, match=message):
                submit(ids, params)
        assert manager.stats()["unfinished"] <= 1
        assert good.result(WAIT).token_ids == generate_greedy(model, prompt(9), 8)


def test_a_group_of_none_is_refused() -> None:
    with RolloutManager(smaller(), **SIZES) as manager, pytest.raises(RequestError, match="n=0"):
        manager.submit_group(prompt(3), 0)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_new_tokens=8, top_p=0.9), SamplingParams(8)])
def test_nan_logits_of_one_request_harm_only_it(params: SamplingParams) -> None:
    model = smaller()
    poison = 7
    clean = [[token for token in prompt(20, seed) if token != poison][: 9 + 4 * seed] for seed in range(2)]
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = math.nan
        model.lm_head.weight[poison] = 0.0  # never the likeliest token
    with RolloutManager(model, **SIZES) as manager:
        with manager.pause():  # so that they share their forwards
            bad = manager.submit([5, poison, 6], params, request_id="poisoned")
            good = [manager.submit(ids, GREEDY) for ids in clean]
            group = manager.submit_group([poison, 6], 2, params)
        for handle in (bad, *group):
            with pytest.raises(RequestError, match=f"{handle.request_id}.*NaN or infinite logits at token 0"):
                handle.result(WAIT)
            with pytest.raises(RequestError, match="other requests are unharmed"):
                list(handle.stream())
        for handle in good:
            output = handle.result(WAIT)
            assert output.token_ids == generate_greedy(model, output.prompt_ids, 8)
        # The blocks that held NaN keys serve others now.
        again = [manager.submit(ids[:length], GREEDY) for ids in clean for length in (9, 2, 5, 7, 8, 3)]
        assert all(handle.result(WAIT).finish_reason == "length" for handle in again)
        assert all(largest_error(model, handle.result()) < 1e-4 for handle in again)
        assert manager.stats()["kv_blocks_used"] == 0


def test_stale_nan_in_a_shared_cache_block_reaches_nobody() -> None:
    """A one-sequence cache: the next request must get the very blocks that the poisoned one left."""
    model = smaller()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.nan
        model.lm_head.weight[7] = 0.0
    ids = [token for token in prompt(20) if token != 7][:5]
    expected = generate_greedy(model, ids, 8)
    with RolloutManager(
        model, rollouts_in_flight=1, max_length=24, block_size=8, engine_threads=1
    ) as manager:
        with pytest.raises(RequestError):
            manager.submit([7] * 16, GREEDY).result(WAIT)
        for _ in range(3):
            assert manager.submit(ids, GREEDY).result(WAIT).token_ids == expected


def test_a_temperature_that_overflows_harms_only_its_request() -> None:
    with RolloutManager(smaller(), **SIZES) as manager:
        good, bad = (
            manager.submit(prompt(5), GREEDY),
            manager.submit(prompt(5), SamplingParams(temperature=1e-42)),
        )
        with pytest.raises(RequestError):
            bad.result(WAIT)
        assert len(good.result(WAIT).token_ids) == 8


# -- the process -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endings() -> dict[str, Any]:
    """How each scenario of ``exit_scenarios.py`` ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(
        [sys.executable, str(TESTS / "exit_scenarios.py")],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=True,
    )
    assert done.stderr == "", "importing the package printed something"
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("scenario", "status", "output"),
    [
        ("returns", 0, ""),
        ("raises", 1, "ZeroDivisionError: version 0"),
        ("raises_in_update", 1, "ZeroDivisionError: in the update"),
        ("exits", 7, ""),
        ("interrupted_in_result", None, "KeyboardInterrupt"),
        ("interrupted_in_with_block", None, "KeyboardInterrupt"),
    ],
)
def test_the_process_ends_at_once_with_its_own_status(
    endings: dict[str, Any], scenario: str, status: int | None, output: str
) -> None:
    ending = endings[scenario]
    # How an interrupt ends a process is Python's affair (130, -2 or 1): the engine must not change it.
    assert ending["status"] == (endings["interrupted_without_engine"]["status"] if status is None else status)
    assert ending["seconds"] < 10.0
    if output:
        assert output in ending["output"].splitlines(), ending["output"]
    assert ending["output"].count("Traceback") == (1 if output else 0)


def test_nothing_is_printed_at_default_verbosity(endings: dict[str, Any]) -> None:
    assert endings["quiet"]["status"] == 0 and endings["quiet"]["output"] == ""
