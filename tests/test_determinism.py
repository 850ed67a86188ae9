"""A sample does not depend on batch-mates, arrival, chunking, preemption, groups or prefix hits."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import VOCAB, drive, generated, new_engine, prompt, request, sampling, smaller

from rlt_train.engine.engine import Engine, new_group
from rlt_train.engine.sampling import uniforms
from rlt_train.engine.scheduler import ScheduledStep

NEW_TOKENS = 12
PARAMS = sampling(max_new_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, ignore_eos=True)
PROMPTS = {f"p{i}": prompt(length, i) for i, length in enumerate((1, 2, 7, 8, 13, 20, 31))}
PROMPTS |= {
    "p7": prompt(31, 6)[:16] + prompt(5, 50),
    "p8": prompt(31, 6)[:16] + prompt(6, 51),
}  # shared starts
MEMBERS = 3


@dataclass(slots=True)
class Variation:
    """Everything that must not matter."""

    sizes: dict[str, Any]
    order: list[str]
    groups: bool
    strangers: int
    staggered: bool


def variation(rng: random.Random) -> Variation:
    slots = rng.randint(2, 9)
    sizes = {
        "rollouts_in_flight": slots,
        "max_tokens_per_step": rng.choice([slots, 12, 40, 200]),
        "block_size": rng.choice([1, 3, 4, 16]),
        "max_length": 48,
    }
    if sizes["max_tokens_per_step"] < slots:
        sizes["max_tokens_per_step"] = slots
    if rng.random() < 0.6:  # a cache for two sequences or so: preemption
        per_token = 2 * 2 * 2 * 8 * 4
        sizes["kv_cache_gib"] = rng.choice([70, 100]) * per_token / 2**30
    order = list(PROMPTS)
    rng.shuffle(order)
    return Variation(sizes, order, rng.random() < 0.5, rng.randint(0, 3), rng.random() < 0.5)


def sample_all(engine: Engine, how: Variation, rng: random.Random) -> dict[str, list[int]]:
    """The tokens of every member of every prompt, by request id."""
    finished: dict[str, Any] = {}
    for index in range(how.strangers):
        engine.add(request(f"stranger-{index}", prompt(rng.randint(1, 30), 90 + index), PARAMS, seed=999))
    for name in how.order:
        group = new_group(MEMBERS) if how.groups else None
        for member in range(MEMBERS):
            seed = zlib.crc32(f"{name}-{member}".encode())
            engine.add(request(f"{name}-{member}", PROMPTS[name], PARAMS, seed=seed, group=group))
        if how.staggered:
            finished |= {s.request.request_id: s for s in engine.step().finished}
    if how.strangers:
        engine.cancel("stranger-0")
    finished |= drive(engine)
    return {name: generated(s) for name, s in finished.items() if not name.startswith("stranger")}


def of_the_tokens_alone(engine: Engine) -> None:
    """Replace the forward by logits that are a function of a sequence's own tokens."""

    def logits(tokens: list[int]) -> torch.Tensor:
        seed = zlib.crc32(",".join(map(str, tokens)).encode())
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2

    def run(step: ScheduledStep) -> torch.Tensor:
        rows = [logits(s.sequence.tokens[: s.start + s.length]) for s in step.spans if s.samples]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    engine._runner.run = run  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def model() -> Any:
    return smaller()


def test_fifty_shuffles_give_the_same_samples_under_row_invariant_logits(model: Any) -> None:
    rng = random.Random(0)
    preemptions = reused = chunks = 0
    expected: dict[str, list[int]] = {}
    for _ in range(50):
        how = variation(rng)
        engine = new_engine(model, **how.sizes)
        of_the_tokens_alone(engine)
        result = sample_all(engine, how, rng)
        expected = expected or result
        assert result == expected, how
        preemptions += engine.scheduler.preemptions
        reused += engine.scheduler.prompt_tokens_reused
        chunks += how.sizes["max_tokens_per_step"] < 31
    assert preemptions > 50 and reused > 500 and chunks > 10, "nothing was put to the test"
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PROMPTS) * MEMBERS


@torch.inference_mode()
def distance_to_an_edge(model: Any, tokens: list[int], one: int, other: int, uniform: float) -> float:
    """How far, in probability, the uniform of a draw lies from the nearest edge that separates two tokens."""
    logits = (
        model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double() / PARAMS.temperature
    )
    probabilities = logits.softmax(-1)
    ordered, order = probabilities.sort(descending=True, stable=True)
    keep = ordered.cumsum(-1) - ordered < PARAMS.top_p
    kept = torch.zeros_like(probabilities).scatter(0, order, ordered * keep)
    edges = (kept / kept.sum()).cumsum(-1)
    low, high = sorted((one, other))
    return (edges[low:high] - uniform).abs().min().item()


def test_in_default_mode_every_difference_is_a_draw_at_the_edge_of_two_tokens(model: Any) -> None:
    rng = random.Random(1)
    base: dict[str, list[int]] = {}
    differences = 0
    for _ in range(12):
        how = variation(rng)
        result = sample_all(new_engine(model, **how.sizes), how, rng)
        base = base or result
        for name, tokens in result.items():
            at = next((i for i, (a, b) in enumerate(zip(tokens, base[name], strict=True)) if a != b), None)
            if at is None:
                continue
            differences += 1
            seed = zlib.crc32(name.encode())
            uniform = uniforms(0, [seed], [at]).item()
            history = PROMPTS[name.split("-")[0]] + tokens[:at]
            assert distance_to_an_edge(model, history, tokens[at], base[name][at], uniform) < 1e-5, (
                name,
                how,
            )
    print(f"{differences} of {11 * len(base)} samples parted at an edge")
    assert differences < len(base)
