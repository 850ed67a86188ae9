"""Settings for every test (one intra-op thread, so that results and timings do not depend on the machine),
and the small model with a running manager that the manager's tests share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from running import SIZES
from tiny import smaller

from rlt_train import RolloutManager

torch.set_num_threads(1)


@pytest.fixture
def model() -> Any:
    return smaller()


@pytest.fixture
def manager(model: Any) -> Iterator[RolloutManager]:
    with RolloutManager(model, **SIZES) as started:
        yield started
