"""What ``submit`` returns: one request's result, stream and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlt_train.engine.params import SamplingParams
from rlt_train.engine.request import Request, RolloutOutput
from rlt_train.engine.request import Sequence as RolloutSequence

if TYPE_CHECKING:
    from rlt_train.worker import EngineWorker


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token as it streams: its id, behaviour log-prob and the policy version that sampled
    it."""

    token_id: int
    logprob: float
    policy_version: int


class RolloutHandle:
    """One submitted request. Every wait raises ``EngineDeadError`` at once if the engine dies.

    ``await handle`` gives its ``result()`` in an asyncio program.

    Attributes:
        request_id: its name.
        params: the sampling parameters in force.
    """

    def __init__(self, worker: EngineWorker, request: Request, submit: Callable[..., RolloutHandle]) -> None:
        self.request_id = request.request_id
        self.params = request.params
        self._worker = worker
        self._submit = submit
        self._output: RolloutOutput | None = None
        self._sequence: RolloutSequence | None = None
        self._available = 0

    @property
    def done(self) -> bool:
        """True once the output is there, whatever its finish reason."""
        return self._output is not None

    @property
    def output(self) -> RolloutOutput:
        """The output of a done request, failed or not.

        Raises:
            RuntimeError: it is not done.
        """
        if self._output is None:
            raise RuntimeError(f"request {self.request_id!r} is not done: wait for result()")
        return self._output

    def result(self, timeout: float | None = None) -> RolloutOutput:
        """Wait for the output: for the engine to finish this request, ``timeout`` seconds at most.

        Raises:
            RequestError: this request failed.
            TimeoutError: it did not finish in time (it goes on).
            EngineDeadError: the engine died.
        """
        self._worker.wait_for(lambda: self._output is not None, timeout, f"request {self.request_id!r}")
        assert self._output is not None
        if self._output.error is not None:
            raise self._output.error
        return self._output

    def __await__(self) -> Generator[Any, None, RolloutOutput]:
        """Wait as ``result()`` does, without blocking the event loop. Cancelling the task does not cancel the
        request."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def wake() -> None:  # on whatever thread ends the request
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        self._worker.when_ended(self, wake)
        yield from ended.__await__()
        return self.result(timeout=0)

    def continue_with(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> RolloutHandle:
        """Submit the next turn: this prompt, its completion and then ``token_ids`` as the prompt, token for
        token, so that the cached blocks of the conversation are found again.

        Args:
            token_ids: what follows the completion (a tool's answer, the next user turn); may be empty.
            params: default: this request's.
            **options: of ``RolloutManager.submit``.

        Raises:
            RuntimeError: this request is not done.
            RequestError: this request failed, or as ``submit`` raises.
        """
        if not self.done:
            raise RuntimeError(
                f"request {self.request_id!r} is not done: wait for result() before continuing it"
            )
        output = self.result(timeout=0)
        return self._submit(
            [*output.prompt_ids, *output.token_ids, *token_ids], params or self.params, **options
        )

    def stream(self, timeout: float | None = None) -> Iterator[TokenEvent]:
        """Yield tokens as they are sampled; ``timeout`` bounds the wait for each. Raises as ``result``
        does."""
        position = 0
        with self._worker.streaming():
            while self._wait_for_token(position, timeout):
                sequence, available = self._sequence, self._available
                assert sequence is not None
                while position < available:
                    yield TokenEvent(
                        sequence.tokens[len(sequence.request.prompt_ids) + position],
                        sequence.logprobs[position],
                        sequence.policy_versions[position],
                    )
                    position += 1

    def _wait_for_token(self, position: int, timeout: float | None) -> bool:
        """Wait for the token after ``position``; False when the request has ended without one."""
        self._worker.wait_for(
            lambda: self._available > position or self._output is not None,
            timeout,
            f"request {self.request_id!r}",
        )
        if self._available > position:
            return True
        assert self._output is not None
        if self._output.error is not None:
            raise self._output.error
        return False

    def cancel(self) -> None:
        """Ask for the request to end; its result then has finish reason "cancelled" unless it finished
        before."""
        self._worker.cancel(self.request_id)

    def progress(self, sequence: RolloutSequence) -> None:
        """Take the tokens sampled so far (the worker, under its lock)."""
        self._sequence = sequence
        self._available = sequence.generated

    def finish(self, sequence: RolloutSequence) -> RolloutOutput:
        """Take the finished sequence (the worker, under its lock)."""
        self.progress(sequence)
        self._output = RolloutOutput.of(sequence)
        return self._output
