"""The errors a user of the manager or the trainer can meet, one class for each thing that can be done about
it."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model cannot be served by the embedded engine; the message names the architecture and the
    reason."""


class BackendSelectionError(ValueError):
    """No attention backend fits the model and the machine; the message lists every candidate with its
    reason."""


class SharedWeightsError(RuntimeError):
    """The training module tree and the generation view no longer hold the same ``Parameter`` objects."""


class UnfencedWriteError(RuntimeError):
    """A weight was written while the engine was free to run, outside ``weight_update()`` and the optimizer
    fence."""


class RequestError(ValueError):
    """One request is invalid or failed; every other request is unharmed."""


class DeadlineError(RequestError, TimeoutError):
    """A request passed its deadline; what it had generated is on the output, every other request is
    unharmed."""


class QueueFullError(RuntimeError):
    """The queue holds as many requests as ``max_queued`` allows, and none left in time; nothing was
    queued."""


class EngineDeadError(RuntimeError):
    """The engine thread stopped on an error (the ``__cause__``); every waiter and every later call raises
    this."""


class EngineStoppedError(RuntimeError):
    """The manager is not running: it was never started, or it was stopped."""


class PauseTimeoutError(TimeoutError):
    """A pause was not granted within its timeout; the hold has been given back."""


class PeerFailedError(EngineDeadError):
    """Another data parallel process failed; the message names it and its cause."""
