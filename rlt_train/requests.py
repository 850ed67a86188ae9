"""From what a caller submits to requests the engine takes: parameters resolved, ids and random streams
given."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlt_train.engine.engine import Engine, new_group
from rlt_train.engine.params import BUILT_IN, SamplingParams, generation_defaults
from rlt_train.engine.request import Request
from rlt_train.errors import RequestError
from rlt_train.weights.view import GenerationView


class RequestFactory:
    """Numbers requests and resolves their parameters.

    Args:
        view: whose generation config gives defaults.
        defaults: what the manager was told; goes before the generation config.
    """

    def __init__(self, view: GenerationView, defaults: SamplingParams | None) -> None:
        model = generation_defaults(getattr(view.model, "generation_config", None))
        eos = SamplingParams(eos_token_ids=view.eos_token_ids)
        resolved = (defaults or SamplingParams()).over(model).over(eos).over(BUILT_IN)
        # A model may name an EOS that its vocabulary does not have: it cannot be drawn, and is no error.
        vocab = view.config.get_text_config().vocab_size
        self.defaults = replace(
            resolved, eos_token_ids=tuple(token for token in resolved.eos_token_ids or () if token < vocab)
        )
        self._lock = threading.Lock()
        self._numbered = 0

    def build(
        self,
        engine: Engine,
        prompt_ids: Sequence[int],
        params: SamplingParams | None,
        n: int | None,
        request_id: str | None,
        metadata: Any,
    ) -> list[Request]:
        """``n`` requests for one prompt, called ``<request_id>-<i>``; ``None`` makes one, called
        ``request_id``.

        Raises:
            RequestError: bad prompt, parameters or ``n``.
        """
        if n is not None and n < 1:
            raise RequestError(f"n={n} samples of a prompt; give at least 1")
        resolved = (params or SamplingParams()).over(self.defaults)
        tokens = token_ids(prompt_ids)
        with self._lock:
            number = self._numbered
            self._numbered += n or 1
        name = request_id or f"request-{number}"
        try:
            engine.validate(tokens, resolved)
        except RequestError as error:
            raise RequestError(f"request {name!r}: {error}") from None
        # A given seed names 2**64 streams of its own, one a member; numbered requests share those of seed -1.
        stream = number - (1 << 64) if resolved.seed is None else resolved.seed << 64
        deadline = None if resolved.deadline is None else engine.clock() + resolved.deadline
        group = new_group(n or 1)
        return [
            Request(
                request_id=name if n is None else f"{name}-{member}",
                prompt_ids=tokens,
                params=resolved,
                seed=stream + member,
                eos_token_ids=frozenset() if resolved.ignore_eos else frozenset(resolved.eos_token_ids or ()),
                group=group,
                metadata=metadata,
                deadline=deadline,
            )
            for member in range(n or 1)
        ]


def token_ids(prompt_ids: Sequence[int]) -> list[int]:
    """Plain ints of whatever holds integers (a list, a NumPy array, a tensor ``[tokens]``).

    Raises:
        RequestError: something else is among them.
    """
    try:
        return [operator.index(token) for token in prompt_ids]
    except TypeError as error:
        raise RequestError(f"a prompt is a sequence of integer token ids: {error}") from error
