"""The rollout manager: requests, streams, cancel, hooks, start and stop, threads, training beside it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from running import (
    ENDLESS,
    GREEDY,
    LONG,
    SAMPLED,
    SIZES,
    WAIT,
    busy,
    goes_on,
    in_thread,
    shift,
    until,
)
from tiny import VOCAB, generate_greedy, largest_error, prompt, qwen3

from rlt_train import (
    EngineStoppedError,
    RequestError,
    RolloutManager,
    SamplingParams,
)

# -- requests --------------------------------------------------------------------------------------------


def test_a_request_comes_back_whole(model: Any, manager: RolloutManager) -> None:
    output = manager.submit(prompt(9), SAMPLED, request_id="mine", metadata={"row": 3}).result(WAIT)
    assert output.request_id == "mine" and output.metadata == {"row": 3} and output.prompt_ids == prompt(9)
    lengths = {len(output.token_ids), len(output.logprobs), len(output.processed_logprobs)}
    assert lengths == {12} and output.policy_versions == [0] * 12
    assert output.finish_reason == "length" and output.error is None
    assert largest_error(model, output) < 1e-4


@pytest.mark.parametrize(
    "convert", [tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.int32).tolist()]
)
def test_prompts_may_be_anything_that_holds_integers(manager: RolloutManager, convert: Any) -> None:
    output = manager.submit(convert(prompt(9)), SAMPLED).result(WAIT)
    assert output.prompt_ids == prompt(9) and all(type(token) is int for token in output.prompt_ids)
    assert output.token_ids == manager.submit(prompt(9), SAMPLED).result(WAIT).token_ids


def test_defaults_eos_of_the_model_and_ids(model: Any) -> None:
    greedy = generate_greedy(model, prompt(9), 8)
    model.generation_config.eos_token_id = [VOCAB - 1, greedy[4]]
    at = greedy.index(greedy[4])
    defaults = SamplingParams(max_new_tokens=8, temperature=0.0)
    with RolloutManager(model, defaults=defaults, **SIZES) as manager:
        output = manager.submit(prompt(9)).result(WAIT)
        assert (output.token_ids, output.finish_reason) == (greedy[: at + 1], "stop")
        assert manager.submit(prompt(9), GREEDY).result(WAIT).token_ids == greedy  # ignore_eos
        other = SamplingParams(max_new_tokens=8, temperature=0.0, eos_token_ids=())
        assert manager.submit(prompt(9), other).result(WAIT).token_ids == greedy
        ids = [manager.submit(prompt(3)).request_id for _ in range(2)]
        ids += [handle.request_id for handle in manager.submit_group(prompt(3), 2, request_id="group")]
        assert len(set(ids)) == 4 and ids[2:] == ["group-0", "group-1"]


def test_group_members_differ_and_a_given_seed_repeats_them(manager: RolloutManager) -> None:
    def tokens(seed: int | None) -> list[tuple[int, ...]]:
        params = SamplingParams(max_new_tokens=10, ignore_eos=True, seed=seed)
        return [tuple(h.result(WAIT).token_ids) for h in manager.submit_group(prompt(6), 4, params)]

    first, again, neighbour = tokens(1), tokens(1), tokens(2)
    assert first == again
    assert len(set(first + neighbour)) == 8
    assert len(set(tokens(None) + tokens(None))) == 8  # numbered streams never repeat
    assert len(set(tokens(1) + tokens(1 + 2**32) + tokens(2**33))) == 12  # seeds are not cut to 32 bits


def test_group_prompts_are_computed_once(manager: RolloutManager) -> None:
    for handle in manager.submit_group(prompt(10), 5, LONG):
        handle.result(WAIT)
    assert manager.stats()["prompt_tokens"] == 50 and manager.stats()["prompt_tokens_reused"] == 40
    assert manager.stats()["kv_blocks_used"] == 0 and manager.stats()["unfinished"] == 0


def test_a_stream_yields_every_token_with_logprob_and_version(model: Any) -> None:
    with busy(model) as manager:
        manager.cancel("endless")
        handle = manager.submit(prompt(9), LONG)
        events = []
        for event in handle.stream(WAIT):
            events.append(event)
            if len(events) == 5:
                with manager.weight_update():
                    shift(model)
        output = handle.result(WAIT)
    assert [event.token_id for event in events] == output.token_ids
    assert [event.logprob for event in events] == output.logprobs
    assert [event.policy_version for event in events] == output.policy_versions
    assert output.policy_versions[0] == 0 and output.policy_versions[-1] == 1


def test_a_stream_does_not_wait_for_the_end_and_may_start_late_or_twice(model: Any) -> None:
    with busy(model) as manager:
        handle = manager.submit(prompt(9), ENDLESS)
        first = handle.stream(WAIT)
        early = [next(first) for _ in range(3)]
        assert not handle.done
        second = handle.stream(WAIT)
        assert [next(second) for _ in range(3)] == early
        handle.cancel()
        rest = [*early, *first]
        output = handle.result(WAIT)
        assert [event.token_id for event in rest] == output.token_ids
        assert list(handle.stream()) == rest  # after the end: everything at once


def test_result_timeout_leaves_the_request_running(model: Any) -> None:
    with busy(model) as manager:
        handle = manager.submit(prompt(5), ENDLESS)
        with pytest.raises(TimeoutError, match=rf"{handle.request_id}.*0.05 s"):
            handle.result(0.05)
        with pytest.raises(TimeoutError):
            manager.wait_for(lambda: handle.done, 0.05)
        assert not handle.done and goes_on(manager)


def test_cancel_delivers_what_there_is(model: Any) -> None:
    with busy(model, rollouts_in_flight=1) as manager:
        waiting = manager.submit(prompt(4), LONG)
        waiting.cancel()
        assert waiting.result(WAIT).finish_reason == "cancelled" and waiting.result().token_ids == []
        follower = manager.submit(prompt(4), GREEDY)
        manager.cancel("endless")
        assert follower.result(WAIT).finish_reason == "length"
        waiting.cancel()
        manager.cancel("nobody")
        running = manager.submit(prompt(4), ENDLESS)
        next(running.stream(WAIT))
        running.cancel()
        output = running.result(WAIT)
        assert output.finish_reason == "cancelled"
        assert len(output.token_ids) == len(output.logprobs) == len(output.policy_versions) > 0
        assert manager.stats()["kv_blocks_used"] == 0


# -- hooks -----------------------------------------------------------------------------------------------


def record_events(manager: RolloutManager) -> list[Any]:
    events: list[Any] = []
    manager.on("paused", lambda: events.append("paused"))
    manager.on("weights_updated", lambda version: events.append(("weights_updated", version)))
    manager.on("resumed", lambda: events.append("resumed"))
    return events


def test_hooks_run_in_order_on_the_updating_thread_and_can_be_removed(manager: RolloutManager) -> None:
    events = record_events(manager)
    threads: list[Any] = []
    remove = manager.on("paused", lambda: threads.append(threading.current_thread()))
    with manager.weight_update():
        events.append("body")
    remove()
    with manager.pause(), manager.pause():
        pass
    assert events == ["paused", "body", ("weights_updated", 1), "resumed", "paused", "paused", "resumed"]
    assert threads == [threading.current_thread()]


def test_finished_hooks_get_every_output_on_the_engine_thread(manager: RolloutManager) -> None:
    seen: dict[str, Any] = {}
    names: set[str] = set()

    def hook(output: Any) -> None:
        names.add(threading.current_thread().name)
        seen[output.request_id] = output

    manager.on("finished", hook)
    handles = manager.submit_group(prompt(4), 3, GREEDY)
    outputs = [handle.result(WAIT) for handle in handles]
    until(lambda: len(seen) == 3)
    assert list(seen.values()) == outputs and names == {"rlt-rollouts"}


def test_an_error_in_a_finished_hook_is_logged_and_generation_goes_on(
    manager: RolloutManager, caplog: pytest.LogCaptureFixture
) -> None:
    remove = manager.on("finished", lambda _: 1 / 0)
    handle = manager.submit(prompt(4), GREEDY, request_id="hooked")
    handle.result(WAIT)
    until(lambda: "'finished' hook failed on request 'hooked'" in caplog.text)
    remove()
    assert manager.submit(prompt(4), GREEDY).result(WAIT).token_ids == handle.result().token_ids


@pytest.mark.parametrize("event", ["paused", "resumed", "weights_updated"])
def test_an_error_in_another_hook_reaches_the_caller_and_the_pause_is_released(
    model: Any, event: Any
) -> None:
    with busy(model) as manager:
        remove = manager.on(event, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), manager.weight_update():
            pass
        remove()
        assert goes_on(manager)
        with manager.weight_update():
            pass


# -- life ------------------------------------------------------------------------------------------------


def test_stop_without_drain_cancels_and_with_drain_finishes(model: Any) -> None:
    for drain, reason, count in ((False, "cancelled", None), (True, "length", 50)):
        manager = RolloutManager(model, **{**SIZES, "rollouts_in_flight": 2}).start()
        handles = [manager.submit(prompt(4 + i), LONG) for i in range(5)]
        next(handles[0].stream(WAIT))
        manager.stop(drain=drain, timeout=WAIT)
        outputs = [handle.result(0) for handle in handles]
        assert outputs[-1].finish_reason == reason
        assert count is None or [len(output.token_ids) for output in outputs] == [count] * 5
        assert manager.stats()["kv_blocks_used"] == 0 and manager.stats()["unfinished"] == 0
        assert not manager.running
        manager.stop()  # again: nothing to do
        for action in (lambda: manager.submit(prompt(3)), lambda: manager.wait_for(lambda: False)):  # noqa: B023
            with pytest.raises(EngineStoppedError, match="stopped"):
                action()


def test_stop_that_cannot_drain_in_time_says_so_and_can_be_repeated(model: Any) -> None:
    with busy(model) as manager:
        with pytest.raises(TimeoutError, match="drain"):
            manager.stop(drain=True, timeout=0.05)
        with pytest.raises(EngineStoppedError, match="takes no more requests"):
            manager.submit(prompt(3))
        manager.stop(timeout=WAIT)


def test_a_waiter_learns_of_the_stop(model: Any) -> None:
    with busy(model) as manager:
        thread, outcome = in_thread(lambda: manager.wait_for(lambda: False, WAIT, "a miracle"))
        time.sleep(0.05)
        manager.stop()
        thread.join(WAIT)
        assert isinstance(outcome[0], EngineStoppedError) and "a miracle" in str(outcome[0])


def test_restart_after_stop_and_start_twice(model: Any) -> None:
    manager = RolloutManager(model, **SIZES)
    with pytest.raises(EngineStoppedError, match="not started"):
        manager.submit(prompt(3))
    manager.stop()
    tokens = []
    for _ in range(2):
        assert manager.start().start() is manager and manager.running
        tokens.append(manager.submit(prompt(9), SAMPLED).result(WAIT).token_ids)
        manager.stop()
    assert tokens[0] == tokens[1]
    assert sum(thread.name == "rlt-rollouts" for thread in threading.enumerate()) == 0


def test_an_idle_engine_takes_no_cpu_time(manager: RolloutManager) -> None:
    manager.submit(prompt(4), GREEDY).result(WAIT)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.03


def test_a_paused_engine_with_work_takes_no_cpu_time(model: Any) -> None:
    with busy(model) as manager, manager.pause(WAIT):
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.03


def test_the_training_thread_keeps_its_thread_count(model: Any) -> None:
    before = torch.get_num_threads()
    with RolloutManager(model, **{**SIZES, "engine_threads": 2}) as manager:
        manager.submit(prompt(4), GREEDY).result(WAIT)
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_two_managers_share_one_model(model: Any) -> None:
    with RolloutManager(model, **SIZES) as one, RolloutManager(model, **SIZES) as two:
        with one.weight_update(), two.weight_update():
            shift(model)
        handles = [m.submit(prompt(9 + i), SAMPLED) for i in range(3) for m in (one, two)]
        for handle in handles:
            assert largest_error(model, handle.result(WAIT)) < 1e-4
        one.stop()
        assert two.submit(prompt(9), SAMPLED).result(WAIT).token_ids == handles[0].result().token_ids


def test_stats_and_attention_info_say_what_happened(manager: RolloutManager) -> None:
    manager.submit(prompt(9), GREEDY).result(WAIT)
    stats = manager.stats()
    assert stats["tokens_generated"] == 8 and stats["forward_tokens"] == 9 + 7 and stats["forwards"] == 8
    assert stats["kv_blocks"] == 8 * 16 and stats["kv_bytes"] == 8 * 16 * 4 * (2 * 2 * 2 * 8 * 4)
    assert manager.attention_info["requested"] == "auto" and manager.attention_info["selected"] == "numba"


def test_overlap_counts_the_forwards_that_ran_beside_training(model: Any) -> None:
    with busy(model) as manager:
        with manager.pause(WAIT):
            before = manager.stats()
        assert before["overlapping_forwards"] == 0
        with manager.overlap.training():
            assert goes_on(manager) and goes_on(manager)
        after = manager.stats()
        assert after["overlapping_forwards"] >= 3
        assert goes_on(manager)
        assert manager.stats()["overlapping_forwards"] <= after["overlapping_forwards"] + 1


# -- training beside generation --------------------------------------------------------------------------


def test_training_stays_causal_while_the_engine_generates() -> None:
    """transformers' own engine writes ``config.is_causal = False`` where a training forward reads it."""
    model = qwen3(num_hidden_layers=2)
    ids = torch.tensor([prompt(16), prompt(16)])
    ids[1, -1] = (ids[1, -1] + 1) % VOCAB
    with busy(model) as manager:
        manager.submit(prompt(6), ENDLESS)
        before = manager.overlap.forwards
        for _ in range(40):
            logits = model(input_ids=ids, use_cache=False).logits
            assert torch.equal(logits[0, :-1], logits[1, :-1]), "a later token changed an earlier logit"
            assert not torch.equal(logits[0, -1], logits[1, -1])
        assert manager.overlap.forwards > before + 5, "nothing ran beside the forwards"


