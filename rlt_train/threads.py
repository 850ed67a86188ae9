"""Intra-op threads on a CPU: training and generation each get a share of the cores, said explicitly.

``torch.set_num_threads`` is per calling thread, and the count is part of the arithmetic: two runs are
comparable bit by bit only with the same count on the training thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ThreadSplit:
    """Intra-op threads of the training thread and of the engine thread."""

    training: int
    engine: int


def usable_cores() -> int:
    """Cores that this process may use, shared out evenly between the processes of one host that a launcher
    started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def split_threads(
    device: torch.device, training: int | None = None, engine: int | None = None
) -> ThreadSplit:
    """Fill in what was not given: on a CPU half the cores each (training gets an odd one), elsewhere one for
    the engine."""
    cores = usable_cores()
    if device.type != "cpu":
        return ThreadSplit(training or torch.get_num_threads(), engine or 1)
    return ThreadSplit(training or max(1, cores - cores // 2), engine or max(1, cores // 2))
