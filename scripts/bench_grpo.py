"""Time GRPO steps here and in TRL, on the same model, prompts, completions and lengths.

    python scripts/bench_grpo.py --against trl
    python scripts/bench_grpo.py --against none --rounds 1

Every arm is a process of its own that stays alive; a round runs all of them in turn, each a fresh training of a
few GRPO steps, and medians over the rounds are taken, because other processes come and go. The first steps of
a run warm up and the last ones are left out too, so that the window is the steady state, in which our engine
generates as many tokens as are trained. Wall time and CPU time (of the whole process, all threads) are per
optimizer step. Fails (exit code 1) if a step here is not 1.5 times faster in wall time and 1.1 times cheaper in
CPU time than the best arm of TRL in that measure, or if the mean completion lengths differ by over 10 %.

Equal in all arms: the weights (random Qwen3, 4 layers, fp32), the prompts in the same order, the completions a
step, the probability 1/32 of EOS at every token (a property of the weights, see ``build_model``) and the cap of
64 tokens, temperature 1 with no truncation, the reward function, the micro-batches, loss "dapo" with beta 0,
fused AdamW at 1e-6 (so the lengths stay put), gradient clipping, no gradient checkpointing, no logging, the
attention implementation of training (sdpa).

Different: here one thread trains while one generates, with ``max_staleness=1``: a step is trained on
completions that are up to one update old. TRL generates, then trains, strictly on-policy, and has both cores
for either, so each of its ways to generate runs with 1 and with 2 intra-op threads. ``ours_on_policy``
(``max_staleness=0``) is shown beside and judged by nothing. Rows are paired with micro-batches as each trainer
does it: ours by length, TRL's at random under one padded width. Sampled tokens differ, their lengths only by
chance. TRL's continuous batching gets a cache of exactly the size that the step needs.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from statistics import mean, median
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from rlt_train.overlap import EngineStep, OverlapMeter  # noqa: E402
from rlt_train.threads import usable_cores  # noqa: E402

LEAST_WALL_SPEEDUP = 1.5
LEAST_CPU_SPEEDUP = 1.1
LENGTH_TOLERANCE = 0.1
VOCABULARY = 2000
PAD, EOS = 0, 1
EOS_PROBABILITY = 1 / 32
MAX_COMPLETION = 64
PROMPT_LENGTHS = (5, 60)
GROUP = 8
WARM_UP_STEPS = 2
TRAILING_STEPS = 2  # steps that generate less, because nothing comes after them

ARMS: dict[str, dict[str, Any]] = {
    "ours": {"max_staleness": 1},
    "ours_on_policy": {"max_staleness": 0},
    "trl_generate_1": {"continuous_batching": False, "threads": 1},
    "trl_generate_2": {"continuous_batching": False, "threads": 2},
    "trl_continuous_batching_1": {"continuous_batching": True, "threads": 1},
    "trl_continuous_batching_2": {"continuous_batching": True, "threads": 2},
}


@dataclass
class GrpoBenchArguments:
    """What is timed, and how often."""

    against: Literal["trl", "none"] = field(default="trl", metadata={"help": "none times our arms alone"})
    rounds: int = field(default=3, metadata={"help": "rounds; each runs every arm once"})
    steps: int = field(default=8, metadata={"help": "timed optimizer steps of a run"})
    completions: int = field(default=64, metadata={"help": "completions of a step, a multiple of 8"})
    micro_batch: int = field(default=16, metadata={"help": "completions of one forward and backward"})
    quick: bool = field(
        default=False,
        metadata={"help": "1 round, 2 steps, 16 completions: does it run? Judges nothing"},
    )

    def __post_init__(self) -> None:
        if self.quick:
            self.rounds, self.steps, self.completions, self.micro_batch = 1, 2, 16, 8
        if self.completions % GROUP or self.completions % self.micro_batch:
            raise ValueError(
                f"completions={self.completions} must be a multiple of {GROUP} (samples a prompt) and of "
                f"micro_batch={self.micro_batch}"
            )
        if min(self.rounds, self.steps) < 1:
            raise ValueError(f"rounds={self.rounds} and steps={self.steps} must be at least 1")


# -- the workload, the same for every arm --------------------------------------------------------------------


def build_model() -> PreTrainedModel:
    """A random Qwen3 model in fp32 that ends a completion with probability 1/32 at every token.

    Hidden dimension 0 is a constant of 16 beside 255 of variance 1: the embedding sets it and no layer writes
    it, so after the final norm it is close to ``16 / sqrt(511 / 256)`` at every position. Only the EOS row of
    the head reads it; all other logits are small.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    constant = 16.0
    after_norm = constant / math.sqrt((constant**2 + 255) / 256)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = constant
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight.normal_(std=0.005)
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[EOS] = 0
        odds = EOS_PROBABILITY / (1 - EOS_PROBABILITY)
        model.lm_head.weight[EOS, 0] = math.log(odds * (VOCABULARY - 1)) / after_norm
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: "<pad>", "<eos>", "w2", "w3", ..."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{token}": token for token in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_dataset(prompts: int, seed: int) -> Dataset:
    """Prompts of 5 to 60 random tokens."""
    rng = random.Random(seed)
    texts = [
        " ".join(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(rng.randint(*PROMPT_LENGTHS)))
        for _ in range(prompts)
    ]
    return Dataset.from_dict({"prompt": texts})


