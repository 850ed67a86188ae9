"""From finished rollouts to a batch a model can run: training rows, micro-batches by length, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One completion with all that training needs to know of it. Sequences are stored as tuples.

    Attributes:
        prompt_ids: token ids, at least one.
        completion_ids: token ids, the stop token included when there is one; may be empty.
        behaviour_logps: log-probability of each completion token under the policy that sampled it.
        versions: policy version that sampled each completion token.
        advantage: of the whole completion.
        truncated: the completion ended at the length limit instead of a stop token.

    Raises:
        ValueError: an empty prompt, or lists of different lengths.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    behaviour_logps: Sequence[float]
    versions: Sequence[int]
    advantage: float
    truncated: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "completion_ids", "behaviour_logps", "versions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.prompt_ids:
            raise ValueError(
                "prompt_ids is empty: no position predicts the first completion token; give one or more"
            )
        counts = (len(self.completion_ids), len(self.behaviour_logps), len(self.versions))
        if len(set(counts)) != 1:
            raise ValueError(
                f"completion_ids, behaviour_logps and versions have {counts[0]}, {counts[1]} and {counts[2]} "
                "entries; expected one of each per completion token"
            )

    @property
    def total_length(self) -> int:
        """Prompt and completion together, in tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Rows as tensors. B = rows, S = longest row, T = completion tokens of all rows, laid end to end in row
    order.

    Attributes:
        input_ids: [B, S] int64, padded on the right. Under causal attention no token sees the padding, so
            positions and mask may be left to the model.
        attention_mask: [B, S] int64, 1 for tokens and 0 for padding.
        predict_index: [T] int64, positions in the flattened [B * S] whose logits predict the completion
            tokens.
        targets: [T] int64, the completion tokens.
        behaviour_logps: [T] float32.
        advantages: [T] float32, the row's advantage at each of its tokens.
        versions: [T] int64, policy version that sampled each token.
        row_of_token: [T] int64, 0 <= row < B.
        lengths: [B] int64, completion tokens of each row.
        truncated: [B] bool.
    """

    input_ids: Tensor
    attention_mask: Tensor
    predict_index: Tensor
    targets: Tensor
    behaviour_logps: Tensor
    advantages: Tensor
    versions: Tensor
    row_of_token: Tensor
    lengths: Tensor
    truncated: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PaddedBatch:
        """The same batch with every tensor on `device`."""
        names = [field.name for field in fields(self)]
        return replace(
            self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        )


def pad_rows(rows: Sequence[TrainingRow], pad_id: int) -> PaddedBatch:
    """Pad the rows to the longest of them and index their completion tokens. The tensors are on the CPU.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("no rows to pad; give at least one")
    longest = max(row.total_length for row in rows)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    predict_index: list[int] = []
    for number, row in enumerate(rows):
        input_ids[number, : row.total_length] = torch.tensor([*row.prompt_ids, *row.completion_ids])
        attention_mask[number, : row.total_length] = 1
        # The logits at a position predict the token after it: one to the left of each completion token.
        first = number * longest + len(row.prompt_ids) - 1
        predict_index.extend(range(first, first + len(row.completion_ids)))
    lengths = torch.tensor([len(row.completion_ids) for row in rows], dtype=torch.int64)
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32)
    return PaddedBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        predict_index=torch.tensor(predict_index, dtype=torch.int64),
        targets=torch.tensor([token for row in rows for token in row.completion_ids], dtype=torch.int64),
        behaviour_logps=torch.tensor(
            [logp for row in rows for logp in row.behaviour_logps], dtype=torch.float32
        ),
        advantages=advantages.repeat_interleave(lengths),
        versions=torch.tensor([version for row in rows for version in row.versions], dtype=torch.int64),
        row_of_token=torch.arange(len(rows)).repeat_interleave(lengths),
        lengths=lengths,
        truncated=torch.tensor([row.truncated for row in rows], dtype=torch.bool),
    )


def split_by_length(rows: Sequence[TrainingRow], n_batches: int) -> list[list[TrainingRow]]:
    """Micro-batches of equally many rows, rows of similar total length together, the longest first.

    The longest first, so that running out of memory shows at once. Rows of equal length keep their order.

    Raises:
        ValueError: the rows do not divide by `n_batches`.
    """
    if n_batches < 1 or not rows or len(rows) % n_batches:
        raise ValueError(
            f"{len(rows)} rows cannot be split into {n_batches} micro-batches of equally many rows; "
            "give a positive number that divides the rows"
        )
    ordered = sorted(rows, key=lambda row: row.total_length, reverse=True)
    size = len(rows) // n_batches
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def padding_share(batches: Sequence[Sequence[TrainingRow]]) -> float:
    """Share of positions that are padding when each of the batches is padded to its own longest row, 0..1."""
    tokens = sum(row.total_length for rows in batches for row in rows)
    positions = sum(len(rows) * max(row.total_length for row in rows) for rows in batches if rows)
    return 1.0 - tokens / positions if positions else 0.0
