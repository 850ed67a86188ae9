"""Compile kernels ahead of time, with no GPU, exactly as their launchers would launch them.

A launch is recorded in place of being made: the launcher runs on CPU tensors, and what it passes to the
kernel (arguments, constants, warps, stages) goes to ``triton.compile``. Not for ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

KIB = 1024
# What the compiler is told of a chip, and the shared memory that one program may have there; 8.9 is as 8.6.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KIB),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KIB),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * KIB),
    "sm_86": (GPUTarget("cuda", 86, 32), 99 * KIB),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * KIB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KIB),
}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, and its compiler options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    def variant(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
        """``(signature, constants, attributes)``: what triton compiles a kernel anew for."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            is_one = isinstance(value, int) and value == 1 and self._specialised(parameter, value)
            if parameter.is_constexpr or is_one:
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
                continue
            signature[parameter.name] = self._type(value)
            if self._specialised(parameter, value) and self._aligned(value):
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        return signature, constants, attributes

    def compile(self, target: GPUTarget) -> triton.compiler.CompiledKernel:
        """The kernel's machine code for ``target``."""
        return triton.compile(ASTSource(self.kernel, *self.variant()), target=target, options=self.options)

    @staticmethod
    def _specialised(parameter: Any, value: Any) -> bool:
        if isinstance(value, float) or parameter.do_not_specialize:
            return False
        return not (isinstance(value, torch.Tensor) and parameter.do_not_specialize_on_alignment)

    @staticmethod
    def _aligned(value: torch.Tensor | int) -> bool:
        return (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0

    @staticmethod
    def _type(value: torch.Tensor | int | float) -> str:
        if isinstance(value, torch.Tensor):
            return "*" + _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it, launches of Triton kernels are appended to the yielded list and not made."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments.update((name, keywords.pop(name)) for name in list(keywords) if name in self.arg_names)
        launches.append(Launch(self, arguments, keywords))

    run: Callable[..., Any] = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run
