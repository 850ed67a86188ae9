"""Time GRPO steps here and in TRL, on the same model, prompts, completions and lengths.

    python scripts/bench_grpo.py --against trl
    python scripts/bench_grpo.py --against none --rounds 1

Every arm has a process of its own; a round runs all arms in turn, each a fresh training of a few steps, and
medians over the rounds are taken, because other processes come and go. The first and last steps of a training
are left out: what remains is the steady state, in which as many tokens are generated as are trained. Wall
time and CPU time (all threads of the process) are per optimizer step. Fails (exit code 1) if a step here is
not 1.5 times faster in wall time and 1.1 times cheaper in CPU time than TRL's best arm in that measure, or if
the mean completion lengths differ by over 10 %.

Equal in all arms: the weights (random Qwen3, 4 layers, fp32), the prompts and their order, completions a step
and a micro-batch, probability 1/32 of EOS at every token (a property of the weights, see ``build_model``)
under a cap of 64 tokens, temperature 1 without truncation, the reward, loss "dapo" with beta 0, fused AdamW
at 1e-6 (so lengths stay put), gradient clipping, sdpa, no gradient checkpointing, no logging.

Different: ours trains on one thread while it generates on another, by default on completions up to one update
old; ``ours_on_policy`` (``max_staleness=0``) is shown and not judged. TRL generates, then trains, with 1 or 2
intra-op threads for both. Ours puts rows of similar length into a micro-batch, TRL pads all rows of a step to
one width. The sampled tokens differ, their lengths only by chance. TRL's continuous batching is given a cache
and a batch that fit the step, the best of the settings that were tried; TRL's time hardly depends on the size
of the micro-batch. With other work on the cores TRL's two threads wait for each other at every operation, so
run it on an idle machine.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
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
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
)

from rlt_train.overlap import EngineStep, OverlapMeter  # noqa: E402
from rlt_train.threads import usable_cores  # noqa: E402

LEAST_SPEEDUP = {"wall": 1.5, "cpu": 1.1}
LENGTH_TOLERANCE = 0.1
VOCABULARY, PAD, EOS = 2000, 0, 1
EOS_PROBABILITY = 1 / 32
LONGEST_COMPLETION = 64
SHORTEST_PROMPT, LONGEST_PROMPT = 5, 60
GROUP = 8
WARM_UP_STEPS = 2
TRAILING_STEPS = 2  # the last steps generate less: no step comes after them

Figures = dict[str, float]


@dataclass
class GrpoBenchArguments:
    """What is timed, and how often."""

    against: Literal["trl", "none"] = field(default="trl", metadata={"help": "none: our arms alone"})
    rounds: int = field(default=3, metadata={"help": "each round runs every arm once"})
    steps: int = field(default=8, metadata={"help": "timed optimizer steps of a run"})
    completions: int = field(default=32, metadata={"help": "completions of a step"})
    micro_batch: int = field(default=16, metadata={"help": "completions of a forward and backward"})
    quick: bool = field(default=False, metadata={"help": "1 round of 2 small steps, which judges nothing"})

    def __post_init__(self) -> None:
        if self.quick:
            self.rounds, self.steps, self.completions, self.micro_batch = 1, 2, 16, 8
        if min(self.rounds, self.steps, self.completions, self.micro_batch) < 1:
            raise ValueError("rounds, steps, completions and micro_batch must be at least 1")
        if self.completions % GROUP or self.completions % self.micro_batch:
            raise ValueError(
                f"completions={self.completions} must be a multiple of {GROUP} (a group) and of micro_batch="
                f"{self.micro_batch}"
            )


# -- the workload, the same for every arm --------------------------------------------------------------------


def build_model() -> PreTrainedModel:
    """A random Qwen3 model in fp32 that gives EOS a probability of about 1/32 at every position.

    Hidden dimension 0 is a constant of 16 beside 255 of variance 1: the embedding sets it and no layer writes
    it, so the final norm makes about ``16 / sqrt(511 / 256)`` of it everywhere. Of the head's rows only EOS's
    reads it, and all other logits are near 0.
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
    normalised = constant / math.sqrt((constant**2 + 255) / 256)
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
        model.lm_head.weight[EOS, 0] = math.log(odds * (VOCABULARY - 1)) / normalised
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: "<pad>", "<eos>", "w2", "w3", ..."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{token}": token for token in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_dataset(arguments: GrpoBenchArguments, seed: int) -> Dataset:
    """A prompt of 5 to 60 random tokens for every group of a run."""
    rng = random.Random(seed)
    groups = total_steps(arguments) * arguments.completions // GROUP
    lengths = [rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT) for _ in range(groups)]
    prompts = [" ".join(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(length)) for length in lengths]
    return Dataset.from_dict({"prompt": prompts})


