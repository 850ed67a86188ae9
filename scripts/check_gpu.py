"""Check attention, log-probs and the engine on a GPU, in less than five minutes.

    python scripts/check_gpu.py
    python scripts/check_gpu.py --backends triton flash3

Ceilings come first: bytes a second of a large copy (read and written), and floating-point operations a second
of a bfloat16 matrix product. Then, for every attention backend that is usable here:

* correctness: keys are written and attended on small batches of decodes and prefill chunks, for layers with
  grouped heads, windows, chunks, soft-caps, sinks and odd head sizes, against float64;
* a decode step of one layer, as the share of the bandwidth at which it reads its keys and values;
* a prefill of one layer, as the share of the measured operations a second, counting visible keys only.

The kernel of selective log-probs is compared with the chunked torch version, forward and backward: results,
time and memory. At last the whole engine generates with a random model, with CUDA graphs off and on where the
engine has them, and its log-probs are compared with an ordinary forward's.

Exits with code 2 and "no GPU" where there is none, and with 1 if a result is wrong. ``--device cpu`` runs the
same code on small shapes, to see that it runs; its figures mean nothing. What is left out: several GPUs, and
training.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import HfArgumentParser, Qwen3Config, Qwen3ForCausalLM

from rlt_kernels.reference import paged_attention
from rlt_train import RolloutManager, SamplingParams
from rlt_train.attention.contract import AttentionBackend, AttentionGroup, LayerSpec, PagedBatch, SequenceSpan
from rlt_train.attention.hardware import Hardware, detect_hardware
from rlt_train.attention.planner import Planner
from rlt_train.attention.selection import BACKENDS, find_backend, import_problem, incompatibility
from rlt_train.engine.sizes import EngineConfig
from rlt_train.grpo import logprobs

NO_GPU = 2
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYER = LayerSpec(32, 8, 128, 128**-0.5, None, None, False, torch.bfloat16)
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "MQA": {"query_heads": 7, "kv_heads": 1, "head_dim": 64},
    "MHA": {"query_heads": 4, "kv_heads": 4, "head_dim": 256},
    "head 80": {"query_heads": 8, "kv_heads": 2, "head_dim": 80},
    "window": {"sliding_window": 300},
    "short window": {"sliding_window": 5},
    "chunk": {"chunk": 200},
    "softcap": {"softcap": 3.0, "sliding_window": 128},
    "sinks": {"has_sinks": True, "sliding_window": 128, "head_dim": 64},
}
# (start, length): contexts of one, around a block, and of several blocks.
SPANS = [(0, 1), (255, 1), (256, 1), (700, 1), (0, 2), (250, 20), (500, 77)]


@dataclass
class GpuArguments:
    """What to check, and for how long."""

    device: str = field(default="cuda", metadata={"help": "cuda, or cpu to see that the script runs"})
    backends: list[str] = field(default_factory=lambda: list(BACKENDS[1:]), metadata={"help": "their names"})
    seconds: float = field(default=200.0, metadata={"help": "for attention, shared between the backends"})
    seed: int = field(default=0, metadata={"help": "seed of all numbers"})


class Bench:
    """A device, its clock, its random numbers, and how large the shapes are."""

    def __init__(self, arguments: GpuArguments) -> None:
        self.device = torch.device(arguments.device)
        self.large = self.device.type == "cuda"
        self.generator = torch.Generator(self.device).manual_seed(arguments.seed)
        self.deadline = time.perf_counter() + arguments.seconds

    def share_time(self, end: float, parts: int) -> None:
        """Let the next of ``parts`` parts have an equal share of the time until ``end``."""
        now = time.perf_counter()
        self.deadline = now + max(0.0, end - now) / parts

    def obstacle(self, name: str, hardware: Hardware, spec: LayerSpec, block_size: int) -> str | None:
        """Why a backend is not tried on a layer."""
        limits = find_backend(name).capabilities
        late = "no time left" if time.perf_counter() > self.deadline else None
        return incompatibility(limits, hardware, spec.dtype, [spec], block_size) or late

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def seconds(self, work: Callable[[], object], calls: int = 10) -> float:
        """Median seconds of ``work`` over rounds of several calls, after it is warm."""
        wait = torch.cuda.synchronize if self.large else lambda: None
        taken = []
        for _ in range(6):
            wait()
            started = time.perf_counter()
            for _ in range(calls if self.large else 1):
                work()
            wait()
            taken.append((time.perf_counter() - started) / (calls if self.large else 1))
        return median(taken[1:])


def ceilings(bench: Bench) -> dict[str, float]:
    """Bytes a second of a copy, and operations a second of a bfloat16 matrix product."""
    source = torch.zeros(2**30 if bench.large else 2**24, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    side = 8192 if bench.large else 256
    left, right = (bench.normal(side, side, dtype=torch.bfloat16) for _ in range(2))
    return {
        "bytes": 2 * source.nbytes / bench.seconds(lambda: target.copy_(source)),
        "flops": 2 * side**3 / bench.seconds(lambda: left @ right),
    }


# -- attention -----------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """One layer's step: its cache, which holds what was computed before, and the new rows."""

    spec: LayerSpec
    batch: PagedBatch
    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of ``attend``."""
        return {"scale": self.spec.scale, "softcap": self.spec.softcap, "sinks": self.sinks}

    def expected(self) -> Tensor:
        """The float64 reference, on the host, from the cache as it is."""
        spec, batch = self.spec, self.batch
        tensors = (self.query, self.keys, self.values, batch.tables, batch.contexts, batch.query_starts)
        sinks = None if self.sinks is None else self.sinks.cpu()
        return paged_attention(
            *(tensor.cpu() for tensor in tensors),
            window=spec.sliding_window,
            chunk=spec.chunk,
            **self.options | {"sinks": sinks},
        )


def build_problem(bench: Bench, spec: LayerSpec, block_size: int, spans: list[tuple[int, int]]) -> Problem:
    """Blocks scattered over a pool; all the cache is filled with random numbers."""
    counts = [-(-(start + length) // block_size) for start, length in spans]
    blocks = torch.randperm(sum(counts), generator=bench.generator, device=bench.device).cpu().split(counts)
    planned = [
        SequenceSpan([own.tolist()], start, length)
        for own, (start, length) in zip(blocks, spans, strict=True)
    ]
    rows, heads = sum(length for _, length in spans), (spec.kv_heads, spec.head_dim)
    store = (spec.kv_heads, sum(counts), block_size, spec.head_dim)
    sizes = [(rows, spec.query_heads, spec.head_dim), (rows, *heads), (rows, *heads), store, store]
    tensors = [bench.normal(*size, dtype=spec.dtype) for size in sizes]
    sinks = bench.normal(spec.query_heads, dtype=spec.dtype) if spec.has_sinks else None
    return Problem(spec, Planner(1, block_size, bench.device).plan(planned)[0], *tensors, sinks)


def start_backend(bench: Bench, name: str, problem: Problem) -> AttentionBackend:
    """A backend for the problem's layer, compiled."""
    block_size = problem.keys.shape[2]
    backend = find_backend(name)(AttentionGroup(problem.spec, (0,)), block_size, bench.device)
    backend.warmup(problem.keys, problem.values, len(problem.batch.lengths))
    return backend


