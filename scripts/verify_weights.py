"""Show that generating while training changes no weight: train alone, train beside a busy engine, compare.

    python scripts/verify_weights.py --steps 300 --attn sdpa --sampling sampled --dropout 0.1 --family dense
    python scripts/verify_weights.py --backend flex --steps 60
    python scripts/verify_weights.py --engine transformers

Both runs start from the same weights, the same seed and the same pre-drawn batches. Beside the second one, a
rollout manager generates from the very parameters that are trained, paused only for the optimizer step. Fails
(exit code 1) if the sha256 of the weights differs after any step, if a request failed, or if fewer than half
of the engine's forwards overlapped a training forward or backward: then the comparison would show little.
After a third of the steps the attention backends compile anew in the fence of a step (``flex`` from empty
caches), which must leave no trace either.
``--engine transformers`` puts transformers' own continuous batching beside training, fenced in the same way.
What is left out: gradient accumulation, schedules and clipping, which touch nothing that is shared.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Beside the engine there are more threads than cores: one that spins at a barrier takes another's core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.optim import AdamW, Optimizer  # noqa: E402
from transformers import HfArgumentParser, PreTrainedModel  # noqa: E402

from rlt_train import RolloutManager, SamplingParams  # noqa: E402
from rlt_train.errors import EngineStoppedError  # noqa: E402
from rlt_train.fence import fence_optimizer  # noqa: E402
from rlt_train.overlap import OverlapMeter  # noqa: E402
from rlt_train.weights import equivalence, fingerprint  # noqa: E402
from rlt_train.weights.equivalence import TrainingRecord, TrainingTask  # noqa: E402

VOCABULARY = 512
SLOTS = 16  # sequences that decode at once
LONGEST_PROMPT = 96
CHUNK = 48  # tokens of one engine forward: a longer prompt is prefilled in chunks
MOST_NEW_TOKENS = 32
LEAST_OVERLAP = 0.5


@dataclass
class VerifyArguments:
    """Which run to compare."""

    steps: int = field(default=300, metadata={"help": "optimizer steps of each run"})
    attn: Literal["sdpa", "eager"] = field(default="sdpa", metadata={"help": "attention in training"})
    sampling: Literal["greedy", "sampled"] = field(default="sampled", metadata={"help": "engine's choice"})
    dropout: float = field(default=0.1, metadata={"help": "attention dropout in training"})
    threads: Literal[1, 2] = field(default=1, metadata={"help": "training's threads; the engine has 1"})
    family: Literal["dense", "moe"] = field(default="dense", metadata={"help": "Qwen3 or Qwen3-MoE"})
    engine: Literal["rlt", "transformers"] = field(default="rlt", metadata={"help": "whose engine generates"})
    backend: str = field(default="auto", metadata={"help": "attention backend of rlt's engine"})
    seed: int = field(default=0, metadata={"help": "seed of weights, batches, dropout and prompts"})
    hidden: int = field(default=64, metadata={"help": "width of the model"})
    layers: int = field(default=4, metadata={"help": "number of layers"})
    batch_size: int = field(default=8, metadata={"help": "sequences in a training batch"})
    length: int = field(default=64, metadata={"help": "tokens of a training sequence"})
    output: str | None = field(default=None, metadata={"help": "keep the two ledgers in this folder"})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: take at least 1 step")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout {self.dropout}: give a probability in [0, 1)")


class Prompt(NamedTuple):
    """One submission: ``samples`` rollouts of one prompt."""

    ids: list[int]
    samples: int
    params: SamplingParams


@dataclass(slots=True)
class EngineReport:
    """What the engine was told to do beside training, and what it did.

    Attributes:
        backend: attention backend asked for.
        warmup_step: the optimizer step in whose fence the backends compile anew; ``None`` for none.
        warmup: what came of that, in the backends' words.
    """

    backend: str = "auto"
    warmup_step: int | None = None
    warmup: str | None = None
    tokens_generated: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    engine_forwards: int = 0
    overlapping_forwards: int = 0
    longest_pause_wait_ms: float | None = None  # where it is measured
    details: dict[str, int] = field(default_factory=dict)

    @property
    def overlap(self) -> float:
        """Share of the forwards that overlapped training compute."""
        return self.overlapping_forwards / self.engine_forwards if self.engine_forwards else 0.0

    def add_forwards(self, meter: OverlapMeter) -> None:
        """Take the counts of a run."""
        self.engine_forwards, self.overlapping_forwards = meter.forwards, meter.overlapping_forwards


def build_model(arguments: VerifyArguments) -> PreTrainedModel:
    """A randomly initialised Qwen3 or Qwen3-MoE model in fp32, the same at each call."""
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden // 4,
        attention_dropout=arguments.dropout,
        attn_implementation=arguments.attn,
    )
    torch.manual_seed(arguments.seed)
    if arguments.family == "dense":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=arguments.hidden // 2)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))


def build_task(arguments: VerifyArguments) -> TrainingTask:
    """AdamW steps on token batches that are all drawn beforehand, from a stream of their own."""
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    shape = (arguments.batch_size, arguments.length)
    drawn = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(arguments.steps)]
    return TrainingTask(
        model=partial(build_model, arguments),
        batches=[{"input_ids": tokens, "labels": tokens} for tokens in drawn],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
        seed=arguments.seed + 2,
        threads=arguments.threads,
    )


def draw_prompts(arguments: VerifyArguments, count: int = 48) -> list[Prompt]:
    """Prompts of mixed lengths, some longer than a chunk, some repeated, single and in groups."""
    generator = torch.Generator().manual_seed(arguments.seed + 3)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    prompts: list[Prompt] = []
    for index in range(count):
        ids = torch.randint(VOCABULARY, (number(1, LONGEST_PROMPT),), generator=generator).tolist()
        if index % 3 == 2:  # the prompt before and a little more: a prefix hit unless the weights changed
            ids = (prompts[-1].ids + ids)[: max(len(prompts[-1].ids), LONGEST_PROMPT // 2)]
        params = SamplingParams(max_new_tokens=number(4, MOST_NEW_TOKENS), temperature=0.0, ignore_eos=True)
        if arguments.sampling == "sampled":
            top_k, top_p = ((0, 1.0), (20, 1.0), (0, 0.9))[index % 3]
            params = replace(params, temperature=1.0, top_k=top_k, top_p=top_p)
        prompts.append(Prompt(ids, 4 if index % 4 == 0 else 1, params))
    return prompts


# -- rlt_train's manager -------------------------------------------------------------------------------------


@contextmanager
def beside_manager(
    prompts: list[Prompt], report: EngineReport, model: PreTrainedModel, optimizer: Optimizer
) -> Iterator[OverlapMeter]:
    """A rollout manager that never idles, fenced by the optimizer's steps."""
    manager = RolloutManager(
        model,
        rollouts_in_flight=SLOTS,
        max_length=LONGEST_PROMPT + MOST_NEW_TOKENS,
        max_tokens_per_step=CHUNK,
        engine_threads=1,
        attention_backend=report.backend,
    )
    with ExitStack() as stack:
        time_pauses(manager, optimizer, report, stack)
        stack.callback(fence_optimizer(optimizer, manager))
        compile_midway(manager, optimizer, report, stack)
        stack.enter_context(manager)
        keep_busy(manager, prompts, report, stack)
        try:
            yield manager.overlap
        finally:
            stats = manager.stats()
            report.add_forwards(manager.overlap)
            report.tokens_generated = int(stats["tokens_generated"])
            names = ("policy_version", "prompt_tokens", "prompt_tokens_reused", "preemptions")
            report.details = {name: int(stats[name]) for name in names}


