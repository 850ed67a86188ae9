"""Token losses of the GRPO family, on the completion tokens of a micro-batch laid end to end (no padding).

A loss type differs from another only in how much each token counts, so the loss is one sum, `policy_loss`,
and the loss type is a weight per token, `token_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
ImportanceLevel = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The result of `policy_loss`. T = completion tokens; everything but `loss` is detached.

    Attributes:
        loss: scalar, differentiable.
        per_token_loss: [T], before weighting, KL term included; 0 where masked.
        ratio: [T], importance ratio of policy to behaviour (the sequence's own at level "sequence"); 1 where
            masked.
        kl: [T], k3 estimate of the KL to the reference policy; None when beta is 0.
        clipped_low, clipped_high: [T] bool, tokens that the clip holds back, from below and from above.
        metrics: scalar tensors under TRL's names: clip_ratio/low_mean, clip_ratio/high_mean,
            clip_ratio/region_mean, kl (when beta is not 0); and our own: ratio/mean, ratio/min, ratio/max,
            and behaviour_kl, the k3 estimate of the KL of behaviour to policy, which is 0 in an exactly
            on-policy step. Means are over active tokens (clip ratios at level "sequence": over sequences).
        active_tokens: number of tokens with mask True, the weight of these means in an average over
            micro-batches.
    """

    loss: Tensor
    per_token_loss: Tensor
    ratio: Tensor
    kl: Tensor | None
    clipped_low: Tensor
    clipped_high: Tensor
    metrics: dict[str, Tensor]
    active_tokens: Tensor


def policy_loss(
    logps: Tensor,
    behaviour_logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    epsilon_low: float,
    epsilon_high: float,
    loss_weights: Tensor,
    ref_logps: Tensor | None = None,
    beta: float = 0.0,
    importance_level: ImportanceLevel = "token",
    row_of_token: Tensor | None = None,
) -> LossOutput:
    """sum(loss_weights * token loss), the token loss being PPO's clipped surrogate plus `beta` times the KL.

    The token loss is -min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A), with ratio =
    exp(logps - behaviour_logps) (PPO 1707.06347, GRPO 2402.03300; unequal epsilons from DAPO 2503.14476). At
    level "sequence" the ratio is the exponential of the row's mean log-ratio (GSPO 2507.18071). The KL to the
    reference is Schulman's k3, exp(d) - d - 1 with d = ref_logps - logps.

    Args:
        logps: [T], differentiable log-probabilities under the policy in training.
        behaviour_logps: [T], under the policy that sampled the tokens.
        advantages: [T], the row's advantage at each of its tokens.
        mask: [T] bool, False for tokens that take no part (as rows left out for truncation); None: all take
            part.
        epsilon_low, epsilon_high: clip range of the ratio, [1 - low, 1 + high].
        loss_weights: [T], from `token_weights`.
        ref_logps: [T], under the reference policy; needed when beta is not 0.
        beta: weight of the KL term.
        importance_level: "token" or "sequence".
        row_of_token: [T] int64, the row of each token, 0-based; needed at level "sequence".

    Raises:
        ValueError: shapes differ, an unknown level, or a needed argument is missing.
    """
    if mask is None:
        mask = torch.ones_like(logps, dtype=torch.bool)
    mask = mask.bool()
    _check_arguments(
        {
            "behaviour_logps": behaviour_logps,
            "advantages": advantages,
            "mask": mask,
            "loss_weights": loss_weights,
            "ref_logps": ref_logps,
            "row_of_token": row_of_token,
        },
        logps,
        beta,
        importance_level,
    )
    log_ratio = _masked_difference(logps, behaviour_logps, mask)
    if importance_level == "sequence":
        log_weight = _mean_per_row(log_ratio, mask, row_of_token)
    else:
        log_weight = log_ratio
    ratio = log_weight.exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = None
    if beta != 0.0:
        kl = _k3(_masked_difference(ref_logps, logps, mask))
        token_loss = token_loss + beta * kl
    token_loss = torch.where(mask, token_loss, 0.0)
    low = mask & (ratio < 1 - epsilon_low) & (advantages < 0)
    high = mask & (ratio > 1 + epsilon_high) & (advantages > 0)
    return LossOutput(
        loss=(loss_weights * token_loss).sum(),
        per_token_loss=token_loss.detach(),
        ratio=ratio.detach(),
        kl=None if kl is None else kl.detach(),
        clipped_low=low,
        clipped_high=high,
        metrics=_ratio_metrics(ratio.detach(), log_ratio.detach(), mask)
        | _clip_metrics(low, high, mask, row_of_token if importance_level == "sequence" else None)
        | ({} if kl is None else {"kl": _token_mean(kl.detach(), mask)}),
        active_tokens=mask.sum(),
    )


