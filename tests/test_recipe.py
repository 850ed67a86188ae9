"""``recipes/grpo.py`` end to end, its configuration files, and how accelerate starts every process of it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from recipes import grpo, launch
from rlt_train.embedded import load_policy
from rlt_train.weights.fingerprint import fingerprint

SHORT = [
    "--max_steps=3",
    "--n_train=64",
    "--n_heldout=12",
    "--per_device_train_batch_size=16",
    "--logging_steps=1",
    "--engine_threads=1",
    "--training_threads=1",
]


@pytest.fixture(autouse=True)
def library_settings() -> Iterator[None]:
    """The recipe quietens transformers for its process; the other tests want it as it was."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    yield
    transformers_logging.set_verbosity(verbosity)
    if bars:
        transformers_logging.enable_progress_bar()


def test_the_recipe_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    returned = grpo.main([*SHORT, f"--output_dir={tmp_path}"])
    printed = capsys.readouterr().out.rstrip("\n").split("\n")
    result = json.loads(printed[-1])
    assert result == returned
    assert list(result) == [
        "heldout_before",
        "heldout_after",
        "n_heldout",
        "seconds",
        "overlap_share",
        "versions_max_lag",
    ]
    assert result["n_heldout"] == 12
    assert all(round(12 * result[name], 2) % 1 in (0, 1) for name in ("heldout_before", "heldout_after"))
    assert 0 < result["heldout_before"] < 1, "the embedded policy begins half trained"
    assert 0 <= result["overlap_share"] <= 1
    assert result["seconds"] > 0
    assert result["versions_max_lag"] == 1
    steps = [line for line in printed if re.match(r"step +\d/3 +reward", line)]
    assert len(steps) == 3
    assert any("summary" in line for line in printed)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fingerprint(trained) != fingerprint(load_policy())


def test_options_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "learning_rate: 5.0e-5\nmax_steps: 7\nn_heldout: 9\noutput_dir: somewhere\nuse_cpu: true\n"
    )
    recipe, config = grpo.parse_arguments(["--config", str(file), "--max_steps=8"])
    assert (config.learning_rate, config.max_steps, recipe.n_heldout) == (5e-5, 8, 9)
    assert config.output_dir == "somewhere" and config.num_generations == 8
    assert recipe.model == "embedded" and recipe.task == "arithmetic"


def test_without_a_file_a_built_in_model_brings_its_settings() -> None:
    recipe, config = grpo.parse_arguments([])
    settings = grpo.read_config(grpo.CONFIGS / "embedded.yaml")
    assert config.max_steps == settings["max_steps"] and config.learning_rate == settings["learning_rate"]
    assert config.use_cpu and recipe.n_train == settings["n_train"]


@pytest.mark.parametrize("file", sorted(grpo.CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_file_is_valid(file: Path) -> None:
    grpo.parse_arguments(["--config", str(file)])


def test_unknown_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "typo.yaml"
    file.write_text("learning_rat: 1.0\nmax_stps: 3\nmax_steps: 3\n")
    with pytest.raises(ValueError, match="typo.yaml sets learning_rat, max_stps, which is no option"):
        grpo.parse_arguments(["--config", str(file)])
    with pytest.raises(FileNotFoundError):
        grpo.parse_arguments(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="lerning_rate"):
        grpo.parse_arguments(["--lerning_rate=1.0"])
    capsys.readouterr()


# -- launching -----------------------------------------------------------------------------------------------

ACCELERATE_CPU = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    "environment, expected",
    [
        (ACCELERATE_CPU, True),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, True),
        ({}, False),
        ({"ACCELERATE_USE_CPU": "true"}, False),
        ({"ACCELERATE_USE_CPU": "false", "MASTER_ADDR": "127.0.0.1"}, False),
        (ACCELERATE_CPU | {"WORLD_SIZE": "2"}, False),
        (ACCELERATE_CPU | {"LOCAL_RANK": "0"}, False),
        (ACCELERATE_CPU | {"OMPI_COMM_WORLD_SIZE": "2"}, False),
    ],
)
def test_when_accelerate_started_one_process_instead_of_several(
    environment: dict[str, str], expected: bool
) -> None:
    assert launch.launched_for_several(environment) is expected


@pytest.mark.parametrize(
    "command, expected",
    [
        (["accelerate", "launch", "--num_processes", "4", "x.py"], 4),
        (["accelerate", "launch", "--num_processes=3", "x.py"], 3),
        (["accelerate", "launch", "--num-processes", "2", "x.py"], 2),
        (["accelerate", "launch", "x.py"], None),
        (["accelerate", "launch", "--num_processes"], None),
        (["accelerate", "launch", "--num_processes", "many"], None),
        ([], None),
    ],
)
def test_how_many_processes_were_asked_for(command: list[str], expected: int | None) -> None:
    assert launch.requested_processes(command) == expected


class Parent:
    command: list[str] = []

    def parent(self) -> Parent:
        return self

    def cmdline(self) -> list[str]:
        return self.command


def test_torchs_launcher_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: executed.append(arguments))
    monkeypatch.setattr(launch.psutil, "Process", Parent)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    launch.start_all_processes("script.py", ["--seed=1"])
    assert not executed, "nothing to do outside accelerate"
    for name, value in ACCELERATE_CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Parent, "command", ["accelerate", "launch", "script.py"])
    with pytest.raises(SystemExit, match="torchrun --standalone --nproc_per_node N"):
        launch.start_all_processes("script.py", [])
    assert not executed
    monkeypatch.setattr(
        Parent, "command", ["accelerate", "launch", "--cpu", "--num_processes", "2", "script.py"]
    )
    launch.start_all_processes("script.py", ["--seed=1"])
    [(program, arguments)] = executed
    assert program == sys.executable == arguments[0]
    assert arguments[1:3] == ["-m", "torch.distributed.run"]
    assert arguments[-4:] == ["--nproc_per_node", "2", "script.py", "--seed=1"]
