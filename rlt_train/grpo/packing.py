"""From finished rollouts to a batch a model can run: training rows and padding."""

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

    @property
    def padding_share(self) -> float:
        """Share of the ``B * S`` positions that are padding, 0..1."""
        return 1.0 - self.attention_mask.float().mean().item()

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
    # Lists first and one tensor at the end: a tensor a row costs more than the padding itself.
    padded: list[list[int]] = []
    predict_index: list[int] = []
    for number, row in enumerate(rows):
        padded.append([*row.prompt_ids, *row.completion_ids, *[pad_id] * (longest - row.total_length)])
        # The logits at a position predict the token after it: one to the left of each completion token.
        first = number * longest + len(row.prompt_ids) - 1
        predict_index.extend(range(first, first + len(row.completion_ids)))
    input_ids = torch.tensor(padded, dtype=torch.int64)
    total_lengths = torch.tensor([row.total_length for row in rows])
    attention_mask = (torch.arange(longest) < total_lengths.unsqueeze(1)).to(torch.int64)
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
