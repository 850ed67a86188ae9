"""The embedded task: small additions and subtractions with answers of varying length.

A problem is the row ``{"prompt": "12+7=", "answer": "19"}``. Everything here is a pure function of its
arguments: the same `n`, `seed` and `split` give the same problems on every machine and in every process.
Which split a problem belongs to is decided by a hash of its text, so a held-out problem can never be drawn
for training, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")

# One problem text in five is held out.
HELD_OUT_ONE_IN = 5

# (digits of the left operand, digits of the right operand) -> share of the problems. Mostly one digit against
# two, so that a small policy can master it; the three-digit shapes are there for answers of four characters
# ("7-312=-305").
DIGIT_MIX: dict[tuple[int, int], float] = {
    (1, 1): 0.12,
    (1, 2): 0.42,
    (2, 1): 0.44,
    (2, 2): 0.01,
    (1, 3): 0.005,
    (3, 1): 0.005,
}

# The longest answer has four characters; the fifth token is the end of the sequence.
MAX_ANSWER_TOKENS = 5

# The problems that every reported held-out accuracy is measured on.
HELD_OUT_PROBLEMS = 600
HELD_OUT_SEED = 0


def split_of(prompt: str) -> Split:
    """The split of a problem text, by its sha256: "held_out" for one in `HELD_OUT_ONE_IN`, else "train"."""
    digest = hashlib.sha256(prompt.encode("ascii")).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0 else "train"


def make_problems(n: int, seed: int, split: Split) -> list[dict[str, str]]:
    """Draw `n` problems of `split`, with repetition, in the proportions of `DIGIT_MIX`.

    Args:
        n: number of problems, at least 0.
        seed: equal seeds give equal problems; different seeds give independent ones.
        split: "train" or "held_out".

    Returns:
        `n` rows with the keys "prompt" (such as "12-30=") and "answer" (such as "-18").

    Raises:
        ValueError: `n` is negative or `split` is not a split.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, allowed are {', '.join(map(repr, SPLITS))}: pass one of these")
    if n < 0:
        raise ValueError(f"n is {n}, allowed is 0 or more: pass the number of problems to draw")
    draw = random.Random(f"{split}-{seed}")
    shapes, shares = list(DIGIT_MIX), list(DIGIT_MIX.values())
    problems: list[dict[str, str]] = []
    while len(problems) < n:
        left_digits, right_digits = draw.choices(shapes, shares)[0]
        left, right = _draw_operand(draw, left_digits), _draw_operand(draw, right_digits)
        operator = draw.choice("+-")
        prompt = f"{left}{operator}{right}="
        if split_of(prompt) == split:
            problems.append(
                {"prompt": prompt, "answer": str(left + right if operator == "+" else left - right)}
            )
    return problems


def _draw_operand(draw: random.Random, digits: int) -> int:
    """A uniform draw from the integers with that many digits (0 counts as one digit)."""
    return draw.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def held_out_problems(n: int = HELD_OUT_PROBLEMS) -> list[dict[str, str]]:
    """The first `n` distinct problems of a fixed held-out sequence; accuracies are reported on these."""
    drawn, distinct = n, {}
    while len(distinct) < n:
        drawn *= 2
        distinct = {problem["prompt"]: problem for problem in make_problems(drawn, HELD_OUT_SEED, "held_out")}
    return list(distinct.values())[:n]


def load_dataset(split: Split, n: int, seed: int) -> Dataset:
    """`make_problems` as a `datasets.Dataset` with the string columns "prompt" and "answer"."""
    from datasets import Dataset

    return Dataset.from_list(make_problems(n, seed, split))


def exact_match_reward(
    prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any
) -> list[float]:
    """1.0 for each completion that equals its answer, character by character, and 0.0 for each other one.

    The signature is TRL's reward-function contract: `prompts`, `completions` and the data set's columns
    (`answer`) are lists with one entry per completion, further columns arrive in `kwargs` and are ignored.

    Args:
        prompts: the problems, unused.
        completions: generated texts, special tokens already removed.
        answer: the right answers.

    Raises:
        ValueError: `completions` and `answer` differ in length.
    """
    if len(completions) != len(answer):
        raise ValueError(
            f"got {len(completions)} completions for {len(answer)} answers, they must be as many: "
            "repeat each row's answer once per completion"
        )
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]