def error_of(bench: Bench, name: str, problem: Problem) -> float:
    """Largest difference from float64 after writing and attending."""
    backend = start_backend(bench, name, problem)
    backend.write(problem.keys, problem.values, problem.batch, problem.key, problem.value)
    plan = backend.plan(problem.batch)
    output = backend.attend(problem.query, problem.keys, problem.values, plan, **problem.options)
    return (output.cpu().double() - problem.expected()).abs().max().item()


def check_attention(bench: Bench, name: str, hardware: Hardware) -> dict[str, float | str]:
    """The error of each case, or why the backend does not serve it."""
    found: dict[str, float | str] = {}
    block_size = 256 if name == "flash2" else 16
    for case, changes in CASES.items():
        spec = replace(replace(LAYER, query_heads=8, kv_heads=2), **changes)
        found[case] = bench.obstacle(name, hardware, spec, block_size) or error_of(
            bench, name, build_problem(bench, spec, block_size, SPANS)
        )
    return found


def time_attention(bench: Bench, name: str, hardware: Hardware, limits: dict[str, float]) -> dict[str, Any]:
    """Milliseconds and shares of the ceilings for a decode and a prefill of a layer as Llama 3 8B has it."""
    spec = LAYER if bench.large else replace(LAYER, query_heads=4, kv_heads=2, dtype=torch.float32)
    block_size = 256 if name == "flash2" else 16
    reason = bench.obstacle(name, hardware, spec, block_size)
    if reason is not None:
        return {"decode": reason, "prefill": reason}
    count, context, length = (64, 4096, 2048) if bench.large else (4, 128, 32)
    result: dict[str, Any] = {}
    for kind, spans in (("decode", [(context - 1, 1)] * count), ("prefill", [(0, length)] * 4)):
        problem = build_problem(bench, spec, block_size, spans)
        backend = start_backend(bench, name, problem)
        plan, tensors = backend.plan(problem.batch), (problem.query, problem.keys, problem.values)
        try:
            seconds = bench.seconds(lambda: backend.attend(*tensors, plan, **problem.options))  # noqa: B023
        except torch.OutOfMemoryError:
            result[kind] = "out of memory"
            continue
        nbytes = 2 * count * context * spec.kv_heads * spec.head_dim * spec.dtype.itemsize
        flops = 4 * spec.query_heads * spec.head_dim * len(spans) * length * (length + 1) // 2
        share = nbytes / limits["bytes"] if kind == "decode" else flops / limits["flops"]
        result[kind] = {"milliseconds": round(1000 * seconds, 3), "share": round(share / seconds, 3)}
    return result


