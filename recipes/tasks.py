"""What a recipe trains on: problems to train and to hold out, and the reward functions.

Four kinds: the embedded arithmetic, additions asked in a chat, any procedural task of ``reasoning-gym``, and
a dataset from a file, a folder or the hub. The rewards here are binary: partial credit for a right answer
inside a longer wrong one is what a policy learns to exploit first.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerBase

from rlt_train.embedded import arithmetic

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., list[float | None]]

NAMED_TASKS = "arithmetic, addition_chat or reasoning_gym:NAME"
REWARDS = "exact_match, math_verify, FILE.py:FUNCTION or MODULE:FUNCTION"
EVALUATION_SPLITS = ("test", "validation", "eval", "dev")
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
HOLD_OUT_AT_MOST_ONE_IN = 5
FULL_MARKS = 1.0 - 1e-6  # of reasoning_gym's scorers, which work with floats


@dataclass(frozen=True)
class Task:
    """Problems with the columns "prompt" (text, or chat messages) and whatever the reward functions read."""

    name: str
    train_dataset: Dataset
    eval_dataset: Dataset
    reward_funcs: list[RewardFunction]


def load_task(
    task: str,
    *,
    dataset: str | None = None,
    reward: str | None = None,
    n_train: int,
    n_eval: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset_config: str | None = None,
) -> Task:
    """The problems and rewards that a recipe's options ask for; equal arguments give equal problems.

    Args:
        task: "arithmetic", "addition_chat" or "reasoning_gym:NAME"; has no effect beside ``dataset``.
        dataset: a JSON, JSONL, CSV or parquet file, a folder, or a hub id, with a column "prompt"; ":SPLIT"
            at its end picks the training split.
        reward: "exact_match", "math_verify", "MODULE:FUNCTION", "FILE.py:FUNCTION", or several with commas
            between; replaces the task's own reward, and a ``dataset`` has none of its own.
        n_train, n_eval: problems at most, at least 1 each.
        seed: of the draw and of the split.
        tokenizer: the policy's; decides whether reasoning_gym's prompts are messages.
        dataset_config: the configuration of a hub dataset that has several.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: what was given, what is allowed, what to do.
    """
    if min(n_train, n_eval) < 1:
        raise ValueError(f"n_train={n_train} and n_eval={n_eval} must both be at least 1")
    if dataset is not None:
        if reward is None:
            raise ValueError(f"the dataset {dataset!r} needs a reward: {REWARDS}")
        loaded = dataset_task(dataset, n_train, n_eval, seed, dataset_config)
    elif task == "arithmetic":
        loaded = arithmetic_task(n_train, n_eval, seed)
    elif task == "addition_chat":
        loaded = addition_chat_task(n_train, n_eval, seed)
    elif task.startswith("reasoning_gym:"):
        chat = bool(getattr(tokenizer, "chat_template", None))
        loaded = reasoning_gym_task(task.partition(":")[2], n_train, n_eval, seed, chat)
    else:
        raise ValueError(f"unknown task {task!r}; choose {NAMED_TASKS}, or pass a dataset")
    if reward is not None:
        columns = loaded.train_dataset.column_names
        functions = [load_reward(name.strip(), columns) for name in reward.split(",")]
        loaded = replace(loaded, reward_funcs=functions)
    _check_readable(loaded, tokenizer)
    return loaded


def _check_readable(task: Task, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse a policy that cannot read its prompts: the embedded one knows sums only."""
    prompt = task.train_dataset[0]["prompt"]
    if tokenizer is None:
        return
    if not isinstance(prompt, str):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the prompts of {task.name!r} are chat messages, and the model's tokenizer has no chat "
                "template; choose an instruct model, for example smollm2"
            )
        return
    ids = tokenizer(prompt)["input_ids"]
    if tokenizer.unk_token_id is not None and ids.count(tokenizer.unk_token_id) > len(ids) / 4:
        raise ValueError(
            f"the model's tokenizer cannot write the prompt {prompt[:60]!r} of {task.name!r}; choose "
            "another model, for example smollm2"
        )


# -- the named tasks -----------------------------------------------------------------------------------------


def arithmetic_task(n_train: int, n_eval: int, seed: int) -> Task:
    """The embedded task: its evaluation problems are the first ``n_eval`` of a fixed held-out sequence."""
    held_out = Dataset.from_list(arithmetic.held_out_problems(n_eval))
    train = arithmetic.load_dataset("train", n_train, seed)
    return Task("arithmetic", train, held_out, [arithmetic.exact_match_reward])


