"""Evaluation: sample every held-out prompt under the present weights and report the rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerState

from rlt_train.engine.params import SamplingParams
from rlt_train.grpo.metrics import completion_metrics, over_processes, reward_metrics
from rlt_train.grpo.prompts import Prompt
from rlt_train.grpo.rewards import RewardFunction
from rlt_train.grpo.rollouts import submit_group
from rlt_train.grpo.scoring import score_groups
from rlt_train.manager import RolloutManager

# Random streams of evaluation lie apart from those of training groups, which are numbered from 0.
_SEED = 1 << 28


def evaluate_prompts(
    manager: RolloutManager,
    prompts: Sequence[Prompt],
    num_generations: int,
    params: SamplingParams,
    functions: Sequence[RewardFunction],
    tokenizer: PreTrainedTokenizerBase,
    state: TrainerState,
    gather: Callable[[list[Any]], list[Any]],
    prefix: str,
) -> dict[str, float]:
    """Metrics ``<prefix>_reward`` and so on over ``prompts`` (this process's share), combined over processes.

    Rollouts of training that are in flight go on beside. The samples depend on the prompt's place and the
    weights only, so two evaluations of the same weights agree.
    """
    groups = [
        submit_group(manager, prompt, _SEED + index, num_generations, params, f"{prefix}-{state.global_step}")
        for index, prompt in enumerate(prompts)
    ]
    manager.wait_for(lambda: all(group.done for group in groups), what=f"the {prefix} rollouts")
    for group in groups:
        group.collect()
    metrics: dict[str, float] = {}
    samples = num_generations * len(groups)
    if groups:  # a process may have no share when there are fewer prompts than processes
        scored = score_groups(groups, functions, tokenizer, state)
        metrics |= reward_metrics([f.name for f in functions], scored.rewards, scored.combined, len(groups))
        metrics |= completion_metrics(scored.outputs)
    combined = over_processes(metrics, gather, weight=samples)
    combined["samples"] = float(sum(gather([samples])))
    return {f"{prefix}_{name}": value for name, value in combined.items()}
