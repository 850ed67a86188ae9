"""Kernels are tested in two kinds of process, because triton chooses between its interpreter and its compiler
when it is first imported. With ``TRITON_INTERPRET=1`` this folder holds the tests that run kernels on the
CPU; without it, those that compile them, and ``test_in_interpreter.py``, which starts the former.

The interpreter keeps bfloat16 numbers as their 16 bits: it multiplies those bits as integers in ``tl.dot``,
and cuts off what it narrows from float32. Here it does both as a GPU does.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

torch.set_num_threads(1)
COMPILED = ["test_in_interpreter.py", "test_ahead_of_time.py", "test_compile_selective_logprob.py"]
INTERPRETED = sorted({path.name for path in Path(__file__).parent.glob("test_*.py")} - {*COMPILED})


def _teach_bfloat16() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl


if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = COMPILED
    _teach_bfloat16()
else:
    collect_ignore = INTERPRETED