def keep_busy(manager: RolloutManager, prompts: list[Prompt], report: EngineReport, stack: ExitStack) -> None:
    """Keep twice as many rollouts unfinished as there are slots, refilling on the engine thread."""
    supply = cycle(prompts)

    def refill() -> None:
        while manager.stats()["unfinished"] < 2 * SLOTS:
            manager.submit_group(*next(supply))

    def finished(output: Any) -> None:
        report.requests_finished += 1
        report.requests_failed += output.error is not None
        with suppress(EngineStoppedError):  # the run is over
            refill()

    refill()
    stack.callback(manager.on("finished", finished))


def compile_midway(
    manager: RolloutManager, optimizer: Optimizer, report: EngineReport, stack: ExitStack
) -> None:
    """Let the attention backends compile anew in one optimizer step. Call it after the fence, whose pause it
    uses."""
    steps = count(1)

    def warm_up(*_: Any) -> None:
        if next(steps) != report.warmup_step:
            return
        with empty_caches() if report.backend == "flex" else nullcontext():
            manager.warmup()
        groups = manager.attention_info["groups"]
        report.warmup = "; ".join(str(group["warmup"]) for group in groups)

    stack.callback(optimizer.register_step_pre_hook(warm_up).remove)


def empty_caches() -> AbstractContextManager[None]:
    """While open, PyTorch's compiler finds nothing that it compiled before, in this process or another."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def time_pauses(
    manager: RolloutManager, optimizer: Optimizer, report: EngineReport, stack: ExitStack
) -> None:
    """Note the longest time from an optimizer step's start to the granted pause. Call it before the fence."""
    asked = [0.0]

    def granted() -> None:
        waited = 1000 * (time.perf_counter() - asked[0])
        report.longest_pause_wait_ms = max(report.longest_pause_wait_ms or 0.0, round(waited, 2))

    asks = optimizer.register_step_pre_hook(lambda *_: asked.__setitem__(0, time.perf_counter()))
    stack.callback(asks.remove)
    stack.callback(manager.on("paused", granted))


