"""From complete groups to training rows: rewards, advantages, and what is reported of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from rlt_train.engine.request import RolloutOutput
from rlt_train.grpo.advantages import combine_rewards, group_advantages
from rlt_train.grpo.packing import TrainingRow
from rlt_train.grpo.rewards import RewardFunction, score_all
from rlt_train.grpo.rollouts import RolloutGroup


@dataclass(frozen=True, slots=True)
class Scored:
    """Complete groups with their rewards: ``rewards [rows, functions]`` (NaN where one does not apply),
    ``combined [rows]``."""

    groups: Sequence[RolloutGroup]
    completions: list[Any]
    rewards: Tensor
    combined: Tensor

    @property
    def outputs(self) -> list[RolloutOutput]:
        """Every output, in row order."""
        return [output for group in self.groups for output in group.outputs]


def score_groups(
    groups: Sequence[RolloutGroup],
    functions: Sequence[RewardFunction],
    tokenizer: PreTrainedTokenizerBase,
    state: TrainerState,
) -> Scored:
    """Decode and score complete groups, all in one call of each reward function.

    Raises:
        TypeError, ValueError: see ``RewardFunction.score``.
    """
    rows = [(group, output) for group in groups for output in group.outputs]
    texts = tokenizer.batch_decode([output.token_ids for _, output in rows], skip_special_tokens=True)
    completions = [group.prompt.completion(text) for (group, _), text in zip(rows, texts, strict=True)]
    columns = {
        name: [group.prompt.columns.get(name) for group, _ in rows]
        for name in dict.fromkeys(name for group in groups for name in group.prompt.columns)
    }
    rewards = score_all(
        functions,
        prompts=[group.prompt.prompt for group, _ in rows],
        completions=completions,
        completion_ids=[output.token_ids for _, output in rows],
        trainer_state=state,
        **columns,
    )
    combined = combine_rewards(rewards, [function.weight for function in functions])
    return Scored(groups, completions, rewards, combined)


def training_rows(
    scored: Scored,
    num_generations: int,
    scale_rewards: str,
    gather: Callable[[list[Any]], list[Any]],
    process: int,
) -> list[TrainingRow]:
    """Rows with their advantages.

    With ``scale_rewards="batch"`` the divisor is over the rewards of all processes, which ``gather`` collects
    (so every process must call); otherwise a group needs nobody else.
    """
    if scale_rewards == "batch":
        gathered = gather([scored.combined.tolist()])
        before = sum(len(rewards) for rewards in gathered[:process])
        everyone = torch.tensor([reward for rewards in gathered for reward in rewards])
        advantages = group_advantages(everyone, num_generations, "batch").advantages
        advantages = advantages[before : before + scored.combined.numel()]
    else:
        advantages = group_advantages(scored.combined, num_generations, scale_rewards).advantages
    return [
        TrainingRow(
            prompt_ids=output.prompt_ids,
            completion_ids=output.token_ids,
            behaviour_logps=output.logprobs,
            versions=output.policy_versions,
            advantage=advantage,
            truncated=output.finish_reason == "length",
        )
        for output, advantage in zip(scored.outputs, advantages.tolist(), strict=True)
    ]
