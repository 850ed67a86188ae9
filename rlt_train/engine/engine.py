"""The engine: ``step()`` is schedule -> forward -> sample -> finish. One owner calls it; it starts no
thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlt_train.attention.discovery import discover_layers
from rlt_train.attention.dispatch import install
from rlt_train.attention.selection import Selection, select_backend
from rlt_train.engine.fusion import fuse_modules
from rlt_train.engine.params import SamplingParams
from rlt_train.engine.request import PromptGroup, Request, Sequence
from rlt_train.engine.runner import ModelRunner
from rlt_train.engine.sampling import sample, uniforms
from rlt_train.engine.scheduler import ScheduledStep, Scheduler
from rlt_train.engine.sizes import EngineConfig
from rlt_train.engine.stopping import Decode, find_stop_string
from rlt_train.errors import DeadlineError, RequestError
from rlt_train.kv import sizing
from rlt_train.kv.cache import PagedCache
from rlt_train.kv.groups import group_layers
from rlt_train.kv.tables import TableAllocator
from rlt_train.weights.view import GenerationView


@dataclass(slots=True)
class StepResult:
    """What a step did: tokens it ran forward, sequences that got a token, and those that are finished."""

    forward_tokens: int = 0
    sampled: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


class Engine:
    """Continuous batching over one generation view.

    Args:
        view: the model.
        config: sizes.
        attention_backend: "auto" or a backend's name, for every attention group.
        decode: token ids to text, for stop strings.
        clock: seconds, for deadlines.

    Raises:
        UnsupportedModelError: the model's attention cannot be paged.
        BackendSelectionError: no attention backend fits; nothing is allocated yet.
        ValueError: ``kv_cache_gib`` holds less than one sequence.
    """

    def __init__(
        self,
        view: GenerationView,
        config: EngineConfig,
        attention_backend: str = "auto",
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = view
        self.clock = clock
        self._decode = decode
        self.config = config
        install(view.config.get_text_config())
        install(view.config)
        # A tree of its own: an ordinary forward of the view stays, to the bit, what the training model gives.
        self.served = view.clone()
        if config.fuse_modules and view.autocast_dtype is None:
            fuse_modules(self.served.model)
        specs = discover_layers(self.served)
        self.groups = group_layers(list(specs.values()))
        self.selections: list[Selection] = [
            select_backend(attention_backend, view.device, group.spec.dtype, [group.spec], config.block_size)
            for group in self.groups
        ]
        blocks = self._size()
        self.cache = PagedCache(specs, self.groups, blocks, config.block_size, view.device)
        self.blocks = TableAllocator(self.groups, blocks, config.block_size)
        self.scheduler = Scheduler(self.blocks, config.rollouts_in_flight, config.tokens_per_step)
        self.backends = [
            selection.backend(group, config.block_size, view.device)
            for selection, group in zip(self.selections, self.groups, strict=True)
        ]
        self.vocab_size: int = view.config.get_text_config().vocab_size
        self._runner = ModelRunner(self.served, self.cache, self.backends)
        self.forward_tokens = 0
        self.tokens_generated = 0
        self._sequences: dict[str, Sequence] = {}
        self._deadlines = 0  # requests in flight that have one

    def warmup(self) -> None:
        """Let the backends compile for these sizes; see ``AttentionBackend.warmup`` for when that may be."""
        layers = list(self.cache.layers.values())
        for group, backend in zip(self.groups, self.backends, strict=True):
            layer = layers[group.layers[0]]
            backend.warmup(layer.keys, layer.values, self.config.rollouts_in_flight)

    def attention_info(self) -> dict[str, Any]:
        """Which backend serves which layers and why: ``selected``, ``reason`` and ``skipped`` of the first
        group, and the same of every group under ``groups``."""
        groups = [
            {
                "layers": list(group.layers),
                "sliding_window": group.spec.sliding_window,
                "chunk": group.spec.chunk,
                "selected": selection.selected,
                "reason": selection.reason,
                "skipped": selection.skipped,
                "warmup": backend.warmup_report,
            }
            for group, selection, backend in zip(self.groups, self.selections, self.backends, strict=True)
        ]
        names = list(dict.fromkeys(selection.selected for selection in self.selections))
        first = self.selections[0]
        return {
            "selected": "+".join(names),
            "reason": first.reason,
            "skipped": first.skipped,
            "groups": groups,
        }

    def _size(self) -> list[int]:
        config = self.config
        workload = sizing.Workload(
            config.rollouts_in_flight, config.max_length, config.tokens_per_step, config.block_size
        )
        if config.kv_cache_gib is None:
            return sizing.blocks_for_workload(self.groups, workload)
        return sizing.blocks_for_budget(config.kv_cache_gib, self.groups, workload)

    @property
    def policy_version(self) -> int:
        """Updates that the weights have seen since the engine was made."""
        return self.scheduler.policy_version

    @property
    def unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._sequences)

    @property
    def queued(self) -> int:
        """Requests that have not begun."""
        return sum(sequence.generated == 0 for sequence in self.scheduler.waiting)

    @property
    def in_flight(self) -> int:
        """Requests that have begun: running, or preempted after their first token."""
        return len(self.scheduler.running) + sum(s.generated > 0 for s in self.scheduler.waiting)

    def validate(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Check a request with resolved parameters before it is queued.

        Raises:
            RequestError: empty or too long prompt, a token outside the vocabulary, or bad sampling
            parameters.
        """
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token (a BOS token, say)")
        for token in prompt_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"prompt token {token} is outside the vocabulary of {self.vocab_size}")
        params.validate(self.vocab_size)
        if params.stop_strings and self._decode is None:
            raise RequestError("stop_strings need text: give RolloutManager(tokenizer=...)")
        total = len(prompt_ids) + params.max_new_tokens  # type: ignore[operator]
        longest = getattr(self.view.config.get_text_config(), "max_position_embeddings", None)
        if longest and total > longest:
            raise RequestError(
                f"a prompt of {len(prompt_ids)} tokens with max_new_tokens={params.max_new_tokens} needs "
                f"{total} "
                f"positions, but the model has {longest}: shorten the prompt or lower max_new_tokens"
            )
        if total > self.config.max_length:
            raise RequestError(
                f"a prompt of {len(prompt_ids)} tokens with max_new_tokens={params.max_new_tokens} needs "
                f"{total} tokens, but max_length is {self.config.max_length}: shorten the prompt, lower "
                f"max_new_tokens or raise max_length"
            )

    def add(self, request: Request) -> None:
        """Queue a validated request.

        Raises:
            RequestError: its id is already queued or running.
        """
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is already in flight; ids must be unique")
        sequence = Sequence(request, list(request.prompt_ids))
        if request.params.prompt_logprobs:
            sequence.prompt_logprobs = [None] * len(request.prompt_ids)
        self._deadlines += request.deadline is not None
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> Sequence | None:
        """Finish a request as cancelled; ``None`` if it is not in flight."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, "cancelled")

    def step(self, admit: bool = True) -> StepResult:
        """Run one forward and sample; without ``admit`` no new request begins. A no-op when nothing is
        scheduled."""
        late = self._end_late()
        step = self.scheduler.schedule(admit)
        result = StepResult(step.tokens, finished=late)
        if step.spans or step.forked:
            logits = self._echo(step, self._runner.run(step))
            self.scheduler.advance(step)
            self._sample(step, logits, result)
        self.forward_tokens += step.tokens
        self.tokens_generated += len(result.sampled)
        return result

    def weights_changed(self, policy_version: int, in_flight: str) -> list[Sequence]:
        """Enter a policy version; returns the sequences that ``in_flight="abort"`` ended."""
        aborted = (
            [self._end(s, "aborted") for s in list(self._sequences.values())] if in_flight == "abort" else []
        )
        self.scheduler.weights_changed(policy_version, recompute=in_flight == "recompute")
        return aborted

    def _end_late(self) -> list[Sequence]:
        """End every request whose deadline has passed."""
        if not self._deadlines:
            return []
        now = self.clock()
        late = [
            sequence
            for sequence in self._sequences.values()
            if sequence.request.deadline is not None and sequence.request.deadline <= now
        ]
        for sequence in late:
            sequence.error = DeadlineError(
                f"request {sequence.request.request_id!r} passed its deadline of "
                f"{sequence.request.params.deadline} s with {sequence.generated} tokens generated; other "
                f"requests "
                f"are unharmed"
            )
            self._end(sequence, "error")
        return late

    def _echo(self, step: ScheduledStep, logits: torch.Tensor) -> torch.Tensor:
        """Take the log-probs of echoed prompt tokens; returns the other rows, ``[sampling spans, vocab]``."""
        if not any(span.echoes for span in step.spans):
            return logits
        left, row = [], 0
        for span in step.spans:
            if span.echoes:
                first, sequence = span.start + 1, span.sequence
                temperature = sequence.request.params.temperature or 1.0
                rows = torch.log_softmax(logits[row : row + span.echoes].float() / temperature, dim=-1)
                tokens = torch.tensor(sequence.tokens[first : first + span.echoes], device=rows.device)
                # After a preemption the prompt is computed, and echoed, again.
                echoed = rows.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
                sequence.prompt_logprobs[first : first + span.echoes] = echoed
                row += span.echoes
            if span.samples:
                left.append(row)
                row += 1
        return logits[left]

    def _sample(self, step: ScheduledStep, logits: torch.Tensor, result: StepResult) -> None:
        forwarded = [span.sequence for span in step.spans if span.samples]
        for row, sequence in enumerate(forwarded):
            self.scheduler.publish_prompt(sequence, logits[row])
        sequences = forwarded + [sequence for sequence, _ in step.forked]
        if not sequences:
            return
        if step.forked:
            logits = torch.cat([logits, torch.stack([row for _, row in step.forked])])
        uniform = None
        if any(s.request.params.temperature for s in sequences):
            uniform = uniforms(
                self.config.seed, [s.request.seed for s in sequences], [s.generated for s in sequences]
            )
        drawn = sample(
            logits, [s.request.params for s in sequences], uniform, [s.history() for s in sequences]
        )
        columns = (drawn.tokens, drawn.logprobs, drawn.processed_logprobs, drawn.finite, drawn.possible)
        for sequence, top, *row in zip(
            sequences, drawn.top, *(column.tolist() for column in columns), strict=True
        ):
            self._take(sequence, top, *row, result=result)

    def _take(
        self,
        sequence: Sequence,
        top: list[tuple[int, float]],
        token: int,
        logprob: float,
        processed: float,
        finite: bool,
        possible: bool,
        *,
        result: StepResult,
    ) -> None:
        if not finite:
            # A backend whose tiles multiply masked values may have spoiled the clean start of this prompt,
            # too.
            self.blocks.invalidate_prefixes()
        if not (finite and possible):
            what = (
                "no token that logit_bias, bad_words, allowed_token_ids and min_new_tokens all allow"
                if finite
                else "NaN or infinite logits"
            )
            sequence.error = RequestError(
                f"request {sequence.request.request_id!r} got {what} at token {sequence.generated} (policy "
                f"version {self.policy_version}); other requests are unharmed."
                + ("" if finite else " Check the weights for NaN.")
            )
            result.finished.append(self._end(sequence, "error"))
            return
        sequence.append(token, logprob, processed, top, self.policy_version)
        self._check_stop_strings(sequence)
        result.sampled.append(sequence)
        if sequence.finish_reason is not None:
            result.finished.append(self._end(sequence, sequence.finish_reason))

    def _check_stop_strings(self, sequence: Sequence) -> None:
        params = sequence.request.params
        if not params.stop_strings or sequence.finish_reason == "stop":
            return
        if sequence.generated < params.min_new_tokens:  # type: ignore[operator]
            return
        assert self._decode is not None
        completion = sequence.tokens[len(sequence.request.prompt_ids) :]
        found = find_stop_string(self._decode, completion, params.stop_strings)
        if found is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", found

    def _end(self, sequence: Sequence, reason: str) -> Sequence:
        sequence.finish_reason = reason  # type: ignore[assignment]
        del self._sequences[sequence.request.request_id]
        self._deadlines -= sequence.request.deadline is not None
        self.scheduler.finish(sequence)
        return sequence


def new_group(members: int) -> PromptGroup | None:
    """The group of ``members`` samples of one prompt; a single sample needs none."""
    return PromptGroup(waiting=members) if members > 1 else None
