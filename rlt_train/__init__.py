"""rlt_train: a GRPO trainer that trains and generates at the same time on one copy of the weights."""

from rlt_train.engine.params import SamplingParams
from rlt_train.engine.request import RolloutOutput
from rlt_train.engine.sizes import EngineConfig
from rlt_train.errors import (
    BackendSelectionError,
    DeadlineError,
    EngineDeadError,
    EngineStoppedError,
    PauseTimeoutError,
    QueueFullError,
    RequestError,
    SharedWeightsError,
    UnfencedWriteError,
    UnsupportedModelError,
)
from rlt_train.handle import RolloutHandle, TokenEvent
from rlt_train.manager import RolloutManager

__version__ = "0.1.0"

__all__ = [
    "EngineConfig",
    "BackendSelectionError",
    "DeadlineError",
    "EngineDeadError",
    "EngineStoppedError",
    "PauseTimeoutError",
    "QueueFullError",
    "RequestError",
    "RolloutHandle",
    "RolloutManager",
    "RolloutOutput",
    "SamplingParams",
    "SharedWeightsError",
    "TokenEvent",
    "UnfencedWriteError",
    "UnsupportedModelError",
]
