"""Thousands of random requests against one small manager, everything going wrong at once.

    python -m tests.soak --requests 20000

One thread submits requests of every kind (greedy with a known answer, sampled, groups, stop strings,
deadlines, echoed prompts, poisoned ones whose logits are NaN, invalid ones) into a cache too small for what
is in flight; others cancel, pause and update the weights, and now and then the engine is killed and
restarted. An update writes the value that is already there, so every greedy answer stays what ``generate``
says. At the end no block may be used, no thread left, and the resident memory of the second half flat. Prints
one JSON object last; exit code 1 if anything of this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import rlt_train.engine.engine
from rlt_train import DeadlineError, EngineDeadError, RequestError, RolloutManager, SamplingParams
from rlt_train.handle import RolloutHandle
from tests.tiny import VOCAB, generate_greedy, prompt, smaller

POISON = 7
NEW_TOKENS = 6
LENGTHS = (1, 3, 4, 9, 16, 25)
IN_FLIGHT = ("keep", "keep", "keep", "recompute", "recompute", "finish", "abort")
MOST_RSS_GROWTH = 2.0  # percent
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


@dataclass(slots=True)
class Expected:
    """A submitted request and what may become of it."""

    handle: RolloutHandle
    kind: str
    length: int = 0


@dataclass(slots=True)
class Soak:
    """The manager, what is outstanding, and what was found wrong."""

    manager: RolloutManager
    answers: dict[int, list[int]]
    rng: random.Random
    outstanding: list[Expected] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    preemptions: int = 0

    def submit_one(self) -> int:
        """Submit a random request or group; returns how many requests that was."""
        kind = self.rng.choices(
            ("greedy", "sampled", "group", "stop", "deadline", "echo", "poison", "invalid"),
            (30, 25, 12, 8, 6, 6, 6, 7),
        )[0]
        length = self.rng.choice(LENGTHS)
        ids = [token for token in prompt(2 * length, length) if token != POISON][:length]
        sampled = SamplingParams(max_new_tokens=self.rng.randint(1, 20), priority=self.rng.randint(-1, 1))
        if kind == "greedy":
            handles = [self.manager.submit(ids, GREEDY)]
        elif kind == "group":
            handles = self.manager.submit_group(ids, self.rng.randint(1, 6), sampled)
        elif kind == "stop":
            handles = [self.manager.submit(ids, SamplingParams(max_new_tokens=8, stop_strings=("a", "bc")))]
        elif kind == "deadline":
            seconds = self.rng.choice((1e-6, 0.01))
            handles = [self.manager.submit(ids, SamplingParams(max_new_tokens=12, deadline=seconds))]
        elif kind == "echo":
            handles = [self.manager.submit(ids, SamplingParams(max_new_tokens=2, prompt_logprobs=True))]
        elif kind == "poison":
            handles = [self.manager.submit([*ids, POISON], sampled)]
        elif kind == "invalid":
            self._submit_invalid(ids)
            return 1
        else:
            handles = [self.manager.submit(ids, sampled)]
        self.outstanding += [Expected(handle, kind, length) for handle in handles]
        return len(handles)

    def _submit_invalid(self, ids: list[int]) -> None:
        bad = self.rng.choice(
            (
                ([], GREEDY),
                ([VOCAB], GREEDY),
                (ids, SamplingParams(temperature=math.nan)),
                (ids, SamplingParams(top_k=VOCAB + 1)),
                (ids, SamplingParams(max_new_tokens=10_000)),
            )
        )
        try:
            self.manager.submit(*bad)
        except RequestError:
            self.outcomes["refused"] += 1
        else:
            self.failures.append(f"{bad} was accepted")

    def disturb(self) -> None:
        """Sometimes cancel, pause, update the weights, or wait for a result."""
        chance = self.rng.random()
        if chance < 0.08 and self.outstanding:
            self.rng.choice(self.outstanding).handle.cancel()
        elif chance < 0.11:
            with self.manager.pause(60):
                pass
        elif chance < 0.14:
            self.update(self.rng.choice(IN_FLIGHT))
        elif chance < 0.30 and self.outstanding:
            self.check(self.outstanding.pop(self.rng.randrange(len(self.outstanding))))

    def update(self, in_flight: str) -> None:
        """A weight update that leaves every answer as it is."""
        with self.manager.weight_update(in_flight, timeout=60), torch.no_grad():  # type: ignore[arg-type]
            self.manager.view.training_model.lm_head.weight.mul_(1.0)

    def abort_one(self, attempts: int = 50) -> None:
        """Abort a request that is decoding; again if it ended before the update came."""
        for _ in range(attempts):
            handle = self.manager.submit([1], SamplingParams(max_new_tokens=40, ignore_eos=True))
            next(iter(handle.stream(60)))
            self.update("abort")
            self.check(Expected(handle, "sampled", 1))
            if handle.output.finish_reason == "aborted":
                return
        self.failures.append(f"nothing was aborted in {attempts} updates")

    def check(self, expected: Expected) -> None:
        """Wait for a request and compare what became of it with what may."""
        try:
            output = expected.handle.result(60)
        except (RequestError, EngineDeadError) as error:
            self.outcomes[type(error).__name__] += 1
            allowed = {"poison": RequestError, "deadline": DeadlineError}.get(expected.kind)
            if not (allowed and isinstance(error, allowed)) and not isinstance(error, EngineDeadError):
                self.failures.append(f"{expected.kind} {expected.handle.request_id}: {error}")
            return
        self.outcomes[output.finish_reason] += 1
        counts = {len(output.token_ids), len(output.logprobs), len(output.policy_versions)}
        if len(counts) != 1 or not all(math.isfinite(value) for value in output.logprobs):
            self.failures.append(f"{expected.handle.request_id}: tokens and log-probs do not match")
        if expected.kind == "poison" and output.finish_reason not in ("cancelled", "aborted"):
            self.failures.append(f"{expected.handle.request_id}: NaN logits went unnoticed")
        if expected.kind == "greedy":
            wanted = self.answers[expected.length]
            if output.finish_reason == "length" and output.token_ids != wanted:
                self.failures.append(f"{expected.handle.request_id}: {output.token_ids}, not {wanted}")

    def kill_and_restart(self) -> None:
        """A fault in the sampler ends the engine; everybody learns of it, and it starts anew."""
        self.preemptions += int(self.manager.stats()["preemptions"])

        def fail(*_: Any, **__: Any) -> Any:
            raise MemoryError("injected")

        sample, rlt_train.engine.engine.sample = rlt_train.engine.engine.sample, fail
        try:
            with contextlib.suppress(EngineDeadError):  # dead already, of what was in flight
                self.outstanding.append(Expected(self.manager.submit([1], GREEDY), "sampled"))
            self.drain()
        finally:
            rlt_train.engine.engine.sample = sample
        self.manager.restart()
        self.outcomes["restarts"] += 1

    def drain(self) -> None:
        """Wait for everything outstanding."""
        while self.outstanding:
            self.check(self.outstanding.pop())


def resident_mb() -> float:
    """Resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def new_soak(seed: int) -> Soak:
    """A two-layer model with one poisoned token, and a cache far too small for its slots."""
    model = smaller()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = math.nan
        model.lm_head.weight[POISON] = 0.0
    answers = {
        length: generate_greedy(
            model, [token for token in prompt(2 * length, length) if token != POISON][:length], NEW_TOKENS
        )
        for length in LENGTHS
    }
    bytes_per_block = 2 * 2 * 2 * 8 * 4 * 4  # layers, keys and values, heads, head_dim, float32, tokens
    manager = RolloutManager(
        model,
        rollouts_in_flight=16,
        max_length=48,
        block_size=4,
        max_tokens_per_step=32,
        kv_cache_gib=24.5 * bytes_per_block / 2**30,
        engine_threads=1,
        tokenizer=Letters(),
        max_queued=64,
        defaults=SamplingParams(logit_bias={POISON: -math.inf}),  # only a prompt may hold the poison
    )
    return Soak(manager, answers, random.Random(seed))


