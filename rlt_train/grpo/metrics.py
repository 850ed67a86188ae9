"""What a run reports: means between two log lines, over processes, and sample completions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlt_train.engine.request import RolloutOutput


class MetricStore:
    """Values since the last log line.

    Names whose last part is ``max`` or starts with ``max_`` keep the maximum, likewise ``min``; others the
    mean.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._weights: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float | Tensor, weight: float = 1.0) -> None:
        """Record a value; NaN and values of weight 0 are left out."""
        number = float(value)
        if weight and not math.isnan(number):
            self._values[name].append(number)
            self._weights[name].append(weight)

    def update(self, values: Mapping[str, float | Tensor], weight: float = 1.0, prefix: str = "") -> None:
        """Record several values of one weight."""
        for name, value in values.items():
            self.add(prefix + name, value, weight)

    def drain(self) -> dict[str, float]:
        """The summary by name, in order of first appearance; the store is empty then."""
        summary = {name: self._summarise(name) for name in self._values}
        self._values.clear()
        self._weights.clear()
        return summary

    def _summarise(self, name: str) -> float:
        values, weights = self._values[name], self._weights[name]
        last = name.rsplit("/", 1)[-1]
        if last == "max" or last.startswith("max_"):
            return max(values)
        if last == "min" or last.startswith("min_"):
            return min(values)
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def over_processes(
    summary: dict[str, float], gather: Callable[[list[Any]], list[Any]], weight: float = 1.0
) -> dict[str, float]:
    """Combine the summaries of all processes: the mean of means, the maximum of maxima, the minimum of
    minima.

    ``gather`` collects one object a process, ``weight`` is this process's in the means; a name that some
    processes lack is combined over the others.
    """
    combined = MetricStore()
    for one, its_weight in gather([(summary, weight)]):
        combined.update(one, its_weight)
    return combined.drain()


def completion_metrics(outputs: Sequence[RolloutOutput]) -> dict[str, float]:
    """Lengths in tokens and the share cut off at the limit, under TRL's names."""
    lengths = torch.tensor([len(output.token_ids) for output in outputs], dtype=torch.float32)
    ended = torch.tensor([output.finish_reason == "stop" for output in outputs])
    metrics = {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": 1 - ended.float().mean().item(),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = lengths[ended].mean().item()
    return metrics


def reward_metrics(names: Sequence[str], rewards: Tensor, combined: Tensor, groups: int) -> dict[str, float]:
    """TRL's reward metrics: ``rewards [rows, functions]`` and their weighted sum ``combined [rows]`` over
    whole groups."""
    metrics: dict[str, float] = {}
    for column, name in enumerate(names):
        values = rewards[:, column][~rewards[:, column].isnan()]
        if values.numel():
            metrics[f"rewards/{name}/mean"] = values.mean().item()
            metrics[f"rewards/{name}/std"] = values.std().item() if values.numel() > 1 else 0.0
    grouped = combined.view(groups, -1)
    std = grouped.std(dim=1) if grouped.shape[1] > 1 else torch.zeros(groups)
    metrics["reward"] = combined.nanmean().item()
    metrics["reward_std"] = std.nanmean().item()
    metrics["frac_reward_zero_std"] = (std < 1e-8).float().mean().item()
    return metrics


class CompletionLog:
    """The latest completions, printed with rich and logged as a wandb table where a wandb run is open."""

    COLUMNS = ("step", "prompt", "completion", "reward", "advantage")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._rows: list[tuple[int, str, str, float, float]] = []

    def add(self, step: int, prompt: Any, completion: Any, reward: float, advantage: float) -> None:
        """Note one completion."""
        self._rows.append((step, _text(prompt), _text(completion), reward, advantage))

    def flush(self, report_to: Sequence[str]) -> None:
        """Print (and log) what was noted since the last flush."""
        rows = self._rows[-self._limit :] if self._limit else self._rows
        self._rows = []
        if not rows:
            return
        table = Table(*self.COLUMNS, title="completions", show_lines=True)
        for step, prompt, completion, reward, advantage in rows:
            table.add_row(str(step), prompt, completion, f"{reward:.3f}", f"{advantage:.3f}")
        Console().print(table)
        if "wandb" in report_to:
            import wandb

            if wandb.run is not None:
                wandb.log(
                    {"completions": wandb.Table(columns=list(self.COLUMNS), data=[list(row) for row in rows])}
                )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(f"[{m['role']}] {m['content']}" for m in value)


def describe_run(facts: Mapping[str, Any]) -> None:
    """Add facts that only a started run knows to the configuration of the open wandb run, if there is one."""
    import wandb

    if wandb.run is not None:
        wandb.config.update(dict(facts), allow_val_change=True)