class LengthReward:
    """Prefers completions of 20 tokens, and counts the tokens it saw."""

    __name__ = "length_reward"

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """A reward function under TRL's contract."""
        lengths = [len(ids) for ids in completion_ids]
        self.tokens += sum(lengths)
        return [-abs(length - 20) / LONGEST_COMPLETION for length in lengths]


def total_steps(arguments: GrpoBenchArguments) -> int:
    """Optimizer steps of a run, with those before and after the timed ones."""
    return WARM_UP_STEPS + arguments.steps + TRAILING_STEPS


def common_config(arguments: GrpoBenchArguments, seed: int, folder: str) -> dict[str, Any]:
    """The configuration that both trainers are given."""
    return {
        "output_dir": folder,
        "seed": seed,
        "max_steps": total_steps(arguments),
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.completions // arguments.micro_batch,
        "num_generations": GROUP,
        "max_completion_length": LONGEST_COMPLETION,
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
    }


# -- clocks --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stopwatch:
    """Wall and CPU seconds of a part of a step; ``cpu_clock`` says whose CPU time."""

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
    """An overlap meter that also takes each side's CPU time; both sides run on one thread each."""

    def __init__(self) -> None:
        super().__init__()
        self.generation_watch = Stopwatch(time.thread_time)
        self.training_watch = Stopwatch(time.thread_time)

    @contextmanager
    def training(self) -> Iterator[None]:
        """See ``OverlapMeter.training``."""
        with self.training_watch.running(), super().training():
            yield

    @contextmanager
    def forward(self) -> Iterator[EngineStep]:
        """See ``OverlapMeter.forward``."""
        with self.generation_watch.running(), super().forward() as step:
            yield step


