"""Group advantages against the formula in Python floats, and TRL's meaning at the edges."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_train.grpo.advantages import combine_rewards, group_advantages

NAN = math.nan


def oracle(rewards: list[float], n: int, scale: str, eps: float) -> tuple[list[float], list[float]]:
    """Advantages and stds, in Python floats; NaN rewards are unknown."""

    def spread(values: list[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        if len(values) == 1:
            return 0.0
        return statistics.stdev(known) if len(known) > 1 else NAN

    advantages, stds = [], []
    for start in range(0, len(rewards), n):
        group = rewards[start : start + n]
        known = [value for value in group if not math.isnan(value)]
        std = spread(rewards if scale == "batch" else group)
        for reward in group:
            advantage = reward - sum(known) / len(known) if known else NAN
            if scale != "none":
                advantage /= std + eps
            advantages.append(0.0 if math.isnan(advantage) else advantage)
            stds.append(std)
    return advantages, stds


@settings(deadline=None, max_examples=150)
@given(
    groups=st.integers(1, 5),
    n=st.integers(1, 6),
    scale=st.sampled_from(["group", "batch", "none"]),
    seed=st.integers(0, 10**6),
    unknown=st.sampled_from([0.0, 0.3]),
    two_dimensional=st.booleans(),
)
def test_against_python_floats(groups, n, scale, seed, unknown, two_dimensional) -> None:
    draw = random.Random(seed)
    rewards = [
        NAN if draw.random() < unknown else draw.choice([0.0, 1.0, draw.uniform(-3, 3)])
        for _ in range(groups * n)
    ]
    tensor = torch.tensor(rewards, dtype=torch.float64)
    result = group_advantages(tensor.view(groups, n) if two_dimensional else tensor, n, scale, eps=1e-4)
    advantages, stds = oracle(rewards, n, scale, 1e-4)
    torch.testing.assert_close(
        result.advantages, torch.tensor(advantages, dtype=torch.float64), rtol=1e-8, atol=1e-9
    )
    torch.testing.assert_close(
        result.std, torch.tensor(stds, dtype=torch.float64), rtol=1e-8, atol=1e-9, equal_nan=True
    )
    zero = sum(abs(std) <= 1e-8 for std in stds) / len(stds)
    assert result.frac_zero_std == pytest.approx(zero, abs=1e-12)


def test_a_worked_example() -> None:
    # Group 1: mean 0.5, unbiased std of (0, 1, 0, 1) = sqrt(1 / 3). Group 2: nothing to learn.
    result = group_advantages(torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0]), 4)
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    torch.testing.assert_close(result.advantages, torch.tensor([-a, a, -a, a, 0.0, 0.0, 0.0, 0.0]))
    assert result.advantages.dtype == torch.float32 and result.frac_zero_std == 0.5
    none = group_advantages(torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0]), 4, "none")
    assert none.advantages.tolist() == [-0.5, 0.5, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert none.frac_zero_std == 0.5


def test_rewards_that_are_integers_bools_and_the_old_bool_setting() -> None:
    bools = torch.tensor([True, False, True, True])
    for rewards in (bools, bools.int()):
        assert torch.equal(
            group_advantages(rewards, 2).advantages, group_advantages(bools.float(), 2).advantages
        )
    assert torch.equal(group_advantages(bools, 2, True).advantages, group_advantages(bools, 2).advantages)
    assert torch.equal(
        group_advantages(bools, 2, False).advantages, group_advantages(bools, 2, "none").advantages
    )


def test_an_unscored_completion_neither_moves_nor_biases_its_group() -> None:
    result = group_advantages(torch.tensor([NAN, 1.0, 3.0, NAN, NAN, 5.0]), 3)
    a = 1.0 / (math.sqrt(2.0) + 1e-4)
    torch.testing.assert_close(result.advantages, torch.tensor([0.0, -a, a, 0.0, 0.0, 0.0]))
    assert result.std[3:].isnan().all() and result.frac_zero_std == 0.0


@pytest.mark.parametrize(
    ("rewards", "n", "scale", "message"),
    [
        (torch.zeros(7), 2, "group", "do not make groups of 2"),
        (torch.zeros(2, 3), 2, "group", "do not make groups of 2"),
        (torch.zeros(0), 2, "group", "at least one group"),
        (torch.zeros(2, 2, 2), 2, "group", "do not make groups"),
        (torch.zeros(4), 0, "group", "do not make groups of 0"),
        (torch.zeros(4), 2, "std", "allowed: 'group', 'batch', 'none'"),
    ],
)
def test_what_cannot_be_grouped_is_refused(rewards, n, scale, message) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, n, scale)


def test_combining_leaves_out_what_does_not_apply() -> None:
    rows = [[1.0, 2.0], [None, 2.0], [1.0, None], [None, None], [True, 0.0]]
    expected = torch.tensor([1.0 * 0.5 - 2.0 * 3.0, -6.0, 0.5, NAN, 0.5])
    combined = combine_rewards(rows, [0.5, -3.0])
    torch.testing.assert_close(combined, expected, equal_nan=True, rtol=0, atol=0)
    tensor = torch.tensor([[NAN if value is None else float(value) for value in row] for row in rows])
    torch.testing.assert_close(combine_rewards(tensor, [0.5, -3.0]), expected, equal_nan=True, rtol=0, atol=0)


def test_a_zero_weight_does_not_make_a_row_unscored() -> None:
    assert combine_rewards([[3.0], [None]], [0.0])[0] == 0.0
    assert combine_rewards([[3.0], [None]], [0.0])[1].isnan()


def test_weights_must_match_the_functions() -> None:
    with pytest.raises(ValueError, match="there are 3 weights"):
        combine_rewards(torch.zeros(4, 2), [1.0, 1.0, 1.0])
