"""The same training run alone and beside generation, its weights compared after every step.

Sharing one copy of the weights is safe only if generation leaves no trace in training: not in the weights,
the train/eval flag, the config, the global random stream, or the number of intra-op threads. A trace in any
of them ends in the weights, so one sha256 a step is the whole check, and the digests of the single tensors
say where it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlt_train.overlap import OverlapMeter
from rlt_train.weights.fingerprint import (
    WeightLedger,
    combine_digests,
    first_divergence,
    read_ledger,
    tensor_digests,
)

Beside = Callable[[Any, torch.optim.Optimizer], AbstractContextManager[OverlapMeter]]
"""Starts generation on ``(model, optimizer)`` and fences the optimizer's steps for as long as it is open; the
meter it gives is told of each stretch of training compute."""


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """A training run that can be repeated exactly.

    Attributes:
        model: builds the (unwrapped) model, with equal weights each time it is called.
        batches: keyword arguments of the model's forward, one mapping a step; its output has a ``loss``.
        optimizer: builds the optimizer over the parameters.
        seed: of the global random stream, set once before the first step (dropout draws from it).
        threads: intra-op threads of the training thread; they are part of the arithmetic.
    """

    model: Callable[[], nn.Module]
    batches: Sequence[Mapping[str, torch.Tensor]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    seed: int = 0
    threads: int = 1


@dataclass(slots=True)
class TrainingRecord:
    """What a run left behind; every mapping is by step, counted from 1.

    Attributes:
        ledger: sha256 of the weights after each step, read back from the file.
        digests: sha256 of each tensor after each step, by parameter name.
        losses: the loss of each step.
        seconds: wall time of the steps, hashing included.
    """

    ledger: dict[int, str] = field(default_factory=dict)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two runs trained the same weights, and where they parted if not.

    Attributes:
        first_divergent_step: the first step (from 1) after which the weights differ, or that one run lacks;
            or ``None``.
        divergent_parameters: names of the tensors that differ after that step, in the order of the names.
            Empty when nothing differs, and when one run does not have the step at all.
    """

    first_divergent_step: int | None
    divergent_parameters: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """The weights were the same after every step, and both runs took the same steps."""
        return self.first_divergent_step is None


def run_alone(task: TrainingTask, ledger: str | Path) -> TrainingRecord:
    """Run the task with nothing beside it; the hashes go to the file ``ledger``, replacing an older one."""
    return _run(task, ledger, lambda model, optimizer: nullcontext(OverlapMeter()))


def run_together(task: TrainingTask, ledger: str | Path, beside: Beside) -> TrainingRecord:
    """Run the task with generation beside it, started by ``beside`` after the random stream was seeded.

    Raises:
        Exception: whatever training, the fence or the engine raises; the ledger holds the steps before.
    """
    return _run(task, ledger, beside)


def compare(alone: TrainingRecord, together: TrainingRecord) -> Comparison:
    """Find the first step after which the weights differ, and the tensors that do.

    Raises:
        ValueError: neither run took a step, so that agreement would mean nothing.
    """
    divergence = first_divergence(alone.ledger, together.ledger)
    if divergence is None:
        return Comparison(None, ())
    left, right = (record.digests.get(divergence.step) for record in (alone, together))
    if left is None or right is None:
        return Comparison(divergence.step, ())
    names = sorted(left.keys() | right.keys())
    return Comparison(divergence.step, tuple(name for name in names if left.get(name) != right.get(name)))


def _run(task: TrainingTask, ledger: str | Path, beside: Beside) -> TrainingRecord:
    path = Path(ledger)
    path.unlink(missing_ok=True)
    record = TrainingRecord()
    with _intra_op_threads(task.threads), torch.random.fork_rng(), WeightLedger(path) as writer:
        model = task.model()
        optimizer = task.optimizer(model.parameters())
        # Seeded before generation starts: a start that draws or seeds shows in the weights, too.
        torch.manual_seed(task.seed)
        with beside(model, optimizer) as meter:
            # Once, not every step: an engine that leaves the model in eval mode shows, too.
            model.train()
            started = time.perf_counter()
            for step, batch in enumerate(task.batches, start=1):
                record.losses.append(_train_step(model, optimizer, batch, meter))
                record.digests[step] = tensor_digests(model, workers=1)
                writer.write(step, combine_digests(record.digests[step]))
                _require_threads(task.threads, step)
            record.seconds = time.perf_counter() - started
    record.ledger = read_ledger(path)
    return record


def _train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor], meter: OverlapMeter
) -> float:
    with meter.training():
        loss = model(**batch).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _require_threads(threads: int, step: int) -> None:
    if torch.get_num_threads() != threads:
        raise RuntimeError(
            f"the training thread had {threads} intra-op threads and has {torch.get_num_threads()} after "
            f"step {step}: something called torch.set_num_threads on it, so the runs cannot be compared. Let "
            "each thread set its own count."
        )


@contextmanager
def _intra_op_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