class TimedSteps(TrainerCallback):
    """Reads all totals at both ends of the timed steps; ``per_step`` is their increase a step."""

    def __init__(self, steps: int, read: Callable[[], Figures]) -> None:
        self._steps = steps
        self._read = read
        self._start: Figures = {}
        self.per_step: Figures = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every optimizer step."""
        now = {"wall": time.perf_counter(), "cpu": time.process_time()} | self._read()
        if state.global_step == WARM_UP_STEPS:
            self._start = now
        elif state.global_step == WARM_UP_STEPS + self._steps:
            self.per_step = {name: (now[name] - self._start[name]) / self._steps for name in now}


def train_timed(trainer: Trainer, steps: int, read: Callable[[], Figures]) -> Figures:
    """Train, and return wall and CPU time and what ``read`` totals, per timed step."""
    timed = TimedSteps(steps, read)
    trainer.add_callback(timed)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return timed.per_step


# -- the arms ------------------------------------------------------------------------------------------------


def run_ours(arguments: GrpoBenchArguments, seed: int, max_staleness: int) -> Figures:
    """One training of ours."""
    from rlt_train.grpo import GRPOConfig, GRPOTrainer

    reward, meter = LengthReward(), ThreadMeter()
    with tempfile.TemporaryDirectory() as folder:
        common = common_config(arguments, seed, folder)
        config = GRPOConfig(**common, max_staleness=max_staleness, training_threads=1, engine_threads=1)
        dataset = build_dataset(arguments, seed)
        trainer = GRPOTrainer(build_model(), reward, config, dataset, processing_class=build_tokenizer())
        trainer.manager.overlap = meter

        def read() -> Figures:
            return {
                "generation_wall": meter.generation_watch.wall,
                "generation_cpu": meter.generation_watch.cpu,
                "training_wall": meter.training_watch.wall,
                "training_cpu": meter.training_watch.cpu,
                "trained_tokens": reward.tokens,
                "generated_tokens": trainer.manager.stats()["tokens_generated"],
            }

        return train_timed(trainer, arguments.steps, read)


def run_trl(arguments: GrpoBenchArguments, seed: int, continuous: bool) -> Figures:
    """One training of TRL, with as many intra-op threads as this process has."""
    from trl import GRPOConfig, GRPOTrainer

    reward = LengthReward()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **common_config(arguments, seed, folder),
            use_transformers_continuous_batching=continuous,
            transformers_continuous_batching_config=continuous_batching_sizes(arguments.completions),
        )
        dataset = build_dataset(arguments, seed)
        trainer = GRPOTrainer(build_model(), reward, config, dataset, processing_class=build_tokenizer())
        generation, inputs, step = (Stopwatch(time.process_time) for _ in range(3))
        trainer._generate_single_turn = generation.around(trainer._generate_single_turn)
        trainer._prepare_inputs = inputs.around(trainer._prepare_inputs)
        trainer.training_step = step.around(trainer.training_step)

        def read() -> Figures:
            return {
                "generation_wall": generation.wall,
                "generation_cpu": generation.cpu,
                # A training step first prepares its inputs (generation, rewards), then goes forward and back.
                "training_wall": step.wall - inputs.wall,
                "training_cpu": step.cpu - inputs.cpu,
                "trained_tokens": reward.tokens,
                "generated_tokens": reward.tokens,
            }

        return train_timed(trainer, arguments.steps, read)


def continuous_batching_sizes(completions: int) -> dict[str, int]:
    """Room for all completions of a step at once at their full length, and few more tokens a forward."""
    page_size = 16
    pages = math.ceil((LONGEST_PROMPT + LONGEST_COMPLETION) / page_size) + 1
    return {
        "page_size": page_size,
        "num_blocks": completions * pages,
        "max_batch_tokens": max(4 * completions, 2 * LONGEST_PROMPT),
        "max_requests_per_batch": completions,
    }


@dataclass(frozen=True, slots=True)
class Arm:
    """What an arm runs, and the intra-op threads of its process's main thread."""

    run: Callable[..., Figures]
    options: dict[str, Any]
    threads: int = 1


ARMS = {
    "ours": Arm(run_ours, {"max_staleness": 1}),
    "ours_on_policy": Arm(run_ours, {"max_staleness": 0}),
    "trl_generate.threads_1": Arm(run_trl, {"continuous": False}),
    "trl_generate.threads_2": Arm(run_trl, {"continuous": False}, threads=2),
    "trl_continuous_batching.threads_1": Arm(run_trl, {"continuous": True}),
    "trl_continuous_batching.threads_2": Arm(run_trl, {"continuous": True}, threads=2),
}


def start_process(threads: int) -> ProcessPoolExecutor:
    """A process that stays alive, with ``threads`` intra-op threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # inherited, for the threads that it starts
    pool = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
    pool.submit(prepare_process, threads).result()
    return pool


def prepare_process(threads: int) -> None:
    """Runs first in every arm's process."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)


def run_arm(name: str, arguments: GrpoBenchArguments, seed: int) -> Figures:
    """Runs in an arm's process."""
    return ARMS[name].run(arguments, seed, **ARMS[name].options)


