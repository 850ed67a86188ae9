"""Cheaper forwards for two kinds of module in the private view: RMS norms and gated MLPs.

Half of a small model's generation on a CPU is not spent in linear layers but in elementwise operations that
transformers writes one by one. The view is the engine's own module tree, so its modules may run other code
over the same parameters. Nothing is recognised by name alone: a module is replaced only if, on random input,
the replacement gives what the module gives, to rounding. Training never sees it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

_TOLERANCE = 1e-5
Forward = Callable[[torch.Tensor], torch.Tensor]


def fuse_modules(model: nn.Module) -> int:
    """Give every module of ``model`` that can be fused its cheaper ``forward``; returns how many."""
    fused = 0
    for module in model.modules():
        forward, width = _rms_norm(module) or _gated_mlp(module) or (None, 0)
        if forward is not None and _agrees(module, forward, width):
            module.forward = forward  # type: ignore[method-assign]
            fused += 1
    return fused


def _rms_norm(module: nn.Module) -> tuple[Forward, int] | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or epsilon is None:
        return None
    if weight.ndim != 1 or list(module.children()):
        return None
    width = weight.shape[0]
    fast = _norm_kernel()
    if fast is not None:
        return lambda hidden_states: fast(hidden_states, weight, epsilon), width
    return lambda hidden_states: F.rms_norm(hidden_states, (width,), weight, epsilon), width


def _norm_kernel() -> Callable[..., torch.Tensor] | None:
    try:
        from rlt_train.engine.norm_kernel import rms_norm
    except ImportError:  # numba is an extra
        return None
    return rms_norm


def _gated_mlp(module: nn.Module) -> tuple[Forward, int] | None:
    gate, up, down = (getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down"))
    if not all(isinstance(layer, nn.Linear) for layer in (gate, up, down)):
        return None
    if not isinstance(getattr(module, "act_fn", None), nn.SiLU) and not _is_silu(module):
        return None

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return down(F.silu(gate(hidden_states), inplace=True).mul_(up(hidden_states)))

    return forward, gate.in_features


def _is_silu(module: nn.Module) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLUActivation", "SiLU")


@torch.inference_mode()
def _agrees(module: nn.Module, forward: Forward, width: int) -> bool:
    """Whether ``forward`` gives what the module gives on a random input."""
    parameter = next(module.parameters())
    if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
        return False  # elsewhere rounding differs more than this test allows, and the gain is a kernel's
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn((1, 3, width), generator=generator)
    try:
        expected = module(hidden_states)
    except Exception:
        return False  # it takes more than hidden states, so it is no such module
    if not isinstance(expected, torch.Tensor) or expected.shape != hidden_states.shape:
        return False
    actual = forward(hidden_states)
    return bool(torch.allclose(actual, expected, atol=_TOLERANCE * float(expected.abs().max()), rtol=0))
