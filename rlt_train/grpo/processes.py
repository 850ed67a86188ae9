"""Data parallel processes: small objects exchanged between them, and one's failure made everybody's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rlt_train.errors import PeerFailedError


class Processes:
    """The data parallel processes of a run; alone, every method is local."""

    def __init__(self) -> None:
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.count = dist.get_world_size() if self._distributed else 1
        self.rank = dist.get_rank() if self._distributed else 0

    def gather(self, objects: list[Any]) -> list[Any]:
        """Concatenate every process's list, in rank order. Every process must call."""
        if not self._distributed:
            return objects
        collected: list[Any] = [None] * self.count
        dist.all_gather_object(collected, objects)
        return [item for part in collected for item in part]

    def agree(self, error: BaseException | None) -> None:
        """Raise on every process if any of them has an error; each process must call at the same point.

        Raises:
            The own error, where there is one; else ``PeerFailedError`` naming the failed process and its
            cause.
        """
        failures = self.gather([None if error is None else f"{type(error).__name__}: {error}"])
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise PeerFailedError(f"process {rank} failed, so process {self.rank} stops too: {failure}")
