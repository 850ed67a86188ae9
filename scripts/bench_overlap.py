"""Time training and generation alone and both together on two cores, and the wait for a pause.

    python scripts/bench_overlap.py
    python scripts/bench_overlap.py --hidden 512 --layers 8

Two fixed workloads on one set of weights, one intra-op thread each: training takes M optimizer steps,
generation decodes N rollouts of a fixed length, in waves, as slots fall free. M is chosen so that both take
equally long alone; ``overlap_efficiency`` is the longer of the two divided by the time of both together, 1
being ideal and 0.5 taking turns. Two threads that only multiply matrices give the ceiling of the machine at
the same moment. The rounds of all arms are interleaved and medians are taken, because other processes come
and go. A pause is asked for at random moments while the engine decodes; its wait is given in median engine
forwards. Fails (exit code 1) if the efficiency is below 0.85, the workloads differ by more than 10 % alone,
or the p99 of the wait is over 1.5 forwards. What is left out: rewards, and everything else that a training
loop does between its steps.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from transformers import HfArgumentParser, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from rlt_train import RolloutHandle, RolloutManager, SamplingParams  # noqa: E402
from rlt_train.fence import fence_optimizer  # noqa: E402
from rlt_train.overlap import EngineStep, OverlapMeter  # noqa: E402
from rlt_train.threads import usable_cores  # noqa: E402

VOCABULARY = 2000
PROMPT_TOKENS = 8
LEAST_EFFICIENCY = 0.85
MOST_PAUSE_FORWARDS = 1.5
ALONE_TOLERANCE = 0.1


@dataclass
class OverlapArguments:
    """Sizes of the two workloads."""

    hidden: int = field(default=256, metadata={"help": "width of the model"})
    layers: int = field(default=4, metadata={"help": "number of layers"})
    rollouts: int = field(default=32, metadata={"help": "rollouts that decode at once"})
    waves: int = field(default=2, metadata={"help": "how many times that many rollouts a round generates"})
    new_tokens: int = field(default=160, metadata={"help": "tokens that each rollout generates"})
    batch_size: int = field(default=8, metadata={"help": "sequences in a training batch"})
    length: int = field(default=64, metadata={"help": "tokens of a training sequence"})
    rounds: int = field(default=5, metadata={"help": "interleaved rounds of all arms"})
    pauses: int = field(default=300, metadata={"help": "pauses whose wait is measured"})
    seed: int = field(default=0, metadata={"help": "seed of weights, batches, prompts and pause times"})

    @property
    def rollouts_a_round(self) -> int:
        """All waves together."""
        return self.waves * self.rollouts


class ForwardTimes(OverlapMeter):
    """An overlap meter that also keeps the seconds of each engine forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    @contextmanager
    def forward(self) -> Iterator[EngineStep]:
        """One engine step."""
        with super().forward() as step:
            started = time.perf_counter()
            yield step
            if step.forward:
                self.seconds.append(time.perf_counter() - started)


@dataclass(slots=True)
class Workloads:
    """The two sides: each does its fixed work once per call."""

    arguments: OverlapArguments
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    manager: RolloutManager
    forward_times: list[float]
    steps: int = 1
    _prompts: Iterator[int] = field(default_factory=count)

    def train(self) -> None:
        """``steps`` forwards, backwards and fenced AdamW steps on a fixed batch."""
        generator = torch.Generator().manual_seed(self.arguments.seed)
        shape = (self.arguments.batch_size, self.arguments.length)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        for _ in range(self.steps):
            with self.manager.overlap.training():
                self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def submit(self, new_tokens: int) -> RolloutHandle:
        """Submit one rollout, with a prompt that was never seen before: no prefix is reused."""
        generator = torch.Generator().manual_seed(next(self._prompts))
        prompt = torch.randint(VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()
        return self.manager.submit(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))

    def begin_generation(self) -> Callable[[], None]:
        """Submit the rollouts of a round; returns a wait for all of them."""
        arguments = self.arguments
        handles = [self.submit(arguments.new_tokens) for _ in range(arguments.rollouts_a_round)]

        def wait() -> None:
            for handle in handles:
                handle.result(timeout=600)

        return wait

    def generate(self) -> None:
        """Generate alone."""
        self.begin_generation()()

    def both(self) -> None:
        """Start both, wait for both."""
        wait = self.begin_generation()
        self.train()
        wait()


def seconds(work: Callable[[], None]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def build_model(arguments: OverlapArguments) -> PreTrainedModel:
    """A randomly initialised Qwen3 model in fp32."""
    torch.manual_seed(arguments.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=arguments.hidden,
            intermediate_size=2 * arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=arguments.hidden // 4,
            max_position_embeddings=2048,
        )
    ).train()


@contextmanager
def workloads(arguments: OverlapArguments) -> Iterator[Workloads]:
    """A running manager beside a training model, the optimizer's steps fenced."""
    model = build_model(arguments)
    # The fused kernel is what transformers' Trainer uses by default; the plain one would lengthen the fence.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    manager = RolloutManager(
        model,
        rollouts_in_flight=arguments.rollouts,
        max_length=PROMPT_TOKENS + arguments.new_tokens,
        engine_threads=1,
    )
    manager.overlap = meter = ForwardTimes()
    remove_fence = fence_optimizer(optimizer, manager)
    try:
        with manager:
            yield Workloads(arguments, model, optimizer, manager, meter.seconds)
    finally:
        remove_fence()


