"""The scheduler, through the engine: budget, order, admission, groups, preemption, cancel, and no leak."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import GREEDY, VOCAB, drive, generate_greedy, generated, new_engine, prompt, request, smaller

from rlt_train.engine.engine import Engine, new_group
from rlt_train.engine.params import SamplingParams
from rlt_train.engine.scheduler import ScheduledStep
from rlt_train.engine.sizes import EngineConfig
from rlt_train.errors import RequestError

SAMPLED = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return smaller()


@pytest.fixture(scope="module")
def greedy_reference(model: Any) -> dict[int, list[int]]:
    """The greedy continuation of ``prompt(length)`` by ``model.generate``, by length."""
    return {length: generate_greedy(model, prompt(length), 8) for length in (1, 2, 4, 7, 8, 13, 30, 61)}


def small_cache(model: Any, blocks: int, **sizes: Any) -> Engine:
    """An engine with exactly ``blocks`` KV blocks of 4 tokens, however much it would like."""
    layers = 2
    per_block = layers * 2 * 2 * 8 * 4 * 4  # layers, keys and values, heads, head_dim, float32, tokens
    engine = new_engine(model, kv_cache_gib=(blocks + 0.5) * per_block / 2**30, **sizes)
    assert engine.blocks.num_blocks == blocks
    return engine


def slots(blocks: list[int], start: int, end: int) -> set[tuple[int, int]]:
    return {(blocks[position // 4], position % 4) for position in range(start, end)}


def in_use(engine: Engine, step: ScheduledStep) -> set[tuple[int, int]]:
    """Every cache slot that holds a key somebody will read: running sequences' and published prompts'."""
    targets = {target for _, _, target in step.copies}
    used: set[tuple[int, int]] = set()
    for sequence in engine.scheduler.running.values():
        used |= {slot for slot in slots(sequence.tables[0], 0, sequence.computed) if slot[0] not in targets}
    for sequence in engine.scheduler.waiting:
        if (group := sequence.request.group) is not None and group.state is not None:
            used |= slots(group.state.tables[0], 0, len(sequence.request.prompt_ids))
    return used


def watched(engine: Engine) -> list[ScheduledStep]:
    """Every plan the scheduler makes from now on, checked as it is made."""
    plans: list[ScheduledStep] = []
    schedule = engine.scheduler.schedule

    def checked(admit: bool = True) -> ScheduledStep:
        step = schedule(admit)
        plans.append(step)
        assert step.tokens == sum(span.length for span in step.spans) <= engine.scheduler.max_tokens_per_step
        assert len(engine.scheduler.running) <= engine.scheduler.max_sequences
        read = in_use(engine, step)
        written = [slots([target], 0, 4) for _, _, target in step.copies]
        for span in step.spans:
            assert span.sequence.computed == span.start
            written.append(slots(span.sequence.tables[0], span.start, span.start + span.length))
        assert not read & set().union(*written), "a slot that somebody reads is written"
        assert sum(map(len, written)) == len(set().union(*written)), "two sequences write one slot"
        return step

    engine.scheduler.schedule = checked  # type: ignore[method-assign]
    return plans


def assert_all_free(engine: Engine) -> None:
    assert engine.unfinished == 0 and not engine.scheduler.has_work
    assert engine.blocks.num_used == 0


def test_mixed_lengths_with_chunked_prefill_keep_the_budget_and_the_tokens(
    model: Any, greedy_reference: dict[int, list[int]]
) -> None:
    engine = new_engine(model, rollouts_in_flight=4, max_tokens_per_step=6)
    plans = watched(engine)
    for length in greedy_reference:
        engine.add(request(f"{length}", prompt(length)))
    finished = drive(engine)
    assert {int(name): generated(sequence) for name, sequence in finished.items()} == greedy_reference
    assert max(step.tokens for step in plans) == 6
    assert any(not span.samples for step in plans for span in step.spans), "nothing was chunked"
    assert_all_free(engine)


def test_decodes_come_before_prefill_chunks_and_never_wait_for_them(model: Any) -> None:
    engine = new_engine(model, rollouts_in_flight=4, max_tokens_per_step=5)
    for name in ("a", "b"):
        engine.add(request(name, prompt(2, seed=ord(name))))
    engine.step()
    engine.add(request("long", prompt(61)))
    plans = watched(engine)
    for _ in range(5):
        engine.step()
    for step in plans:
        assert [(span.sequence.request.request_id, span.length) for span in step.spans] == [
            ("a", 1),
            ("b", 1),
            ("long", 3),
        ]


def test_admission_waits_for_slots_and_is_first_come_first_served(model: Any) -> None:
    engine = new_engine(model, rollouts_in_flight=2)
    for index in range(5):
        engine.add(request(f"{index}", prompt(3 + index, index)))
    engine.step()
    assert list(engine.scheduler.running) == ["0", "1"]
    assert list(drive(engine)) == ["0", "1", "2", "3", "4"]


def test_admission_waits_for_free_blocks(model: Any, greedy_reference: dict[int, list[int]]) -> None:
    engine = small_cache(model, 12, max_length=48)
    watched(engine)
    for name, length in (("first", 30), ("second", 13), ("third", 7)):
        engine.add(request(name, prompt(length)))
    engine.step()
    assert list(engine.scheduler.running) == [
        "first"
    ]  # 8 of 12 blocks; the second needs 4, and one is reserved
    finished = drive(engine)
    assert [generated(finished[name]) for name in ("first", "second", "third")] == [
        greedy_reference[length] for length in (30, 13, 7)
    ]
    assert_all_free(engine)


def test_preemption_loses_nothing(model: Any, greedy_reference: dict[int, list[int]]) -> None:
    roomy = new_engine(model, rollouts_in_flight=6)
    tight = small_cache(model, 16, max_length=48, rollouts_in_flight=6)
    watched(tight)
    for engine in (roomy, tight):
        for index in range(6):
            params = SamplingParams(max_new_tokens=30, ignore_eos=True)
            engine.add(request(f"{index}", prompt(2 + 2 * index, index), params, seed=index))
    expected, finished = drive(roomy), drive(tight)
    assert tight.scheduler.preemptions > 0 and roomy.scheduler.preemptions == 0
    for name, sequence in expected.items():
        assert generated(finished[name]) == generated(sequence)
        assert len(finished[name].logprobs) == len(finished[name].policy_versions) == 30
        torch.testing.assert_close(
            torch.tensor(finished[name].logprobs), torch.tensor(sequence.logprobs), atol=1e-4, rtol=0
        )
    assert_all_free(tight)


def test_one_sequence_may_fill_the_whole_cache(model: Any) -> None:
    engine = small_cache(model, 12, max_length=48)
    engine.add(request("full", prompt(40)))
    engine.add(request("next", prompt(40, 1)))
    assert {len(generated(sequence)) for sequence in drive(engine).values()} == {8}
    assert_all_free(engine)


def test_a_cache_below_one_sequence_is_refused_with_the_number_it_needs(model: Any) -> None:
    with pytest.raises(
        ValueError, match=r"128 tokens \(32 blocks of 4 tokens\): give at least 3\.05e-05 GiB"
    ):
        new_engine(model, kv_cache_gib=1e-6, max_length=128)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rollouts_in_flight": 0}, "rollouts_in_flight=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"block_size": -1}, "block_size=-1"),
        ({"rollouts_in_flight": 8, "max_tokens_per_step": 7}, "max_tokens_per_step=7.*rollouts_in_flight=8"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**sizes)


# -- groups --------------------------------------------------------------------------------------------


def add_group(
    engine: Engine, n: int, ids: list[int], name: str = "g", params: SamplingParams = SAMPLED
) -> None:
    group = new_group(n)
    for member in range(n):
        engine.add(request(f"{name}-{member}", ids, params, seed=100 + member, group=group))


@pytest.mark.parametrize("length", [1, 3, 4, 8, 13])
def test_a_group_computes_its_prompt_once_and_its_members_diverge(model: Any, length: int) -> None:
    alone = {}
    for member in range(4):
        engine = new_engine(model)
        engine.add(request(f"g-{member}", prompt(length), SAMPLED, seed=100 + member))
        alone |= drive(engine)
    engine = new_engine(model)
    plans = watched(engine)
    add_group(engine, 4, prompt(length))
    together = drive(engine)
    assert {name: generated(s) for name, s in together.items()} == {n: generated(s) for n, s in alone.items()}
    assert len({tuple(generated(sequence)) for sequence in together.values()}) == 4
    prefill = sum(span.length for step in plans for span in step.spans if span.start < length)
    assert prefill == length
    assert engine.scheduler.prompt_tokens == 4 * length
    assert engine.scheduler.prompt_tokens_reused == 3 * length
    assert_all_free(engine)


def test_a_group_larger_than_the_slots_still_computes_its_prompt_once(model: Any) -> None:
    engine = new_engine(model, rollouts_in_flight=2)
    watched(engine)
    add_group(engine, 5, prompt(13))
    assert len(drive(engine)) == 5
    assert engine.scheduler.prompt_tokens_reused == 4 * 13
    assert_all_free(engine)


def test_a_group_under_block_pressure_gives_the_same_tokens(model: Any) -> None:
    roomy, tight = new_engine(model), small_cache(model, 13, max_length=48)
    watched(tight)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for engine in (roomy, tight):
        add_group(engine, 4, prompt(13), "one", params)
        add_group(engine, 3, prompt(10, 1), "two", params)
    expected, finished = drive(roomy), drive(tight)
    assert {name: generated(s) for name, s in finished.items()} == {
        n: generated(s) for n, s in expected.items()
    }
    assert tight.scheduler.preemptions > 0
    assert_all_free(tight)


def test_a_finished_prompt_is_reused_by_full_blocks(
    model: Any, greedy_reference: dict[int, list[int]]
) -> None:
    engine = new_engine(model)
    for name in ("first", "second"):
        engine.add(request(name, prompt(13)))
        assert generated(drive(engine)[name]) == greedy_reference[13]
    assert engine.scheduler.prompt_tokens_reused == 12  # three full blocks; the last token is always computed
    engine.add(request("third", prompt(8)))
    assert generated(drive(engine)["third"]) == greedy_reference[8]


# -- cancel, in every state ----------------------------------------------------------------------------


def states(model: Any) -> Iterator[tuple[str, Engine, str, set[str]]]:
    """(state, engine, the request to cancel in that state, the requests that must finish all the same)."""
    engine = new_engine(model, rollouts_in_flight=1)
    engine.add(request("runs", prompt(5)))
    engine.add(request("victim", prompt(6)))
    engine.step()
    yield "waiting", engine, "victim", {"runs"}
    engine = new_engine(model, max_tokens_per_step=8)
    add_group(engine, 3, prompt(30))
    engine.step()
    assert engine.scheduler.running["g-0"].computed == 8
    yield "leader prefilling", engine, "g-0", {"g-1", "g-2"}
    engine = new_engine(model, max_tokens_per_step=8)
    add_group(engine, 3, prompt(30))
    engine.step()
    yield "follower waiting for its leader", engine, "g-1", {"g-0", "g-2"}
    engine = new_engine(model, rollouts_in_flight=1)
    add_group(engine, 3, prompt(6))
    engine.step()
    yield "follower waiting on a published prompt", engine, "g-2", {"g-0", "g-1"}
    engine = new_engine(model)
    add_group(engine, 3, prompt(6))
    engine.step()
    engine.step()
    yield "running", engine, "g-1", {"g-0", "g-2"}
    engine = new_engine(model)
    add_group(engine, 3, prompt(6))
    yield "nothing scheduled yet", engine, "g-0", {"g-1", "g-2"}


@pytest.mark.parametrize("index", range(6))
def test_cancel_frees_everything_and_the_others_finish(model: Any, index: int) -> None:
    state, engine, victim, others = list(states(model))[index]
    cancelled = engine.cancel(victim)
    assert cancelled is not None and cancelled.finish_reason == "cancelled", state
    assert engine.cancel(victim) is None
    watched(engine)
    finished = drive(engine)
    assert set(finished) == others, state
    for name in others:
        assert len(generated(finished[name])) == 8
    assert_all_free(engine)


def test_cancelling_every_member_of_a_published_group_releases_its_prompt(model: Any) -> None:
    engine = new_engine(model, rollouts_in_flight=1)
    add_group(engine, 3, prompt(6))
    engine.step()
    for member in range(3):
        engine.cancel(f"g-{member}")
    assert_all_free(engine)


def test_a_duplicate_id_is_refused_and_the_first_is_unharmed(model: Any) -> None:
    engine = new_engine(model)
    engine.add(request("twice", prompt(5)))
    with pytest.raises(RequestError, match="'twice' is already in flight"):
        engine.add(request("twice", prompt(6)))
    assert list(drive(engine)) == ["twice"]


# -- everything at once --------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_random_work_with_cancels_updates_and_pressure_ends_with_every_block_free(
    model: Any, seed: int
) -> None:
    rng = random.Random(seed)
    engine = small_cache(
        model, rng.choice([12, 20]), max_length=48, rollouts_in_flight=4, max_tokens_per_step=9
    )
    watched(engine)
    # Which token comes next does not matter here, so the forward is left out.
    engine._runner.run = lambda step: torch.zeros(sum(span.samples for span in step.spans), VOCAB)
    names: set[str] = set()
    ended: set[str] = set()
    version = 0
    for step in range(60):
        if rng.random() < 0.3:
            n, ids = rng.choice([1, 1, 3]), prompt(rng.choice([1, 4, 9, 20]), rng.choice([0, 1]))
            spec = SamplingParams(max_new_tokens=rng.randint(1, 20), ignore_eos=True)
            group = new_group(n)
            for member in range(n):
                name = f"{step}-{member}"
                engine.add(request(name, ids, spec, seed=rng.randint(0, 99), group=group))
                names.add(name)
        if names - ended and rng.random() < 0.1:
            victim = rng.choice(sorted(names - ended))
            assert engine.cancel(victim) is not None
            ended.add(victim)
        if rng.random() < 0.1:
            version += 1
            policy = rng.choice(["keep", "keep", "recompute", "abort"])
            ended |= {sequence.request.request_id for sequence in engine.weights_changed(version, policy)}
        ended |= {s.request.request_id for s in engine.step(admit=rng.random() < 0.9).finished}
    ended |= set(drive(engine))
    assert ended == names
    assert_all_free(engine)


def test_without_admission_nothing_new_begins_and_what_runs_goes_on(model: Any) -> None:
    engine = new_engine(model)
    engine.add(request("runs", prompt(5)))
    engine.step()
    engine.add(request("waits", prompt(6), GREEDY))
    finished: list[str] = []
    for _ in range(20):
        finished += [sequence.request.request_id for sequence in engine.step(admit=False).finished]
    assert finished == ["runs"] and engine.unfinished == 1 and engine.in_flight == 0
    assert list(drive(engine)) == ["waits"]