def addition_chat_task(n_train: int, n_eval: int, seed: int) -> Task:
    """Additions of one-digit numbers in a chat, judged by the first number of the completion.

    The completion goes on after "The answer is": that keeps the first reward of a small instruct model above
    zero, where GRPO would learn nothing. A fifth of the 100 problems is held out, training repeats the rest.
    """
    pairs = [(left, right) for left in range(10) for right in range(10)]
    random.Random(f"addition_chat-{seed}").shuffle(pairs)
    held_out = len(pairs) // HOLD_OUT_AT_MOST_ONE_IN
    train = random.Random(f"addition_chat-train-{seed}").choices(pairs[held_out:], k=n_train)
    return Task(
        "addition_chat",
        Dataset.from_list([_addition_row(*pair) for pair in train]),
        Dataset.from_list([_addition_row(*pair) for pair in pairs[: min(n_eval, held_out)]]),
        [first_number_reward],
    )


def _addition_row(left: int, right: int) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"What is {left}+{right}?"},
        {"role": "assistant", "content": "The answer is"},
    ]
    return {"prompt": messages, "answer": str(left + right)}


def reasoning_gym_task(name: str, n_train: int, n_eval: int, seed: int, chat: bool) -> Task:
    """A procedural task of ``reasoning-gym``, judged by the task's own scorer, full marks only.

    Its problem ``i`` of seed ``s`` is problem ``i - 1`` of seed ``s + 1``, so neighbouring seeds give almost
    the same problems: the two seeds are drawn far apart, and training questions that are held out dropped.

    Raises:
        ModuleNotFoundError: the package is missing.
        ValueError: no task of that name, or one that has no problems to train on.
    """
    drawn = {
        part: _procedural(name, size, f"{part}-{seed}")
        for part, size in (("eval", n_eval), ("train", n_train))
    }
    entries = [*drawn["eval"], *drawn["train"]]
    rows = [_reasoning_row(entry, index, chat) for index, entry in enumerate(entries)]
    held_out = Dataset.from_list(rows[:n_eval])
    train = without_prompts_of(Dataset.from_list(rows[n_eval:]), held_out)
    score = drawn["train"].score_answer

    def full_marks_reward(completions: list[Any], entry: list[int], **kwargs: Any) -> list[float]:
        """1.0 where the scorer gives the final answer full marks."""
        return [
            _full_marks(score, completion_text(completion), entries[index])
            for completion, index in zip(completions, entry, strict=True)
        ]

    return Task(f"reasoning_gym:{name}", train, held_out, [full_marks_reward])


def _full_marks(score: Callable[[str, dict[str, Any]], float], text: str, entry: dict[str, Any]) -> float:
    try:
        return float(score(extract_answer(text, entry["answer"]), entry) >= FULL_MARKS)
    except Exception as error:  # several scorers fail on an answer that is not in the form they expect
        logger.debug("scored 0: the scorer of %s failed: %r", entry["metadata"].get("source_dataset"), error)
        return 0.0


