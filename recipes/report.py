"""What a run shows: a line at every log, a live progress bar, and the closing summary."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rlt_train import RolloutManager


@dataclass
class RunFacts:
    """What the callback saw of a run: times in seconds, tokens generated, and the largest staleness of a
    trained token."""

    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    max_lag: int = 0
    trained_tokens: float = 0.0


class ProgressReport(TrainerCallback):
    """Prints step, reward, tokens/s, staleness and the time left while training runs."""

    def __init__(self, manager: RolloutManager, console: Console) -> None:
        self.facts = RunFacts()
        self._manager = manager
        self._console = console
        self._tokens = 0.0
        self._time = 0.0
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("staleness {task.fields[staleness]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.facts = RunFacts()
        self._time, self._tokens = time.perf_counter(), self._generated()
        if state.is_world_process_zero:
            self._task = self._progress.add_task(
                "train", total=state.max_steps, reward="-", rate="-", staleness="-"
            )
            self._progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "reward" not in logs:
            return
        self.facts.max_lag = max(self.facts.max_lag, int(logs.get("staleness/max", 0)))
        self.facts.trained_tokens = logs.get("num_tokens", 0.0)
        now, tokens = time.perf_counter(), self._generated()
        rate = (tokens - self._tokens) / max(now - self._time, 1e-9)
        self._time, self._tokens = now, tokens
        if self._task is None:
            return
        left = (now - self.facts.started) / state.global_step * (state.max_steps - state.global_step)
        shown = {
            "reward": f"{logs['reward']:.3f}",
            "rate": f"{rate:,.0f}",
            "staleness": f"{logs.get('staleness/mean', 0):.2f}",
        }
        self._progress.update(self._task, **shown)
        self._console.print(
            f"step {state.global_step:>5}/{state.max_steps}   reward {shown['reward']}   "
            f"{shown['rate']:>6} tokens/s   staleness {shown['staleness']}   {left:4.0f} s left",
            highlight=False,
        )

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar down, also after an error."""
        self.facts.seconds = time.perf_counter() - self.facts.started
        if self._task is not None:
            self._progress.stop()

    def _generated(self) -> float:
        return self._manager.stats()["tokens_generated"]


def peak_memory_mib() -> float:
    """The largest resident size of this process so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (2**20 if sys.platform == "darwin" else 2**10)


def print_summary(console: Console, result: dict[str, Any], details: dict[str, str]) -> None:
    """The closing table: held-out reward before and after, then ``details`` in order."""
    table = Table(title="summary", show_header=False)
    table.add_row(
        "held-out reward",
        f"{result['heldout_before']:.3f} -> {result['heldout_after']:.3f}   ({result['n_heldout']} problems, "
        f"sampled)",
    )
    for name, value in details.items():
        table.add_row(name, value)
    console.print(table)
