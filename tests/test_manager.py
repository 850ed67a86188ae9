"""The rollout manager: pause, weight updates and versions, prefixes, hooks, streams, cancel, stop, threads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCAB, generate_greedy, largest_error, ordinary_logprobs, prompt, qwen3, smaller

from rlt_train import (
    EngineDeadError,
    EngineStoppedError,
    PauseTimeoutError,
    RequestError,
    RolloutManager,
    SamplingParams,
    SharedWeightsError,
    UnfencedWriteError,
)

SIZES: dict[str, Any] = {"rollouts_in_flight": 8, "max_length": 64, "block_size": 4, "engine_threads": 1}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=3)
LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=3900, ignore_eos=True)
ENOUGH_FOR_ENDLESS = {"max_length": 4000, "rollouts_in_flight": 2}
WAIT = 30.0


@pytest.fixture
def model() -> Any:
    return smaller()


@pytest.fixture
def manager(model: Any) -> Iterator[RolloutManager]:
    with RolloutManager(model, **SIZES) as started:
        yield started


@contextlib.contextmanager
def busy(model: Any, **changes: Any) -> Iterator[RolloutManager]:
    """A manager whose engine generates for as long as the block lasts."""
    with RolloutManager(model, **{**SIZES, **ENOUGH_FOR_ENDLESS, **changes}) as started:
        started.submit(prompt(5), ENDLESS, request_id="endless")
        until(lambda: started.stats()["tokens_generated"] > 2)
        yield started


def until(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not predicate():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def advances(manager: RolloutManager) -> bool:
    """Does the engine make tokens now? Looks for a while when it does not."""
    before = manager.stats()["tokens_generated"]
    deadline = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        if manager.stats()["tokens_generated"] > before + 1:
            return True
        time.sleep(0.002)
    return False


def goes_on(manager: RolloutManager) -> bool:
    before = manager.stats()["tokens_generated"]
    until(lambda: manager.stats()["tokens_generated"] > before + 1)
    return True


def shift(model: Any, amount: float = 0.5) -> None:
    """Change the policy much."""
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(amount)
        model.lm_head.weight.mul_(-1)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run ``function`` on a thread; what it returned or raised ends up in the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


# -- requests --------------------------------------------------------------------------------------------


def test_a_request_comes_back_whole(model: Any, manager: RolloutManager) -> None:
    output = manager.submit(prompt(9), SAMPLED, request_id="mine", metadata={"row": 3}).result(WAIT)
    assert output.request_id == "mine" and output.metadata == {"row": 3} and output.prompt_ids == prompt(9)
    lengths = {len(output.token_ids), len(output.logprobs), len(output.processed_logprobs)}
    assert lengths == {12} and output.policy_versions == [0] * 12
    assert output.finish_reason == "length" and output.error is None
    assert largest_error(model, output) < 1e-4


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.int32).tolist()])
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


# -- pause -----------------------------------------------------------------------------------------------


def test_nothing_runs_while_a_pause_is_held_and_everything_goes_on_after(model: Any) -> None:
    with busy(model) as manager:
        assert advances(manager)
        with manager.pause(WAIT):
            before = manager.overlap.forwards
            assert not advances(manager) and manager.overlap.forwards == before
            handle = manager.submit(prompt(3), GREEDY)
            assert not advances(manager) and not handle.done
        assert handle.result(WAIT).token_ids == generate_greedy(model, prompt(3), 8)


def test_a_pause_is_granted_at_a_forward_boundary_only(model: Any) -> None:
    with busy(model) as manager:
        assert manager._engine is not None
        inside, proceed = threading.Event(), threading.Event()
        step = manager._engine.step

        def slow(**arguments: Any) -> Any:
            inside.set()
            proceed.wait(WAIT)
            return step(**arguments)

        manager._engine.step = slow  # type: ignore[method-assign]
        inside.wait(WAIT)
        with pytest.raises(PauseTimeoutError, match=r"pause\(\).*0.05 s.*still in its forward"):
            manager.pause(0.05)
        thread, outcome = in_thread(lambda: manager.pause(WAIT))
        time.sleep(0.05)
        assert outcome == []
        manager._engine.step = step  # type: ignore[method-assign]
        proceed.set()
        thread.join(WAIT)
        assert not advances(manager)
        outcome[0].release()
        assert goes_on(manager), "the timed-out pause must have given its hold back"


def test_pauses_nest_in_one_thread(model: Any) -> None:
    with busy(model) as manager:
        outer = manager.pause(WAIT)
        manager.pause(WAIT)
        manager.resume()
        assert not advances(manager)
        outer.release()
        outer.release()  # a second release is harmless
        assert goes_on(manager)
        with manager.pause(), manager.pause():
            pass
        assert goes_on(manager)


def test_two_threads_hold_independently(model: Any) -> None:
    with busy(model) as manager:
        mine = manager.pause(WAIT)
        thread, theirs = in_thread(lambda: manager.pause(WAIT))
        thread.join(WAIT)
        mine.release()
        assert not advances(manager)
        with pytest.raises(RuntimeError, match="resume.. without pause"):
            manager.resume()  # the other thread's hold is not ours to release
        assert not advances(manager)
        theirs[0].release()
        assert goes_on(manager)


def test_many_threads_pausing_at_once_lose_no_hold_and_no_release_check(model: Any) -> None:
    with busy(model) as manager:
        resumed: list[int] = []
        manager.on("resumed", lambda: resumed.append(1))

        def pause_often() -> None:
            for _ in range(30):
                with manager.pause(WAIT):
                    pass

        threads = [in_thread(pause_often) for _ in range(4)]
        for thread, outcome in threads:
            thread.join(WAIT)
            assert outcome == [None]
        assert resumed and goes_on(manager)


def test_of_two_holds_released_at_once_one_runs_the_release_check(manager: RolloutManager) -> None:
    """The check of the weights must not be skipped because each releaser took the other for the last."""
    gate, resumed = manager._gate, []
    manager.on("resumed", lambda: resumed.append(1))
    first, second = manager.pause(), manager.pause()

    class Meeting:
        """The gate's lock, but each thread's first section ends only when the other's has, too."""

        def __init__(self, lock: Any) -> None:
            self.lock, self.barrier, self.met = lock, threading.Barrier(2), threading.local()

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            if not getattr(self.met, "done", False):
                self.met.done = True
                self.barrier.wait(WAIT)

    lock = gate.lock
    gate.lock = Meeting(lock)  # type: ignore[assignment]
    threads = [in_thread(hold.release)[0] for hold in (first, second)]
    for thread in threads:
        thread.join(WAIT)
    gate.lock = lock
    assert resumed == [1] and not gate.held