def test_training_with_learning_rate_zero_changes_no_completion(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.tensor([prompt(16)])
    rounds = []
    with RolloutManager(model, **SIZES) as manager:
        for _ in range(3):
            with manager.pause():  # so that each round is batched alike, and its bits can be compared
                handles = [manager.submit(prompt(5 + i, i), SamplingParams(24, seed=i)) for i in range(4)]
            rounds.append([(h.result(WAIT).token_ids, h.result().logprobs) for h in handles])
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            with manager.weight_update():
                optimizer.step()
        assert manager.policy_version == 3
    assert rounds[0] == rounds[1] == rounds[2]


def test_no_warning_is_logged(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), RolloutManager(model, **SIZES) as manager:
        manager.submit(prompt(5), SAMPLED).result(WAIT)
        with manager.weight_update():
            shift(model)
        manager.submit_group(prompt(5), 2, LONG)
    ours = [record for record in caplog.records if record.name.startswith("rlt_train")]
    assert any("rollout engine" in record.getMessage() for record in ours)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_duplicate_id_is_refused_whole_and_the_first_is_unharmed(model: Any) -> None:
    with busy(model) as manager:
        first = manager.submit(prompt(4), ENDLESS, request_id="group-1")
        before = manager.stats()["unfinished"]
        with pytest.raises(RequestError, match="'group-1' is already in flight"):
            manager.submit_group(prompt(4), 3, request_id="group")
        assert manager.stats()["unfinished"] == before
        first.cancel()
        assert first.result(WAIT).finish_reason == "cancelled"
        assert len(manager.submit(prompt(4), GREEDY, request_id="group-1").result(WAIT).token_ids) == 8
