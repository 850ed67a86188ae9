"""Compiles the kernels of selective log-probs for GPUs, and prints a line each: kernel, dtype, chip, bytes of
shared memory used and allowed. ``RLT_COMPILE_ALL=1`` compiles every dtype and option for every chip.
"""

from __future__ import annotations

import os
import tempfile
from itertools import product

import torch
from ahead_of_time import TARGETS, Launch, recorded

from rlt_kernels.logit_tiles import LogitTransform
from rlt_kernels.selective_logprob import selective_logprob

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# dtype, chip, soft-cap, bias
SOME = [(BF16, "sm_80", 30.0, True), (FP32, "sm_90", None, False), (FP16, "sm_100", None, False)]
ALL = list(product((FP32, FP16, BF16), TARGETS, (None, 30.0), (False, True)))


def launches(dtype: torch.dtype, softcap: float | None, bias: bool) -> list[Launch]:
    """What one forward and backward launches."""
    hidden = torch.zeros(40, 2048, dtype=dtype, requires_grad=True)
    weight = torch.zeros(1000, 2048, dtype=dtype, requires_grad=True)
    with recorded() as found:
        logps, _ = selective_logprob(
            hidden,
            weight,
            torch.zeros(1000, dtype=dtype) if bias else None,
            torch.zeros(40, dtype=torch.int64),
            LogitTransform(softcap=softcap),
        )
        logps.sum().backward()
    return found


def main() -> None:
    """Compile for real, whatever an earlier run left behind."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for dtype, chip, softcap, bias in ALL if os.environ.get("RLT_COMPILE_ALL") == "1" else SOME:
            for launch in launches(dtype, softcap, bias):
                target, limit = TARGETS[chip]
                compiled = launch.compile(target)
                assert compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
                print(launch.kernel.__name__, dtype, chip, compiled.metadata.shared, limit)


if __name__ == "__main__":
    main()
