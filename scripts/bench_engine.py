"""Tokens per CPU-second of the embedded engine, of transformers' continuous batching and of ``generate``.

    python scripts/bench_engine.py --against transformers,generate
    python scripts/bench_engine.py --model smollm2 --workloads uniform_32

One random Qwen3-style float32 model (4 layers, hidden 256, vocabulary 2000), prompts of 5 to 120 tokens,
greedy, one thread. Four workloads: 128 and 32 prompts with 64 new tokens each, 128 prompts with exponential
lengths (mean about 55, at most 256), and 16 prompts of 200 tokens with 8 samples of 32 new tokens each. The
arms take turns within one process and the median round counts. ``generate`` gets one left-padded batch and
runs to the longest length; only tokens that were asked for count. transformers' manager is started before the
clock, gets the whole workload as room, and no prefix sharing is taken from it. Every arm must give the same
tokens; two logits within 1e-4 are a tie.

Also measured, in the engine alone: the share of CPU time in the model's own linear layers (the limit of what
an engine can do), the share of scheduler and planner, the memory above the weights in a process of its own,
and what an idle engine costs. Fails (exit code 1) if a ratio is below its target or tokens differ.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import HfArgumentParser  # noqa: E402

from rlt_train import EngineConfig, RolloutManager, SamplingParams  # noqa: E402
from rlt_train.engine.engine import Engine, new_group  # noqa: E402
from rlt_train.engine.params import BUILT_IN  # noqa: E402
from rlt_train.engine.request import Request  # noqa: E402
from rlt_train.weights.view import GenerationView  # noqa: E402

VOCABULARY = 2000
TARGETS = {
    "uniform_128": {"transformers": 4.5, "generate": 1.5},
    "uniform_32": {"transformers": 2.0, "generate": 1.35},
    "exponential": {"transformers": 4.0, "generate": 4.5},
    "groups": {"transformers": 4.0, "generate": 2.0},
}
MOST_MEMORY_MB = 64.0
TIE = 1e-4


@dataclass
class EngineArguments:
    """What is measured."""

    against: str = field(default="transformers,generate", metadata={"help": "the other arms"})
    workloads: str = field(default=",".join(TARGETS), metadata={"help": "of " + ", ".join(TARGETS)})
    rounds: int = field(default=3, metadata={"help": "interleaved rounds; medians count"})
    backend: str = field(default="auto", metadata={"help": "attention backend of the engine"})
    model: str = field(default="random", metadata={"help": "random or smollm2"})
    seed: int = field(default=0, metadata={"help": "seed of weights, prompts and lengths"})
    memory_only: bool = field(default=False, metadata={"help": "print only the memory above the weights"})


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt: ``n`` samples of ``new_tokens`` tokens each."""

    prompt: list[int]
    new_tokens: int
    n: int = 1


Completions = list[list[int]]  # of each item, the members of a group after another


def workload(name: str, seed: int) -> list[Item]:
    """The items of a workload."""
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    if name == "groups":
        return [Item(prompt(200), 32, 8) for _ in range(16)]
    if name == "exponential":
        lengths = [min(256, 1 + int(rng.expovariate(1 / 55))) for _ in range(128)]
        return [Item(prompt(rng.randint(5, 120)), length) for length in lengths]
    return [Item(prompt(rng.randint(5, 120)), 64) for _ in range(int(name.removeprefix("uniform_")))]


def load_model(arguments: EngineArguments) -> Any:
    """The model in eval mode; no token of it ends a sequence."""
    if arguments.model == "smollm2":
        sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, only scripts/ is on the path
        from recipes.models import load_model_and_tokenizer

        model = load_model_and_tokenizer("smollm2")[0]
    else:
        torch.manual_seed(arguments.seed)
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=256,
                intermediate_size=768,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=32,
                max_position_embeddings=1024,
                eos_token_id=None,
                bos_token_id=None,
                pad_token_id=None,
            )
        )
    model.generation_config.eos_token_id = None
    return model.eval()


# -- the arms ----------------------------------------------------------------------------------------------


def longest(items: list[Item]) -> int:
    """Tokens of the longest sequence."""
    return max(len(item.prompt) + item.new_tokens for item in items)


@contextmanager
def ours(model: Any, items: list[Item], backend: str = "auto") -> Iterator[Callable[[], Completions]]:
    """The embedded engine, through its manager."""
    manager = RolloutManager(
        model,
        rollouts_in_flight=sum(item.n for item in items),
        max_length=longest(items),
        engine_threads=1,
        attention_backend=backend,
    )

    def run() -> Completions:
        handles = []
        with manager.weight_update():  # no prompt of an earlier round is found again
            for item in items:
                params = SamplingParams(max_new_tokens=item.new_tokens, temperature=0.0, ignore_eos=True)
                handles += manager.submit_group(item.prompt, item.n, params)
        return [handle.result(600).token_ids for handle in handles]

    with manager:
        yield run