class LengthReward:
    """Prefers completions of 20 tokens, and keeps all the lengths it saw."""

    __name__ = "length_reward"

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """TRL's contract of a reward function."""
        lengths = [len(ids) for ids in completion_ids]
        self.lengths += lengths
        return [-abs(length - 20) / MAX_COMPLETION for length in lengths]


def training_arguments(arguments: GrpoBenchArguments, seed: int, folder: str) -> dict[str, Any]:
    """What both trainers' configurations are given alike."""
    return {
        "output_dir": folder,
        "max_steps": WARM_UP_STEPS + arguments.steps + TRAILING_STEPS,
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.completions // arguments.micro_batch,
        "num_generations": GROUP,
        "max_completion_length": MAX_COMPLETION,
        "shuffle_dataset": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "dapo",
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": seed,
    }


# -- clocks --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stopwatch:
    """Wall and CPU seconds spent in a part of a step; ``cpu_clock`` decides whose CPU time."""

    cpu_clock: Callable[[], float]
    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the body."""
        wall, cpu = time.perf_counter(), self.cpu_clock()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - wall
            self.cpu += self.cpu_clock() - cpu

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.running():
                return function(*args, **kwargs)

        return timed


class ThreadMeter(OverlapMeter):
    """An overlap meter that also takes the CPU time of the two threads, each with one intra-op thread."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = Stopwatch(time.thread_time)
        self.compute = Stopwatch(time.thread_time)

    @contextmanager
    def training(self) -> Iterator[None]:
        """See ``OverlapMeter.training``."""
        with self.compute.running(), super().training():
            yield

    @contextmanager
    def forward(self) -> Iterator[EngineStep]:
        """See ``OverlapMeter.forward``."""
        with self.generation.running(), super().forward() as step:
            yield step


