"""Host buffers in which a step's metadata is built, and their copy to the device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 8  # bytes: an int64 array may follow an int32 one


class StagingBuffers:
    """Two host buffers used in turn: one step's metadata is built while the last one's copy may still run.

    On CUDA they are pinned and copied without blocking; on a CPU the device tensors are the host memory
    itself. What a step staged is valid until the second next ``begin``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._host = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._copied: list[Any] = [None, None]  # CUDA events after the last copy out of each buffer
        self._turn = 0
        self._used = 0

    def begin(self, nbytes: int) -> None:
        """Turn to the other buffer and make room for ``nbytes`` of arrays, alignment not counted."""
        self._turn = 1 - self._turn
        self._used = 0
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()  # waits for a copy of two steps ago, done by now
        needed = nbytes + 64 * _ALIGNMENT
        if self._host[self._turn].numel() < needed:
            self._host[self._turn] = torch.empty(2 * needed, dtype=torch.uint8, pin_memory=self._pinned)

    def array(self, shape: tuple[int, ...], dtype: type[np.generic]) -> StagedArray:
        """The next uninitialised array of the buffer."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        first = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = first + size
        host = self._host[self._turn][first : self._used]
        assert host.numel() == size, "StagingBuffers.begin was told too few bytes"
        return StagedArray(host.numpy().view(dtype).reshape(shape), first, size)

    def commit(self) -> torch.Tensor:
        """Copy everything to the device; returns the bytes there, for ``StagedArray.on``."""
        host = self._host[self._turn][: self._used]
        if self._device.type == "cpu":
            return host
        copied = host.to(self._device, non_blocking=self._pinned)
        if self._pinned:
            self._copied[self._turn] = torch.cuda.Event()
            self._copied[self._turn].record()
        return copied


class StagedArray:
    """An array of a staging buffer: ``host`` is its NumPy view."""

    def __init__(self, host: np.ndarray, first: int, size: int) -> None:
        self.host = host
        self._bytes = slice(first, first + size)

    def on(self, committed: torch.Tensor) -> torch.Tensor:
        """The same array among the committed bytes."""
        dtype = torch.from_numpy(self.host[:0]).dtype
        return committed[self._bytes].view(dtype).view(self.host.shape)
