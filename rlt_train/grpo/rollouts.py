"""Keeps the engine full within the staleness bound, and turns finished groups into training rows.

Pacing: step ``s`` trains groups ``s * G .. (s + 1) * G - 1`` in admission order, and group ``g`` is admitted
once step ``g // G - max_staleness`` has begun. A token is sampled after its group was admitted, so when it is
trained it is at most ``max_staleness`` updates old; nothing is ever discarded. With ``max_staleness = 0`` a
step's groups are admitted when the step begins, and its first micro-batches train while the rest of it still
decodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlt_train.engine.params import SamplingParams
from rlt_train.engine.request import RolloutOutput
from rlt_train.grpo.packing import TrainingRow
from rlt_train.grpo.prompts import Prompt
from rlt_train.handle import RolloutHandle
from rlt_train.manager import RolloutManager


@dataclass(slots=True)
class RolloutGroup:
    """One prompt and its ``num_generations`` samples.

    Attributes:
        index: number of the group in the run; also the seed of its random streams.
        outputs: in sample order, once all are finished.
    """

    index: int
    prompt: Prompt
    handles: list[RolloutHandle]
    outputs: list[RolloutOutput]

    @property
    def done(self) -> bool:
        """Every sample is finished."""
        return all(handle.done for handle in self.handles)

    def collect(self) -> None:
        """Fill ``outputs``; raises a failed request's error."""
        self.outputs = [handle.result() for handle in self.handles]


def submit_group(
    manager: RolloutManager, prompt: Prompt, index: int, n: int, params: SamplingParams, kind: str
) -> RolloutGroup:
    """Queue ``n`` samples of ``prompt`` whose random streams are ``index``'s own, under any schedule."""
    handles = manager.submit_group(
        prompt.token_ids, n, replace(params, seed=index), request_id=f"{kind}-{index}"
    )
    return RolloutGroup(index, prompt, handles, [])


Scorer = Callable[[Sequence[RolloutGroup]], list[TrainingRow]]


class RolloutQueue:
    """The groups in flight and the scored rows of the step in training.

    Args:
        manager: a running manager.
        prompt_of: the prompt of this process's group number ``g``.
        groups_per_step: groups that this process trains a step.
        num_generations: samples a group.
        params: how they are sampled.
        max_staleness: see the module docstring.
        last_step: steps at and after this one are never trained, so nothing is admitted for them.
        score: rewards and advantages of complete groups, as rows in order.
        whole_step: score a step's groups all at once (advantages scaled by the whole batch need that).
    """

    def __init__(
        self,
        manager: RolloutManager,
        prompt_of: Callable[[int], tuple[int, Prompt]],
        groups_per_step: int,
        num_generations: int,
        params: SamplingParams,
        max_staleness: int,
        last_step: int,
        score: Scorer,
        whole_step: bool,
    ) -> None:
        self._manager = manager
        self._prompt_of = prompt_of
        self._groups_per_step = groups_per_step
        self._num_generations = num_generations
        self._params = params
        self._max_staleness = max_staleness
        self._last_step = last_step
        self._score = score
        self._whole_step = whole_step
        self._admitted: dict[int, list[RolloutGroup]] = {}  # by the step that trains them
        self._next_step: int | None = None
        self._step: int | None = None
        self._rows: list[TrainingRow] = []
        self.wait_seconds = 0.0

    def begin_step(self, step: int) -> None:
        """Admit every group that may be sampled while step ``step`` is trained. A repeated call does
        nothing."""
        if self._next_step is None:
            self._next_step = step
        while self._next_step <= min(step + self._max_staleness, self._last_step - 1):
            first = self._next_step * self._groups_per_step
            self._admitted[self._next_step] = [
                self._submit(group) for group in range(first, first + self._groups_per_step)
            ]
            self._next_step += 1
        if self._step != step:
            self._step, self._rows = step, []

    def take(self, step: int, count: int) -> list[TrainingRow]:
        """The next ``count`` rows of step ``step``, longest first among those that are scored.

        Waits for the engine to finish enough groups of the step; an engine that dies or is stopped ends the
        wait.
        """
        self.begin_step(step)
        waiting = self._admitted[step]

        def enough() -> bool:
            done = sum(group.done for group in waiting)
            if self._whole_step:
                return done == len(waiting)
            return len(self._rows) + done * self._num_generations >= count

        started = time.perf_counter()
        self._manager.wait_for(enough, what=f"the rollouts of step {step}")
        self.wait_seconds += time.perf_counter() - started
        finished = [group for group in waiting if group.done]
        if finished:
            for group in finished:
                group.collect()
            self._admitted[step] = [group for group in waiting if not group.outputs]
            self._rows += self._score(finished)
            self._rows.sort(key=lambda row: row.total_length, reverse=True)
        taken, self._rows = self._rows[:count], self._rows[count:]
        return taken

    def _submit(self, group: int) -> RolloutGroup:
        index, prompt = self._prompt_of(group)
        return submit_group(self._manager, prompt, index, self._num_generations, self._params, "group")
