"""Forks one child for each way of ending a process while the engine generates, and reports how each ended.

Importing torch and transformers takes seconds, so it is done once, here; each child starts its own engine
and leaves through the interpreter's ordinary exit. Prints one JSON object: scenario -> exit status, seconds,
output.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
from tiny import prompt, smaller

from rlt_train import RolloutManager, SamplingParams

LIMIT = 30.0
SIZES: dict[str, Any] = {"rollouts_in_flight": 2, "max_length": 4000, "engine_threads": 1}
ENDLESS = SamplingParams(max_new_tokens=3900, ignore_eos=True)


def generating() -> RolloutManager:
    manager = RolloutManager(smaller(), **SIZES).start()
    next(manager.submit(prompt(5), ENDLESS).stream(LIMIT))
    return manager


def quiet() -> None:
    """Everything ordinary, which must print nothing at default verbosity."""
    model = smaller()
    with RolloutManager(model, **SIZES) as manager:
        manager.submit(prompt(5), SamplingParams(max_new_tokens=5)).result(LIMIT)
        with manager.weight_update():
            pass
        manager.submit(prompt(5), ENDLESS)


def returns() -> None:
    generating()


def raises() -> None:
    manager = generating()
    raise ZeroDivisionError(f"version {manager.policy_version}")


def raises_in_update() -> None:
    with generating().weight_update():
        raise ZeroDivisionError("in the update")


def exits() -> None:
    generating()
    sys.exit(7)


def interrupted_without_engine() -> None:
    """What an interrupt does to any process of these imports: the others are compared with it."""
    print("ready", flush=True)
    time.sleep(LIMIT)


def interrupted_in_result() -> None:
    manager = generating()
    handle = manager.submit(prompt(6), ENDLESS)
    print("ready", flush=True)
    handle.result()


def interrupted_in_with_block() -> None:
    with generating():
        print("ready", flush=True)
        time.sleep(LIMIT)


SCENARIOS = {
    function.__name__: function
    for function in (
        quiet,
        returns,
        raises,
        raises_in_update,
        exits,
        interrupted_without_engine,
        interrupted_in_result,
        interrupted_in_with_block,
    )
}


def observe(child: int, output: Any, interrupt: bool) -> dict[str, Any]:
    started = time.monotonic()
    while time.monotonic() < started + LIMIT:
        pid, status = os.waitpid(child, os.WNOHANG)
        output.seek(0)
        text = output.read()
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return {"status": code, "seconds": time.monotonic() - started, "output": text}
        if interrupt and "ready" in text:
            os.kill(child, signal.SIGINT)
            started, interrupt = time.monotonic(), False
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"status": "killed", "seconds": LIMIT, "output": text}


def main() -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: the scenarios need it on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        with tempfile.TemporaryFile("w+") as output:
            sys.stdout.flush()
            if scenario is not quiet:  # where not one line may be printed, not even by a collector
                gc.freeze()  # or each child spends seconds on collecting what was imported
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                return scenario()
            results[name] = observe(child, output, interrupt=name.startswith("interrupted"))
    gc.unfreeze()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