@contextmanager
def transformers_manager(model: Any, items: list[Item], _: str = "") -> Iterator[Callable[[], Completions]]:
    """transformers' continuous batching, with room for the whole workload."""
    page, count = 16, sum(item.n for item in items)
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=page,
            num_blocks=count * (-(-longest(items) // page) + 1),
            max_batch_tokens=max(256, count),
            max_requests_per_batch=count,
            allow_block_sharing=False,
            use_cuda_graph=False,
        ),
    )
    rounds = 0

    def run() -> Completions:
        nonlocal rounds
        rounds += 1
        names = []
        for index, item in enumerate(items):
            for member in range(item.n):
                name = f"{rounds}-{index}-{member}"
                manager.add_request(item.prompt, request_id=name, max_new_tokens=item.new_tokens)
                names.append(name)
        results: dict[str, list[int]] = {}
        while len(results) < len(names):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                results[output.request_id] = list(output.generated_tokens)
        return [results[name] for name in names]

    manager.start()
    try:
        yield run
    finally:
        manager.stop(block=True, timeout=30)


@contextmanager
def generate(model: Any, items: list[Item], _: str = "") -> Iterator[Callable[[], Completions]]:
    """``model.generate`` on one left-padded batch."""
    prompts = [item.prompt for item in items for _ in range(item.n)]
    lengths = [item.new_tokens for item in items for _ in range(item.n)]
    width, most = max(map(len, prompts)), max(lengths)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    def run() -> Completions:
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
            )
        return [row[width : width + length] for row, length in zip(output.tolist(), lengths, strict=True)]

    yield run


ARMS: dict[str, Callable[..., Any]] = {
    "ours": ours,
    "transformers": transformers_manager,
    "generate": generate,
}


def measure(model: Any, items: list[Item], names: list[str], arguments: EngineArguments) -> dict[str, Any]:
    """Tokens per CPU-second and per second of every arm, and whether all gave the same tokens."""
    tokens = sum(item.n * item.new_tokens for item in items)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    completions: dict[str, Completions] = {}
    with ExitStack() as stack:
        arms = {name: stack.enter_context(ARMS[name](model, items, arguments.backend)) for name in names}
        for run in arms.values():
            run()  # warm up
        for _ in range(arguments.rounds):
            for name, run in arms.items():
                wall, cpu = time.perf_counter(), time.process_time()
                completions[name] = run()
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    figures: dict[str, Any] = {
        name: {
            "tokens_per_cpu_second": round(tokens / median(cpu for _, cpu in taken)),
            "tokens_per_second": round(tokens / median(wall for wall, _ in taken)),
        }
        for name, taken in seconds.items()
    }
    figures["ties"], figures["different"] = compare(model, items, completions)
    return figures


def compare(model: Any, items: list[Item], completions: dict[str, Completions]) -> tuple[int, int]:
    """How many sequences part from ours at a tie of two logits, and how many part otherwise."""
    prompts = [item.prompt for item in items for _ in range(item.n)]
    ties = different = 0
    for name in completions.keys() - {"ours"}:
        for prompt, mine, other in zip(prompts, completions["ours"], completions[name], strict=True):
            if mine == other:
                continue
            at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
            if at is None:
                different += 1
                continue
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + mine[:at]]), use_cache=False).logits[0, -1]
            tie = (logits[mine[at]] - logits[other[at]]).abs().item() < TIE
            ties += tie
            different += not tie
    return ties, different


# -- the engine alone --------------------------------------------------------------------------------------


def new_engine(model: Any, items: list[Item], backend: str) -> Engine:
    """An engine without a thread, all items queued."""
    sizes = EngineConfig(rollouts_in_flight=sum(item.n for item in items), max_length=longest(items))
    engine = Engine(GenerationView(model), sizes, backend)
    engine.warmup()
    return engine


def run_engine(engine: Engine, items: list[Item]) -> float:
    """Serve all items; returns CPU-seconds of this thread."""
    for index, item in enumerate(items):
        params = SamplingParams(max_new_tokens=item.new_tokens, temperature=0.0).over(BUILT_IN)
        group = new_group(item.n)
        for member in range(item.n):
            name = f"{index}-{member}"
            engine.add(Request(name, item.prompt, params, seed=0, eos_token_ids=frozenset(), group=group))
    started = time.thread_time()
    while engine.unfinished:
        engine.step()
    return time.thread_time() - started