def _procedural(name: str, size: int, seed: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reasoning_gym tasks need a package that is not installed: pip install 'rlt-train[tasks]'",
            name=error.name,
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ValueError(f"reasoning_gym has no task {name!r}; near matches: {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=random.Random(seed).randrange(2**31))
    except AssertionError as error:  # its configurations check themselves by assertions
        raise ValueError(f"reasoning_gym:{name} needs more than a name: {error}; choose another") from error


def _reasoning_row(entry: dict[str, Any], index: int, chat: bool) -> dict[str, Any]:
    """``entry`` is the problem's number: metadata without a common schema fits into no dataset column."""
    question = f"{entry['question']}\nGive the final answer between <answer> and </answer>."
    prompt = [{"role": "user", "content": question}] if chat else f"{question}\n"
    return {"prompt": prompt, "answer": entry["answer"], "entry": index}


# -- datasets ------------------------------------------------------------------------------------------------


def dataset_task(source: str, n_train: int, n_eval: int, seed: int, config: str | None = None) -> Task:
    """Rows of a file, folder or hub dataset, without a reward.

    Evaluation rows come from the first of the splits test, validation, eval and dev that exists; without one,
    or if ``source`` names a split, they are held out of the training rows, a fifth of them at most.

    Raises:
        FileNotFoundError, ValueError: no such source or split, no column "prompt", or too few rows.
    """
    location, _, split = (source, "", "") if Path(source).exists() else source.partition(":")
    splits = _read(location, config)
    chosen = split or ("train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else "")
    if chosen not in splits:
        wanted = f"no split {split!r}" if split else "no split 'train'"
        raise ValueError(
            f"{location} has {wanted}, its splits are {', '.join(splits)}: name one as {location}:SPLIT"
        )
    train = splits[chosen].shuffle(seed=seed)
    if "prompt" not in train.column_names:
        raise ValueError(
            f"{source} has no column 'prompt', its columns are {', '.join(train.column_names)}: rename "
            "the one that holds the question"
        )
    evaluation = [name for name in EVALUATION_SPLITS if name in splits and name != chosen and not split]
    if evaluation:
        held_out = splits[evaluation[0]].shuffle(seed=seed)
        held_out = held_out.select(range(min(n_eval, len(held_out))))
    else:
        size = min(n_eval, len(train) // HOLD_OUT_AT_MOST_ONE_IN)
        if size < 1:
            raise ValueError(f"{source} has {len(train)} rows; without an evaluation split, 5 are needed")
        held_out, train = train.select(range(size)), train.select(range(size, len(train)))
        train = without_prompts_of(train, held_out)
    train = train.select(range(min(n_train, len(train))))
    logger.info("%s: training on %d rows of %r, holding out %d", source, len(train), chosen, len(held_out))
    return Task(source, train, held_out, [])


def without_prompts_of(train: Dataset, held_out: Dataset) -> Dataset:
    """The training rows whose prompt is not held out. Raises ``ValueError`` if there are none."""
    seen = {str(prompt) for prompt in held_out["prompt"]}
    kept = [row for row, prompt in enumerate(train["prompt"]) if str(prompt) not in seen]
    if not kept:
        raise ValueError(f"all {len(train)} training prompts are held out too; use more, different problems")
    return train.select(kept)


def _read(location: str, config: str | None) -> DatasetDict:
    """All splits of a file, a folder (saved by ``save_to_disk``, or of data files) or a hub dataset."""
    path = Path(location)
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(
                f"cannot read {location}: the endings of dataset files are {', '.join(FILE_FORMATS)}"
            )
        return load_dataset(FILE_FORMATS[path.suffix], data_files=str(path))
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        saved = load_from_disk(location)
        return saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
    if not path.exists() and (path.is_absolute() or location.startswith(".") or path.suffix in FILE_FORMATS):
        raise FileNotFoundError(f"no dataset file or folder {location}; give an existing one, or a hub id")
    return load_dataset(location, config)


# -- rewards -------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"-?\d+")
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Not the tail of another number or word: the last number of "10-4" is 4, of "7/4" 7, of "1,234" all of it.
_LAST_NUMBER = re.compile(r"(?<![\w./])-?\d[\d,]*(?:\.\d+)?")


def completion_text(completion: Any) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(completion: str, gold: str | None) -> str:
    """The final answer: what the last <answer> tag holds, else the last lines, as many as ``gold`` has.

    Where ``gold`` is a number, it is the last number in there. Where the task has no single right answer
    (``None``) and there is no tag, it is the whole completion.
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    text = (tagged[-1] if tagged else completion).strip()
    if gold is None:
        return text
    if not tagged:
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        text = "\n".join(lines[-max(1, len(gold.split("\n"))) :])
    if _PLAIN_NUMBER.fullmatch(gold):
        numbers = _LAST_NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else ""
    return text


def first_number_reward(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the first integer in the completion is the answer."""
    found = [_INTEGER.search(completion_text(completion)) for completion in completions]
    return [
        float(match is not None and match.group() == gold) for match, gold in zip(found, answer, strict=True)
    ]


def exact_match(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    """1.0 where the completion is the answer, apart from white space around either."""
    texts = [completion_text(completion).strip() for completion in completions]
    return [float(text == str(gold).strip()) for text, gold in zip(texts, answer, strict=True)]


def math_verify(completions: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where Math-Verify finds the completion equal to the column "answer", or else "solution".

    None, so no reward at all, where it can read no mathematics in that column.
    """
    from math_verify import parse, verify

    # Its time limits are signals, which only the main thread may set.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    rewards: list[float | None] = []
    for completion, gold in zip(completions, columns.get("answer") or columns["solution"], strict=True):
        expected = parse(str(gold), parsing_timeout=limit)
        given = parse(completion_text(completion), parsing_timeout=limit)
        rewards.append(float(verify(expected, given, timeout_seconds=limit)) if expected else None)
    return rewards


def load_reward(name: str, columns: Sequence[str]) -> RewardFunction:
    """The reward function called ``name``, one of ``REWARDS``.

    Raises:
        ValueError: unknown, or the dataset lacks the column that it reads.
        FileNotFoundError, ModuleNotFoundError: its file or module does not exist.
    """
    reads = {"exact_match": ("answer",), "math_verify": ("answer", "solution")}.get(name)
    if reads is None:
        return import_reward(name)
    if not set(reads) & set(columns):
        raise ValueError(
            f"the dataset has no column {' or '.join(map(repr, reads))} for the reward {name}; its columns "
            f"are {', '.join(columns)}"
        )
    if name == "exact_match":
        return exact_match
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "the reward math_verify needs a package that is not installed: pip install 'rlt-train[tasks]'",
            name="math_verify",
        )
    return math_verify


def import_reward(name: str) -> RewardFunction:
    """Import "MODULE:FUNCTION" or "FILE.py:FUNCTION". Raises as ``load_reward``."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ValueError(f"unknown reward {name!r}; choose {REWARDS}")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        error.add_note(f"imported for the reward {name!r}; a file is given as path/to/file.py:function")
        raise
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"the reward {name!r}: {source} has no function {attribute!r}")
    return function


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module
