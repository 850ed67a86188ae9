"""The GPU check says plainly that there is no GPU, runs small shapes elsewhere, and fails what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rlt_train.attention.backends.torch_paged import TorchBackend
from scripts import check_gpu


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["check_gpu.py", *arguments])
    return check_gpu.main()


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch) == 2
    assert capsys.readouterr().out.startswith("no GPU")


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {name: check_gpu.CASES[name] for name in ("fp32", "softcap", "sinks")}
    monkeypatch.setattr(check_gpu, "CASES", cases)
    monkeypatch.setattr(check_gpu, "SPANS", [(0, 1), (300, 1), (140, 5)])


@pytest.mark.usefixtures("few_cases")
def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--device", "cpu", "--backends", "torch", "flash2") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["backends"]["torch"]["errors"]) == {"fp32", "softcap", "sinks"}
    assert all(0 < error < 0.03 for error in result["backends"]["torch"]["errors"].values())
    for kind in ("decode", "prefill"):
        assert result["backends"]["torch"]["timings"][kind]["share"] > 0
    assert result["backends"]["flash2"] == {"reason": "runs on cuda, not on cpu"}
    assert result["engine"]["graphs off"]["logprob_error"] < 1e-4


@pytest.mark.usefixtures("few_cases")
def test_a_wrong_backend_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = TorchBackend.attend

    def forgets_sinks(self: TorchBackend, *args: Any, sinks: Any, **options: Any) -> torch.Tensor:
        return right(self, *args, sinks=None, **options)

    monkeypatch.setattr(TorchBackend, "attend", forgets_sinks)
    assert run(monkeypatch, "--device", "cpu", "--backends", "torch") == 1
    failures = capsys.readouterr().err.splitlines()
    assert len(failures) == 1 and "torch" in failures[0] and "'sinks'" in failures[0]


@pytest.mark.usefixtures("few_cases")
def test_a_backend_without_time_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--device", "cpu", "--backends", "torch", "--seconds", "0") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["backends"]["torch"]["errors"].values()) == {"no time left"}
