"""The embedded task and policy: problems, splits, reward, tokenizer, evaluation and the shipped artefacts."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlt_train.embedded import (
    HELD_OUT_PROBLEMS,
    MAX_ANSWER_TOKENS,
    exact_match_reward,
    held_out_problems,
    load_dataset,
    load_policy,
    load_tokenizer,
    make_problems,
    measure_accuracy,
    policy_path,
    split_of,
)

RECORD = json.loads((policy_path() / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def policy():
    return load_policy()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / "pretrain_tiny.py"
    spec = importlib.util.spec_from_file_location("pretrain_tiny", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


# The task


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_agree_with_python(split):
    for problem in make_problems(2000, 3, split):
        match = re.fullmatch(r"(\d{1,3})([+-])(\d{1,3})=", problem["prompt"])
        left, right = int(match[1]), int(match[3])
        assert problem["answer"] == str(left + right if match[2] == "+" else left - right)


def test_no_problem_is_in_both_splits():
    held_out = {problem["prompt"] for problem in make_problems(3000, 0, "held_out")}
    train = {problem["prompt"] for seed in range(2) for problem in make_problems(8000, seed, "train")}
    assert len(held_out) > 700 and len(train) > 2500
    assert not held_out & train
    assert {split_of(prompt) for prompt in held_out} == {"held_out"}
    assert {split_of(prompt) for prompt in train} == {"train"}


def test_the_split_of_a_text_never_changes():
    # Published accuracies are comparable only while these stay as they are.
    texts = ["12+7=", "3-4=", "7-312=", "0+0=", "99-9=", "1+1=", "25-8=", "40+2="]
    digests = [int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) for text in texts]
    assert [split_of(text) for text in texts] == ["train" if d % 5 else "held_out" for d in digests]
    assert {split_of(text) for text in texts} == {"train", "held_out"}


def test_problems_depend_on_seed_and_split_only():
    assert make_problems(200, 5, "train") == make_problems(200, 5, "train")
    assert make_problems(50, 5, "train") == make_problems(200, 5, "train")[:50]
    assert make_problems(200, 5, "train") != make_problems(200, 6, "train")
    # Pinned, so that a change of the generator, of the mix or of Python's random does not pass unseen.
    rows = json.dumps(make_problems(100, 0, "held_out")).encode()
    assert hashlib.sha256(rows).hexdigest()[:16] == "96028a9a7ad6028d"


def test_answers_have_one_to_four_characters_and_some_are_negative():
    answers = [problem["answer"] for problem in make_problems(5000, 0, "train")]
    assert {len(answer) for answer in answers} == {1, 2, 3, 4}
    assert max(map(len, answers)) + 1 == MAX_ANSWER_TOKENS
    assert 0.1 < sum(answer.startswith("-") for answer in answers) / len(answers) < 0.5


def test_held_out_problems_are_many_and_distinct():
    problems = held_out_problems()
    assert len(problems) == HELD_OUT_PROBLEMS >= 500
    assert len({problem["prompt"] for problem in problems}) == len(problems)
    assert held_out_problems(30) == problems[:30]
    assert held_out_problems(0) == []


def test_dataset_holds_the_problems():
    dataset = load_dataset("train", 20, seed=1)
    assert dataset.column_names == ["prompt", "answer"]
    assert dataset.to_list() == make_problems(20, 1, "train")


@pytest.mark.parametrize("arguments, word", [((-1, 0, "train"), "-1"), ((1, 0, "test"), "held_out")])
def test_bad_arguments_are_refused(arguments, word):
    with pytest.raises(ValueError, match=word):
        make_problems(*arguments)


def test_reward_is_one_for_an_exact_match_only():
    completions = ["19", "19 ", "019", "", "-5", "5"]
    answers = ["19", "19", "19", "19", "-5", "-5"]
    rewards = exact_match_reward(["x="] * 6, completions, answers, completion_ids=[[0]] * 6, level=[1] * 6)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert all(type(reward) is float for reward in rewards)


def test_reward_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match="2 completions for 1 answers"):
        exact_match_reward(["x="], ["1", "2"], ["1"])


# The tokenizer


def test_tokenizer_has_one_token_a_character_after_bos(tokenizer):
    text = "102-97=5"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.convert_ids_to_tokens(ids[1:]) == list(text)


def test_tokenizer_round_trips_every_problem(tokenizer):
    texts = [problem["prompt"] + problem["answer"] for problem in held_out_problems(200)]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ended = [row + [tokenizer.eos_token_id, tokenizer.pad_token_id] for row in ids]
    assert tokenizer.batch_decode(ended, skip_special_tokens=True) == texts
    assert not any(tokenizer.unk_token_id in row for row in ids)


def test_tokenizer_pads_on_the_left_with_distinct_special_tokens(tokenizer):
    special = {getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "unk")}
    assert len(special) == 4 and None not in special
    batch = tokenizer(["1+1=", "11+11="], padding=True)
    assert batch["input_ids"][0][:3] == [tokenizer.pad_token_id] * 2 + [tokenizer.bos_token_id]
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1, 1]


# The artefacts


def test_artefacts_load_with_the_auto_classes(policy, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(policy_path())
    assert model.config.model_type == "qwen3"
    assert len(AutoTokenizer.from_pretrained(policy_path())) == len(tokenizer) == model.config.vocab_size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert (
            getattr(model.config, name) == getattr(model.generation_config, name) == getattr(tokenizer, name)
        )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), policy.parameters(), strict=True))
    assert load_policy(torch.bfloat16).dtype == torch.bfloat16


def test_artefacts_are_small(policy):
    assert policy.num_parameters() == RECORD["parameters"] <= 1_000_000
    assert sum(file.stat().st_size for file in policy_path().iterdir()) <= 4_000_000


def test_recorded_sha256_is_the_weights_own():
    weights = (policy_path() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == RECORD["sha256"]


def test_artefacts_name_no_machine_path():
    for file in policy_path().glob("*.json"):
        assert not re.search(r'"(/|~|[A-Za-z]:\\)', file.read_text(encoding="utf-8")), file.name


def test_recorded_accuracies_are_the_weights_own_and_in_the_window(policy, tokenizer):
    state = torch.random.get_rng_state()
    accuracy = measure_accuracy(policy, tokenizer, held_out_problems())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert accuracy.sampled == pytest.approx(RECORD["held_out_sampled"], abs=1e-4)
    assert accuracy.greedy == pytest.approx(RECORD["held_out_greedy"], abs=0.005)
    assert 0.35 <= accuracy.sampled <= 0.55
    assert accuracy.greedy < 0.7  # the likeliest answers are no solution either


def test_accuracies_agree_with_generating(policy, tokenizer):
    problems = held_out_problems(300)
    prompts = tokenizer([problem["prompt"] for problem in problems], padding=True, return_tensors="pt")
    answers = [problem["answer"] for problem in problems]

    def generated(**options) -> float:
        ids = policy.generate(**prompts, max_new_tokens=MAX_ANSWER_TOKENS, **options)
        texts = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        repeats = options.get("num_return_sequences", 1)
        expected = [answer for answer in answers for _ in range(repeats)]
        rewards = exact_match_reward([], texts, expected)
        return sum(rewards) / len(rewards)

    accuracy = measure_accuracy(policy, tokenizer, problems)
    assert generated(do_sample=False) == pytest.approx(accuracy.greedy, abs=0.01)
    torch.manual_seed(0)
    sampled = generated(do_sample=True, temperature=1.0, top_k=0, num_return_sequences=4)
    assert sampled == pytest.approx(accuracy.sampled, abs=0.05)  # 1,200 samples: 0.014 standard error


def test_accuracy_refuses_no_problems(policy, tokenizer):
    with pytest.raises(ValueError, match="empty"):
        measure_accuracy(policy, tokenizer, [])


# The script that rebuilds them


def test_shipped_tokenizer_is_the_scripts(script, tokenizer):
    assert script.build_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_shipped_policy_was_trained_with_the_scripts_defaults(script):
    arguments = script.PretrainArguments()
    for name in set(vars(arguments)) - {"output"}:
        assert RECORD[name] == getattr(arguments, name), name


def test_the_same_seed_gives_the_same_weights(script, tmp_path):
    def weights(seed: int, name: str) -> str:
        arguments = script.PretrainArguments(output=tmp_path / name, seed=seed, batch_size=8)
        torch.manual_seed(seed)
        tokenizer = script.build_tokenizer()
        model = script.build_model(tokenizer, arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for step in range(1, 6):
            script.take_step(model, tokenizer, optimizer, step, arguments)
        return script.save(model, tokenizer, arguments.output, {"seed": seed})

    assert weights(0, "first") == weights(0, "second") != weights(1, "third")
    first, second = (tmp_path / name / "training.json" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
