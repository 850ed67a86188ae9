"""Penalties, biases and bans against a plain Python oracle, and what each request feature does in a run."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from tiny import (
    VOCAB,
    drive,
    generate_greedy,
    generated,
    new_engine,
    ordinary_logprobs,
    prompt,
    request,
    sampling,
    smaller,
)
from transformers import GenerationConfig

from rlt_train.engine.engine import Engine, new_group
from rlt_train.engine.params import BUILT_IN, SamplingParams, generation_defaults
from rlt_train.engine.processors import History, banned_tokens, process_logits
from rlt_train.engine.sampling import sample
from rlt_train.engine.stopping import find_stop_string
from rlt_train.errors import DeadlineError, RequestError


@pytest.fixture(scope="module")
def model() -> Any:
    return smaller()


def oracle(logits: list[float], params: SamplingParams, history: History) -> list[float]:
    """Each rule spelled out token by token on Python floats."""
    completion = list(history.tokens[history.prompt :])
    result = []
    for token, score in enumerate(logits):
        if token in history.tokens:
            penalty = params.repetition_penalty
            score = score * penalty if score < 0 else score / penalty
        score -= params.frequency_penalty * completion.count(token)
        score -= params.presence_penalty * (token in completion)
        score += (params.logit_bias or {}).get(token, 0.0)
        if history.generated < params.min_new_tokens and token in history.ending:
            score = -math.inf
        for word in params.bad_words or ():
            start = list(word[:-1])
            if token == word[-1] and list(history.tokens)[len(history.tokens) - len(start) :] == start:
                score = -math.inf
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            score = -math.inf
        result.append(score)
    return result


def test_processed_logits_are_the_oracles() -> None:
    rng = random.Random(0)
    rows, vocab = 120, 12
    params, histories = [], []
    for _ in range(rows):
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 10))]
        histories.append(History(tokens, rng.randint(1, len(tokens)), frozenset(rng.sample(range(vocab), 2))))
        params.append(
            sampling(
                repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
                presence_penalty=rng.choice([0.0, 0.5, -0.5]),
                frequency_penalty=rng.choice([0.0, 0.2]),
                logit_bias=rng.choice([None, {3: 2.5, 4: -1.0}, {5: -math.inf}]),
                bad_words=rng.choice([None, [[2]], [[tokens[-1], 7]], [[1, 2, 3]]]),
                min_new_tokens=rng.choice([0, 3]),
                allowed_token_ids=rng.choice([None, None, [1, 2, 3, 4, 7]]),
            )
        )
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    processed = process_logits(logits, params, histories)
    assert torch.equal(logits, before)
    expected = torch.tensor([oracle(logits[i].tolist(), params[i], histories[i]) for i in range(rows)])
    torch.testing.assert_close(processed, expected)


def test_a_row_that_asks_for_nothing_is_the_same_tensor_and_untouched_beside_others() -> None:
    logits = torch.randn(2, 9)
    histories = [History([1, 2], 1), History([1, 2], 1)]
    assert process_logits(logits, [sampling()] * 2, histories) is logits
    processed = process_logits(logits, [sampling(), sampling(frequency_penalty=1.0)], histories)
    assert torch.equal(processed[0], logits[0]) and not torch.equal(processed[1], logits[1])


def test_a_bad_word_at_the_very_start_of_a_short_history() -> None:
    params = sampling(bad_words=[[1, 2, 3, 4]])
    assert banned_tokens(params, History([2, 3], 2)) == set()
    assert banned_tokens(params, History([1, 2, 3], 3)) == {4}


def test_behaviour_logprobs_stay_those_of_the_unpenalised_full_vocabulary() -> None:
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    params = sampling(temperature=0.7, allowed_token_ids=[2, 5], logit_bias={2: 1.0}, top_logprobs=3)
    drawn = sample(logits, [params], torch.tensor([0.3], dtype=torch.float64), [History([1], 1)])
    token = drawn.tokens.item()
    raw = torch.log_softmax(logits[0] / 0.7, -1)
    assert token in (2, 5) and drawn.logprobs.item() == raw[token].item()
    kept = torch.log_softmax((logits[0, [2, 5]] + torch.tensor([1.0, 0.0])) / 0.7, -1)
    assert drawn.processed_logprobs.item() == pytest.approx(kept[[2, 5].index(token)].item(), abs=1e-6)
    assert [t for t, _ in drawn.top[0]] == raw.topk(3).indices.tolist()
    assert [p for _, p in drawn.top[0]] == raw.topk(3).values.tolist()


# -- through the engine ------------------------------------------------------------------------------------


def run(model: Any, *items: Any, **sizes: Any) -> dict[str, Any]:
    engine = new_engine(model, **sizes)
    for item in items:
        engine.add(item)
    return drive(engine)


def greedy(**values: Any) -> SamplingParams:
    return sampling(**{"max_new_tokens": 12, "temperature": 0.0, **values})


def test_penalties_agree_with_generate(model: Any) -> None:
    ids = torch.tensor([prompt(9)])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        repetition_penalty=1.7,
        bad_words_ids=[[5], [3, 4]],
        pad_token_id=0,
    )[0, 9:].tolist()
    params = greedy(repetition_penalty=1.7, bad_words=[[5], [3, 4]])
    assert generated(run(model, request("r", prompt(9), params))["r"]) == expected
    assert expected != generate_greedy(model, prompt(9), 12)


def test_min_new_tokens_puts_off_every_end(model: Any) -> None:
    free = generate_greedy(model, prompt(9), 12)
    stop = free[2]
    params = greedy(min_new_tokens=7, stop_token_ids=(stop,))
    tokens = generated(run(model, request("r", prompt(9), params, eos=(free[3],)))["r"])
    assert len(tokens) >= 7 and not {stop, free[3]} & set(tokens[:7])


def test_allowed_tokens_and_an_impossible_draw(model: Any) -> None:
    result = run(
        model,
        request("allowed", prompt(9), sampling(max_new_tokens=20, allowed_token_ids=[3, 8])),
        request("impossible", prompt(5), sampling(allowed_token_ids=[3], bad_words=[[3]])),
        request("other", prompt(7), greedy()),
    )
    assert set(generated(result["allowed"])) == {3, 8}
    assert "no token that logit_bias" in str(result["impossible"].error)
    assert "'impossible'" in str(result["impossible"].error)
    assert generated(result["other"]) == generate_greedy(model, prompt(7), 12)


def spell(tokens: list[int]) -> str:
    """A decoder whose tokens are one to three letters: stop strings end inside and across tokens."""
    return "".join("abcdefghij"[token % 10] * (1 + token % 3) for token in tokens)


def test_stop_strings_end_across_and_inside_tokens(model: Any) -> None:
    free = generate_greedy(model, prompt(9), 30)
    text = spell(free)
    for first, last in ((2, 5), (3, 9), (10, 13)):
        engine = Engine(new_engine(model).view, new_engine(model).config, decode=spell)
        stop = text[first:last]
        engine.add(request("r", prompt(9), greedy(max_new_tokens=30, stop_strings=[stop, "zzz"])))
        sequence = drive(engine)["r"]
        tokens = generated(sequence)
        assert sequence.finish_reason == "stop" and sequence.stop_reason == stop
        assert stop in spell(tokens) and stop not in spell(tokens[:-1])
        assert tokens == free[: len(tokens)]


def test_the_tail_that_is_searched_holds_the_whole_string() -> None:
    tokens = [1] * 50 + [2, 3, 4]
    letters = {1: "x", 2: "é", 3: "n", 4: "d"}
    assert find_stop_string(lambda ids: "".join(letters[i] for i in ids), tokens, ["xénd"]) == "xénd"
    assert find_stop_string(lambda ids: "".join(letters[i] for i in ids), tokens, ["no"]) is None


def test_stop_strings_without_a_tokenizer_are_refused(model: Any) -> None:
    with pytest.raises(RequestError, match="RolloutManager.tokenizer"):
        new_engine(model).validate(prompt(3), sampling(stop_strings=["x"]))


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_are_the_ordinary_forwards_whatever_the_chunks_and_prefixes(
    model: Any, budget: int
) -> None:
    params = sampling(max_new_tokens=3, temperature=0.8, prompt_logprobs=True, ignore_eos=True)
    plain = greedy(max_new_tokens=4)
    items = [request("plain", prompt(37), plain)]
    items += [request(f"{length}", prompt(length), params, seed=length) for length in (1, 2, 21, 37)]
    group = new_group(3)
    items += [request(f"g{member}", prompt(14), params, seed=member, group=group) for member in range(3)]
    result = run(model, *items, rollouts_in_flight=4, max_tokens_per_step=budget)
    for name, sequence in result.items():
        echoed, ids = sequence.prompt_logprobs, sequence.request.prompt_ids
        if name == "plain":
            assert echoed == []
            continue
        assert echoed[0] is None and len(echoed) == len(ids)
        if len(ids) > 1:
            expected = ordinary_logprobs(model, ids[:1], ids[1:], temperature=0.8)
            torch.testing.assert_close(torch.tensor(echoed[1:]), expected, atol=1e-4, rtol=0)
        new = ordinary_logprobs(model, ids, generated(sequence), temperature=0.8)
        torch.testing.assert_close(torch.tensor(sequence.logprobs), new, atol=1e-4, rtol=0)


def test_a_priority_overtakes_but_starves_nobody(model: Any) -> None:
    engine = new_engine(model, rollouts_in_flight=1)
    for index in range(3):
        engine.add(request(f"plain-{index}", prompt(3, index), greedy(max_new_tokens=1)))
    engine.add(request("urgent", prompt(3, 9), greedy(max_new_tokens=1, priority=1)))
    assert list(drive(engine)) == ["urgent", "plain-0", "plain-1", "plain-2"]
    engine.add(request("patient", prompt(3), greedy(max_new_tokens=1)))
    finished: list[str] = []
    for index in range(200):  # an endless stream of urgent requests, one for each step
        engine.add(request(f"urgent-{index}", prompt(3, index), greedy(max_new_tokens=1, priority=1)))
        finished += [s.request.request_id for s in engine.step().finished]
        if "patient" in finished:
            break
    assert 60 <= finished.index("patient") <= 70


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones(model: Any) -> None:
    engine = new_engine(model, rollouts_in_flight=4, max_tokens_per_step=8)
    engine.add(request("long", prompt(100), greedy(max_new_tokens=2)))
    finished: list[str] = []
    for index in range(60):
        engine.add(request(f"short-{index}", prompt(2, index), greedy(max_new_tokens=2)))
        finished += [s.request.request_id for s in engine.step().finished]
        if "long" in finished:
            return
    raise AssertionError(f"not served within 60 steps, beside {len(finished)} short requests")


def test_a_deadline_ends_a_request_waiting_or_running_and_harms_no_other(model: Any) -> None:
    now = [0.0]
    blueprint = new_engine(model, rollouts_in_flight=2)
    engine = Engine(blueprint.view, blueprint.config, clock=lambda: now[0])
    items = {
        "running": request("running", prompt(5), greedy(max_new_tokens=60, deadline=5.0)),
        "other": request("other", prompt(7), greedy(max_new_tokens=12)),
        "waiting": request("waiting", prompt(5, 1), greedy(deadline=3.0)),
    }
    for item in items.values():
        item.deadline = item.params.deadline
        engine.add(item)
    engine.step()
    now[0] = 3.5
    (late,) = engine.step().finished
    assert late.request.request_id == "waiting" and isinstance(late.error, DeadlineError)
    assert "'waiting' passed its deadline of 3.0 s with 0 tokens" in str(late.error)
    now[0] = 5.0
    (late,) = engine.step().finished
    assert late.request.request_id == "running" and late.generated == 2
    assert generated(drive(engine)["other"]) == generate_greedy(model, prompt(7), 12)
    assert engine.blocks.num_used == 0


# -- where values come from --------------------------------------------------------------------------------


def test_explicit_values_win_over_defaults_over_the_model_over_what_is_built_in() -> None:
    config = GenerationConfig(
        temperature=0.6, top_k=20, repetition_penalty=1.05, eos_token_id=[1, 2], bad_words_ids=[[3]]
    )
    model = generation_defaults(config)
    resolved = (
        SamplingParams(temperature=0.0, top_p=0.9)
        .over(SamplingParams(top_k=5, top_p=0.5))
        .over(model)
        .over(BUILT_IN)
    )
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.0, 0.9, 5)
    assert (resolved.repetition_penalty, resolved.eos_token_ids) == (1.05, (1, 2))
    assert resolved.bad_words == [[3]] and resolved.max_new_tokens == 64 and resolved.min_p == 0.0
    assert generation_defaults(None) == SamplingParams()
    assert generation_defaults(GenerationConfig()).over(BUILT_IN).top_k == 0


def test_a_request_longer_than_the_model_is_refused() -> None:
    engine = new_engine(smaller(max_position_embeddings=32), max_length=64)
    engine.validate(prompt(20), sampling(max_new_tokens=12))
    with pytest.raises(RequestError, match="needs 33 positions, but the model has 32"):
        engine.validate(prompt(20), sampling(max_new_tokens=13))
    assert VOCAB == 300