# -- transformers' own continuous batching -------------------------------------------------------------------


@contextmanager
def beside_transformers(
    prompts: list[Prompt], report: EngineReport, model: PreTrainedModel, optimizer: Optimizer
) -> Iterator[OverlapMeter]:
    """transformers' continuous-batching manager on the same model, kept busy and fenced in the same way."""
    sampled = prompts[0].params.temperature > 0
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=sampled, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=1024, max_batch_tokens=CHUNK, max_requests_per_batch=SLOTS
        ),
    )
    meter = OverlapMeter()
    with ExitStack() as stack:
        manager.start()
        stack.callback(manager.stop, timeout=60, hard_stop=True)
        fence_with(manager.pause, optimizer, stack)
        count_forwards(model, threading.get_ident(), meter, stack)
        feed_transformers(manager, prompts, report, stack)
        try:
            yield meter
        finally:
            report.add_forwards(meter)


def fence_with(pause: Callable[[], Any], optimizer: Optimizer, stack: ExitStack) -> None:
    """Hold ``pause()`` open during every step of the optimizer."""
    held = ExitStack()
    stack.enter_context(held)
    before = optimizer.register_step_pre_hook(lambda *_: held.enter_context(pause()) and None)
    after = optimizer.register_step_post_hook(lambda *_: held.close())
    stack.callback(before.remove)
    stack.callback(after.remove)


def count_forwards(model: PreTrainedModel, thread: int, meter: OverlapMeter, stack: ExitStack) -> None:
    """Tell ``meter`` of every forward of ``model`` on another thread than ``thread``, the training one."""
    running = ExitStack()

    def begins(*_: Any) -> None:
        if threading.get_ident() != thread:
            running.enter_context(meter.forward())

    def ends(*_: Any) -> None:
        if threading.get_ident() != thread:
            running.close()

    stack.callback(model.register_forward_pre_hook(begins).remove)
    stack.callback(model.register_forward_hook(ends).remove)


