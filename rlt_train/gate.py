"""May the engine run its next forward? The one place that decides, and the holds that say no."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlt_train.errors import PauseTimeoutError


@dataclass(eq=False, slots=True)
class Hold:
    """A granted pause. Release it once; as a context manager it releases itself."""

    gate: ForwardGate
    thread: int

    def release(self) -> None:
        """Give the hold back; the engine runs on when nobody else holds one. A second release does
        nothing."""
        self.gate.release(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ForwardGate:
    """Holds and forward boundaries. ``lock`` is the one lock of a manager; no forward ever holds it.

    Attributes:
        wake: what the engine thread waits on: work, the last release, or the end.
        boundary: what a pauser waits on: the running forward to end.
        busy: a forward is running (set and read under ``lock``).
        paused_seconds: time from the first grant to the last release, summed over pauses.
        on_release: called, without the lock, before the last hold goes; its error reaches the releaser.
    """

    def __init__(self, on_release: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self.wake = threading.Condition(self.lock)
        self.boundary = threading.Condition(self.lock)
        self.busy = False
        self.paused_seconds = 0.0
        self._paused_since: float | None = None
        self._on_release = on_release
        self._holds: list[Hold] = []

    @property
    def held(self) -> bool:
        """Somebody holds a pause, granted or waited for."""
        return bool(self._holds)

    def held_by_me(self) -> bool:
        """The calling thread holds a pause."""
        return any(hold.thread == threading.get_ident() for hold in self._holds)

    def pause(self, timeout: float | None, wait: Callable[..., None]) -> Hold:
        """Take a hold and wait, by ``wait(condition, predicate, timeout, what)``, for the forward boundary.

        An error or an interrupt while waiting gives the hold back: a pause cannot be lost between request and
        grant.
        """
        hold = Hold(self, threading.get_ident())
        with self.lock:
            self._holds.append(hold)
            try:
                wait(self.boundary, lambda: not self.busy, timeout, "pause()")
            except BaseException as error:
                self._holds.remove(hold)
                self.wake.notify_all()
                if type(error) is TimeoutError:
                    raise PauseTimeoutError(f"{error}: the engine is still in its forward") from None
                raise
            if self._paused_since is None:
                self._paused_since = time.perf_counter()
        return hold

    def release(self, hold: Hold) -> None:
        """Give ``hold`` back; a hold that is not held any more is ignored."""
        with self.lock:
            if hold not in self._holds:
                return
            if self._holds != [hold]:  # decided and done under one lock: one must be the last
                self._holds.remove(hold)
                return
        try:
            self._on_release()
        finally:
            with self.lock:
                if hold in self._holds:
                    self._holds.remove(hold)
                if not self._holds and self._paused_since is not None:
                    self.paused_seconds += time.perf_counter() - self._paused_since
                    self._paused_since = None
                self.wake.notify_all()

    def latest_of_this_thread(self) -> Hold:
        """The hold that the calling thread took last.

        Raises:
            RuntimeError: it holds none.
        """
        with self.lock:
            mine = [hold for hold in self._holds if hold.thread == threading.get_ident()]
        if not mine:
            raise RuntimeError("resume() without pause(): this thread holds no pause of the rollout manager")
        return mine[-1]
