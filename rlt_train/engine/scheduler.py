"""Which tokens the next forward computes: decodes first, then prefill chunks, then admissions, under a token
budget.

Groups that see everything take the blocks of a whole prompt (and of what a preempted sequence had generated)
at admission, windowed groups those of each chunk as it comes, giving back what falls out of the window. When
a sequence finds no free block, the one that is last in order gives up its blocks and starts again from its
tokens (preemption by recompute, after vLLM): nothing that was generated is lost.

The order is that of arrival, a step of priority counting as ``PRIORITY_STRIDE`` arrivals: an urgent request
overtakes those before it, but no more than that many of each priority below, so that nobody starves.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import count

import torch

from rlt_train.engine.request import PromptGroup, PromptState, Sequence
from rlt_train.kv.tables import TableAllocator

PRIORITY_STRIDE = 64


@dataclass(slots=True)
class ScheduledSpan:
    """Tokens ``start .. start + length`` of a sequence; ``samples`` if its next token is drawn after this
    forward, ``echoes`` its first so many rows, whose next token is one of a prompt that wants its
    log-probs."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    echoes: int = 0


@dataclass(slots=True)
class ScheduledStep:
    """One engine step.

    Attributes:
        spans: what the forward computes.
        copies: (group, source, target) blocks to copy before the forward.
        forked: sequences whose prompt a group leader computed, each with the logits ``[vocab]`` after it:
            their first token is drawn from those, no forward.
        tokens: tokens that the forward computes.
    """

    spans: list[ScheduledSpan] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    forked: list[tuple[Sequence, torch.Tensor]] = field(default_factory=list)
    tokens: int = 0