def feed_transformers(manager: Any, prompts: list[Prompt], report: EngineReport, stack: ExitStack) -> None:
    """Submit a prompt for every result, from a thread of its own: that manager has no such hook."""
    over = threading.Event()

    def feed() -> None:
        unfinished, supply = 0, cycle(prompts)
        while not over.is_set() and manager.is_running():
            while unfinished < 2 * SLOTS:
                prompt = next(supply)
                for _ in range(prompt.samples):
                    manager.add_request(prompt.ids, max_new_tokens=prompt.params.max_new_tokens)
                unfinished += prompt.samples
            output = manager.get_result(timeout=0.1)
            if output is not None:
                unfinished -= 1
                report.requests_finished += 1
                report.requests_failed += output.error is not None
                report.tokens_generated += len(output.generated_tokens)

    thread = threading.Thread(target=feed, name="feeder", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(over.set)


# -- the verdict ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verdict:
    """The comparison and what went wrong, if anything: an empty ``failures`` is a pass."""

    comparison: equivalence.Comparison
    alone: TrainingRecord
    together: TrainingRecord
    report: EngineReport
    error: str | None = None
    alone_repeats: bool | None = None

    @property
    def failures(self) -> list[str]:
        """One sentence for each claim that does not hold."""
        found = []
        if self.error is not None:
            found.append(f"training beside the engine raised {self.error}")
        if not self.comparison.equal:
            names = self.comparison.divergent_parameters
            what = f" in {names[0]} and {len(names) - 1} more" if names else ""
            found.append(f"the weights differ after step {self.comparison.first_divergent_step}{what}")
        if self.alone_repeats is False:
            found.append("training alone does not repeat itself either: its arithmetic varies")
        if self.report.overlap < LEAST_OVERLAP:
            share = f"{self.report.overlap:.1%} of the engine's forwards"
            found.append(f"{share} overlapped training compute; {LEAST_OVERLAP:.0%} are needed")
        if "did not compile" in (self.report.warmup or ""):
            found.append(f"the attention backend {self.report.warmup}")
        if self.report.requests_failed:
            found.append(f"{self.report.requests_failed} requests failed")
        return found


def verify(arguments: VerifyArguments, folder: Path) -> Verdict:
    """Run both, compare, and, if they differ, check that training alone repeats itself."""
    task, prompts = build_task(arguments), draw_prompts(arguments)
    report = EngineReport(backend=arguments.backend, warmup_step=max(1, arguments.steps // 3))
    beside = partial(beside_manager if arguments.engine == "rlt" else beside_transformers, prompts, report)
    alone = equivalence.run_alone(task, folder / "alone.jsonl")
    error = None
    try:
        together = equivalence.run_together(task, folder / "together.jsonl", beside)
    except Exception as raised:  # an engine that breaks training is a result, too: report the steps before
        error = f"{type(raised).__name__}: {raised}"
        together = TrainingRecord(ledger=fingerprint.read_ledger(folder / "together.jsonl"))
    verdict = Verdict(equivalence.compare(alone, together), alone, together, report, error)
    if (step := verdict.comparison.first_divergent_step) is not None:
        again = equivalence.run_alone(
            replace(task, batches=task.batches[:step]), folder / "alone_again.jsonl"
        )
        verdict.alone_repeats = all(alone.ledger[at] == sha256 for at, sha256 in again.ledger.items())
    return verdict


def figures(arguments: VerifyArguments, verdict: Verdict) -> dict[str, Any]:
    """What the JSON line holds."""
    comparison, report = verdict.comparison, verdict.report
    counts = asdict(report)
    details = counts.pop("details")
    settings = ("engine", "family", "attn", "sampling", "dropout", "threads", "steps")
    return {name: getattr(arguments, name) for name in settings} | {
        "passed": not verdict.failures,
        "equal": comparison.equal,
        "first_divergent_step": comparison.first_divergent_step,
        "divergent_parameter": next(iter(comparison.divergent_parameters), None),
        "divergent_parameters": len(comparison.divergent_parameters),
        "alone_repeats": verdict.alone_repeats,
        "error": verdict.error,
        **counts,
        **details,
        "overlapping_share": round(report.overlap, 4),
        "final_sha256": verdict.alone.ledger[arguments.steps],
        "seconds_alone": round(verdict.alone.seconds, 2),
        "seconds_together": round(verdict.together.seconds, 2),
    }


def main() -> int:
    """Print the table, the failures and the JSON line; the exit code is 1 if anything failed."""
    (arguments,) = HfArgumentParser(VerifyArguments).parse_args_into_dataclasses()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.output or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        verdict = verify(arguments, folder)
    result = figures(arguments, verdict)
    for name, value in result.items():
        print(f"{name:<22} {'-' if value is None else value}")
    for failure in verdict.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(verdict.failures))


if __name__ == "__main__":
    sys.exit(main())
