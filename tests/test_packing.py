"""Training rows, padding, and what a model's flattened logits predict."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_train.grpo.packing import TrainingRow, pad_rows


def make_row(prompt: list[int], completion: list[int], advantage: float = 0.5, truncated: bool = False):
    return TrainingRow(
        prompt_ids=prompt,
        completion_ids=completion,
        behaviour_logps=[-0.25 * (index + 1) for index in range(len(completion))],
        versions=[index // 2 for index in range(len(completion))],
        advantage=advantage,
        truncated=truncated,
    )


def test_a_worked_example() -> None:
    batch = pad_rows([make_row([11, 12], [13], -1.0), make_row([21], [22, 23, 24], 2.0, truncated=True)], 9)
    assert batch.input_ids.tolist() == [[11, 12, 13, 9], [21, 22, 23, 24]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.predict_index.tolist() == [1, 4, 5, 6]
    assert batch.targets.tolist() == [13, 22, 23, 24]
    assert batch.behaviour_logps.tolist() == [-0.25, -0.25, -0.5, -0.75]
    assert batch.advantages.tolist() == [-1.0, 2.0, 2.0, 2.0]
    assert batch.versions.tolist() == [0, 0, 0, 1]
    assert batch.row_of_token.tolist() == [0, 1, 1, 1]
    assert batch.lengths.tolist() == [1, 3] and batch.truncated.tolist() == [False, True]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6))
def test_every_completion_token_is_predicted_from_the_position_before_it(seed: int, rows: int) -> None:
    draw = random.Random(seed)
    made = [
        make_row(
            [draw.randrange(50) for _ in range(draw.randint(1, 5))],
            [draw.randrange(50) for _ in range(draw.randint(0, 6))],
            draw.uniform(-1, 1),
        )
        for _ in range(rows)
    ]
    batch = pad_rows(made, pad_id=99)
    expected = []
    for number, row in enumerate(made):
        ids = [*row.prompt_ids, *row.completion_ids]
        assert batch.input_ids[number].tolist() == ids + [99] * (batch.input_ids.shape[1] - len(ids))
        for offset, token in enumerate(row.completion_ids):
            expected.append((number, len(row.prompt_ids) + offset - 1, token, row.behaviour_logps[offset]))
    width = batch.input_ids.shape[1]
    actual = [
        (row, index - row * width, token, logp)
        for row, index, token, logp in zip(
            batch.row_of_token.tolist(),
            batch.predict_index.tolist(),
            batch.targets.tolist(),
            batch.behaviour_logps.tolist(),
            strict=True,
        )
    ]
    assert actual == expected
    following = batch.input_ids.flatten()[batch.predict_index + 1]
    assert torch.equal(following, batch.targets)


def test_dtypes_and_moving_to_a_device() -> None:
    batch = pad_rows([make_row([1], [2])], 0)
    floats = {"behaviour_logps", "advantages"}
    for field in fields(batch):
        expected = (
            torch.float32
            if field.name in floats
            else torch.bool
            if field.name == "truncated"
            else torch.int64
        )
        assert getattr(batch, field.name).dtype == expected, field.name
    moved = batch.to("meta")
    assert all(getattr(moved, field.name).device.type == "meta" for field in fields(moved))


def test_rows_without_completion_tokens_are_allowed() -> None:
    batch = pad_rows([make_row([1, 2], []), make_row([3], [])], 0)
    assert batch.predict_index.shape == batch.targets.shape == (0,) and batch.lengths.tolist() == [0, 0]
    assert batch.predict_index.dtype == batch.targets.dtype == torch.int64


def test_a_row_is_immutable_and_owns_its_sequences() -> None:
    prompt = [1, 2]
    row = make_row(prompt, [3])
    prompt.append(4)
    assert row.prompt_ids == (1, 2) and row.total_length == 3
    with pytest.raises(FrozenInstanceError):
        row.advantage = 1.0


def test_rows_that_cannot_be_trained_on_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        make_row([], [1])
    with pytest.raises(ValueError, match="have 2, 1 and 2 entries"):
        TrainingRow([1], [2, 3], [-0.1], [0, 0], 0.0)
    with pytest.raises(ValueError, match="no rows"):
        pad_rows([], 0)


def test_padding_share_counts_positions_without_a_token() -> None:
    rows = [make_row([1], [5] * length) for length in [0, 9, 0, 9]]
    assert pad_rows(rows, 0).padding_share == pytest.approx(1 - 22 / 40)
    assert pad_rows(rows[::2], 0).padding_share == 0.0