class Window(TrainerCallback):
    """Reads every counter at the two ends of the timed steps.

    ``read`` returns running totals by name; ``per_step`` has their increase divided by the timed steps.
    """

    def __init__(self, steps: int, read: Callable[[], dict[str, float]]) -> None:
        self._steps = steps
        self._read = read
        self._start: dict[str, float] = {}
        self.per_step: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every optimizer step."""
        now = {"wall": time.perf_counter(), "cpu": time.process_time()} | self._read()
        if state.global_step == WARM_UP_STEPS:
            self._start = now
        elif state.global_step == WARM_UP_STEPS + self._steps:
            self.per_step = {name: (now[name] - self._start[name]) / self._steps for name in now}


# -- the arms ------------------------------------------------------------------------------------------------


def run_ours(arguments: GrpoBenchArguments, seed: int, max_staleness: int) -> dict[str, float]:
    """One training of ours; returns what ``Window`` measured, per step."""
    from rlt_train.grpo import GRPOConfig, GRPOTrainer

    reward, meter = LengthReward(), ThreadMeter()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **training_arguments(arguments, seed, folder),
            max_staleness=max_staleness,
            training_threads=1,
            engine_threads=1,
        )
        trainer = GRPOTrainer(
            build_model(),
            reward,
            config,
            build_dataset(config.max_steps * config.groups_per_step, seed),
            processing_class=build_tokenizer(),
        )
        trainer.manager.overlap = meter

        def read() -> dict[str, float]:
            return {
                "generation_wall": meter.generation.wall,
                "generation_cpu": meter.generation.cpu,
                "training_wall": meter.compute.wall,
                "training_cpu": meter.compute.cpu,
                "trained_tokens": sum(reward.lengths),
                "generated_tokens": trainer.manager.stats()["tokens_generated"],
            }

        window = Window(arguments.steps, read)
        trainer.add_callback(window)
        trainer.train()
    return window.per_step


def run_trl(
    arguments: GrpoBenchArguments, seed: int, continuous_batching: bool, threads: int
) -> dict[str, float]:
    """One training of TRL; returns what ``Window`` measured, per step."""
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    reward = LengthReward()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **training_arguments(arguments, seed, folder),
            use_transformers_continuous_batching=continuous_batching,
            transformers_continuous_batching_config=continuous_batching_sizes(arguments),
        )
        trainer = GRPOTrainer(
            build_model(),
            reward,
            config,
            build_dataset(config.max_steps * arguments.completions // GROUP, seed),
            processing_class=build_tokenizer(),
        )
        generation, inputs, step = (Stopwatch(time.process_time) for _ in range(3))
        trainer._generate_single_turn = generation.around(trainer._generate_single_turn)
        trainer._prepare_inputs = inputs.around(trainer._prepare_inputs)
        trainer.training_step = step.around(trainer.training_step)

        def read() -> dict[str, float]:
            return {
                "generation_wall": generation.wall,
                "generation_cpu": generation.cpu,
                # A training step fetches its inputs (generation, rewards), then goes forward and backward.
                "training_wall": step.wall - inputs.wall,
                "training_cpu": step.cpu - inputs.cpu,
                "trained_tokens": sum(reward.lengths),
                "generated_tokens": sum(reward.lengths),
            }

        window = Window(arguments.steps, read)
        trainer.add_callback(window)
        trainer.train()
    return window.per_step


def continuous_batching_sizes(arguments: GrpoBenchArguments) -> dict[str, int]:
    """Room for every completion of a step at full length, and for all their prompts in one forward."""
    page = 16
    pages = math.ceil((PROMPT_LENGTHS[1] + MAX_COMPLETION) / page) + 1
    return {
        "page_size": page,
        "num_blocks": arguments.completions * pages,
        "max_batch_tokens": arguments.completions * PROMPT_LENGTHS[1],
    }


def serve(connection: Connection, arm: str, arguments: GrpoBenchArguments) -> None:
    """The process of one arm: run it once for every seed received, until ``None``."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    run = run_ours if arm.startswith("ours") else run_trl
    while (seed := connection.recv()) is not None:
        connection.send(run(arguments, seed, **ARMS[arm]))


class Arm:
    """One arm's process, with the OpenMP default of its thread count."""

    def __init__(self, name: str, arguments: GrpoBenchArguments) -> None:
        self.name = name
        self.measured: list[dict[str, float]] = []
        os.environ["OMP_NUM_THREADS"] = str(ARMS[name].get("threads", 1))
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=serve, args=(remote, name, arguments), daemon=True)
        self._process.start()
        remote.close()  # so that the process's death ends a wait here

    def run(self, seed: int) -> None:
        """Run once, and keep what was measured.

        Raises:
            RuntimeError: the process died; its traceback is on stderr.
        """
        self._connection.send(seed)
        try:
            self.measured.append(self._connection.recv())
        except EOFError:
            raise RuntimeError(f"the process of arm {self.name!r} died; see the traceback above") from None

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(30)

    def summary(self, arguments: GrpoBenchArguments) -> dict[str, float]:
        """Medians over the rounds, seconds and tokens per step; lengths are means over all of them."""
        figures = {name: median(run[name] for run in self.measured) for name in self.measured[0]}
        figures["mean_length"] = mean(run["trained_tokens"] for run in self.measured) / arguments.completions
        return {name: round(value, 3) for name, value in figures.items()}


