"""What a request asks of the sampler, where unset values come from, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rlt_train.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples. ``None`` takes the manager's default: what ``RolloutManager(defaults=...)``
    says, else the model's ``generation_config``, else the value in brackets. ``RolloutHandle.params`` reads
    back what is in force.

    Attributes:
        max_new_tokens: tokens to generate at most, >= 1 [64].
        min_new_tokens: before so many, no token that would end the sequence is drawn [0].
        temperature: divides the logits; 0 is greedy [1].
        top_k: keep the k likeliest tokens; 0 is off [0].
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; 1 is off [1].
        min_p: keep tokens at least this share as likely as the likeliest; 0 is off [0].
        repetition_penalty: divides positive and multiplies negative logits of every token that occurs in
        prompt
            or completion (Keskar et al. 2019); 1 is off [1].
        presence_penalty: subtracted from the logit of every token that occurs in the completion [0].
        frequency_penalty: subtracted from a token's logit once for each time it occurs in the completion [0].
        logit_bias: added to the logits, by token id; -inf forbids a token.
        bad_words: token sequences that never occur: the last token of one is not drawn after the others.
        allowed_token_ids: only these are drawn.
        seed: the request's own random stream; the manager numbers it if ``None``.
        eos_token_ids: end a sequence; default: the model's.
        stop_token_ids: further tokens that end a sequence.
        stop_strings: end a sequence once its text holds one of them, also across tokens; the manager needs a
            tokenizer.
        ignore_eos: generate on past EOS tokens.
        prompt_logprobs: also give the log-prob of every prompt token after the first.
        top_logprobs: also give the k likeliest tokens at each position and their log-probs; 0 is off.
        priority: a request is served as if it had been submitted so many requests earlier, times 64 [0].
        deadline: seconds after submission at which the request fails with ``DeadlineError``.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    eos_token_ids: Sequence[int] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: bool | None = None
    top_logprobs: int | None = None
    priority: int | None = None
    deadline: float | None = None

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These values where they are set, and ``defaults`` where they are not."""
        unset = {f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **unset)

    def validate(self, vocab_size: int) -> None:
        """Check resolved parameters (``over(BUILT_IN)``).

        Raises:
            RequestError: names the field, the value and what is allowed.
        """
        for name, (valid, allowed) in _CHECKS.items():
            value = getattr(self, name)
            try:
                fine = valid(value, vocab_size)
            except TypeError:
                fine = False
            if not fine:
                raise RequestError(
                    f"{name}={value!r} is not valid; it must be {allowed.format(vocab=vocab_size)}"
                )
        if self.min_new_tokens > self.max_new_tokens:  # type: ignore[operator]
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
            )
        for name, tokens in self._token_ids():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name} holds {token}, outside the vocabulary of {vocab_size}")

    def _token_ids(self) -> Iterable[tuple[str, Iterable[int]]]:
        for name in ("eos_token_ids", "stop_token_ids", "allowed_token_ids", "logit_bias"):
            yield name, getattr(self, name) or ()
        for word in self.bad_words or ():
            yield "bad_words", word


BUILT_IN = SamplingParams(
    max_new_tokens=64,
    min_new_tokens=0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    stop_token_ids=(),
    stop_strings=(),
    ignore_eos=False,
    prompt_logprobs=False,
    top_logprobs=0,
    priority=0,
)
"""What is in force where neither the request, the manager nor the model says anything."""


def generation_defaults(generation_config: Any) -> SamplingParams:
    """What a model's ``generation_config`` sets. ``do_sample=False`` beside sampling values is greedy only if
    it was
    written down: transformers' own default is ``False`` for a config that says nothing."""
    if generation_config is None:
        return SamplingParams()

    def get(name: str) -> Any:
        return getattr(generation_config, name, None)

    eos = get("eos_token_id")
    return SamplingParams(
        max_new_tokens=get("max_new_tokens"),
        min_new_tokens=get("min_new_tokens"),
        temperature=get("temperature"),
        top_k=get("top_k"),
        top_p=get("top_p"),
        min_p=get("min_p"),
        repetition_penalty=get("repetition_penalty"),
        bad_words=get("bad_words_ids"),
        eos_token_ids=None if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
    )


def _number(value: Any) -> bool:
    return math.isfinite(value)


_CHECKS: dict[str, Any] = {
    "max_new_tokens": (lambda v, n: v >= 1 and v == int(v), "an integer >= 1"),
    "min_new_tokens": (lambda v, n: v >= 0 and v == int(v), "an integer >= 0"),
    "temperature": (lambda v, n: _number(v) and v >= 0, "finite and >= 0 (0 is greedy)"),
    "top_k": (lambda v, n: 0 <= v <= n, "0 (off) to the vocabulary size {vocab}"),
    "top_p": (lambda v, n: 0 < v <= 1, "in (0, 1]"),
    "min_p": (lambda v, n: 0 <= v <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda v, n: _number(v) and v > 0, "finite and > 0 (1 is off)"),
    "presence_penalty": (lambda v, n: _number(v) and -100 <= v <= 100, "in [-100, 100]"),
    "frequency_penalty": (lambda v, n: _number(v) and -100 <= v <= 100, "in [-100, 100]"),
    "logit_bias": (
        lambda v, n: v is None or all(not math.isnan(b) and b < math.inf for b in v.values()),
        "token ids with numbers (-inf forbids a token)",
    ),
    "bad_words": (
        lambda v, n: v is None or all(len(word) for word in v),
        "sequences of at least one token id",
    ),
    "allowed_token_ids": (lambda v, n: v is None or len(v) > 0, "at least one token id"),
    "stop_strings": (
        lambda v, n: not isinstance(v, str) and all(isinstance(s, str) and s for s in v),
        "a sequence of strings of at least one character",
    ),
    "top_logprobs": (lambda v, n: 0 <= v <= n, "0 (off) to the vocabulary size {vocab}"),
    "priority": (lambda v, n: v == int(v) and abs(v) <= 1 << 20, "an integer of at most 1048576 in size"),
    "deadline": (lambda v, n: v is None or v > 0, "None or seconds > 0"),
}