def test_resume_without_pause_is_an_error(manager: RolloutManager) -> None:
    with pytest.raises(RuntimeError, match="without pause"):
        manager.resume()


def test_waits_on_the_engine_thread_are_refused_not_deadlocked(model: Any) -> None:
    errors: list[BaseException] = []
    with busy(model) as manager:

        def hook(_: Any) -> None:
            actions = (
                manager.pause,
                manager.stop,
                lambda: manager.begin_update("finish"),
                lambda: manager.wait_for(lambda: False, WAIT),
            )
            for action in actions:
                try:
                    action()
                except RuntimeError as error:
                    errors.append(error)

        remove = manager.on("finished", hook)
        manager.submit(prompt(3), GREEDY).result(WAIT)
        until(lambda: len(errors) == 4)
        remove()
        assert all("wait for itself" in str(error) for error in errors)
        assert goes_on(manager)


def test_pause_works_before_start_and_after_stop(model: Any) -> None:
    manager = RolloutManager(model, **SIZES)
    with manager.pause(1.0):
        manager.start()
        handle = manager.submit(prompt(3), GREEDY)
        time.sleep(0.05)
        assert not handle.done
    handle.result(WAIT)
    manager.stop()
    with manager.pause(1.0):
        pass


def test_stop_inside_a_pause_ends_and_draining_inside_one_is_refused(model: Any) -> None:
    with busy(model) as manager:
        with manager.pause(WAIT):
            with pytest.raises(RuntimeError, match="release the pause first"):
                manager.stop(drain=True)
            assert manager.running
            manager.stop(timeout=WAIT)
        assert not manager.running


# -- weight updates and versions -------------------------------------------------------------------------


def update_midway(model: Any, policy: Any, tokens: int = 10) -> tuple[RolloutManager, list[Any]]:
    """Stream a group and a single request, update the weights when the single one has ``tokens`` tokens."""
    with RolloutManager(model, in_flight=policy, **SIZES) as manager:
        handle = manager.submit(prompt(9), LONG)
        others = manager.submit_group(prompt(6), 3, LONG)
        for count, _ in enumerate(handle.stream(WAIT), 1):
            if count == tokens:
                with manager.weight_update():
                    shift(model)
        return manager, [h.result(WAIT) for h in (handle, *others)]


