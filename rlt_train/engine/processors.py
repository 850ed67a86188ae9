"""What changes the logits before a draw, beside temperature and truncation: penalties, biases and bans.

Pure functions on float32 logits ``[rows, vocab]``; each touches only the rows that ask for it, so a request's
tokens do not depend on what its batch-mates ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlt_train.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    """A sequence before a draw: its tokens, how many of them are the prompt, and which tokens would end
    it."""

    tokens: Sequence[int]
    prompt: int
    ending: frozenset[int] = frozenset()

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt


def changes_logits(params: SamplingParams, history: History) -> bool:
    """Whether ``processed_row`` does anything."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or history.generated < params.min_new_tokens  # type: ignore[operator]
    )


def process_logits(
    logits: torch.Tensor, params: Sequence[SamplingParams], histories: Sequence[History]
) -> torch.Tensor:
    """Apply what each row asks for; returns ``logits`` itself when no row asks for anything."""
    rows = [row for row, (p, h) in enumerate(zip(params, histories, strict=True)) if changes_logits(p, h)]
    if not rows:
        return logits
    processed = logits.clone()
    for row in rows:
        processed[row] = processed_row(logits[row], params[row], histories[row])
    return processed


def processed_row(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    """One row ``[vocab]`` after penalties, then bias, then bans (transformers' order)."""
    device = logits.device
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(history.tokens)), device=device)
        scores = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if params.presence_penalty or params.frequency_penalty:
        completion = torch.tensor(history.tokens[history.prompt :], dtype=torch.long, device=device)
        counts = torch.zeros_like(logits).index_add_(
            0, completion, torch.ones(len(completion), device=device)
        )
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=device, dtype=logits.dtype)
    banned = banned_tokens(params, history)
    if banned:
        logits[torch.tensor(sorted(banned), device=device)] = float("-inf")
    if params.allowed_token_ids is not None:
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        allowed[torch.tensor(list(params.allowed_token_ids), device=device)] = True
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits


def banned_tokens(params: SamplingParams, history: History) -> set[int]:
    """The tokens that may not come next: the end of a bad word whose start is there, and what would end a
    sequence too early."""
    banned: set[int] = set()
    if history.generated < params.min_new_tokens:  # type: ignore[operator]
        banned |= history.ending
    for word in params.bad_words or ():
        *start, last = word
        if not start or list(history.tokens[-len(start) :]) == start:
            banned.add(last)
    return banned
