"""Paged generation against ordinary forwards and ``model.generate``, for each architecture family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import (
    FAMILIES,
    GREEDY,
    drive,
    gemma2,
    generate_greedy,
    generated,
    new_engine,
    prompt,
    qwen3,
    request,
)

from rlt_train.attention.call import PagedCall
from rlt_train.engine.engine import Engine, new_group
from rlt_train.engine.params import SamplingParams

LENGTHS = (1, 2, 5, 16, 17, 33, 70)  # block edges, one-token prompts, beyond Gemma's window of 24
CLOSE = 1e-4  # on logits whose standard deviation is about 1; float32 rounding stays near 1e-5


def paged_logits(engine: Engine, prompts: list[list[int]]) -> dict[int, torch.Tensor]:
    """The logits that each greedy token was taken from: ``[generated, vocab]`` by prompt index."""
    recorded: dict[str, list[torch.Tensor]] = {}
    run = engine._runner.run

    def recording(step: Any) -> torch.Tensor:
        logits = run(step)
        for row, span in enumerate(span for span in step.spans if span.samples):
            recorded.setdefault(span.sequence.request.request_id, []).append(logits[row].clone())
        return logits

    engine._runner.run = recording  # type: ignore[method-assign]
    for index, ids in enumerate(prompts):
        engine.add(request(f"{index}", ids))
    finished = drive(engine)
    assert all(len(rows) == len(generated(finished[name])) for name, rows in recorded.items())
    return {int(name): torch.stack(rows) for name, rows in recorded.items()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_logits_are_the_ordinary_forwards(family: str, attention: str, record_property: Any) -> None:
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("transformers' sdpa has no soft-cap, so Gemma 2 is loaded with eager attention")
    model = FAMILIES[family](attention=attention)
    engine = new_engine(model, rollouts_in_flight=4, max_tokens_per_step=19, block_size=8)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    logits = paged_logits(engine, prompts)
    largest = 0.0
    for index, ids in enumerate(prompts):
        completion = generate_greedy(model, ids, 8)
        with torch.no_grad():
            ordinary = model(input_ids=torch.tensor([ids + completion]), use_cache=False).logits[0]
        difference = (ordinary[len(ids) - 1 : -1] - logits[index]).abs().max().item()
        largest = max(largest, difference)
    record_property("largest_logit_difference", largest)
    print(f"{family} over {attention}: largest |paged - ordinary| logit difference {largest:.3g}")
    assert largest <= CLOSE


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_generates(family: str, tied: bool) -> None:
    model = FAMILIES[family](seed=1, tie_word_embeddings=tied)
    expected = {length: generate_greedy(model, prompt(length), 8) for length in LENGTHS}
    engine = new_engine(model, rollouts_in_flight=5, max_tokens_per_step=11)
    for length in LENGTHS:
        engine.add(request(f"alone-{length}", prompt(length)))
    group = new_group(3)
    for member in range(3):
        engine.add(request(f"group{member}-33", prompt(33), group=group))
    finished = drive(engine)
    for length in LENGTHS:  # everything again: now the prompts are found in the prefix index
        engine.add(request(f"again-{length}", prompt(length)))
    reused = engine.scheduler.prompt_tokens_reused
    finished |= drive(engine)
    assert engine.scheduler.prompt_tokens_reused - reused >= 64
    for name, sequence in finished.items():
        assert generated(sequence) == expected[int(name.split("-")[1])], name


@pytest.mark.parametrize("build", [qwen3, gemma2])
def test_preemption_does_not_change_greedy_tokens(build: Callable[..., Any]) -> None:
    model = build()
    lengths = (5, 14, 20, 31)
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    bytes_per_block = 4 * 2 * 2 * 16 * 4 * 4  # layers, keys and values, heads, head_dim, float32, tokens
    engine = new_engine(model, max_length=64, kv_cache_gib=19.5 * bytes_per_block / 2**30)
    for length in lengths:
        engine.add(request(f"{length}", prompt(length), params))
    finished = drive(engine)
    assert engine.scheduler.preemptions > 0
    for length in lengths:
        assert generated(finished[f"{length}"]) == generate_greedy(model, prompt(length), 20)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_the_block_size_does_not_change_tokens(block_size: int) -> None:
    model = gemma2()
    engine = new_engine(model, block_size=block_size)
    for length in (1, 16, 40):
        engine.add(request(f"{length}", prompt(length)))
    for name, sequence in drive(engine).items():
        assert generated(sequence) == generate_greedy(model, prompt(int(name)), 8)


def test_multi_query_and_multi_head_attention() -> None:
    for kv_heads in (1, 4):
        model = qwen3(num_key_value_heads=kv_heads)
        engine = new_engine(model)
        for length in (3, 20):
            engine.add(request(f"{length}", prompt(length)))
        for name, sequence in drive(engine).items():
            assert generated(sequence) == generate_greedy(model, prompt(int(name)), 8)


def test_nothing_is_read_that_was_not_written_for_the_sequence() -> None:
    """A former owner may leave NaN in any block, and not even a masked NaN may be read: 0 * NaN is NaN."""
    model = qwen3()
    lengths = (1, 5, 18, 21, 24)  # several block counts share a bucket, so that tables are padded
    expected = {length: generate_greedy(model, prompt(length), 8) for length in lengths}
    engine = new_engine(model, rollouts_in_flight=4, max_tokens_per_step=30)
    engine.blocks.pools[0].allocate(3)  # somebody else's, NaN as well; padding must not read them either
    for layer in engine.cache.layers.values():
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)
    for length in lengths:
        engine.add(request(f"{length}", prompt(length)))
    group = new_group(3)
    for member in range(3):
        engine.add(request(f"{18}-{member}", prompt(18), group=group))
    for name, sequence in drive(engine).items():
        assert sequence.error is None
        assert generated(sequence) == expected[int(name.split("-")[0])]


def test_each_group_of_layers_is_planned_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers that alternate between a window and full attention make two groups."""
    engine = new_engine(gemma2())
    planned: list[int | None] = []
    for backend in engine.backends:
        plan, window = backend.plan, backend.group.spec.sliding_window
        monkeypatch.setattr(
            backend, "plan", lambda batch, plan=plan, window=window: planned.append(window) or plan(batch)
        )
    metadata: list[int] = []
    stage = engine._runner._planner._stage_group
    monkeypatch.setattr(
        engine._runner._planner, "_stage_group", lambda *a: metadata.append(a[1]) or stage(*a)
    )
    engine.add(request("r", prompt(40), SamplingParams(max_new_tokens=3, ignore_eos=True)))
    steps = 0
    while engine.unfinished:
        engine.step()
        steps += 1
    assert steps == 3 and sorted(planned, key=str) == [24] * steps + [None] * steps
    assert sorted(metadata) == [0] * steps + [1] * steps
    spec = engine.groups[0].spec
    assert (spec.softcap, spec.head_dim, engine.groups[0].layers) == (50.0, 16, (0, 2))


def test_windowed_layers_give_back_the_blocks_that_fall_out_of_the_window() -> None:
    model = gemma2()
    engine = new_engine(model, rollouts_in_flight=2, max_tokens_per_step=8, max_length=128)
    full, windowed = (engine.blocks.pools[number] for number in (1, 0))
    assert windowed.num_blocks < full.num_blocks
    engine.add(request("r", prompt(90)))
    most = 0
    finished: dict[str, Any] = {}
    while engine.unfinished:
        finished |= {s.request.request_id: s for s in engine.step().finished}
        most = max(most, windowed.num_used)
    assert most <= -(-24 // 4) + 1, "more than the window is held between steps"
    assert generated(finished["r"]) == generate_greedy(model, prompt(90), 8)
    assert engine.blocks.num_used == 0


def test_the_forward_of_a_paged_call_needs_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``PagedCall`` the same view runs ordinary attention: the cache is neither read nor written."""
    model = qwen3()
    engine = new_engine(model)
    touched: list[Any] = []
    monkeypatch.setattr(PagedCall, "attend", lambda *_, **__: touched.append(1))
    ids = torch.tensor([prompt(10)])
    with torch.no_grad():
        assert torch.equal(engine.view.model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert touched == [] and GREEDY.temperature == 0
