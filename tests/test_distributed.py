"""Two data parallel processes: equal weights, different prompts, and one's failure ends both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
LIMIT = 200.0

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def launch(mode: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [*command, str(TESTS / "distributed_run.py"), mode, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    ranks = [folder / f"rank{rank}.json" for rank in (0, 1)]
    missing = [path.name for path in ranks if not path.exists()]
    assert not missing, f"no {missing}:\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
    return ended, [json.loads(path.read_text()) for path in ranks]


def test_two_processes_end_with_equal_weights_and_drew_different_prompts(tmp_path: Path) -> None:
    ended, ranks = launch("train", tmp_path)
    assert ended.returncode == 0, ended.stderr[-6000:]
    first, second = ranks
    assert [(facts["rank"], facts["count"], facts["steps"]) for facts in ranks] == [(0, 2, 3), (1, 2, 3)]
    assert first["before"] == second["before"]
    assert first["after"] == second["after"] != first["before"]
    assert first["untied"] == second["untied"]
    for facts in ranks:
        assert facts["prompts"] == facts["expected"]
    for step in "012":
        assert not {tuple(p) for p in first["prompts"][step]} & {tuple(p) for p in second["prompts"][step]}
    assert first["rewards"] == second["rewards"] and len(first["losses"]) == 3
    assert first["samples"] == second["samples"] == [12.0, 4.0]
    assert first["evaluated"] == second["evaluated"]
    assert all(0 <= reward <= 1 and round(12 * reward, 4) % 1 == 0 for reward in first["evaluated"])


def test_a_dead_engine_of_one_process_ends_both(tmp_path: Path) -> None:
    started = time.monotonic()
    ended, (first, second) = launch("die", tmp_path)
    assert ended.returncode != 0
    assert time.monotonic() - started < LIMIT
    assert "PeerFailedError: process 1 failed, so process 0 stops too" in first["error"]
    assert "the memory is on fire" in first["error"]
    assert "OSError: the memory is on fire" in second["error"]
    assert "process 1 failed" in ended.stderr
