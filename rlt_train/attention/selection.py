"""Which backend attends: the first compatible one for the machine, or exactly the one that was asked for.

``auto`` skips a candidate only because it does not fit or cannot be imported, and says why for each; an
explicit choice never falls back. Every backend declares its capabilities, so the choice is a comparison (the
idea of declared capabilities is vLLM's).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlt_train.attention.contract import AttentionBackend, Capabilities, LayerSpec
from rlt_train.attention.hardware import Hardware, Kind, detect_hardware
from rlt_train.checks import one_of
from rlt_train.errors import BackendSelectionError

_PLACES = {
    "flash4": "rlt_train.attention.backends.flash4:Flash4Backend",
    "flash3": "rlt_train.attention.backends.flash3:Flash3Backend",
    "flash2": "rlt_train.attention.backends.flash2:Flash2Backend",
    "triton": "rlt_train.attention.backends.triton_paged:TritonBackend",
    "numba": "rlt_train.attention.backends.numba_paged:NumbaBackend",
    "flex": "rlt_train.attention.backends.flex:FlexBackend",
    "torch": "rlt_train.attention.backends.torch_paged:TorchBackend",
}
BACKENDS = ("auto", *_PLACES)

AUTO_ORDER: dict[Kind, tuple[str, ...]] = {
    "cuda": ("flash4", "flash3", "flash2", "triton", "torch"),
    "rocm": ("triton", "torch"),
    "cpu": ("numba", "torch"),
    "mps": ("torch",),
}

REQUIREMENTS = ("cuda_graphs", "packed_prefill", "exact")
"""What ``required`` may ask of a backend beside serving the layers: names of flags of ``Capabilities``."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice and why.

    Attributes:
        requested: "auto" or a backend's name.
        selected: name of the backend.
        reason: why this one.
        skipped: the candidates before it, with the reason for each.
        backend: its class.
    """

    requested: str
    selected: str
    reason: str
    skipped: dict[str, str]
    backend: type[AttentionBackend]


def find_backend(name: str) -> type[AttentionBackend]:
    """The class of a backend. Its module imports nothing that may be missing; ``load`` does."""
    module, attribute = _PLACES[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def select_backend(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    specs: Sequence[LayerSpec],
    block_size: int,
    required: frozenset[str] = frozenset(),
    *,
    hardware: Hardware | None = None,
    find: Callable[[str], type[AttentionBackend]] = find_backend,
) -> Selection:
    """Choose the backend for layers ``specs`` whose keys and values have ``dtype``.

    Args:
        requested: "auto" or a backend's name; an explicit one must fit.
        device: where the model is.
        dtype: dtype of the keys and values.
        specs: the layers that it must serve.
        block_size: tokens a KV block.
        required: of ``REQUIREMENTS``.
        hardware: what ``device`` is; default: looked up.
        find: name to class.

    Raises:
        ValueError: an unknown name in ``requested`` or ``required``.
        BackendSelectionError: nothing fits; lists every candidate with its reason.
    """
    one_of("attention_backend", requested, BACKENDS)
    for name in sorted(required):
        one_of("required", name, REQUIREMENTS)
    hardware = hardware or detect_hardware(device)
    candidates = AUTO_ORDER[hardware.kind] if requested == "auto" else (requested,)
    skipped: dict[str, str] = {}
    for name in candidates:
        backend = find(name)
        obstacle = incompatibility(
            backend.capabilities, hardware, dtype, specs, block_size, required
        ) or import_problem(backend)
        if obstacle is None:
            return Selection(requested, name, _reason(requested, hardware, skipped), skipped, backend)
        skipped[name] = obstacle
    listed = "".join(f"\n  {name}: {why}" for name, why in skipped.items())
    wanted = f" with {', '.join(sorted(required))}" if required else ""
    raise BackendSelectionError(
        f"no attention backend fits attention_backend={requested!r} on {hardware}{wanted} for {dtype} layers "
        f"with "
        f"head_dim {_values(spec.head_dim for spec in specs)} and KV blocks of {block_size} tokens:{listed}\n"
        f"Change what the reasons name"
        + (", or use attention_backend='auto'." if requested != "auto" else ".")
    )


def incompatibility(
    capabilities: Capabilities,
    hardware: Hardware,
    dtype: torch.dtype,
    specs: Sequence[LayerSpec],
    block_size: int,
    required: frozenset[str] = frozenset(),
) -> str | None:
    """The first declared limit that does not fit, in words, or ``None``."""
    if hardware.kind not in capabilities.devices:
        return f"runs on {_values(capabilities.devices)}, not on {hardware.kind}"
    limits = capabilities.compute_capability
    if limits is not None and hardware.compute_capability is not None:
        least, most = limits
        if not least <= hardware.compute_capability <= most:
            return f"needs compute capability {_dotted(least)} to {_dotted(most)}, not {hardware}"
    if dtype not in capabilities.dtypes:
        return f"takes {_values(capabilities.dtypes)}, not {dtype}"
    for spec in specs:
        if not _within(spec.head_dim, capabilities.head_dims):
            return f"takes head_dim {_range(capabilities.head_dims)}, not {spec.head_dim}"
        for asked, able, what in (
            (spec.sliding_window is not None, capabilities.sliding_window, "sliding-window layers"),
            (spec.chunk is not None, capabilities.chunked, "chunked-attention layers"),
            (spec.softcap is not None, capabilities.softcap, "layers with a soft-cap"),
            (spec.has_sinks, capabilities.sinks, "layers with attention sinks"),
        ):
            if asked and not able:
                return f"does not serve {what}"
    if not _within(block_size, capabilities.block_sizes):
        return f"takes block_size {_range(capabilities.block_sizes)}, not {block_size}"
    for name in sorted(required):
        if not getattr(capabilities, name):
            return f"does not offer {name}, which is required"
    return None


def import_problem(backend: type[AttentionBackend]) -> str | None:
    """Why the backend's implementation cannot be imported, or ``None``. A broken binary counts as missing;
    any other exception surfaces."""
    try:
        backend.load()
    except (ImportError, OSError) as error:
        return f"cannot be imported ({type(error).__name__}: {error})"
    return None


def _reason(requested: str, hardware: Hardware, skipped: dict[str, str]) -> str:
    if requested != "auto":
        return "asked for by name"
    if skipped:
        return f"the first of {', '.join(AUTO_ORDER[hardware.kind])} that fits on {hardware}"
    return f"the first choice on {hardware}"


def _within(value: int, limits: tuple[int, int, int]) -> bool:
    least, most, multiple = limits
    return least <= value <= most and value % multiple == 0


def _range(limits: tuple[int, int, int]) -> str:
    least, most, multiple = limits
    bounds = f"{least} to {most}" if most < 1 << 16 else f"from {least} on"
    return bounds if multiple == 1 else f"{bounds} in multiples of {multiple}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _values(values: object) -> str:
    return ", ".join(sorted({str(value) for value in values}))  # type: ignore[attr-defined]
