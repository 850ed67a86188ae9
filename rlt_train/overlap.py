"""How much of generation ran while training computed: counted at the forwards themselves, not inferred from
times."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class EngineStep:
    """One step of the engine; ``forward`` is set False if it turned out to need no forward (only forks,
    say)."""

    forward: bool = True


class OverlapMeter:
    """Counts engine forwards, and those during which a training forward or backward ran for at least a part.

    The trainer wraps its compute in ``training()``, the engine each forward in ``forward()``; either may be
    entered from its own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._training = 0
        self._sections = 0
        self.forwards = 0
        self.overlapping_forwards = 0
        self.forward_tokens = 0
        self.forward_seconds = 0.0
        self.training_seconds = 0.0

    @property
    def share(self) -> float:
        """Share of the engine's forwards that overlapped training compute; 0 before the first."""
        return self.overlapping_forwards / self.forwards if self.forwards else 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """A stretch of training compute."""
        with self._lock:
            self._training += 1
            self._sections += 1
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._training -= 1
                self.training_seconds += time.perf_counter() - started

    @contextmanager
    def forward(self) -> Iterator[EngineStep]:
        """One engine step; an error inside counts nothing, nor does a step marked as having no forward."""
        with self._lock:
            busy, before = self._training > 0, self._sections
        started = time.perf_counter()
        step = EngineStep()
        yield step
        if not step.forward:
            return
        with self._lock:
            self.forwards += 1
            self.forward_seconds += time.perf_counter() - started
            self.overlapping_forwards += busy or self._sections > before
