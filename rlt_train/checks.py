"""Checks of arguments that several modules make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    """Return ``value`` if it is allowed.

    Raises:
        ValueError: it is not; the message lists what is.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not valid; choose from {', '.join(map(repr, allowed))}")
    return value