def switch(output: Any) -> int:
    """How many tokens version 0 sampled; asserts that versions only grow."""
    versions = output.policy_versions
    assert versions == sorted(versions) and set(versions) <= {0, 1}
    return versions.count(0)


def split_error(old: Any, new: Any, output: Any) -> tuple[float, float]:
    """Largest log-prob error of the tokens before the update under ``old``, and after it under ``new``."""
    errors = []
    for model, part in ((old, slice(0, switch(output))), (new, slice(switch(output), None))):
        expected = ordinary_logprobs(model, output.prompt_ids, output.token_ids)
        errors.append((expected - torch.tensor(output.logprobs))[part].abs().max().item())
    return errors[0], errors[1]


def test_keep_changes_the_version_exactly_at_the_update_and_keeps_the_cache(model: Any) -> None:
    manager, outputs = update_midway(model, "keep")
    assert manager.policy_version == 1
    for output in outputs:
        assert output.finish_reason == "length" and 0 < switch(output) < 50
        before, after = split_error(smaller(), model, output)
        assert before < 1e-4
        assert after > 1e-3, "the old keys were kept, so a replay under the new weights must differ"


def test_recompute_gives_the_new_weights_logprobs_after_the_update(model: Any) -> None:
    manager, outputs = update_midway(model, "recompute")
    assert manager.stats()["preemptions"] == 0  # not one of those that memory forces
    for output in outputs:
        assert len(output.token_ids) == 50 and 0 < switch(output) < 50
        assert max(split_error(smaller(), model, output)) < 1e-4


def test_finish_lets_running_requests_end_under_the_old_weights(model: Any) -> None:
    with RolloutManager(model, **{**SIZES, "rollouts_in_flight": 2}) as manager:
        handles = [manager.submit(prompt(5 + i), LONG) for i in range(4)]
        next(handles[0].stream(WAIT))
        with manager.weight_update("finish"):
            assert [handle.done for handle in handles] == [True, True, False, False]
            shift(model)
        outputs = [handle.result(WAIT) for handle in handles]
    assert [set(output.policy_versions) for output in outputs] == [{0}, {0}, {1}, {1}]
    for output, policy in zip(outputs, [smaller(), smaller(), model, model], strict=True):
        assert largest_error(policy, output) < 1e-4


def test_finish_inside_ones_own_pause_is_refused_not_deadlocked(model: Any) -> None:
    with busy(model) as manager:
        with manager.pause(WAIT), pytest.raises(RuntimeError, match="release the pause first"):
            manager.begin_update("finish")
        assert goes_on(manager)
        with pytest.raises(TimeoutError), manager.weight_update("finish", timeout=0.05):
            pytest.fail("the endless request cannot have finished")
        assert goes_on(manager) and manager.policy_version == 0


def test_abort_ends_running_and_waiting_requests_with_what_they_have(model: Any) -> None:
    with busy(model, rollouts_in_flight=1) as manager:
        handle = manager.submit(prompt(5), ENDLESS)
        seen: list[Any] = []
        manager.on("finished", seen.append)
        manager.cancel("endless")
        next(handle.stream(WAIT))
        queued = manager.submit(prompt(6), GREEDY)
        until(lambda: manager._engine is not None and manager._engine.unfinished == 2)
        with manager.weight_update("abort"):
            shift(model)
        outputs = [handle.result(1.0), queued.result(1.0)]
        assert [output.finish_reason for output in outputs] == ["aborted", "aborted"]
        assert outputs[0].token_ids and set(outputs[0].policy_versions) == {0} and not outputs[1].token_ids
        assert {output.request_id for output in seen} >= {handle.request_id, queued.request_id}
        output = manager.submit(prompt(5), SAMPLED).result(WAIT)
        assert set(output.policy_versions) == {1} and largest_error(model, output) < 1e-4


@pytest.mark.parametrize("policy", ["keep", "recompute", "finish", "abort"])
def test_a_repeated_prompt_never_uses_the_old_weights_keys(model: Any, policy: Any) -> None:
    with RolloutManager(model, in_flight=policy, **SIZES) as manager:
        for version in range(3):
            outputs = [manager.submit(prompt(21), SAMPLED).result(WAIT) for _ in range(2)]
            for output in outputs:
                assert set(output.policy_versions) == {version}
                assert largest_error(model, output) < 1e-4
            # Inside a version the second one finds five full blocks of 4 tokens.
            assert manager.stats()["prompt_tokens_reused"] == 20 * (version + 1)
            with manager.weight_update():
                shift(model, 0.2)