def size_training(work: Workloads, attempts: int = 5) -> None:
    """Set ``work.steps`` so that training alone takes as long as generation alone."""
    work.both()  # warm up both
    for _ in range(attempts):
        generation = median(seconds(work.generate) for _ in range(3))
        training = median(seconds(work.train) for _ in range(3 if work.steps > 1 else 5))
        ratio = training / generation
        if abs(ratio - 1) < ALONE_TOLERANCE / 3:
            return
        work.steps = max(1, round(work.steps / ratio))


def multiply_matrices(times: int) -> None:
    """A fixed number of matrix products, all in one thread."""
    torch.set_num_threads(1)
    left, right = torch.ones(256, 256), torch.ones(256, 256)
    for _ in range(times):
        torch.mm(left, right)


def two_threads(times: int) -> None:
    """The same products in each of two threads."""
    threads = [threading.Thread(target=multiply_matrices, args=(times,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_rounds(work: Workloads, rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in every round, by arm."""
    products = max(1, round(500 / seconds(lambda: multiply_matrices(500))))  # about a second
    arms: dict[str, Callable[[], None]] = {
        "generation": work.generate,
        "training": work.train,
        "together": work.both,
        "one_matmul_thread": lambda: multiply_matrices(products),
        "two_matmul_threads": lambda: two_threads(products),
    }
    measured: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name, arm in arms.items():
            measured[name].append(seconds(arm))
        print(
            f"round {number + 1}: "
            + ", ".join(f"{name} {times[-1]:.2f} s" for name, times in measured.items())
        )
    return measured


def measure_pauses(work: Workloads, pauses: int, seed: int) -> tuple[list[float], float]:
    """Ask for a pause at random moments while the engine decodes; every finished rollout is replaced.

    Returns:
        The seconds from each call to its grant, and the median seconds of the engine's forwards meanwhile.
    """
    manager, moments, lengths, waits = work.manager, random.Random(seed), random.Random(seed + 1), []
    longest = work.arguments.new_tokens

    def replace_finished(*_: Any) -> None:
        work.submit(lengths.randint(1 + longest // 4, longest))

    remove = manager.on("finished", replace_finished)
    for _ in range(work.arguments.rollouts):
        replace_finished()
    time.sleep(0.5)  # past the prefill
    work.forward_times.clear()
    forward = manager.overlap.forward_seconds / manager.overlap.forwards
    for _ in range(pauses):
        time.sleep(moments.uniform(1, 3) * forward)
        asked = time.perf_counter()
        with manager.pause():
            waits.append(time.perf_counter() - asked)
    forward = median(work.forward_times)
    remove()
    manager.wait_for(lambda: not manager.stats()["unfinished"], timeout=600)
    return waits, forward


# -- the verdict ---------------------------------------------------------------------------------------------


def figures(
    arguments: OverlapArguments,
    steps: int,
    measured: dict[str, list[float]],
    waits: list[float],
    forward: float,
) -> dict[str, Any]:
    """What the JSON line holds; seconds are medians over the rounds."""
    arms = {name: median(times) for name, times in measured.items()}
    alone = arms["generation"], arms["training"]
    percentiles = quantiles(waits, n=100)
    return {
        "overlap_efficiency": round(max(alone) / arms["together"], 4),
        "alone_ratio": round(arms["training"] / arms["generation"], 4),
        "pause_p50_forwards": round(percentiles[49] / forward, 3),
        "pause_p99_forwards": round(percentiles[98] / forward, 3),
        "matmul_ceiling": round(arms["one_matmul_thread"] / arms["two_matmul_threads"], 4),
        **{f"{name}_seconds": round(value, 3) for name, value in arms.items()},
        "forward_ms": round(1000 * forward, 2),
        "pauses": len(waits),
        "training_steps": steps,
        "tokens_a_round": arguments.rollouts_a_round * arguments.new_tokens,
        "rounds": arguments.rounds,
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "cores": usable_cores(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def failed_claims(result: dict[str, Any]) -> list[str]:
    """One sentence for each claim that does not hold."""
    found = []
    if result["overlap_efficiency"] < LEAST_EFFICIENCY:
        found.append(f"overlap efficiency {result['overlap_efficiency']} is below {LEAST_EFFICIENCY}")
    if abs(result["alone_ratio"] - 1) > ALONE_TOLERANCE:
        found.append(
            f"training alone took {result['alone_ratio']} of generation alone; the sizes do not match"
        )
    if result["pause_p99_forwards"] > MOST_PAUSE_FORWARDS:
        found.append(
            f"the p99 wait for a pause is {result['pause_p99_forwards']} forwards, over {MOST_PAUSE_FORWARDS}"
        )
    return found


def main() -> int:
    """Print the rounds, the table, the failures and the JSON line; the exit code is 1 if a claim failed."""
    (arguments,) = HfArgumentParser(OverlapArguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    with workloads(arguments) as work:
        size_training(work)
        measured = measure_rounds(work, arguments.rounds)
        waits, forward = measure_pauses(work, arguments.pauses, arguments.seed)
        result = figures(arguments, work.steps, measured, waits, forward)
    failures = failed_claims(result)
    for name, value in result.items():
        print(f"{name:<26} {value}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures and result["load_average"] > result["cores"] + 0.5:
        print(
            "other processes ran on these cores (see load_average): run again on an idle machine",
            file=sys.stderr,
        )
    print(json.dumps(result))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