class Scheduler:
    """Owns the queue, the running set and every block reference. Not thread-safe: one owner calls it.

    Args:
        blocks: the blocks of every attention group.
        max_sequences: running sequences at most (the slots).
        max_tokens_per_step: tokens of one forward at most, at least ``max_sequences`` so that all can decode
            at once.
    """

    def __init__(self, blocks: TableAllocator, max_sequences: int, max_tokens_per_step: int) -> None:
        self.blocks = blocks
        self.max_sequences = max_sequences
        self.max_tokens_per_step = max_tokens_per_step
        self.policy_version = 0
        self.waiting: list[Sequence] = []  # in order
        self.running: dict[str, Sequence] = {}  # in admission order
        self._arrivals = count()
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_reused = 0
        self._published: list[PromptGroup] = []

    @property
    def has_work(self) -> bool:
        """Anything waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its group, if any, already counts it as waiting."""
        sequence.tables = self.blocks.new_tables()
        sequence.order = next(self._arrivals) - PRIORITY_STRIDE * (sequence.request.params.priority or 0)
        self._queue(sequence)

    def schedule(self, admit: bool = True) -> ScheduledStep:
        """Plan the next step; ``advance`` must follow its forward. Without ``admit`` only preempted requests
        re-enter."""
        step = ScheduledStep()
        for decode in (True, False):
            for sequence in list(self.running.values()):
                running = sequence.request.request_id in self.running  # else an earlier one took its blocks
                if running and (_left(sequence) == 1) is decode and step.tokens < self.max_tokens_per_step:
                    self._continue(step, sequence)
        self._admit(step, admit)
        # A last prefill token is a decode to the attention, and those are packed first.
        step.spans.sort(key=lambda span: span.length > 1)
        return step

    def advance(self, step: ScheduledStep) -> None:
        """Note that the forward of ``step`` ran: its tokens are in the cache, full blocks are findable."""
        for span in step.spans:
            sequence = span.sequence
            sequence.computed = span.start + span.length
            if span.length > 1 and sequence.cache_version == self.policy_version:
                self.blocks.index_prefix(sequence.tokens[: sequence.computed], sequence.tables)
            self.blocks.drop_unseen(sequence.tables, sequence.computed)

    def publish_prompt(self, leader: Sequence, logits: torch.Tensor) -> None:
        """Offer a leader's computed prompt (``logits [vocab]`` after its last token) to the waiting of its
        group."""
        group = leader.request.group
        if group is None or group.leader != leader.request.request_id:
            return
        group.leader = None
        if group.waiting and leader.cache_version == self.policy_version:
            needed = self.blocks.blocks_for(len(leader.request.prompt_ids))
            tables = [table[:needed] for table in leader.tables]
            self.blocks.share(tables)
            group.state = PromptState(self.policy_version, tables, logits.clone(), leader.prompt_logprobs)
            self._published.append(group)

    def finish(self, sequence: Sequence) -> None:
        """Forget a finished sequence, running or waiting, and give its blocks back."""
        if self.running.pop(sequence.request.request_id, None) is None:
            self.waiting.remove(sequence)
            self._left_queue(sequence)
        elif sequence.cache_version == self.policy_version and sequence.finish_reason in ("stop", "length"):
            self.blocks.index_prefix(sequence.tokens[: sequence.computed], sequence.tables)
        self._drop_leadership(sequence)
        self._release(sequence)

    def weights_changed(self, policy_version: int, recompute: bool) -> None:
        """Start a new policy version: no cached prompt outlives it.

        Running sequences keep their keys and values (which then mix versions and are never shared again), or,
        with ``recompute``, are computed anew from their tokens.
        """
        self.policy_version = policy_version
        self.blocks.invalidate_prefixes()
        self._release_prompts()
        if recompute:
            for sequence in list(self.running.values()):
                self._preempt(sequence)
        for sequence in self.running.values():
            sequence.cache_version = None

    def _span(self, step: ScheduledStep, sequence: Sequence) -> ScheduledSpan:
        """The next tokens of a sequence that the budget allows."""
        length = min(_left(sequence), self.max_tokens_per_step - step.tokens)
        echoes = 0
        if sequence.request.params.prompt_logprobs:
            last = len(sequence.request.prompt_ids) - 1  # what follows it is not of the prompt
            echoes = max(0, min(length, last - sequence.computed))
        samples = length == _left(sequence)
        return ScheduledSpan(sequence, sequence.computed, length, samples, echoes)

    def _continue(self, step: ScheduledStep, sequence: Sequence) -> None:
        """Plan a running sequence, preempting from the back where it finds no block (itself in the end)."""
        span = self._span(step, sequence)
        while not self.blocks.cover(sequence.tables, span.start + span.length):
            if self._release_prompts():
                continue
            victim = max(self.running.values(), key=_order)
            step.spans = [planned for planned in step.spans if planned.sequence is not victim]
            step.tokens = sum(planned.length for planned in step.spans)
            self._preempt(victim)
            self.preemptions += 1
            if victim is sequence:
                return
        _plan(step, span)

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.request.request_id]
        self._drop_leadership(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.cache_version = None
        if sequence.generated == 0 and sequence.request.group is not None:
            sequence.request.group.waiting += 1
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def _admit(self, step: ScheduledStep, new: bool) -> None:
        skipped: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting.pop(0)
            if sequence.generated == 0 and not new:
                skipped.append(sequence)
                continue
            group = sequence.request.group if sequence.generated == 0 else None
            if group is not None and group.leader is not None:
                skipped.append(sequence)  # its prompt is being computed by the group's leader
                continue
            if group is not None and group.state is not None:
                admitted = self._fork(step, sequence, group.state)
            elif step.tokens >= self.max_tokens_per_step:
                skipped.append(sequence)
                continue
            else:
                admitted = self._start(step, sequence)
            if not admitted:
                if self._release_prompts():
                    self._queue(sequence)
                    continue
                skipped.append(sequence)
                break
            self.running[sequence.request.request_id] = sequence
            if sequence.generated == 0:
                self._left_queue(sequence)
        self.waiting[:0] = skipped  # they were taken from the front, in order

    def _start(self, step: ScheduledStep, sequence: Sequence) -> bool:
        """Admit by computing the tokens, from the longest cached prefix on."""
        # The last token's logits are needed, so it is computed even if it is cached.
        if sequence.request.params.prompt_logprobs:  # a cached prefix has no logits
            sequence.tables = self.blocks.new_tables()
        else:
            sequence.tables = self.blocks.match_prefix(sequence.tokens[:-1])
        self.blocks.share(sequence.tables)
        sequence.computed = len(sequence.tables[0]) * self.blocks.block_size
        span = self._span(step, sequence)
        # While others run, leave them some blocks to decode into, or admission and preemption chase each
        # other.
        spare = -(-len(self.running) // 8)
        if not self.blocks.cover(
            sequence.tables, span.start + span.length, whole=len(sequence.tokens), spare=spare
        ):
            self._release(sequence)
            sequence.computed = 0
            return False
        sequence.cache_version = self.policy_version
        self.prompt_tokens += len(sequence.tokens)
        self.prompt_tokens_reused += sequence.computed
        group = sequence.request.group
        if group is not None and sequence.generated == 0:
            group.leader = sequence.request.request_id
        _plan(step, span)
        return True

    def _fork(self, step: ScheduledStep, sequence: Sequence, state: PromptState) -> bool:
        """Admit on a prompt that the group's leader computed: share its full blocks, copy a partial last
        one."""
        prompt = len(sequence.request.prompt_ids)
        full = prompt // self.blocks.block_size
        sequence.tables = [table[:full] for table in state.tables]
        self.blocks.share(sequence.tables)
        if not self.blocks.cover(sequence.tables, prompt):
            self._release(sequence)
            return False
        for group, (table, source) in enumerate(zip(sequence.tables, state.tables, strict=True)):
            step.copies += [(group, source[at], table[at]) for at in range(full, len(table))]
        sequence.computed = prompt
        sequence.prompt_logprobs = list(state.prompt_logprobs)
        sequence.cache_version = state.policy_version
        self.prompt_tokens += sequence.computed
        self.prompt_tokens_reused += sequence.computed
        step.forked.append((sequence, state.logits))
        return True

    def _left_queue(self, sequence: Sequence) -> None:
        group = sequence.request.group
        if group is None or sequence.generated:
            return
        group.waiting -= 1
        if group.waiting == 0 and group.state is not None:
            # Its last block may still be the source of a planned copy: copies read before anything of the
            # step writes.
            self._release_prompt(group)

    def _release_prompts(self) -> bool:
        """Give back every shared prompt; their waiting members will compute it again. True if any was
        held."""
        held = bool(self._published)
        for group in list(self._published):
            self._release_prompt(group)
        return held

    def _release_prompt(self, group: PromptGroup) -> None:
        assert group.state is not None
        self.blocks.release(group.state.tables)
        group.state = None
        self._published.remove(group)

    def _drop_leadership(self, sequence: Sequence) -> None:
        group = sequence.request.group
        if group is not None and group.leader == sequence.request.request_id:
            group.leader = None

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.tables)
        sequence.tables = self.blocks.new_tables()


def _plan(step: ScheduledStep, span: ScheduledSpan) -> None:
    step.spans.append(span)
    step.tokens += span.length


def _order(sequence: Sequence) -> int:
    return sequence.order


def _left(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