def check_logprobs(bench: Bench) -> dict[str, Any]:
    """The fused kernel and the chunked version on one head, forward and backward."""
    tokens, width, vocab = (4096, 4096, 128_256) if bench.large else (16, 32, 500)
    dtype = torch.bfloat16 if bench.large else torch.float32
    head = nn.Linear(width, vocab, bias=False, device=bench.device, dtype=dtype)
    hidden = bench.normal(tokens, width, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=bench.generator, device=bench.device)
    chunk = logprobs.default_chunk(vocab)

    def run(lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        hidden.grad = head.weight.grad = None
        logps, _ = logprobs.chunked_logprobs(hidden, lm_head, targets, temperature=0.9, chunk_tokens=chunk)
        logps.mean().backward()
        return logps.detach()

    result: dict[str, Any] = {}
    outcome = {}
    # A function is no linear layer to the trainer, so it goes in chunks.
    for name, lm_head in (("fused", head), ("chunked", lambda rows: head(rows))):
        seconds = bench.seconds(lambda: run(lm_head), calls=2)  # noqa: B023
        outcome[name] = [run(lm_head), hidden.grad, head.weight.grad]
        result[name] = {"milliseconds": round(1000 * seconds, 2)}
        if bench.large:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(lm_head)
            result[name]["extra_mib"] = (torch.cuda.max_memory_allocated() - before) // 2**20
    pairs = zip(("logps", "hidden", "weight"), outcome["fused"], outcome["chunked"], strict=True)
    result["relative_error"] = {
        name: round(((a.float() - b.float()).norm() / b.float().norm()).item(), 6) for name, a, b in pairs
    }
    return result


# -- log-probs and the engine --------------------------------------------------------------------------------


def graph_options() -> dict[str, dict[str, bool]]:
    """Sizes of the engine with CUDA graphs off and on; only off while ``EngineConfig`` has no such option."""
    if "cuda_graphs" not in {option.name for option in fields(EngineConfig)}:
        return {"graphs off": {}}
    return {"graphs off": {"cuda_graphs": False}, "graphs on": {"cuda_graphs": True}}


def check_engine(bench: Bench) -> dict[str, Any]:
    """Tokens a second of a random model of 0.3 billion parameters, and its largest log-prob error in nats."""
    layers, hidden, rollouts, tokens = (12, 1024, 64, 256) if bench.large else (2, 64, 4, 8)
    config = Qwen3Config(
        vocab_size=32_000 if bench.large else 500,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(bench.device, torch.bfloat16 if bench.large else torch.float32).eval()
    prompts = torch.randint(config.vocab_size, (rollouts, 64), generator=bench.generator, device=bench.device)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    result: dict[str, Any] = {"graphs on": "not available"}
    for name, options in graph_options().items():
        with RolloutManager(model, rollouts_in_flight=rollouts, max_length=64 + tokens, **options) as manager:
            for _ in range(2):  # the first round compiles
                started = time.perf_counter()
                handles = [manager.submit(prompt, params) for prompt in prompts.tolist()]
                outputs = [handle.result(120) for handle in handles]
                seconds = time.perf_counter() - started
            backend = manager.attention_info["selected"]
        with torch.no_grad():
            ids = torch.tensor([outputs[0].prompt_ids + outputs[0].token_ids], device=bench.device)
            logits = model(ids).logits[0, 63:-1].float().log_softmax(dim=-1)
        expected = logits.gather(1, ids[0, 64:, None])[:, 0].cpu()
        result[name] = {
            "backend": backend,
            "tokens_per_second": round(rollouts * tokens / seconds),
            "logprob_error": round((expected - torch.tensor(outputs[0].logprobs)).abs().max().item(), 5),
        }
    return result


# -- the verdict ---------------------------------------------------------------------------------------------


def failed_checks(result: dict[str, Any]) -> list[str]:
    """One sentence for each wrong result."""
    found = []
    for name, report in result["backends"].items():
        for case, error in report.get("errors", {}).items():
            allowed = TOLERANCE[CASES[case].get("dtype", LAYER.dtype)]
            if not isinstance(error, str) and not error <= allowed:
                found.append(f"{name} is {error:.1e} away from float64 for {case!r}, over {allowed}")
    for name, error in result["logprobs"]["relative_error"].items():
        if not error <= 0.02:
            found.append(f"the fused kernel's {name} differ from the chunked version's by {error:.1%}")
    for name, report in result["engine"].items():
        if not isinstance(report, str) and not report["logprob_error"] <= 0.1:
            found.append(f"the engine ({name}) is {report['logprob_error']} nats away from a forward")
    return found


def print_tables(result: dict[str, Any]) -> None:
    """What a person reads."""
    limits = result["ceilings"]
    print(f"{result['device']}: {limits['bytes'] / 1e9:.0f} GB/s, {limits['flops'] / 1e12:.1f} TFLOP/s")
    for name, report in result["backends"].items():
        if "reason" in report:
            print(f"\n{name}: {report['reason']}")
            continue
        print(f"\n{name}")
        for case, error in report["errors"].items():
            print(f"  {case:<14}{error if isinstance(error, str) else f'error {error:.1e}'}")
        for kind, timing in report["timings"].items():
            print(f"  {kind:<14}{timing}")
    for part in ("logprobs", "engine"):
        print(f"\n{part}")
        for name, report in result[part].items():
            print(f"  {name:<14}{report}")


def unusable(name: str, hardware: Hardware) -> str | None:
    """Why a backend serves no layer at all here."""
    backend = find_backend(name)
    dtype = next(iter(backend.capabilities.dtypes))
    return incompatibility(backend.capabilities, hardware, dtype, [], 256) or import_problem(backend)


def measure(arguments: GpuArguments) -> dict[str, Any]:
    """All parts in turn."""
    bench = Bench(arguments)
    end = bench.deadline
    hardware = detect_hardware(bench.device)
    reasons = {name: unusable(name, hardware) for name in arguments.backends}
    usable = [name for name, reason in reasons.items() if reason is None]
    backends: dict[str, Any] = {name: {"reason": reason} for name, reason in reasons.items() if reason}
    with torch.inference_mode():
        limits = ceilings(bench)
        for index, name in enumerate(usable):
            bench.share_time(end, len(usable) - index)
            timings = time_attention(bench, name, hardware, limits)
            backends[name] = {"timings": timings, "errors": check_attention(bench, name, hardware)}
    return {
        "device": torch.cuda.get_device_name(bench.device) if bench.large else str(hardware),
        "ceilings": limits,
        "backends": backends,
        "logprobs": check_logprobs(bench),
        "engine": check_engine(bench),
    }


def main() -> int:
    """Print the tables, the failures and the JSON line."""
    (arguments,) = HfArgumentParser(GpuArguments).parse_args_into_dataclasses()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device here, so nothing was checked")
        return NO_GPU
    started = time.perf_counter()
    result = measure(arguments)
    result["seconds"] = round(time.perf_counter() - started, 1)
    failures = failed_checks(result)
    print_tables(result)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
