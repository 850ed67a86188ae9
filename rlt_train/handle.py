"""What ``submit`` returns: one request's result, stream and cancellation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlt_train.engine.request import RolloutOutput, Sequence

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
    """One submitted request. Every wait raises ``EngineDeadError`` at once if the engine dies."""

    def __init__(self, worker: EngineWorker, request_id: str) -> None:
        self.request_id = request_id
        self._worker = worker
        self._output: RolloutOutput | None = None
        self._sequence: Sequence | None = None
        self._available = 0

    @property
    def done(self) -> bool:
        """True once the output is there, whatever its finish reason."""
        return self._output is not None

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

    def progress(self, sequence: Sequence) -> None:
        """Take the tokens sampled so far (the worker, under its lock)."""
        self._sequence = sequence
        self._available = sequence.generated

    def finish(self, sequence: Sequence) -> RolloutOutput:
        """Take the finished sequence (the worker, under its lock)."""
        self.progress(sequence)
        self._output = RolloutOutput.of(sequence)
        return self._output