def run(requests: int, seed: int = 0) -> dict[str, Any]:
    """Submit ``requests`` requests; returns the figures."""
    threads_before = set(threading.enumerate())
    soak = new_soak(seed)
    soak.manager.start()
    submitted, half_rss, quarter = 0, 0.0, max(1, requests // 4)
    next_kill = quarter
    started = time.perf_counter()
    while submitted < requests:
        submitted += soak.submit_one()
        soak.disturb()
        if submitted >= next_kill:
            soak.abort_one()
            soak.kill_and_restart()
            next_kill += quarter
            if not half_rss and submitted >= requests // 2:
                half_rss = resident_mb()
    soak.drain()
    stats = soak.manager.stats()
    rss = resident_mb()
    soak.manager.stop()
    left = [thread.name for thread in threading.enumerate() if thread not in threads_before]
    return {
        "requests": submitted,
        "failures": len(soak.failures),
        "leaked_blocks": int(stats["kv_blocks_used"]),
        "threads_left": len(left),
        "rss_growth_pct": round(100 * (rss - half_rss) / half_rss, 3) if half_rss else 0.0,
        "preemptions": soak.preemptions + int(stats["preemptions"]),
        "policy_versions": int(stats["policy_version"]),
        "outcomes": dict(sorted(soak.outcomes.items())),
        "seconds": round(time.perf_counter() - started, 1),
        "first_failures": soak.failures[:5],
    }


def main() -> int:
    """Print the figures; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = run(arguments.requests, arguments.seed)
    for name, value in result.items():
        print(f"{name:<18} {value}")
    print(json.dumps(result))
    clean = not (result["failures"] or result["leaked_blocks"] or result["threads_left"])
    return int(not clean or result["rss_growth_pct"] > MOST_RSS_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