def measure(arguments: GrpoBenchArguments) -> dict[str, Figures]:
    """Run all rounds; by arm the medians over the rounds, per step, and the mean length over all of them."""
    names = [name for name in ARMS if arguments.against == "trl" or name.startswith("ours")]
    measured: dict[str, list[Figures]] = {name: [] for name in names}
    with ExitStack() as stack:
        processes = {name: stack.enter_context(start_process(ARMS[name].threads)) for name in names}
        for seed in range(arguments.rounds):
            for name, process in processes.items():
                run = process.submit(run_arm, name, arguments, seed).result()
                measured[name].append(run)
                print(f"round {seed + 1}, {name}: {run['wall']:.2f} s, CPU {run['cpu']:.2f} s", flush=True)
    summaries = {}
    for name, runs in measured.items():
        summary = {figure: median(run[figure] for run in runs) for figure in runs[0]}
        summary["mean_length"] = mean(run["trained_tokens"] for run in runs) / arguments.completions
        summaries[name] = {figure: round(value, 3) for figure, value in summary.items()}
    return summaries


# -- the verdict ---------------------------------------------------------------------------------------------


def figures(arguments: GrpoBenchArguments, arms: dict[str, Figures]) -> dict[str, Any]:
    """What the JSON line holds."""
    result: dict[str, Any] = {}
    for clock in LEAST_SPEEDUP:
        theirs = [arm[clock] for name, arm in arms.items() if name.startswith("trl")]
        result[f"speedup_{clock}"] = round(min(theirs) / arms["ours"][clock], 3) if theirs else None
    for name, arm in arms.items():
        way, _, threads = name.partition(".")
        if threads:
            result.setdefault(way, {})[threads] = arm
        else:
            result[way] = arm
    load = round(os.getloadavg()[0], 2)
    return result | asdict(arguments) | {"cores": usable_cores(), "load_average": load}


def failed_claims(result: dict[str, Any], arms: dict[str, Figures]) -> list[str]:
    """One sentence for each claim that does not hold."""
    found = []
    for clock, least in LEAST_SPEEDUP.items():
        speedup = result[f"speedup_{clock}"]
        if speedup is not None and speedup < least:
            found.append(f"the {clock} time of a step is {speedup} times below TRL's best, not {least} times")
    lengths = {name: arm["mean_length"] for name, arm in arms.items()}
    if max(lengths.values()) > min(lengths.values()) * (1 + LENGTH_TOLERANCE):
        found.append(f"the mean completion lengths differ, so the arms did unequal work: {lengths}")
    return found


def print_table(arms: dict[str, Figures]) -> None:
    """Wall and CPU seconds per step, of all and of its two parts."""
    print(f"\n{'seconds per step':<36}{'all':>9}{'generation':>17}{'training':>15}{'mean':>15}{'tokens':>9}")
    print(f"{'':<36}" + f"{'wall':>8}{'CPU':>7}" * 3 + f"{'length':>9}{'a step':>9}")
    for name, arm in arms.items():
        print(f"{name:<36}", end="")
        for part in ("", "generation_", "training_"):
            print(f"{arm[part + 'wall']:>8.2f}{arm[part + 'cpu']:>7.2f}", end="")
        print(f"{arm['mean_length']:>9.1f}{arm['generated_tokens']:>9.0f}")


def main() -> int:
    """Print the rounds, the table, the failures and the JSON line; the exit code is 1 if a claim failed."""
    (arguments,) = HfArgumentParser(GrpoBenchArguments).parse_args_into_dataclasses()
    arms = measure(arguments)
    result = figures(arguments, arms)
    print_table(arms)
    if arguments.against == "trl":
        print(f"TRL's best over ours: wall {result['speedup_wall']}, CPU {result['speedup_cpu']}\n")
    failures = [] if arguments.quick else failed_claims(result, arms)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if result["load_average"] > result["cores"] + 0.5:
        print("other processes ran on these cores (see load_average): trust no wall time", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
