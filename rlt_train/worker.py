"""The engine thread: it takes requests in, runs the engine step by step, and hands results to their handles.

Waits and what ends them: the thread waits for work and an open gate (``gate.wake``); consumers wait for
results (``outputs``), pausers for a forward boundary (``gate.boundary``). All share the gate's lock, and a
dying or stopping thread notifies all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from rlt_train.engine.engine import Engine, StepResult
from rlt_train.engine.request import Request, RolloutOutput, Sequence
from rlt_train.errors import EngineDeadError, EngineStoppedError, QueueFullError, RequestError
from rlt_train.gate import ForwardGate
from rlt_train.handle import RolloutHandle
from rlt_train.overlap import OverlapMeter


class EngineWorker:
    """Owns the engine thread and everything in flight on it.

    Args:
        engine: stepped on the thread only, and by others only while the gate is held.
        gate: decides when a forward may run.
        meter: counts the forwards.
        num_threads: intra-op threads of the engine thread.
        guard: called after each forward, before its tokens go out; its error kills the engine.
        on_finished: called on the engine thread with each output; must not raise.
        submit: submits the next turn of a request (``RolloutManager.submit``).
        max_queued: requests that may wait for their first forward at once; ``None`` is any number.
    """

    def __init__(
        self,
        engine: Engine,
        gate: ForwardGate,
        meter: OverlapMeter,
        num_threads: int,
        guard: Callable[[], None],
        on_finished: Callable[[RolloutOutput], None],
        submit: Callable[..., RolloutHandle],
        max_queued: int | None = None,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._meter = meter
        self._num_threads = num_threads
        self._guard = guard
        self._on_finished = on_finished
        self._submit = submit
        self._max_queued = max_queued
        self._callbacks: dict[RolloutHandle, list[Callable[[], None]]] = {}
        self.outputs = threading.Condition(gate.lock)
        self.handles: dict[str, RolloutHandle] = {}
        self.dead: BaseException | None = None
        self.state: Literal["running", "draining", "stopping", "stopped"] = "running"
        self._inbox: list[Request] = []
        self._cancels: list[str] = []
        self._admission_holds = 0
        self._streams = 0
        self._thread = threading.Thread(target=self._run, name="rlt-rollouts", daemon=True)
        self._thread.start()

    # -- called by other threads -----------------------------------------------------------------------------

    @property
    def is_current_thread(self) -> bool:
        """The caller runs on the engine thread (in a hook)."""
        return threading.current_thread() is self._thread

    def submit(self, requests: list[Request], timeout: float | None = None) -> list[RolloutHandle]:
        """Queue validated requests, all or none; waits for room in a full queue, ``timeout`` seconds at most.

        Raises:
            RequestError: an id is already in flight.
            QueueFullError: no room in time, or never for so many.
            EngineDeadError, EngineStoppedError: nothing can be queued.
        """
        with self._gate.lock:
            self.check_alive()
            self._wait_for_room(len(requests), timeout)
            if self.state != "running":
                raise EngineStoppedError("the rollout manager is stopping; it takes no more requests")
            handles = {request.request_id: RolloutHandle(self, request, self._submit) for request in requests}
            for request_id in handles:
                if request_id in self.handles:
                    raise RequestError(f"request id {request_id!r} is already in flight; ids must be unique")
            self.handles |= handles
            self._inbox += requests
            self._gate.wake.notify()
        return list(handles.values())

    def _wait_for_room(self, requests: int, timeout: float | None) -> None:
        most = self._max_queued
        if most is None:
            return
        if requests > most:
            raise QueueFullError(
                f"{requests} requests at once never fit a queue of max_queued={most}; raise it or submit "
                f"fewer"
            )
        try:
            self.wait(self.outputs, lambda: self.queued + requests <= most, timeout, "room in the queue")
        except TimeoutError:
            raise QueueFullError(
                f"{self.queued} requests are queued, max_queued={most}, and none left within {timeout} s: "
                f"wait for "
                f"results, give a longer timeout, or raise max_queued"
            ) from None

    @property
    def queued(self) -> int:
        """Requests that wait for their first forward."""
        return len(self._inbox) + self._engine.queued

    def when_ended(self, handle: RolloutHandle, function: Callable[[], None]) -> None:
        """Call ``function`` once the handle is done or never will be; at once if that is so now."""
        with self._gate.lock:
            if not (handle.done or self.dead is not None or self.state == "stopped"):
                self._callbacks.setdefault(handle, []).append(function)
                return
        function()

    def _call_back(self, handles: Iterable[RolloutHandle]) -> None:
        for handle in handles:
            for function in self._callbacks.pop(handle, ()):
                function()

    def cancel(self, request_id: str) -> None:
        """End a request as "cancelled" at the next boundary; unknown and finished ids are ignored."""
        with self._gate.lock:
            if request_id in self.handles:
                self._cancels.append(request_id)
                self._gate.wake.notify()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until ``predicate`` holds; it is evaluated under the lock whenever a request finishes."""
        with self.outputs:
            self.wait(self.outputs, predicate, timeout, what)

    def wait(
        self, condition: threading.Condition, predicate: Callable[[], bool], timeout: float | None, what: str
    ) -> None:
        """Wait on ``condition`` (its lock held) for ``predicate``, the engine's death or its stop.

        Raises:
            TimeoutError, EngineDeadError, EngineStoppedError
        """
        if self.is_current_thread and not predicate():
            raise RuntimeError(f"waiting for {what} on the engine thread (in a hook) would wait for itself")
        met = condition.wait_for(
            lambda: predicate() or self.dead is not None or self.state == "stopped", timeout=timeout
        )
        if predicate():
            return
        self.check_alive()
        if not met:
            raise TimeoutError(f"{what} did not finish within {timeout} s")
        raise EngineStoppedError(f"the rollout manager was stopped while {what} was waited for")

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` from the cause if the engine died."""
        if self.dead is not None:
            raise EngineDeadError(
                f"the rollout engine died of {type(self.dead).__name__}: {self.dead}"
            ) from self.dead

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """While open, waiters are woken at every token, not only at finished requests."""
        with self.outputs:
            self._streams += 1
        try:
            yield
        finally:
            with self.outputs:
                self._streams -= 1

    @contextmanager
    def drained(self, timeout: float | None) -> Iterator[None]:
        """Admit nothing new, wait for what runs to finish, and keep it so while the body runs."""
        with self.outputs:
            if self._gate.held_by_me() and self._engine.in_flight:
                raise RuntimeError(
                    "in_flight='finish' inside pause() would wait for ever: release the pause first, or "
                    "choose another policy for this update"
                )
            self._admission_holds += 1
        try:
            self.wait_for(lambda: not self._engine.in_flight, timeout, "requests in flight")
            yield
        finally:
            with self.outputs:
                self._admission_holds -= 1
                self._gate.wake.notify_all()

    def stop(self, drain: bool, timeout: float | None) -> None:
        """See ``RolloutManager.stop``."""
        if drain and self.dead is None:
            if self._gate.held_by_me():
                raise RuntimeError(
                    "stop(drain=True) inside pause() would wait for ever: release the pause first"
                )
            with self.outputs:
                self.state = "draining"
                self.wait(self.outputs, lambda: not self.handles, timeout, "stop(drain=True)")
        with self._gate.lock:
            self.state = "stopping"
            self._gate.wake.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine thread did not reach a forward boundary within {timeout} s")
        with self._gate.lock:
            if self.dead is None:
                self._receive()
                ended = [self._engine.cancel(request_id) for request_id in list(self.handles)]
                self.deliver(sequence for sequence in ended if sequence is not None)
            self.state = "stopped"
            self._call_back(list(self._callbacks))
            self.outputs.notify_all()

    def kill(self, error: BaseException) -> None:
        """Declare the engine dead: every waiter and every later call raises from ``error``."""
        with self._gate.lock:
            self.dead = self.dead or error
            self._gate.busy = False
            self._call_back(list(self._callbacks))
            for condition in (self._gate.wake, self._gate.boundary, self.outputs):
                condition.notify_all()

    def join(self, timeout: float | None) -> None:
        """Wait for the thread of a dead engine to end.

        Raises:
            TimeoutError: it is still in a forward after ``timeout`` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the dead engine's thread did not end within {timeout} s")

    def deliver(self, finished: Iterable[Sequence]) -> list[RolloutOutput]:
        """Hand finished sequences to their handles (lock held)."""
        delivered = []
        for sequence in finished:
            handle = self.handles.pop(sequence.request.request_id)
            delivered.append(handle.finish(sequence))
            self._call_back([handle])
        if delivered:
            self.outputs.notify_all()
        return delivered

    # -- the engine thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while self._next_turn():
                with self._meter.forward() as step:
                    result = self._engine.step(admit=self._admission_holds == 0)
                    step.forward = result.forward_tokens > 0
                self._guard()
                self._hand_out(result)
        except BaseException as error:  # every waiter must learn of it, whatever it is
            self.kill(error)

    def _next_turn(self) -> bool:
        """Wait for work and an open gate, and take the forward's turn; False when it is time to end."""
        with self._gate.lock:
            self._gate.busy = False
            self._gate.boundary.notify_all()
            self._gate.wake.wait_for(self._may_turn)
            if self.state == "stopping" or self.dead is not None:
                return False
            cancelled = self._receive()
            self._gate.busy = True
        self._announce(cancelled)
        return True

    def _may_turn(self) -> bool:
        if self.state == "stopping" or self.dead is not None:
            return True
        if self._gate.held:
            return False
        work = self._engine.unfinished if self._admission_holds == 0 else self._engine.in_flight
        return bool(self._inbox or self._cancels or work)

    def _receive(self) -> list[RolloutOutput]:
        for request in self._inbox:
            self._engine.add(request)
        ended = [self._engine.cancel(request_id) for request_id in self._cancels]
        self._inbox.clear()
        self._cancels.clear()
        return self.deliver(sequence for sequence in ended if sequence is not None)

    def _hand_out(self, result: StepResult) -> None:
        with self._gate.lock:
            if self._streams:
                for sequence in result.sampled:
                    if handle := self.handles.get(sequence.request.request_id):
                        handle.progress(sequence)
                self.outputs.notify_all()
            finished = self.deliver(result.finished)
            if self._max_queued is not None:
                self.outputs.notify_all()  # somebody may wait for room in the queue
        self._announce(finished)

    def _announce(self, finished: list[RolloutOutput]) -> None:
        for output in finished:
            self._on_finished(output)
