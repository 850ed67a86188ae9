"""What is asked for, what is in flight, and what comes out: plain data with one owner each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rlt_train.engine.params import SamplingParams
from rlt_train.engine.processors import History
from rlt_train.kv.tables import Tables

FinishReason = Literal["stop", "length", "cancelled", "aborted", "error"]


@dataclass(slots=True)
class PromptState:
    """A computed prompt that the members of a group start from.

    Attributes:
        policy_version: the version that computed it; useless after the next one.
        tables: its KV blocks in each group, one reference held here. A partly filled last block is copied,
            never written.
        logits: ``[vocab]`` after the last prompt token.
        prompt_logprobs: see ``Sequence``.
    """

    policy_version: int
    tables: Tables
    logits: torch.Tensor
    prompt_logprobs: list[float | None]


@dataclass(slots=True)
class PromptGroup:
    """Requests for samples of one prompt: the first to be scheduled (the leader) computes it for the others.

    Attributes:
        waiting: members not yet scheduled; the state is released with the last one.
        leader: id of the request that is computing the prompt now.
    """

    waiting: int
    leader: str | None = None
    state: PromptState | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one prompt; ``params`` are resolved, ``deadline`` is a time of the engine's clock."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    group: PromptGroup | None = None
    metadata: Any = None
    deadline: float | None = None

    @property
    def ending(self) -> frozenset[int]:
        """The tokens that end the sequence."""
        return self.eos_token_ids.union(self.params.stop_token_ids or ())


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. Invariant: ``computed < len(tokens)`` between steps, and ``tables`` cover
    ``computed``.

    Attributes:
        tokens: prompt and generated tokens.
        logprobs, processed_logprobs, policy_versions, top_logprobs: one entry a generated token.
        prompt_logprobs: one entry a prompt token, ``None`` for the first; empty unless the request asks for
        them.
        tables: the block table of each attention group.
        computed: tokens whose keys and values are in the cache.
        cache_version: policy version of *all* cached keys, or ``None`` once they mix versions.
        order: its place in the queue, lowest first; set by the scheduler.
        stop_reason: the token or stop string that ended it.
    """

    request: Request
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    computed: int = 0
    cache_version: int | None = None
    order: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.policy_versions)

    def history(self) -> History:
        """What the sampler needs to know of it."""
        return History(self.tokens, len(self.request.prompt_ids), self.request.ending)

    def append(
        self,
        token: int,
        logprob: float,
        processed_logprob: float,
        top: list[tuple[int, float]],
        policy_version: int,
    ) -> None:
        """Take a sampled token and finish if it ends the sequence or reaches the limit."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.processed_logprobs.append(processed_logprob)
        self.top_logprobs.append(top)
        self.policy_versions.append(policy_version)
        if token in self.request.ending:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.generated >= self.request.params.max_new_tokens:  # type: ignore[operator]
            self.finish_reason = "length"


@dataclass(frozen=True, slots=True)
class RolloutOutput:
    """A finished request.

    Attributes:
        request_id: as submitted.
        prompt_ids: as submitted.
        token_ids: generated tokens, the EOS or stop token included.
        logprobs: behaviour log-probs, log-softmax(logits / temperature) over the full vocabulary, one a
        token.
        processed_logprobs: log-probs of the distribution really drawn from (after penalties, bans and
            truncation), one a token.
        policy_versions: the policy version that sampled each token.
        finish_reason: "stop" (EOS, stop token or stop string), "length", "cancelled", "aborted" (by a weight
            update) or "error".
        metadata: as submitted.
        error: why, when ``finish_reason`` is "error".
        stop_reason: the token or the string that ended it, for "stop".
        top_logprobs: the likeliest tokens at each position with their log-probs, if ``top_logprobs`` was
        asked for.
        prompt_logprobs: log-prob of each prompt token (``None`` for the first), if asked for.
    """

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    processed_logprobs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason
    metadata: Any = None
    error: Exception | None = None
    stop_reason: int | str | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)

    @classmethod
    def of(cls, sequence: Sequence) -> RolloutOutput:
        """The output of a finished sequence."""
        request = sequence.request
        assert sequence.finish_reason is not None
        return cls(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=sequence.tokens[len(request.prompt_ids) :],
            logprobs=sequence.logprobs,
            processed_logprobs=sequence.processed_logprobs,
            policy_versions=sequence.policy_versions,
            finish_reason=sequence.finish_reason,
            metadata=request.metadata,
            error=sequence.error,
            stop_reason=sequence.stop_reason,
            top_logprobs=sequence.top_logprobs if request.params.top_logprobs else [],
            prompt_logprobs=sequence.prompt_logprobs,
        )
