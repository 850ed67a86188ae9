"""What a program does with requests: defaults, await, iterate, continue, a full queue, restart, training
beside."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from running import ENDLESS, ENOUGH_FOR_ENDLESS, GREEDY, SAMPLED, SIZES, WAIT, in_thread, shift, until
from tiny import generate_greedy, llama, ordinary_logprobs, prompt, smaller

from rlt_train import (
    DeadlineError,
    EngineDeadError,
    EngineStoppedError,
    QueueFullError,
    RequestError,
    RolloutManager,
    SamplingParams,
)


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


# -- parameters --------------------------------------------------------------------------------------------


def test_what_is_in_force_can_be_read_back() -> None:
    model = smaller()
    model.generation_config.top_k = 7
    model.generation_config.eos_token_id = [5, 6]
    manager = RolloutManager(model, defaults=SamplingParams(temperature=0.5, max_new_tokens=3), **SIZES)
    with manager:
        handle = manager.submit(prompt(4), SamplingParams(temperature=0.0))
        assert (handle.params.temperature, handle.params.max_new_tokens) == (0.0, 3)
        assert (handle.params.top_k, handle.params.top_p) == (7, 1.0)
        assert handle.params.eos_token_ids == (5, 6)
        assert manager.defaults.temperature == 0.5
        handle.result(WAIT)


def test_stop_strings_deadline_and_metadata(model: Any) -> None:
    free = generate_greedy(model, prompt(6), 8)
    stop = Letters().decode(free[2:4])
    metadata = {"row": object()}
    with RolloutManager(model, tokenizer=Letters(), **{**SIZES, "max_length": 4000}) as manager:
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop_strings=[stop])
        output = manager.submit(prompt(6), params, metadata=metadata).result(WAIT)
        assert output.token_ids == free[:4] and (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.metadata is metadata
        late = manager.submit(
            prompt(5), SamplingParams(max_new_tokens=3900, ignore_eos=True, deadline=0.2), request_id="late"
        )
        with pytest.raises(DeadlineError, match="'late' passed its deadline of 0.2 s"):
            late.result(WAIT)
        assert late.output.token_ids and late.output.finish_reason == "error"


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], GREEDY, "'r': the prompt is empty"),
        ([1, -1], GREEDY, "'r': prompt token -1"),
        ([1], SamplingParams(top_k=10**6), "'r': top_k=1000000"),
        ([1], SamplingParams(max_new_tokens=64), "'r': .*max_length is 64"),
        ([1], SamplingParams(stop_strings=["x"]), "'r': .*tokenizer"),
    ],
)
def test_a_refused_request_is_named(
    manager: RolloutManager, ids: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        manager.submit(ids, params, request_id="r")


# -- waiting -----------------------------------------------------------------------------------------------


def test_await_gives_results_and_lets_the_loop_run(model: Any) -> None:
    async def program(manager: RolloutManager) -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        handles = [manager.submit(prompt(3 + i, i), GREEDY) for i in range(4)]
        outputs = await asyncio.gather(*(_result(handle) for handle in handles))
        outputs.append(await handles[0])  # once more, done already
        ticker.cancel()
        return outputs, ticks

    with RolloutManager(model, **SIZES) as manager:
        outputs, ticks = asyncio.run(program(manager))
    assert [output.token_ids for output in outputs[:4]] == [
        generate_greedy(model, prompt(3 + i, i), 8) for i in range(4)
    ]
    assert outputs[4] is outputs[0] and ticks > 4


async def _result(handle: Any) -> Any:
    return await handle


def test_await_raises_when_the_engine_dies_or_stops_or_the_request_fails(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = RolloutManager(model, **{**SIZES, **ENOUGH_FOR_ENDLESS}).start()

    async def program(end: Any) -> None:
        handle = manager.submit(prompt(5), ENDLESS)
        threading.Timer(0.2, end).start()
        await asyncio.wait_for(_result(handle), WAIT)

    with pytest.raises(DeadlineError):
        asyncio.run(_failing(manager))
    cancelled: list[Any] = []
    handle = manager.submit(prompt(5), ENDLESS)

    async def cancelled_one() -> None:
        threading.Timer(0.2, handle.cancel).start()
        cancelled.append(await asyncio.wait_for(_result(handle), WAIT))

    asyncio.run(cancelled_one())
    assert cancelled[0].finish_reason == "cancelled"

    def die() -> None:
        monkeypatch.setattr("rlt_train.engine.engine.sample", _boom)

    with pytest.raises(EngineDeadError) as raised:
        asyncio.run(program(die))
    assert isinstance(raised.value.__cause__, MemoryError)


async def _failing(manager: RolloutManager) -> None:
    await manager.submit(prompt(5), SamplingParams(max_new_tokens=3900, ignore_eos=True, deadline=0.1))


def _boom(*_: Any, **__: Any) -> Any:
    raise MemoryError("out of memory")


def test_a_cancelled_await_leaves_the_request_running(model: Any) -> None:
    with RolloutManager(model, **{**SIZES, **ENOUGH_FOR_ENDLESS}) as manager:
        handle = manager.submit(prompt(5), ENDLESS)

        async def program() -> None:
            await asyncio.wait_for(_result(handle), 0.2)

        with pytest.raises(TimeoutError):
            asyncio.run(program())
        assert not handle.done
        handle.cancel()  # the closed loop's callback must not disturb the engine thread
        assert handle.result(WAIT).finish_reason == "cancelled"
        assert manager.submit(prompt(4), GREEDY).result(WAIT).finish_reason == "length"


def test_as_completed_yields_in_the_order_of_finishing_failures_among_them(model: Any) -> None:
    with RolloutManager(model, **{**SIZES, **ENOUGH_FOR_ENDLESS, "rollouts_in_flight": 4}) as manager:
        with manager.pause():
            slow = manager.submit(prompt(5), SamplingParams(max_new_tokens=200, ignore_eos=True))
            late = manager.submit(
                prompt(6), SamplingParams(max_new_tokens=3900, ignore_eos=True, deadline=0.001)
            )
            quick = manager.submit(prompt(4), SamplingParams(max_new_tokens=2, ignore_eos=True))
        names = [output.request_id for output in manager.as_completed()]
        assert names == [late.request_id, quick.request_id, slow.request_id]
        assert late.output.finish_reason == "error"
        assert [output.request_id for output in manager.as_completed([quick, slow])] == [
            quick.request_id,
            slow.request_id,
        ]
        endless = manager.submit(prompt(5), ENDLESS)
        with pytest.raises(TimeoutError, match="the next request"):
            next(manager.as_completed([endless], timeout=0.1))


def test_waiting_for_one_never_needs_another_to_be_read(model: Any) -> None:
    with RolloutManager(model, **SIZES) as manager:
        unread = manager.submit(prompt(5), SAMPLED)
        stream = iter(manager.submit(prompt(6), SAMPLED).stream())
        next(stream)  # a consumer that reads one token and never again
        broken = manager.submit(prompt(7), SAMPLED)
        with pytest.raises(ZeroDivisionError):
            for _ in broken.stream():
                raise ZeroDivisionError
        assert manager.submit(prompt(8), GREEDY).result(WAIT).finish_reason == "length"
        until(lambda: unread.done and broken.done)
        assert broken.result().finish_reason == "length"


# -- turns -------------------------------------------------------------------------------------------------


def test_the_next_turn_reuses_the_conversations_blocks(model: Any) -> None:
    with RolloutManager(model, **SIZES) as manager:
        with manager.pause():
            first = manager.submit(prompt(17), GREEDY)
            with pytest.raises(RuntimeError, match="is not done"):
                first.continue_with([1])
        output = first.result(WAIT)
        reused = manager.stats()["prompt_tokens_reused"]
        second = first.continue_with([9, 8, 7], request_id="turn-2")
        answer = second.result(WAIT)
        assert answer.prompt_ids == prompt(17) + output.token_ids + [9, 8, 7]
        assert answer.token_ids == generate_greedy(model, answer.prompt_ids, 8)
        assert (
            manager.stats()["prompt_tokens_reused"] - reused == 24
        )  # 17 + 8 tokens, less the last, by fours
        assert 0 < manager.stats()["prefix_hit_rate"] < 1
        assert second.request_id == "turn-2" and second.params == first.params
        third = second.continue_with([], SamplingParams(max_new_tokens=2, temperature=0.0))
        assert third.result(WAIT).token_ids == generate_greedy(
            model, [*answer.prompt_ids, *answer.token_ids], 2
        )


# -- back-pressure -----------------------------------------------------------------------------------------


def test_a_full_queue_blocks_or_raises_and_loses_nothing(model: Any) -> None:
    sizes = {**SIZES, **ENOUGH_FOR_ENDLESS, "rollouts_in_flight": 1}
    with RolloutManager(model, max_queued=2, **sizes) as manager:
        running = manager.submit(prompt(5), ENDLESS)
        until(lambda: manager.stats()["queued"] == 0)
        waiting = [manager.submit(prompt(4, i), GREEDY) for i in range(2)]
        with pytest.raises(QueueFullError, match="2 requests are queued, max_queued=2"):
            manager.submit(prompt(4), GREEDY, timeout=0)
        before = time.monotonic()
        with pytest.raises(QueueFullError, match="0.2 s"):
            manager.submit(prompt(4), GREEDY, timeout=0.2)
        assert time.monotonic() - before >= 0.2
        with pytest.raises(QueueFullError, match="never fit"):
            manager.submit_group(prompt(4), 3, GREEDY)
        thread, outcome = in_thread(lambda: manager.submit(prompt(6), GREEDY, timeout=WAIT).result(WAIT))
        time.sleep(0.1)
        assert not outcome
        running.cancel()
        thread.join(WAIT)
        assert outcome[0].finish_reason == "length"
        assert all(handle.result(WAIT).finish_reason == "length" for handle in waiting)


def test_a_submitter_that_waits_for_room_learns_of_the_end(model: Any) -> None:
    sizes = {**SIZES, **ENOUGH_FOR_ENDLESS, "rollouts_in_flight": 1}
    manager = RolloutManager(model, max_queued=1, **sizes).start()
    manager.submit(prompt(5), ENDLESS)
    until(lambda: manager.stats()["queued"] == 0)
    manager.submit(prompt(5), ENDLESS)
    thread, outcome = in_thread(lambda: manager.submit(prompt(5), ENDLESS))
    time.sleep(0.1)
    manager.stop()
    thread.join(WAIT)
    assert isinstance(outcome[0], EngineStoppedError)


# -- restart -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("boom"), MemoryError("out of memory")])
def test_restart_works_once_the_cause_is_gone(
    model: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = RolloutManager(model, **SIZES).start()
    with manager.weight_update():
        pass
    with monkeypatch.context() as patched:

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        patched.setattr("rlt_train.engine.engine.sample", fail)
        lost = manager.submit(prompt(5), GREEDY)
        with pytest.raises(EngineDeadError, match=str(error)):
            lost.result(WAIT)
        with pytest.raises(EngineDeadError):
            manager.start()
    version = manager.policy_version
    assert manager.restart() is manager and manager.running
    assert manager.policy_version == version + 1
    output = manager.submit(prompt(5), GREEDY).result(WAIT)
    assert output.token_ids == generate_greedy(model, prompt(5), 8)
    assert output.policy_versions == [version + 1] * 8
    with pytest.raises(EngineDeadError):
        lost.result(0)
    assert manager.restart().submit(prompt(5), GREEDY).result(WAIT).token_ids == output.token_ids
    manager.stop()
    assert manager.restart().submit(prompt(5), GREEDY).result(WAIT).token_ids == output.token_ids
    manager.stop()


# -- beside training ---------------------------------------------------------------------------------------


def test_a_model_in_train_mode_keeps_its_dropout_and_rollouts_get_none() -> None:
    model = llama(attention_dropout=0.5).train()
    ids = torch.tensor([prompt(20)])
    with RolloutManager(model, **SIZES) as manager:
        one = manager.submit(prompt(9), GREEDY).result(WAIT)
        first, second = (model(input_ids=ids).logits for _ in range(2))
        assert model.training and not torch.equal(first, second)
        assert manager.submit(prompt(9), GREEDY).result(WAIT).token_ids == one.token_ids
    assert one.token_ids == generate_greedy(model.eval(), prompt(9), 8)


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "finish", "abort"])
def test_versions_are_exact_and_recompute_can_be_replayed(in_flight: Any) -> None:
    """Each token's log-prob is that of the weights its version names; after "keep" only those before."""
    model = smaller()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    params = SamplingParams(max_new_tokens=120, ignore_eos=True, seed=1)
    with RolloutManager(model, **{**SIZES, "max_length": 160}) as manager:
        handle = manager.submit(prompt(9), params)
        until(lambda: manager.stats()["tokens_generated"] > 10)
        with manager.weight_update(in_flight=in_flight, timeout=WAIT):
            shift(model, 0.05)
        output = handle.result(WAIT)
    versions = output.policy_versions
    assert versions == sorted(versions) and set(versions) <= {0, 1}
    new = ordinary_logprobs(model, output.prompt_ids, output.token_ids)
    model.load_state_dict(before)
    old = ordinary_logprobs(model, output.prompt_ids, output.token_ids)
    recorded = torch.tensor(output.logprobs)
    switch = versions.index(1) if 1 in versions else len(versions)
    torch.testing.assert_close(recorded[:switch], old[:switch], atol=1e-5, rtol=0)
    if in_flight == "recompute":
        assert 10 < switch < 120
        torch.testing.assert_close(recorded[switch:], new[switch:], atol=1e-5, rtol=0)
        assert (new[switch:] - old[switch:]).abs().max() > 0.01, "the update changed nothing"
    elif in_flight == "keep":
        assert 10 < switch < 120
    else:
        assert switch == len(versions)
        assert output.finish_reason == ("aborted" if in_flight == "abort" else "length")
