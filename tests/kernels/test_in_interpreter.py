"""Starts the tests that need Triton's interpreter, in a process of their own: see ``conftest.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_everything_passes_in_the_interpreter() -> None:
    folder = Path(__file__).parent
    # The other conftest files import much that these tests do not need.
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--confcutdir", str(folder), str(folder)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