def shares(model: Any, items: list[Item], backend: str) -> dict[str, float]:
    """Shares of the engine's CPU time: the model's linear layers, and scheduler and planners."""
    spent = {"linear": 0.0, "planner": 0.0}
    engine = new_engine(model, items, backend)

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = function(*args, **kwargs)
            spent[kind] += time.thread_time() - started
            return result

        return call

    for module in engine.served.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = timed("linear", module.forward)
    for owner, name in (
        (engine.scheduler, "schedule"),
        (engine.scheduler, "advance"),
        (engine._runner._planner, "plan"),
        *((backend, "plan") for backend in engine.backends),
    ):
        setattr(owner, name, timed("planner", getattr(owner, name)))
    total = run_engine(engine, items)
    return {f"{kind}_share": round(seconds / total, 4) for kind, seconds in spent.items()}


def memory_above_weights(model: Any, items: list[Item], backend: str) -> dict[str, float]:
    """Peak resident MB above the weights and what a small run left, and the KV pool's MB."""
    run_engine(new_engine(model, items[:2], backend), items[:2])
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    before = _status_mb("VmRSS")
    engine = new_engine(model, items, backend)
    run_engine(engine, items)
    pool = engine.cache.nbytes() / 2**20
    return {"rss_above_weights_mb": round(_status_mb("VmHWM") - before, 1), "kv_pool_mb": round(pool, 1)}


def _status_mb(field_name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field_name))


def memory_in_another_process(arguments: EngineArguments) -> dict[str, float]:
    """``memory_above_weights`` in a fresh process, so that no other arm's memory is reused."""
    command = [sys.executable, __file__, "--memory_only", "True", "--model", arguments.model]
    command += ["--backend", arguments.backend, "--seed", str(arguments.seed)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def idle_share(model: Any, seconds: float = 3.0) -> float:
    """CPU time of a started engine without requests, per second."""
    with RolloutManager(model, rollouts_in_flight=8, max_length=64, engine_threads=1):
        time.sleep(0.2)
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(seconds)
        return round((time.process_time() - cpu) / (time.perf_counter() - wall), 5)


# -- the verdict -------------------------------------------------------------------------------------------


def failed_claims(result: dict[str, Any]) -> list[str]:
    """One sentence for each claim that does not hold."""
    found = []
    for name, ratios in result["ratios"].items():
        for arm, ratio in ratios.items():
            if ratio < TARGETS[name][arm]:
                found.append(f"{name}: {ratio} times {arm}, not {TARGETS[name][arm]}")
    if not result["tokens_equal"]:
        found.append("the arms gave different tokens")
    if result["planner_share"] > 0.1:
        found.append(f"scheduler and planner take {result['planner_share']} of the CPU time, over 0.1")
    if result["rss_above_weights_mb"] > result["kv_pool_mb"] + MOST_MEMORY_MB:
        found.append(
            f"{result['rss_above_weights_mb']} MB above the weights, over the KV pool + {MOST_MEMORY_MB}"
        )
    if result["idle_share"] > 0.002:
        found.append(f"an idle engine takes {result['idle_share']} of a core, over 0.002")
    return found


def main() -> int:
    """Print the rounds, the table, the failures and the JSON line; the exit code is 1 if a claim failed."""
    (arguments,) = HfArgumentParser(EngineArguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = load_model(arguments)
    largest = workload("uniform_128", arguments.seed)
    if arguments.memory_only:
        print(json.dumps(memory_above_weights(model, largest, arguments.backend)))
        return 0
    others = [name for name in arguments.against.split(",") if name]
    result: dict[str, Any] = {"ratios": {}, "tokens_equal": True, "ties": 0, "arms": {}}
    for name in arguments.workloads.split(","):
        figures = measure(model, workload(name, arguments.seed), ["ours", *others], arguments)
        mine = figures["ours"]["tokens_per_cpu_second"]
        ratios = {other: round(mine / figures[other]["tokens_per_cpu_second"], 3) for other in others}
        result["ratios"][name] = ratios
        result["ties"] += figures["ties"]
        result["tokens_equal"] &= figures["different"] == 0
        result["arms"][name] = {arm: figures[arm] for arm in ("ours", *others)}
        rates = ", ".join(f"{arm} {figures[arm]['tokens_per_cpu_second']}" for arm in ("ours", *others))
        print(f"{name:<12} tokens per CPU-second: {rates}; ratios {ratios}", flush=True)
    result |= shares(model, largest, arguments.backend) | memory_in_another_process(arguments)
    result["idle_share"] = idle_share(model)
    result["load_average"] = round(os.getloadavg()[0], 2)
    for name, value in result.items():
        if name not in ("ratios", "arms"):
            print(f"{name:<22} {value}")
    failures = failed_claims(result) if arguments.model == "random" else []
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
