"""Reward functions: what they are called with, what they may return, and what the errors say."""

from __future__ import annotations

import asyncio
import functools
import math
import time

import numpy as np
import pytest
import torch
from torch import nn

from rlt_train.grpo.rewards import RewardFunction, score_all

ROWS = dict(prompts=["1+1=", "2+2="], completions=["2", "5"], completion_ids=[[7], [8, 9]])


def returning(value):
    def given(**kwargs):
        return value

    return RewardFunction(given)


def score(function, **columns):
    return function.score(**ROWS, **columns)


def test_the_function_gets_keywords_columns_and_the_trainer_state() -> None:
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return [1.0, 0.5]

    assert score(RewardFunction(spy), answer=["2", "4"], trainer_state="state") == [1.0, 0.5]
    assert seen == ROWS | {"answer": ["2", "4"], "trainer_state": "state"}


def test_a_function_may_name_what_it_uses_and_take_the_rest() -> None:
    def correct(completions, answer, **kwargs):
        return [completion == wanted for completion, wanted in zip(completions, answer, strict=True)]

    assert score(RewardFunction(correct), answer=["2", "4"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        [1, 0.5],
        (True, 0.5),
        [np.float32(1), np.float64(0.5)],
        [np.bool_(True), np.float16(0.5)],
        [torch.tensor(1.0), torch.tensor([0.5])],
        torch.tensor([1.0, 0.5]),
        torch.tensor([1.0, 0.5], requires_grad=True),
        np.array([1.0, 0.5]),
    ],
    ids=str,
)
def test_numbers_of_many_kinds_are_numbers(value) -> None:
    rewards = score(returning(value))
    assert rewards == [1.0, 0.5] and all(type(reward) is float for reward in rewards)


