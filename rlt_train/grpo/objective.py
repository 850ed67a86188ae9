"""The loss of one optimizer step, micro-batch by micro-batch, while the rest of the step may still decode."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlt_train.grpo.config import GRPOConfig
from rlt_train.grpo.losses import policy_loss, token_weights
from rlt_train.grpo.metrics import MetricStore
from rlt_train.grpo.packing import PaddedBatch, TrainingRow
from rlt_train.grpo.policy import PolicyHead
from rlt_train.grpo.processes import Processes


class Objective:
    """GRPO's loss and its bookkeeping over the micro-batches of a step.

    Args:
        args: the configuration.
        policy: the model in training, unwrapped.
        reference: the frozen reference model; ``None``: no KL term, or the policy with its adapters off.
        processes: the data parallel processes.
        metrics: where the step's metrics go.
    """

    def __init__(
        self,
        args: GRPOConfig,
        policy: nn.Module,
        reference: nn.Module | None,
        processes: Processes,
        metrics: MetricStore,
    ) -> None:
        self._args = args
        self._policy = policy
        self._reference = reference
        self._processes = processes
        self._metrics = metrics
        self._head = PolicyHead(policy, args.logprob_chunk_tokens)
        self._reference_head = None if reference is None else PolicyHead(reference, args.logprob_chunk_tokens)
        self._loss = 0.0
        self._tokens = 0
        self._micro_tokens = 0

    def admit(self, rows: list[TrainingRow]) -> list[TrainingRow]:
        """Count a micro-batch's tokens and return the rows to run: all, or with ``skip_zero_advantages``
        those that give a gradient (one at least, so that every process runs its backward)."""
        masked = self._args.mask_truncated_completions
        self._micro_tokens = sum(len(row.completion_ids) for row in rows if not (masked and row.truncated))
        self._tokens += self._micro_tokens
        if not self._args.skip_zero_advantages:
            return rows
        return [row for row in rows if row.advantage != 0.0] or rows[-1:]

    def loss(self, model: nn.Module, batch: PaddedBatch, policy_version: int) -> Tensor:
        """The weighted token loss of one micro-batch; the gradients of a step's micro-batches add up.

        Args:
            model: the policy as the trainer wraps it.
            batch: the rows that ``admit`` returned, on the model's device.
            policy_version: of the weights in training, to report staleness.
        """
        args = self._args
        logps, entropies = self._head.logprobs(model, batch, args.temperature)
        active = ~batch.truncated if args.mask_truncated_completions else torch.ones_like(batch.truncated)
        mask = active[batch.row_of_token]
        result = policy_loss(
            logps,
            batch.behaviour_logps,
            batch.advantages,
            mask,
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            loss_weights=self._weights(batch, active),
            ref_logps=self._reference_logprobs(batch) if args.beta else None,
            beta=args.beta,
            importance_level=args.importance_sampling_level,
            row_of_token=batch.row_of_token,
        )
        tokens = int(result.active_tokens)
        self._loss += result.loss.item()
        self._metrics.update(result.metrics, weight=tokens)
        self._report(batch, mask, logps.detach(), entropies, policy_version)
        return result.loss

    def end_step(self, parameters: Iterable[nn.Parameter]) -> float:
        """After a step's last backward: give the dapo loss its true token count, and return the step's loss.

        The count of all processes is known only now, so the micro-batches used a nominal one; gradients are
        linear in it.
        """
        factor = 1.0
        if self._args.loss_type == "dapo":
            tokens = sum(self._processes.gather([self._tokens]))
            factor = self._nominal_tokens() / max(tokens, 1)
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
        loss = self._loss * factor
        self._loss, self._tokens = 0.0, 0
        return loss

    def _weights(self, batch: PaddedBatch, active: Tensor) -> Tensor:
        args = self._args
        return token_weights(
            args.loss_type,
            batch.lengths,
            active=active,
            rows_in_step=args.completions_per_step,
            tokens_in_step=self._nominal_tokens(),
            tokens_in_micro_batch=self._micro_tokens,
            micro_batches=args.gradient_accumulation_steps,
            max_completion_length=args.max_completion_length,
            num_processes=self._processes.count,
        )

    def _nominal_tokens(self) -> int:
        return self._args.completions_per_step * self._args.max_completion_length * self._processes.count

    @torch.no_grad()
    def _reference_logprobs(self, batch: PaddedBatch) -> Tensor:
        if self._reference is not None and self._reference_head is not None:
            return self._reference_head.logprobs(self._reference, batch, self._args.temperature)[0]
        # The switch is the training tree's; the view that generates at this moment has its own.
        with self._policy.disable_adapter():
            return self._head.logprobs(self._policy, batch, self._args.temperature)[0]

    def _report(
        self, batch: PaddedBatch, mask: Tensor, logps: Tensor, entropies: Tensor, policy_version: int
    ) -> None:
        """Entropy, staleness, and how far the trainer's log-probs are from the engine's, over the active
        tokens."""
        if not mask.any():
            return
        tokens = int(mask.sum())
        self._metrics.add("padding_share", batch.padding_share)
        difference = (logps - batch.behaviour_logps).abs()[mask]
        staleness = (policy_version - batch.versions).float()[mask]
        self._metrics.add("entropy", entropies[mask].mean(), tokens)
        self._metrics.add("sampling/sampling_logp_difference/mean", difference.mean(), tokens)
        self._metrics.add("sampling/sampling_logp_difference/max", difference.max())
        self._metrics.add("staleness/mean", staleness.mean(), tokens)
        self._metrics.add("staleness/max", staleness.max())
