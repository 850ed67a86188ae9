"""Group-relative advantages: from the rewards of n completions per prompt to one advantage per completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

ScaleRewards = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """The result of `group_advantages`; rows = groups * num_generations, in the order of the rewards.

    Attributes:
        advantages: [rows], the rewards' floating dtype; 0 for a row whose reward is NaN.
        std: [rows], unbiased standard deviation of the row's group (of all rewards with "batch"); NaN where
            fewer than two rewards are known.
        frac_zero_std: share of rows whose `std` is 0 and that therefore teach nothing, 0..1.
    """

    advantages: Tensor
    std: Tensor
    frac_zero_std: float


def group_advantages(
    rewards: Tensor, num_generations: int, scale_rewards: ScaleRewards | bool = "group", eps: float = 1e-4
) -> GroupAdvantages:
    """(reward - mean of its group) / (std + eps), as in GRPO (DeepSeekMath, 2402.03300), with TRL 1.16's
    meaning.

    The mean is always the group's. The divisor is the unbiased std of the group ("group"), of all rewards
    given ("batch", Lite PPO 2508.08221), or absent ("none", Dr. GRPO 2503.20783). True and False mean "group"
    and "none". NaN marks a completion that no reward function scored: mean and std ignore it, and its
    advantage is 0.

    Args:
        rewards: [groups * num_generations], the completions of a prompt adjacent, or [groups,
            num_generations]. Integer and bool rewards are taken as float32.
        num_generations: completions per prompt, at least 1 (with 1 every advantage is 0).
        scale_rewards: "group", "batch", "none", True or False.
        eps: added to the standard deviation, in units of reward.

    Raises:
        ValueError: a shape that does not divide into groups, or an unknown `scale_rewards`.
    """
    scale = _scale_name(scale_rewards)
    grouped = _as_groups(rewards, num_generations)
    flat = grouped.reshape(-1)
    mean = grouped.nanmean(dim=1, keepdim=True)
    if scale == "batch":
        std = _nan_std(flat.unsqueeze(0)).expand(flat.numel())
    else:
        std = _nan_std(grouped).repeat_interleave(num_generations)
    advantages = (grouped - mean).reshape(-1)
    if scale != "none":
        advantages = advantages / (std + eps)
    zero_std = torch.isclose(std, torch.zeros_like(std))
    return GroupAdvantages(
        advantages=torch.nan_to_num(advantages, nan=0.0),
        std=std,
        frac_zero_std=zero_std.double().mean().item(),
    )


def combine_rewards(rewards: Tensor | Sequence[Sequence[float | None]], weights: Sequence[float]) -> Tensor:
    """Weighted sum of several reward functions; entries that do not apply (None or NaN) are left out.

    A row to which no function applies is NaN, so that `group_advantages` leaves it out of its group's mean.

    Args:
        rewards: [rows, functions].
        weights: one per function.

    Returns:
        [rows]: float32, or the tensor's own floating dtype.

    Raises:
        ValueError: the number of weights is not the number of functions.
    """
    if not isinstance(rewards, Tensor):
        known = [[float("nan") if value is None else float(value) for value in row] for row in rewards]
        rewards = torch.tensor(known, dtype=torch.float32)
    if rewards.dim() != 2 or rewards.shape[1] != len(weights):
        raise ValueError(
            f"rewards have shape {list(rewards.shape)} and there are {len(weights)} weights; expected "
            "[rows, functions] and one weight per function"
        )
    values = rewards if rewards.is_floating_point() else rewards.float()
    weighted = values * torch.tensor(list(weights), dtype=values.dtype, device=values.device)
    return torch.where(values.isnan().all(dim=1), torch.nan, weighted.nansum(dim=1))


def _scale_name(scale_rewards: ScaleRewards | bool) -> ScaleRewards:
    if isinstance(scale_rewards, bool):
        return "group" if scale_rewards else "none"
    if scale_rewards not in get_args(ScaleRewards):
        raise ValueError(
            f"scale_rewards is {scale_rewards!r}; allowed: 'group', 'batch', 'none', True, False"
        )
    return scale_rewards


def _as_groups(rewards: Tensor, num_generations: int) -> Tensor:
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    fits = num_generations >= 1 and rewards.numel() > 0
    if rewards.dim() == 1:
        fits = fits and rewards.numel() % num_generations == 0
    else:
        fits = fits and rewards.dim() == 2 and rewards.shape[1] == num_generations
    if not fits:
        raise ValueError(
            f"rewards of shape {list(rewards.shape)} do not make groups of {num_generations}; expected "
            "[groups * num_generations] or [groups, num_generations], at least one group"
        )
    return rewards.reshape(-1, num_generations)


def _nan_std(values: Tensor) -> Tensor:
    """Unbiased std over the last dimension, ignoring NaN; 0 for one column, NaN if fewer than two known."""
    if values.shape[-1] == 1:
        return torch.zeros_like(values[..., 0])
    known = (~values.isnan()).sum(dim=-1)
    squares = (values - values.nanmean(dim=-1, keepdim=True)).square().nansum(dim=-1)
    return torch.where(known > 1, (squares / (known - 1)).sqrt(), torch.nan)
