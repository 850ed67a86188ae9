"""One process of a data parallel run, for ``test_distributed.py``: ``distributed_run.py train|die FOLDER``.

Each process writes what it saw to ``FOLDER/rank<r>.json``.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from grpo_runs import arithmetic_trainer  # noqa: E402
from tiny import smaller  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from rlt_train.embedded import held_out_problems  # noqa: E402
from rlt_train.weights.fingerprint import fingerprint  # noqa: E402


def train(folder: Path) -> dict[str, Any]:
    """Train, evaluate three prompts on two processes and then one; returns what is compared."""
    trainer = arithmetic_trainer(
        folder, max_steps=3, gradient_accumulation_steps=2, scale_rewards="batch", temperature=2.0
    )
    before = fingerprint(trainer.model)
    trainer.train()
    problems = held_out_problems(3)
    evaluations = [trainer.evaluate(problems[:count]) for count in (3, 1)]
    stream = trainer._stream()
    by_step = {
        step: sorted({p for m in trainer.recorded if m.step == step for p in m.prompts}) for step in range(3)
    }
    expected = {
        step: sorted(tuple(stream[(2 * step + trainer.processes.rank) * 4 + g].token_ids) for g in range(4))
        for step in range(3)
    }
    return {
        "rank": trainer.processes.rank,
        "count": trainer.processes.count,
        "before": before,
        "after": fingerprint(trainer.model),
        "prompts": by_step,
        "expected": expected,
        "rewards": trainer.logged("reward"),
        "losses": trainer.logged("loss"),
        "steps": trainer.state.global_step,
        "samples": [metrics["eval_samples"] for metrics in evaluations],
        "evaluated": [metrics["eval_reward"] for metrics in evaluations],
        "untied": train_untied(folder),
    }


def train_untied(folder: Path) -> str:
    """The head is used outside the wrapped forward: its gradient must be averaged all the same."""
    trainer = arithmetic_trainer(
        folder,
        model=smaller(vocab_size=17),
        reward=lambda completion_ids, **kwargs: [float(ids[0]) for ids in completion_ids],
        max_steps=2,
        beta=0.1,
    )
    head = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(trainer.model.lm_head.weight, head)
    return fingerprint(trainer.model)


class KillEngine(TrainerCallback):
    """Makes the engine's next forward of process 1 fail."""

    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def fail(*_: Any) -> None:
            raise OSError("the memory is on fire")

        if state.global_step == 2 and self.trainer.processes.rank == 1:
            self.trainer.manager._engine._runner.run = fail


def die(folder: Path) -> dict[str, Any]:
    """Train far longer than the test waits, with an engine that dies on the way."""
    callback = KillEngine()
    trainer = arithmetic_trainer(folder, max_steps=100_000, extra={"callbacks": [callback]})
    callback.trainer = trainer
    try:
        trainer.train()
    except BaseException:
        save(folder, trainer.processes.rank, {"error": traceback.format_exc()})
        raise
    return {"rank": trainer.processes.rank, "error": None}


def save(folder: Path, rank: int, facts: dict[str, Any]) -> None:
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    mode, target = sys.argv[1], Path(sys.argv[2])
    result = {"train": train, "die": die}[mode](target)
    save(target, result["rank"], result)
