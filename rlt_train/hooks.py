"""What a manager tells of itself: functions called at its events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from rlt_train.checks import one_of
from rlt_train.engine.request import RolloutOutput

logger = logging.getLogger(__name__)

Event = Literal["paused", "resumed", "weights_updated", "finished"]
EVENTS: tuple[Event, ...] = ("paused", "resumed", "weights_updated", "finished")


class Hooks:
    """The functions to call at each event, in the order in which they were added."""

    def __init__(self) -> None:
        self._functions: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}

    def add(self, event: Event, function: Callable[..., Any]) -> Callable[[], None]:
        """Call ``function`` at ``event`` from now on; returns a function that removes it again."""
        functions = self._functions[one_of("event", event, EVENTS)]
        functions.append(function)
        return lambda: functions.remove(function)

    def emit(self, event: Event, *arguments: Any) -> None:
        """Call the functions of ``event``; their errors reach the caller."""
        for function in list(self._functions[event]):
            function(*arguments)

    def finished(self, output: RolloutOutput) -> None:
        """Call the functions of "finished"; an error of one is logged, because generation must go on."""
        for function in list(self._functions["finished"]):
            try:
                function(output)
            except Exception:
                logger.exception("a 'finished' hook failed on request %r", output.request_id)
