"""What the backends need to know about the device they would run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["cpu", "cuda", "rocm", "mps"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device as backends see it.

    Attributes:
        kind: "cpu", "cuda", "rocm" or "mps".
        compute_capability: of an NVIDIA GPU, (9, 0) for an H100; ``None`` elsewhere.
    """

    kind: Kind
    compute_capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.kind
        return (
            f"{self.kind} with compute capability {self.compute_capability[0]}.{self.compute_capability[1]}"
        )


def detect_hardware(device: torch.device) -> Hardware:
    """The hardware behind a torch device.

    Raises:
        ValueError: no backend knows this type of device.
    """
    if device.type == "cuda":
        if torch.version.hip is not None:  # ROCm builds of torch call their devices "cuda" too
            return Hardware("rocm")
        return Hardware("cuda", torch.cuda.get_device_capability(device))
    if device.type in ("cpu", "mps"):
        return Hardware(device.type)  # type: ignore[arg-type]
    raise ValueError(f"device {device} is not supported; use a CUDA, ROCm, MPS or CPU device")
