"""Time the decode attention of one layer on a CPU: its growth with the batch, and against a frozen reference.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --backends numba torch --kv_heads 2

The layer is one of a small model: 8 query heads over 4 KV heads of 64 numbers, float32, KV blocks of 16
tokens in random order. One intra-op thread. A step attends every layer of the pool and the next step other
sequences, and the pool is several times a last-level cache: keys and values always come from memory. Times
are medians over the rounds, all arms interleaved, because other processes come and go.

``scaling_128_over_32`` is the time of a layer for 128 sequences over that for 32, all of 320 tokens and drawn
from the same pool: 4 is linear. ``milliseconds`` are for a layer and 32 sequences of 128 to 512 tokens, which
fill their part of the pool, with the layer's share of the step's metadata, which is built once for the layers
of the pool (four by default). ``best_cpu_over_reference`` is the reference's time over the fastest backend's.
The reference is frozen in this file: sequences in buckets by length, each gathered with ``index_select``
(into memory that is kept, so that no fresh page is paid for) and attended by SDPA with a mask, query heads
folded over their KV head. ``bandwidth_share`` is the fastest backend's keys and values a second over what one
thread reads when it sums the pool from end to end, in the same rounds; a page here and there is slower.

Fails (exit code 1) if the scaling of a backend is above 4.6, the fastest is not 2.5 times as fast as the
reference, or a result is wrong. A backend that cannot be imported here is reported and left out. One that
does not serve such a layer is an error that says why: leave it out of ``--backends``. What is left out:
prefill, writing keys and values, and the rest of a model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import HfArgumentParser  # noqa: E402

from rlt_train.attention.contract import (  # noqa: E402
    AttentionBackend,
    AttentionGroup,
    LayerSpec,
    PagedBatch,
    SequenceSpan,
)
from rlt_train.attention.planner import Planner  # noqa: E402
from rlt_train.attention.selection import Selection, find_backend, import_problem, select_backend  # noqa: E402
from rlt_train.errors import BackendSelectionError  # noqa: E402
from rlt_train.threads import usable_cores  # noqa: E402

CPU = torch.device("cpu")
COUNTS = (8, 32, 128)
EQUAL_CONTEXT = 320
MIXED_CONTEXTS = tuple(np.linspace(128, 512, 32).astype(int).tolist())
MOST_SCALING = 4.6
LEAST_SPEEDUP = 2.5


@dataclass
class AttentionArguments:
    """The layer, and how long to measure."""

    backends: list[str] = field(
        default_factory=lambda: ["numba", "torch", "flex"], metadata={"help": "names of the backends to time"}
    )
    query_heads: int = field(default=8, metadata={"help": "query heads"})
    kv_heads: int = field(default=4, metadata={"help": "key and value heads"})
    head_dim: int = field(default=64, metadata={"help": "size of a head"})
    block_size: int = field(default=16, metadata={"help": "tokens of a KV block"})
    dtype: str = field(default="float32", metadata={"help": "dtype of keys and values"})
    pool_mb: int = field(default=256, metadata={"help": "size of the pool, several last-level caches"})
    rounds: int = field(default=5, metadata={"help": "interleaved rounds of all arms"})
    seed: int = field(default=0, metadata={"help": "seed of keys, values, queries and block tables"})


# -- the frozen reference ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReferenceBucket:
    """Sequences whose contexts are within a factor of two, padded to ``width`` blocks: int64 ``rows [n]`` and
    ``blocks [n * width]``, and bool ``mask [n, 1, 1, width * block_size]``, true where a key counts."""

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


class Reference:
    """Bucketed gather and SDPA. Frozen: it shares no code with the backends."""

    def __init__(self, spec: LayerSpec, block_size: int) -> None:
        self._spec = spec
        self._block_size = block_size
        self._gathered = [torch.empty(0, dtype=spec.dtype) for _ in range(2)]

    def plan(self, batch: PagedBatch) -> list[ReferenceBucket]:
        """The buckets of a batch of decodes."""
        contexts = batch.host_contexts
        size = np.ceil(np.log2(contexts))
        buckets = []
        for one in np.unique(size):
            rows = np.flatnonzero(size == one)
            width = -(-int(contexts[rows].max()) // self._block_size)
            mask = np.arange(width * self._block_size) < contexts[rows, None]
            buckets.append(
                ReferenceBucket(
                    rows=torch.from_numpy(rows),
                    blocks=torch.from_numpy(batch.host_tables[rows, :width].astype(np.int64).reshape(-1)),
                    mask=torch.from_numpy(mask[:, None, None]),
                )
            )
        return buckets

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: list[ReferenceBucket]
    ) -> torch.Tensor:
        """As ``AttentionBackend.attend``."""
        spec, output = self._spec, torch.empty_like(query)
        for bucket in plan:
            n = len(bucket.rows)
            key, value = (self._gather(i, store, bucket.blocks, n) for i, store in enumerate((keys, values)))
            folded = query[bucket.rows].view(n, spec.kv_heads, -1, spec.head_dim)
            result = torch.nn.functional.scaled_dot_product_attention(
                folded, key, value, attn_mask=bucket.mask, scale=spec.scale
            )
            output[bucket.rows] = result.reshape(n, spec.query_heads, spec.head_dim)
        return output

    def _gather(self, which: int, store: torch.Tensor, blocks: torch.Tensor, n: int) -> torch.Tensor:
        shape = (store.shape[0], len(blocks), *store.shape[2:])
        size = int(np.prod(shape))
        if self._gathered[which].numel() < size:
            self._gathered[which] = torch.empty(size, dtype=store.dtype)
        gathered = self._gathered[which][:size].view(shape)
        torch.index_select(store, 1, blocks, out=gathered)
        return gathered.view(store.shape[0], n, -1, store.shape[3]).transpose(0, 1)


# -- what is timed -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pool:
    """Keys and values of some layers, ``[kv_heads, blocks, block_size, head_dim]`` each."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    block_size: int
    generator: np.random.Generator

    def batches(self, contexts: Sequence[int], filled: bool) -> list[list[SequenceSpan]]:
        """Decodes of the given contexts in as many disjoint sets of blocks as there are, in random order: all
        that is read before anything is read again. With ``filled`` a batch has all blocks of its part of the
        pool, as a pool is sized for what runs; else its blocks are anywhere, whatever its size."""
        counts = [-(-context // self.block_size) for context in contexts]
        ends, found = np.cumsum(counts), []
        order = self.generator.permutation(self.layers[0][0].shape[1])
        for first in range(0, len(order) - sum(counts) + 1, sum(counts)):
            blocks = order[first : first + sum(counts)]
            blocks = first + blocks.argsort() if filled else blocks
            tables = [blocks[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)]
            decodes = [SequenceSpan([t], context - 1, 1) for t, context in zip(tables, contexts, strict=True)]
            found.append(decodes)
        return found


def build_pool(arguments: AttentionArguments, spec: LayerSpec) -> Pool:
    """A pool of random numbers: each layer holds the largest batch, and there are at least two."""
    blocks = max(COUNTS) * -(-EQUAL_CONTEXT // arguments.block_size)
    shape = (spec.kv_heads, blocks, arguments.block_size, spec.head_dim)
    nbytes = 2 * int(np.prod(shape)) * spec.dtype.itemsize
    layers = max(2, -(-arguments.pool_mb * 2**20 // nbytes))
    torch.manual_seed(arguments.seed)
    stores = [tuple(torch.randn(shape, dtype=spec.dtype) for _ in range(2)) for _ in range(layers)]
    return Pool(stores, arguments.block_size, np.random.default_rng(arguments.seed))


@dataclass(slots=True)
class Arm:
    """One backend, or the reference, on one kind of batch.

    Attributes:
        plan, attend: what it does once a step, after the planner, and once a layer.
        pool, batches: what is attended to: decodes of the pool, taken in turn.
        query: ``[decodes, query_heads, head_dim]``.
        metadata: whether planning is timed.
    """

    plan: Callable[[PagedBatch], Any]
    attend: Callable[..., torch.Tensor]
    planner: Planner
    pool: Pool
    batches: list[list[SequenceSpan]]
    query: torch.Tensor
    metadata: bool

    def step(self, spans: list[SequenceSpan]) -> tuple[torch.Tensor, float]:
        """Plan, then attend every layer: the result of the last, and the seconds a layer."""
        started = time.perf_counter()
        plan = self.plan(self.planner.plan(spans)[0])
        planned = time.perf_counter()
        for keys, values in self.pool.layers:
            output = self.attend(self.query, keys, values, plan)
        took = time.perf_counter() - (started if self.metadata else planned)
        return output, took / len(self.pool.layers)

    def first_result(self) -> torch.Tensor:
        """What it makes of the first batch, in the last layer."""
        return self.step(self.batches[0])[0]

    def seconds(self) -> float:
        """Mean seconds a layer, over all batches in turn."""
        return fmean(self.step(batch)[1] for batch in self.batches)


def select(arguments: AttentionArguments, spec: LayerSpec) -> tuple[list[Selection], dict[str, str]]:
    """The backends to time, and the reasons of those that cannot be imported.

    Raises:
        BackendSelectionError: a backend does not fit the layer, or none is left.
    """
    chosen, missing = [], {}
    select_backend("auto", CPU, spec.dtype, [spec], arguments.block_size)  # the error lists all candidates
    for name in arguments.backends:
        try:
            chosen.append(select_backend(name, CPU, spec.dtype, [spec], arguments.block_size))
        except BackendSelectionError:
            problem = import_problem(find_backend(name))
            if problem is None:
                raise
            missing[name] = problem
    if not chosen:
        raise BackendSelectionError(f"no backend of {arguments.backends} can be used here: {missing}")
    return chosen, missing


def start_backend(selection: Selection, spec: LayerSpec, pool: Pool) -> AttentionBackend:
    """Make a backend and compile what it compiles."""
    layers = tuple(range(len(pool.layers)))
    backend = selection.backend(AttentionGroup(spec, layers), pool.block_size, CPU)
    backend.warmup(*pool.layers[0], max(COUNTS))
    print(f"{selection.selected}: {backend.warmup_report or 'ready'}")
    return backend


def build_arms(
    backends: dict[str, AttentionBackend], spec: LayerSpec, pool: Pool
) -> dict[tuple[str, str], Arm]:
    """The arms by (backend or "reference", kind of batch): a number of equal contexts, or "mixed"."""
    options = {"scale": spec.scale, "softcap": None, "sinks": None}
    reference, planner = Reference(spec, pool.block_size), Planner(1, pool.block_size, CPU)
    kinds = {str(count): (EQUAL_CONTEXT,) * count for count in COUNTS} | {"mixed": MIXED_CONTEXTS}
    arms = {}
    for kind, contexts in kinds.items():
        query = torch.randn(len(contexts), spec.query_heads, spec.head_dim, dtype=spec.dtype)
        mixed = kind == "mixed"
        shared = (planner, pool, pool.batches(contexts, filled=mixed), query, mixed)
        for name, backend in backends.items():
            arms[name, kind] = Arm(backend.plan, partial(backend.attend, **options), *shared)
        arms["reference", kind] = Arm(reference.plan, reference.attend, *shared)
    return {place: arm for place, arm in arms.items() if place[0] != "reference" or place[1] == "mixed"}


def read_pool(pool: Pool) -> float:
    """Bytes a second when one thread sums the pool from end to end."""
    stores = [store.view(torch.float32) for layer in pool.layers for store in layer]
    started = time.perf_counter()
    for store in stores:
        store.sum()
    return sum(store.nbytes for store in stores) / (time.perf_counter() - started)


def wrong_results(arms: dict[tuple[str, str], Arm], tolerance: float) -> list[str]:
    """One sentence for each backend whose result is not the reference's; also warms every arm up."""
    expected = arms["reference", "mixed"].first_result()
    found = []
    for (name, kind), arm in arms.items():
        result = arm.first_result()
        if kind == "mixed" and not torch.allclose(result, expected, atol=tolerance):
            found.append(f"{name} is {(result - expected).abs().max():.1e} away from the reference")
    return found


# -- the verdict ---------------------------------------------------------------------------------------------


def figures(
    arguments: AttentionArguments,
    measured: dict[tuple[str, str], list[float]],
    bandwidths: list[float],
    missing: dict[str, str],
) -> dict[str, Any]:
    """What the JSON line holds; times are medians over the rounds."""
    took = {place: median(seconds) for place, seconds in measured.items()}
    names = sorted({name for name, _ in took} - {"reference"})
    best = min(names, key=lambda name: took[name, "mixed"])
    token = 2 * arguments.kv_heads * arguments.head_dim * getattr(torch, arguments.dtype).itemsize
    bandwidth = median(bandwidths)
    return {
        "scaling_128_over_32": {name: round(took[name, "128"] / took[name, "32"], 3) for name in names},
        "best_cpu_over_reference": round(took["reference", "mixed"] / took[best, "mixed"], 3),
        "milliseconds": {name: round(1000 * took[name, "mixed"], 3) for name in names},
        "bandwidth_share": round(sum(MIXED_CONTEXTS) * token / took[best, "mixed"] / bandwidth, 3),
        "best": best,
        "reference_milliseconds": round(1000 * took["reference", "mixed"], 3),
        "equal_milliseconds": {
            name: {str(count): round(1000 * took[name, str(count)], 3) for count in COUNTS} for name in names
        },
        "read_gb_per_second": round(bandwidth / 1e9, 2),
        "missing": missing,
        "rounds": arguments.rounds,
        "cores": usable_cores(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def failed_claims(result: dict[str, Any]) -> list[str]:
    """One sentence for each claim that does not hold."""
    found = [
        f"{name} takes {scaling} times as long for 128 sequences as for 32, over {MOST_SCALING}"
        for name, scaling in result["scaling_128_over_32"].items()
        if scaling > MOST_SCALING
    ]
    if result["best_cpu_over_reference"] < LEAST_SPEEDUP:
        found.append(
            f"{result['best']} is only {result['best_cpu_over_reference']} times as fast as the reference, "
            f"less than {LEAST_SPEEDUP}"
        )
    return found


def print_table(result: dict[str, Any]) -> None:
    """Milliseconds of one layer by backend and batch."""
    print(
        f"{'milliseconds a layer':<22}" + "".join(f"{count:>9}" for count in COUNTS) + "    mixed  128 / 32"
    )
    for name, times in result["equal_milliseconds"].items():
        row = "".join(f"{times[str(count)]:>9.2f}" for count in COUNTS)
        scaling = result["scaling_128_over_32"][name]
        print(f"{name:<22}{row}{result['milliseconds'][name]:>9.2f}{scaling:>10.2f}")
    print(f"{'reference':<22}{'':>27}{result['reference_milliseconds']:>9.2f}")
    for name, reason in result["missing"].items():
        print(f"{name:<22}{reason}")
    speedup, share = result["best_cpu_over_reference"], f"{result['bandwidth_share']:.0%}"
    print(f"{result['best']}: {speedup} times the reference, {share} of {result['read_gb_per_second']} GB/s")


def measure(arguments: AttentionArguments, spec: LayerSpec) -> tuple[dict[str, Any], list[str]]:
    """Run all arms in turn; returns the figures and what failed."""
    chosen, missing = select(arguments, spec)
    pool = build_pool(arguments, spec)
    arms = build_arms({s.selected: start_backend(s, spec, pool) for s in chosen}, spec, pool)
    failures = wrong_results(arms, 1e-4 if spec.dtype == torch.float32 else 2e-2)
    measured: dict[tuple[str, str], list[float]] = {place: [] for place in arms}
    bandwidths = []
    for _ in range(arguments.rounds):
        for place, arm in arms.items():
            measured[place].append(arm.seconds())
        bandwidths.append(read_pool(pool))
    result = figures(arguments, measured, bandwidths, missing)
    return result, failures + failed_claims(result)


def main() -> int:
    """Print the table, the failures and the JSON line; the exit code is 1 if a claim failed."""
    (arguments,) = HfArgumentParser(AttentionArguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    spec = LayerSpec(
        query_heads=arguments.query_heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        scale=arguments.head_dim**-0.5,
        sliding_window=None,
        softcap=None,
        has_sinks=False,
        dtype=getattr(torch, arguments.dtype),
    )
    try:
        with torch.inference_mode():
            result, failures = measure(arguments, spec)
    except BackendSelectionError as error:
        print(error, file=sys.stderr)
        return 1
    print_table(result)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures and result["load_average"] > result["cores"] + 0.5:
        print("other processes ran here (see load_average): run again on an idle machine", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