def measure(arguments: GrpoBenchArguments) -> dict[str, dict[str, float]]:
    """Run all rounds; the summary of every arm by name."""
    chosen = [name for name in ARMS if arguments.against == "trl" or name.startswith("ours")]
    arms = [Arm(name, arguments) for name in chosen]
    try:
        for number in range(arguments.rounds):
            for arm in arms:
                arm.run(seed=number)
                last = arm.measured[-1]
                print(
                    f"round {number + 1}, {arm.name}: {last['wall']:.2f} s wall, {last['cpu']:.2f} s CPU",
                    flush=True,
                )
        return {arm.name: arm.summary(arguments) for arm in arms}
    finally:
        for arm in arms:
            arm.close()


# -- the verdict ---------------------------------------------------------------------------------------------


def figures(arguments: GrpoBenchArguments, arms: dict[str, dict[str, float]]) -> dict[str, Any]:
    """What the JSON line holds."""
    result: dict[str, Any] = {"speedup_wall": None, "speedup_cpu": None}
    theirs = {name: arm for name, arm in arms.items() if name.startswith("trl")}
    for measure_name in ("wall", "cpu"):
        if theirs:
            best = min(arm[measure_name] for arm in theirs.values())
            result[f"speedup_{measure_name}"] = round(best / arms["ours"][measure_name], 3)
    result["ours"] = arms["ours"]
    result["ours_on_policy"] = arms["ours_on_policy"]
    for way in ("trl_generate", "trl_continuous_batching"):
        result[way] = {
            f"threads_{threads}": arms[f"{way}_{threads}"] for threads in (1, 2) if f"{way}_{threads}" in arms
        }
    load = round(os.getloadavg()[0], 2)
    return result | {"arguments": asdict(arguments), "cores": usable_cores(), "load_average": load}


def failed_claims(result: dict[str, Any], arms: dict[str, dict[str, float]]) -> list[str]:
    """One sentence for each claim that does not hold."""
    found = []
    for name, least in (("wall", LEAST_WALL_SPEEDUP), ("cpu", LEAST_CPU_SPEEDUP)):
        speedup = result[f"speedup_{name}"]
        if speedup is not None and speedup < least:
            found.append(f"a step takes {speedup} times less {name} time than TRL's best arm, below {least}")
    lengths = [arm["mean_length"] for arm in arms.values()]
    if max(lengths) > min(lengths) * (1 + LENGTH_TOLERANCE):
        found.append(f"the mean completion lengths differ ({lengths}): the arms did not do the same work")
    return found


def print_table(arms: dict[str, dict[str, float]]) -> None:
    """Wall and CPU seconds per step, in all and in the two parts."""
    print(f"\n{'seconds per step':<27}{'all':^16}{'generation':^16}{'training':^16}{'mean':>8}{'tokens':>9}")
    print(f"{'':<27}" + f"{'wall':>8}{'CPU':>8}" * 3 + f"{'length':>8}{'a step':>9}")
    for name, arm in arms.items():
        parts = [
            arm[key] for part in ("", "generation_", "training_") for key in (f"{part}wall", f"{part}cpu")
        ]
        print(f"{name:<27}" + "".join(f"{value:>8.2f}" for value in parts), end="")
        print(f"{arm['mean_length']:>8.1f}{arm['generated_tokens']:>9.0f}")


def main() -> int:
    """Print the rounds, the table, the failures and the JSON line; the exit code is 1 if a claim failed."""
    (arguments,) = HfArgumentParser(GrpoBenchArguments).parse_args_into_dataclasses()
    arms = measure(arguments)
    result = figures(arguments, arms)
    print_table(arms)
    print(f"speed-up over TRL's best arm: wall {result['speedup_wall']}, CPU {result['speedup_cpu']}")
    failures = [] if arguments.quick else failed_claims(result, arms)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures and result["load_average"] > result["cores"] + 0.5:
        print(
            "other processes ran on these cores (see load_average): wall times mean little; run again on an "
            "idle machine",
            file=sys.stderr,
        )
    print(json.dumps(result))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