def test_keys_of_a_request_that_saw_an_update_are_never_shared(model: Any) -> None:
    with RolloutManager(model, **SIZES) as manager:
        handle = manager.submit(prompt(21), SamplingParams(max_new_tokens=20, ignore_eos=True))
        next(handle.stream(WAIT))
        with manager.weight_update():
            shift(model)
        assert len(set(handle.result(WAIT).policy_versions)) == 2
        assert largest_error(model, manager.submit(prompt(21), SAMPLED).result(WAIT)) < 1e-4
        assert manager.stats()["prompt_tokens_reused"] == 0


def test_the_version_does_not_move_when_the_body_raises_before_it_writes(model: Any) -> None:
    with busy(model) as manager:
        with pytest.raises(ZeroDivisionError), manager.weight_update():
            raise ZeroDivisionError
        assert manager.policy_version == 0 and goes_on(manager)
        with pytest.raises(ZeroDivisionError), manager.weight_update():
            shift(model)
            raise ZeroDivisionError
        assert manager.policy_version == 1 and goes_on(manager)
        with manager.weight_update():
            pass
        assert manager.policy_version == 2


def test_an_update_inside_an_update_or_another_threads_is_no_unfenced_write(model: Any) -> None:
    with busy(model) as manager:
        with manager.weight_update():
            shift(model)
            with manager.weight_update():
                shift(model)
            thread, outcome = in_thread(lambda: manager.end_update(manager.begin_update()))
            thread.join(WAIT)
            assert outcome == [None]
            shift(model)
        assert goes_on(manager)
        manager.cancel("endless")
        assert largest_error(model, manager.submit(prompt(9), SAMPLED).result(WAIT)) < 1e-4
        shift(model)  # and the guard is on again
        with pytest.raises(UnfencedWriteError), manager.pause(WAIT):
            pass


def test_an_unfenced_write_is_named_and_reaches_the_waiters(model: Any) -> None:
    with busy(model) as manager:
        handle = manager.submit(prompt(5), ENDLESS)
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        with pytest.raises(EngineDeadError, match="model.norm.weight") as raised:
            handle.result(WAIT)
        assert isinstance(raised.value.__cause__, UnfencedWriteError)


def test_an_unfenced_write_is_found_by_an_idle_engine_at_the_next_fence(model: Any) -> None:
    for fence in ("pause", "weight_update"):
        with RolloutManager(model, **SIZES) as manager:
            shift(model)
            with pytest.raises(UnfencedWriteError, match="layers.0.mlp.up_proj.weight"):
                with getattr(manager, fence)():
                    pass
            with pytest.raises(EngineDeadError):
                manager.submit(prompt(3))


def test_writes_before_start_and_after_stop_need_no_fence(model: Any) -> None:
    manager = RolloutManager(model, **SIZES)
    with manager.weight_update():
        shift(model)
    shift(model)
    with manager.weight_update():
        pass
    for _ in range(2):  # the second round is a restart: what was cached belongs to other weights
        with manager:
            assert largest_error(model, manager.submit(prompt(21), SAMPLED).result(WAIT)) < 1e-4
        shift(model, 0.1)
        with manager.weight_update():
            pass
        with manager.pause():
            pass


def test_a_replaced_parameter_is_named_at_resume_and_ends_the_engine(model: Any) -> None:
    with busy(model) as manager:
        handle = manager.submit(prompt(5), ENDLESS)
        with pytest.raises(SharedWeightsError, match="lm_head.weight"), manager.weight_update():
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        with pytest.raises(EngineDeadError) as raised:
            handle.result(WAIT)
        assert isinstance(raised.value.__cause__, SharedWeightsError)


def test_a_bad_policy_or_event_is_refused_with_the_choices(model: Any) -> None:
    with pytest.raises(ValueError, match="in_flight='drop'.*'keep', 'recompute', 'finish', 'abort'"):
        RolloutManager(model, in_flight="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_backend='fast'.*'auto'"):
        RolloutManager(model, attention_backend="fast")
    manager = RolloutManager(model)
    with pytest.raises(ValueError, match="event='done'.*'finished'"):
        manager.on("done", print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in_flight='drop'"), manager.weight_update("drop"):  # type: ignore[arg-type]
        pass


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
def test_an_error_in_another_hook_reaches_the_caller_and_the_pause_is_released(model: Any, event: Any) -> None:
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
    assert manager.attention_info["requested"] == "auto" and manager.attention_info["selected"] == "torch"


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
