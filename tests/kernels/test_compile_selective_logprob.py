"""The log-prob kernel compiles for every GPU it is meant for, within its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_compiles_for_every_chip_within_its_shared_memory() -> None:
    script = Path(__file__).with_name("compile_selective_logprob.py")
    kernels = str(Path(__file__).parents[2] / "kernels")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([kernels, os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [line.split() for line in result.stdout.splitlines()]
    assert {(kernel, chip) for kernel, _, chip, _, _ in compiled} == {
        (kernel, chip)
        for kernel in ("_reduce_split", "_differentiate_run")
        for chip in ("sm_80", "sm_90", "sm_100")
    }
    for kernel, dtype, chip, used, limit in compiled:
        assert 0 < int(used) <= int(limit), (kernel, dtype, chip)
