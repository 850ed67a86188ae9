"""The rollout manager: pauses, weight updates, policy versions and what happens to requests in flight."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from running import (
    ENDLESS,
    GREEDY,
    LONG,
    SAMPLED,
    SIZES,
    WAIT,
    advances,
    busy,
    goes_on,
    in_thread,
    shift,
    until,
)
from tiny import generate_greedy, largest_error, ordinary_logprobs, prompt, smaller

from rlt_train import (
    EngineDeadError,
    PauseTimeoutError,
    RolloutManager,
    SamplingParams,
    SharedWeightsError,
    UnfencedWriteError,
)

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
