"""Sampling as pure functions: one uniform a token, truncation, and inverse-CDF draws.

A draw depends on (run seed, request seed, position) and the logits alone: never on the global random stream,
on batch-mates or on the schedule. The counter-based generator follows the idea of Salmon et al. 2011
("Parallel random numbers: as easy as 1, 2, 3"); the mixer is the SplitMix64 finaliser (Steele et al. 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlt_train.engine.params import SamplingParams
from rlt_train.engine.processors import History, process_logits


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One draw a row: ``tokens`` int64 ``[rows]``; log-probabilities float32 ``[rows]``.

    ``logprobs`` is log-softmax(logits / temperature) over the full vocabulary (the behaviour log-probs of
    training); ``processed_logprobs`` is the same after penalties, bans, top-k, top-p and min-p, that is, of
    the distribution really drawn from. Greedy rows use temperature 1 for the first and are certain (0.0)
    under the second. ``finite`` is False where a row had no usable logits, ``possible`` where every token was
    banned; the token is meaningless in both cases. ``top`` has, for a row that asks for ``top_logprobs``, the
    likeliest tokens and their ``logprobs``.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    processed_logprobs: torch.Tensor
    finite: torch.Tensor
    possible: torch.Tensor
    top: list[list[tuple[int, float]]]


def uniforms(run_seed: int, request_seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Float64 ``[rows]`` in [0, 1): a pure function of (run seed, request seed, position).

    Seeds are integers of any sign; the run's low 64 bits and a request's low 128 bits count.
    """
    mask = 2**64 - 1
    with np.errstate(over="ignore"):
        state = _mix(np.full(len(request_seeds), run_seed & mask, dtype=np.uint64))
        for shift in (64, 0):
            state = _mix(state ^ np.array([seed >> shift & mask for seed in request_seeds], dtype=np.uint64))
        state = _mix(state ^ np.array(positions, dtype=np.uint64))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    uniform: torch.Tensor | None,
    histories: Sequence[History] | None = None,
) -> SampledTokens:
    """Draw one token a row.

    Args:
        logits: ``[rows, vocab]``; computed with in float32.
        params: one a row, resolved.
        uniform: float64 ``[rows]`` in [0, 1); may be ``None`` if every row is greedy.
        histories: what each row's sequence holds so far; default: nothing.
    """
    logits = logits.float()
    histories = histories or [History((), 0)] * len(params)
    device = logits.device
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device).unsqueeze(1)
    raw = torch.log_softmax(logits / temperature, dim=-1)
    # NaN, +inf, a row of -inf only and a temperature that overflows float32 all make NaN of the whole row.
    finite = torch.isfinite(raw.max(dim=-1).values)
    is_greedy = [p.temperature == 0 for p in params]
    greedy = torch.tensor(is_greedy, device=device)
    changed = process_logits(logits, params, histories)
    penalised = raw if changed is logits else torch.log_softmax(changed / temperature, dim=-1)
    processed = penalised if all(is_greedy) else truncate(penalised, params)
    tokens = penalised.argmax(dim=-1)
    if not all(is_greedy):
        assert uniform is not None
        tokens = torch.where(greedy, tokens, inverse_cdf(processed, uniform.to(device)))
    chosen = processed.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if processed is not raw:
        chosen = chosen - torch.logsumexp(processed, dim=-1)
    return SampledTokens(
        tokens=tokens,
        logprobs=raw.gather(1, tokens.unsqueeze(1)).squeeze(1),
        processed_logprobs=torch.where(greedy, torch.zeros_like(chosen), chosen),
        finite=finite,
        possible=finite if changed is logits else torch.isfinite(penalised.max(dim=-1).values),
        top=[likeliest(row, p.top_logprobs) for row, p in zip(raw, params, strict=True)],
    )


def likeliest(logprobs: torch.Tensor, count: int | None) -> list[tuple[int, float]]:
    """The ``count`` likeliest tokens of one row ``[vocab]`` and their log-probs, likeliest first."""
    if not count:
        return []
    values, ids = logprobs.topk(count)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def truncate(logprobs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Set what top-k, top-p and min-p drop to -inf; returns ``logprobs`` itself when no row truncates.

    ``logprobs [rows, vocab]`` is normalised. The filters apply in the order top-k, top-p, min-p, as in
    transformers; the likeliest token always stays.
    """
    if not any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params):
        return logprobs
    device = logprobs.device
    vocab = logprobs.shape[1]
    top_k = torch.tensor([p.top_k or vocab for p in params], device=device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], device=device, dtype=torch.float64).unsqueeze(1)
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)
    keep = rank < top_k
    probabilities = ordered.double().exp() * keep
    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep &= (before < top_p) | (top_p >= 1)  # a token stays while those before it fall short of top_p
    keep &= probabilities >= min_p * probabilities[:, :1]
    keep[:, 0] = True
    dropped = torch.ones_like(keep).scatter_(1, order, ~keep)
    return logprobs.masked_fill(dropped, float("-inf"))


def inverse_cdf(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token whose cumulative probability first exceeds ``uniform * total``: int64 ``[rows]``.

    ``logprobs [rows, vocab]`` need not be normalised; the running sum is float64 so that no token is lost to
    rounding.
    """
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # uniform * total may round up to total itself; the last token with any probability is then meant.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).squeeze(1)
    # A row of NaN has no such token: any index within the vocabulary does, the caller drops it.
    return torch.minimum(drawn, last).clamp_max_(logprobs.shape[-1] - 1)