def token_weights(
    loss_type: LossType,
    lengths: Sequence[int] | Tensor,
    *,
    active: Sequence[bool] | Tensor | None = None,
    rows_in_step: int | None = None,
    tokens_in_step: int | None = None,
    tokens_in_micro_batch: int | None = None,
    micro_batches: int | None = None,
    max_completion_length: int | None = None,
    num_processes: int = 1,
) -> Tensor:
    """The weight of each completion token of one micro-batch, so that the step's weighted sum is TRL 1.16's
    loss.

    "Step" is one optimizer step. The micro-batches' losses are added up, and gradients averaged over
    processes, as accelerate does; so call `backward` on `policy_loss(...).loss` as it is, without dividing by
    accumulation steps.

        grpo     1 / (rows_in_step * tokens of the row): mean over rows of the mean over their tokens
        bnpo     1 / (micro_batches * active tokens of this micro-batch)
        dr_grpo  1 / (rows_in_step * max_completion_length)
        dapo     num_processes / tokens_in_step

    A row that is not `active` (TRL's `mask_truncated_completions`) has weight 0. As in TRL it still counts as
    a row in the denominators of grpo and dr_grpo, and its tokens do not count in those of bnpo and dapo. (Its
    reward still counts in the group's mean.) A denominator of 0 tokens is taken as 1.

    Args:
        loss_type: "grpo", "bnpo", "dr_grpo" or "dapo".
        lengths: [rows], completion tokens of each row of this micro-batch.
        active: [rows] bool; None: all.
        rows_in_step: rows of this process in the whole step, inactive ones included (grpo, dr_grpo).
        tokens_in_step: active tokens of all processes in the whole step, TRL's `num_items_in_batch` (dapo).
        tokens_in_micro_batch: active tokens of this micro-batch, where it has rows that are not among these
            (bnpo); None: these rows are all.
        micro_batches: micro-batches of this process in the whole step (bnpo).
        max_completion_length: the configured limit in tokens, not the longest row (dr_grpo).
        num_processes: data-parallel processes (dapo).

    Returns:
        [T] float32, T = sum(lengths), in row order, on the device of `lengths`.

    Raises:
        ValueError: an unknown loss type, or a total that this loss type needs is missing or below 1.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    active = torch.ones_like(lengths) if active is None else torch.as_tensor(active, device=lengths.device)
    if lengths.dim() != 1 or active.shape != lengths.shape:
        raise ValueError(
            f"lengths and active have shapes {list(lengths.shape)} and {list(active.shape)}: want [rows]"
        )
    active = active.bool()
    ones = torch.ones_like(lengths, dtype=torch.float64)
    if loss_type == "grpo":
        denominator = lengths.clamp(min=1) * _needed("rows_in_step", rows_in_step, loss_type)
    elif loss_type == "bnpo":
        tokens = (lengths * active).sum().clamp(min=1)
        denominator = ones * tokens * _needed("micro_batches", micro_batches, loss_type)
    elif loss_type == "dr_grpo":
        limit = _needed("max_completion_length", max_completion_length, loss_type)
        denominator = ones * limit * _needed("rows_in_step", rows_in_step, loss_type)
    elif loss_type == "dapo":
        tokens = _needed("tokens_in_step", tokens_in_step, loss_type, least=0)
        denominator = ones * max(tokens, 1) / _needed("num_processes", num_processes, loss_type)
    else:
        raise ValueError(f"loss_type is {loss_type!r}; allowed: {', '.join(get_args(LossType))}")
    return (active / denominator).repeat_interleave(lengths).float()


def _needed(name: str, value: int | None, loss_type: str, least: int = 1) -> int:
    if value is None or value < least:
        raise ValueError(
            f"loss type {loss_type!r} needs {name}, an integer of at least {least}; got {value!r}"
        )
    return value


def _check_arguments(
    others: dict[str, Tensor | None], logps: Tensor, beta: float, level: ImportanceLevel
) -> None:
    if logps.dim() != 1:
        raise ValueError(
            f"logps has shape {list(logps.shape)}; expected [T], completion tokens laid end to end"
        )
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != logps.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {list(logps.shape)} as logps")
    if level not in get_args(ImportanceLevel):
        raise ValueError(f"importance_level is {level!r}; allowed: 'token', 'sequence'")
    if beta != 0.0 and others["ref_logps"] is None:
        raise ValueError(f"beta is {beta}, so the KL term needs ref_logps; give them, or set beta to 0")
    if level == "sequence" and others["row_of_token"] is None:
        raise ValueError("importance_level 'sequence' needs row_of_token, the row of each token")


def _masked_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """a - b, at least fp32, and 0 where masked: an infinite value there would make 0 * inf = NaN."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.where(mask, a.to(dtype) - b.to(dtype), 0.0)


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - d - 1: Schulman's unbiased, non-negative estimate of a KL, d = log(other / sampled-from)."""
    return log_ratio.exp() - log_ratio - 1


def _mean_per_row(values: Tensor, mask: Tensor, row_of_token: Tensor) -> Tensor:
    """[T]: at each token the mean of its row's active values (0 for a row without any)."""
    rows = int(row_of_token.max()) + 1 if row_of_token.numel() else 0
    sums = values.new_zeros(rows).index_add(0, row_of_token, values)
    counts = values.new_zeros(rows).index_add(0, row_of_token, mask.to(values.dtype))
    return (sums / counts.clamp(min=1))[row_of_token]


def _token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def _ratio_metrics(ratio: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    # Masked ratios are 1, which may lie outside the active ones: leave them out of the extremes.
    active = ratio[mask] if mask.any() else ratio.new_ones(1)
    return {
        "ratio/mean": _token_mean(ratio, mask),
        "ratio/min": active.min(),
        "ratio/max": active.max(),
        "behaviour_kl": _token_mean(_k3(log_ratio), mask),
    }


def _clip_metrics(low: Tensor, high: Tensor, mask: Tensor, row_of_token: Tensor | None) -> dict[str, Tensor]:
    """Shares of clipped tokens; of clipped sequences if `row_of_token` is given, as TRL counts them."""

    def share(flags: Tensor) -> Tensor:
        if row_of_token is None or not flags.numel():
            return _token_mean(flags.float(), mask)
        clipped = flags.new_zeros(int(row_of_token.max()) + 1, dtype=torch.float32)
        return clipped.index_add(0, row_of_token, flags.float()).gt(0).float().mean()

    return {
        "clip_ratio/low_mean": share(low),
        "clip_ratio/high_mean": share(high),
        "clip_ratio/region_mean": share(low | high),
    }
