"""Which tokens the next forward computes: decodes first, then prefill chunks, then admissions, under a token
budget.

Blocks of a whole prompt (and of what a preempted sequence had generated) are taken at admission, so only
decodes grow. When a decode finds no free block, the sequence admitted last gives up its blocks and starts
again from its tokens (preemption by recompute, after vLLM): nothing that was generated is lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from rlt_train.engine.request import PromptGroup, PromptState, Sequence
from rlt_train.kv.blocks import BlockPool


@dataclass(slots=True)
class ScheduledSpan:
    """Tokens ``start .. start + length`` of a sequence; ``samples`` if its next token is drawn after this
    forward."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(slots=True)
class ScheduledStep:
    """One engine step.

    Attributes:
        spans: what the forward computes.
        copies: (source, target) blocks to copy before the forward.
        forked: sequences whose prompt a group leader computed, each with the logits ``[vocab]`` after it:
            their first token is drawn from those, no forward.
        tokens: tokens that the forward computes.
    """

    spans: list[ScheduledSpan] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    forked: list[tuple[Sequence, torch.Tensor]] = field(default_factory=list)
    tokens: int = 0


class Scheduler:
    """Owns the queue, the running set and every block reference. Not thread-safe: one owner calls it.

    Args:
        pool: the blocks.
        max_sequences: running sequences at most (the slots).
        max_tokens_per_step: tokens of one forward at most, at least ``max_sequences`` so that all can decode
            at once.
    """

    def __init__(self, pool: BlockPool, max_sequences: int, max_tokens_per_step: int) -> None:
        self.pool = pool
        self.max_sequences = max_sequences
        self.max_tokens_per_step = max_tokens_per_step
        self.policy_version = 0
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}  # in admission order
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
        self.waiting.append(sequence)

    def schedule(self, admit: bool = True) -> ScheduledStep:
        """Plan the next step; ``advance`` must follow its forward. Without ``admit`` only preempted requests
        re-enter."""
        step = ScheduledStep()
        for sequence in list(self.running.values()):
            if sequence.request.request_id in self.running and _left(sequence) == 1:
                if self._grow(sequence):
                    self._span(step, sequence)
        for sequence in self.running.values():
            if _left(sequence) > 1 and step.tokens < self.max_tokens_per_step:
                self._span(step, sequence)
        self._admit(step, admit)
        return step

    def advance(self, step: ScheduledStep) -> None:
        """Note that the forward of ``step`` ran: its tokens are in the cache, complete prompts are
        findable."""
        for span in step.spans:
            sequence = span.sequence
            sequence.computed = span.start + span.length
            if span.length > 1 and span.samples and sequence.cache_version == self.policy_version:
                self.pool.index_prefix(sequence.tokens, sequence.blocks)

    def publish_prompt(self, leader: Sequence, logits: torch.Tensor) -> None:
        """Offer a leader's computed prompt (``logits [vocab]`` after its last token) to the waiting of its
        group."""
        group = leader.request.group
        if group is None or group.leader != leader.request.request_id:
            return
        group.leader = None
        if group.waiting and leader.cache_version == self.policy_version:
            prompt_blocks = leader.blocks[: self.pool.blocks_for(len(leader.request.prompt_ids))]
            self.pool.share(prompt_blocks)
            group.state = PromptState(self.policy_version, prompt_blocks, logits.clone())
            self._published.append(group)

    def finish(self, sequence: Sequence) -> None:
        """Forget a finished sequence, running or waiting, and give its blocks back."""
        if self.running.pop(sequence.request.request_id, None) is None:
            self.waiting.remove(sequence)
            self._left_queue(sequence)
        elif sequence.cache_version == self.policy_version and sequence.finish_reason in ("stop", "length"):
            self.pool.index_prefix(sequence.tokens[: sequence.computed], sequence.blocks)
        self._drop_leadership(sequence)
        self._release(sequence)

    def weights_changed(self, policy_version: int, recompute: bool) -> None:
        """Start a new policy version: no cached prompt outlives it.

        Running sequences keep their keys and values (which then mix versions and are never shared again), or,
        with ``recompute``, are computed anew from their tokens.
        """
        self.policy_version = policy_version
        self.pool.invalidate_prefixes()
        self._release_prompts()
        if recompute:
            while self.running:
                self._preempt(next(reversed(self.running.values())))
        for sequence in self.running.values():
            sequence.cache_version = None

    def _span(self, step: ScheduledStep, sequence: Sequence) -> None:
        length = min(_left(sequence), self.max_tokens_per_step - step.tokens)
        samples = length == _left(sequence)
        step.spans.append(ScheduledSpan(sequence, sequence.computed, length, samples))
        step.tokens += length

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token, preempting from the back; False if the sequence itself had to
        yield."""
        while self.pool.blocks_for(sequence.computed + 1) > len(sequence.blocks):
            if self.pool.num_free:
                sequence.blocks += self.pool.allocate(1)
            elif not self._release_prompts():
                # The victim comes after every sequence already planned in this step: decodes go in admission
                # order.
                victim = next(reversed(self.running.values()))
                self._preempt(victim)
                self.preemptions += 1
                if victim is sequence:
                    return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.request.request_id]
        self._drop_leadership(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.cache_version = None
        if sequence.generated == 0 and sequence.request.group is not None:
            sequence.request.group.waiting += 1
        self.waiting.appendleft(sequence)

    def _admit(self, step: ScheduledStep, new: bool) -> None:
        skipped: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting.popleft()
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
                    self.waiting.appendleft(sequence)
                    continue
                skipped.append(sequence)
                break
            self.running[sequence.request.request_id] = sequence
            if sequence.generated == 0:
                self._left_queue(sequence)
        self.waiting.extendleft(reversed(skipped))

    def _start(self, step: ScheduledStep, sequence: Sequence) -> bool:
        """Admit by computing the tokens, from the longest cached prefix on."""
        cached = self.pool.match_prefix(
            sequence.tokens[:-1]
        )  # the last token's logits are needed, so compute it
        revived = sum(self.pool.references(block) == 0 for block in cached)
        needed = self.pool.blocks_for(len(sequence.tokens)) - len(cached)
        # While others run, leave them some blocks to decode into, or admission and preemption chase each
        # other.
        reserve = -(-len(self.running) // 8)
        if needed + revived + reserve > self.pool.num_free:
            return False
        self.pool.share(cached)
        sequence.blocks = cached + self.pool.allocate(needed)
        sequence.computed = len(cached) * self.pool.block_size
        sequence.cache_version = self.policy_version
        self.prompt_tokens += len(sequence.tokens)
        self.prompt_tokens_reused += sequence.computed
        group = sequence.request.group
        if group is not None and sequence.generated == 0:
            group.leader = sequence.request.request_id
        self._span(step, sequence)
        return True

    def _fork(self, step: ScheduledStep, sequence: Sequence, state: PromptState) -> bool:
        """Admit on a prompt that the group's leader computed: share its full blocks, copy a partial last
        one."""
        full, partial = divmod(len(sequence.request.prompt_ids), self.pool.block_size)
        if partial and not self.pool.num_free:
            return False
        self.pool.share(state.blocks[:full])
        sequence.blocks = state.blocks[:full]
        if partial:
            sequence.blocks += self.pool.allocate(1)
            step.copies.append((state.blocks[full], sequence.blocks[full]))
        sequence.computed = len(sequence.request.prompt_ids)
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
        self.pool.release(group.state.blocks)
        group.state = None
        self._published.remove(group)

    def _drop_leadership(self, sequence: Sequence) -> None:
        group = sequence.request.group
        if group is not None and group.leader == sequence.request.request_id:
            group.leader = None

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []


def _left(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