def test_none_means_not_applicable() -> None:
    rewards = score(returning([None, 0.5]))
    assert math.isnan(rewards[0]) and rewards[1] == 0.5


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ([1.0], ValueError, "returned 1 rewards; expected 2"),
        ([1.0, 2.0, 3.0], ValueError, "returned 3 rewards; expected 2"),
        ([1.0, "0.5"], TypeError, r"returned '0.5' \(str\) for completion 1; expected a number"),
        (
            [1.0, math.nan],
            ValueError,
            r"returned nan \(float\) for completion 1; expected a finite number, or None",
        ),
        ([-math.inf, 1.0], ValueError, r"returned -inf \(float\) for completion 0"),
        ([1.0, [0.5]], TypeError, r"returned \[0.5\] \(list\) for completion 1"),
        ([1.0, 1j], TypeError, r"returned 1j \(complex\)"),
        ([1.0, torch.ones(2)], TypeError, r"\(Tensor\) for completion 1"),
        (torch.ones(2, 1), ValueError, r"returned a Tensor of shape \[2, 1\]; expected \[2\]"),
        (torch.tensor(1.0), ValueError, r"returned a Tensor of shape \[\]"),
        (np.ones((1, 2)), ValueError, r"returned a ndarray of shape \[1, 2\]"),
        (torch.tensor([1.0, math.nan]), ValueError, "for completion 1; expected a finite number"),
        (np.array(["a", "b"]), TypeError, r"returned 'a' \(str\)"),
        (None, TypeError, r"returned None \(NoneType\); expected a list of 2 numbers"),
        (1.0, TypeError, r"returned 1.0 \(float\); expected a list"),
        ({0: 1.0, 1: 1.0}, TypeError, r"\(dict\); expected a list"),
        ((x for x in [1.0, 2.0]), TypeError, r"\(generator\); expected a list"),
        ("ab", TypeError, r"returned 'ab' \(str\); expected a list"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_a_reward_is_refused_with_the_name_of_the_function(value, error, says) -> None:
    with pytest.raises(error, match=f"the reward function 'given' .*{says}"):
        score(returning(value))


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(TypeError) as caught:
        score(returning("x" * 10_000))
    assert len(str(caught.value)) < 300


def test_a_function_that_does_not_take_all_keywords_is_told_to_add_kwargs() -> None:
    def only_completions(completions):
        return [0.0] * len(completions)

    with pytest.raises(
        TypeError, match=r"'only_completions'\(completions\).*unexpected.*must accept \*\*kwargs"
    ):
        score(RewardFunction(only_completions))


def test_a_missing_column_is_named() -> None:
    def needs_answer(completions, answer, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(
        TypeError, match="missing a required argument: 'answer'.*must be a column of the dataset"
    ):
        score(RewardFunction(needs_answer))


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_inside_the_function_arrives_unchanged_with_a_note(is_async: bool) -> None:
    def fails(**kwargs):
        raise TypeError("my own mistake: unexpected keyword")

    async def fails_later(**kwargs):
        fails()

    with pytest.raises(TypeError) as caught:
        score(RewardFunction(fails_later if is_async else fails, name="length"))
    assert caught.value.args == ("my own mistake: unexpected keyword",)
    assert caught.value.__notes__ == ["raised by the reward function 'length'"]


class Judge:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [len(completion) for completion in completions]


def test_async_functions_are_awaited_also_inside_a_running_loop() -> None:
    async def judge(completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    async def notebook():
        return score(RewardFunction(judge))

    assert score(RewardFunction(judge)) == asyncio.run(notebook()) == [1.0, 1.0]
    assert score(RewardFunction(Judge())) == [1.0, 1.0]


def test_what_an_async_function_returns_is_checked_too() -> None:
    async def judge(**kwargs):
        return [1.0]

    with pytest.raises(ValueError, match="'judge' returned 1 rewards; expected 2"):
        score(RewardFunction(judge))


def test_all_functions_together_keep_their_columns_and_async_ones_overlap() -> None:
    waited = []

    def slow(value: float):
        async def judge(**kwargs):
            waited.append(("start", value))
            await asyncio.sleep(0.05)
            waited.append(("end", value))
            return [value, None]

        return RewardFunction(judge)

    functions = [slow(0.25), returning([True, False]), slow(0.75)]
    started = time.monotonic()
    rewards = score_all(functions, **ROWS)
    assert time.monotonic() - started < 5
    expected = torch.tensor([[0.25, 1.0, 0.75], [math.nan, 0.0, math.nan]])
    torch.testing.assert_close(rewards, expected, equal_nan=True, rtol=0, atol=0)
    assert rewards.dtype == torch.float32
    assert [event for event, _ in waited] == ["start", "start", "end", "end"]


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_a_failing_sync_function_leaves_no_coroutine_behind() -> None:
    async def judge(**kwargs):
        return [1.0, 1.0]

    def fails(**kwargs):
        raise OSError("down")

    with pytest.raises(OSError, match="down"):
        score_all([RewardFunction(judge), RewardFunction(Judge()), RewardFunction(fails)], **ROWS)


def test_no_function_is_an_error() -> None:
    with pytest.raises(ValueError, match="no reward function"):
        score_all([], **ROWS)


def test_reward_models_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(TypeError, match="module Linear is one; supported are Python callables"):
        RewardFunction(nn.Linear(2, 1))
    with pytest.raises(
        TypeError, match="hub id 'org/reward-model' is one.*call it inside a function of your own"
    ):
        RewardFunction("org/reward-model")
    with pytest.raises(TypeError, match="a reward must be a callable, got float"):
        RewardFunction(1.0)


def test_names_and_weights() -> None:
    def length(scale=1.0, **kwargs):
        return [scale, scale]

    assert RewardFunction(length).name == "length" and RewardFunction(length).weight == 1.0
    assert RewardFunction(Judge()).name == "Judge"
    partial = RewardFunction(functools.partial(length, scale=3), weight=2)
    assert partial.name == "length" and score(partial) == [3.0, 3.0] and partial.weight == 2.0
    assert RewardFunction(length, name="own").name == "own"
    assert repr(partial) == "RewardFunction('length', weight=2.0)"
