"""Pacing and micro-batches: which groups are admitted when, and which rows a step trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlt_train.engine.params import SamplingParams
from rlt_train.engine.request import RolloutOutput
from rlt_train.grpo.packing import TrainingRow
from rlt_train.grpo.prompts import Prompt, PromptStream
from rlt_train.grpo.rollouts import RolloutGroup, RolloutQueue


class FakeHandle:
    """A request whose completion has ``length`` tokens and that is done when the test says so."""

    def __init__(self, length: int) -> None:
        self.done = False
        self.length = length

    def result(self) -> RolloutOutput:
        assert self.done
        return RolloutOutput("r", [1], [2] * self.length, [0.0] * self.length, [], [0] * self.length, "stop")


class FakeManager:
    """Records what is submitted; ``on_wait`` finishes something, or the wait can never end."""

    def __init__(self, length_of: Callable[[int], int] = lambda group: 1) -> None:
        self.submitted: list[int] = []
        self.handles: dict[int, list[FakeHandle]] = {}
        self.on_wait: Callable[[], None] = self.finish_all
        self._length_of = length_of

    def submit_group(
        self, prompt_ids: Sequence[int], n: int, params: SamplingParams, **_: Any
    ) -> list[FakeHandle]:
        assert params.seed is not None
        self.submitted.append(params.seed)
        self.handles[params.seed] = [FakeHandle(self._length_of(params.seed)) for _ in range(n)]
        return self.handles[params.seed]

    def finish(self, *groups: int) -> None:
        for group in groups:
            for handle in self.handles[group]:
                handle.done = True

    def finish_all(self) -> None:
        self.finish(*self.handles)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None, what: str = "") -> None:
        if not predicate():
            self.on_wait()
        assert predicate(), f"{what} can never finish"


def row_of(group: RolloutGroup, output: RolloutOutput) -> TrainingRow:
    return TrainingRow([group.index], output.token_ids, output.logprobs, output.policy_versions, 0.0)


def make_queue(
    manager: FakeManager, max_staleness: int, last_step: int = 100, whole_step: bool = False
) -> RolloutQueue:
    return RolloutQueue(
        manager,  # type: ignore[arg-type]
        lambda group: (group, Prompt("p", [group], {})),
        groups_per_step=2,
        num_generations=2,
        params=SamplingParams(),
        max_staleness=max_staleness,
        last_step=last_step,
        score=lambda groups: [row_of(group, output) for group in groups for output in group.outputs],
        whole_step=whole_step,
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_group_is_admitted_once_its_step_is_within_the_staleness_bound(max_staleness: int) -> None:
    manager = FakeManager()
    queue = make_queue(manager, max_staleness)
    for step in range(5):
        queue.begin_step(step)
        queue.begin_step(step)
        assert manager.submitted == list(range(2 * (step + max_staleness + 1)))


def test_nothing_is_admitted_for_steps_that_are_never_trained() -> None:
    manager = FakeManager()
    queue = make_queue(manager, max_staleness=5, last_step=3)
    queue.begin_step(0)
    assert manager.submitted == list(range(6))


def test_a_resumed_run_admits_from_its_first_step_on() -> None:
    manager = FakeManager()
    make_queue(manager, max_staleness=0).begin_step(7)
    assert manager.submitted == [14, 15]


def test_a_step_trains_its_own_groups_longest_rows_first() -> None:
    manager = FakeManager(length_of=lambda group: 10 - group)
    queue = make_queue(manager, max_staleness=1)
    first, second = queue.take(0, 2), queue.take(0, 2)
    assert [row.total_length for row in first + second] == [11, 11, 10, 10]
    assert {row.prompt_ids[0] for row in queue.take(1, 4)} == {2, 3}


def test_the_first_micro_batch_does_not_wait_for_the_rest_of_its_step() -> None:
    manager = FakeManager()
    queue = make_queue(manager, max_staleness=0)
    manager.on_wait = lambda: manager.finish(1)
    assert {row.prompt_ids[0] for row in queue.take(0, 2)} == {1}
    manager.on_wait = lambda: manager.finish(0)
    assert {row.prompt_ids[0] for row in queue.take(0, 2)} == {0}


def test_advantages_over_the_whole_step_wait_for_all_of_it() -> None:
    manager = FakeManager()
    queue = make_queue(manager, max_staleness=0, whole_step=True)
    manager.on_wait = lambda: manager.finish(1)
    with pytest.raises(AssertionError, match="can never finish"):
        queue.take(0, 2)
    manager.on_wait = manager.finish_all
    assert len(queue.take(0, 4)) == 4


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), [i], {}) for i in range(count)]


def test_every_epoch_is_another_permutation_and_a_function_of_the_seed() -> None:
    stream = PromptStream(prompts(10), groups_per_step=3, seed=5, shuffle=True)
    assert stream.steps_per_epoch == 3
    epochs = [[stream[epoch * 9 + i].prompt for i in range(9)] for epoch in range(3)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = PromptStream(prompts(10), groups_per_step=3, seed=5, shuffle=True)
    assert [again[i].prompt for i in range(26, -1, -1)][::-1] == sum(epochs, [])
    other = PromptStream(prompts(10), groups_per_step=3, seed=6, shuffle=True)
    assert [other[i].prompt for i in range(9)] != epochs[0]


def test_fewer_prompts_than_a_step_takes_go_round() -> None:
    stream = PromptStream(prompts(2), groups_per_step=5, seed=0, shuffle=False)
    assert [stream[i].prompt for i in range(7)] == ["0", "1", "0", "1", "0", "0", "1"]
