"""What is asked for, what is in flight, and what comes out: plain data with one owner each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rlt_train.engine.sampling import SamplingParams
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
    """

    policy_version: int
    tables: Tables
    logits: torch.Tensor


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


@dataclass(slots=True)
class Request:
    """One sample of one prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    group: PromptGroup | None = None
    metadata: Any = None


@dataclass(slots=True)
class Sequence:
    """A request in flight. Invariant: ``computed < len(tokens)`` between steps, and ``tables`` cover
    ``computed``.

    Attributes:
        tokens: prompt and generated tokens.
        logprobs, processed_logprobs, policy_versions: one entry a generated token.
        tables: the block table of each attention group.
        computed: tokens whose keys and values are in the cache.
        cache_version: policy version of *all* cached keys, or ``None`` once they mix versions.
    """

    request: Request
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    computed: int = 0
    cache_version: int | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.policy_versions)

    def append(self, token: int, logprob: float, processed_logprob: float, policy_version: int) -> None:
        """Take a sampled token and finish if it ends the sequence or reaches the limit."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.processed_logprobs.append(processed_logprob)
        self.policy_versions.append(policy_version)
        params = self.request.params
        if token in self.request.eos_token_ids or token in params.stop_token_ids:
            self.finish_reason = "stop"
        elif self.generated >= params.max_new_tokens:
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
        processed_logprobs: log-probs after top-k, top-p and min-p, one a token.
        policy_versions: the policy version that sampled each token.
        finish_reason: "stop" (EOS or stop token), "length", "cancelled", "aborted" (by a weight update) or
        "error".
        metadata: as submitted.
        error: why, when ``finish_reason`` is "error".
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
        )
