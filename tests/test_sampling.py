"""Sampling against plain Python oracles: validation, truncation, draws, uniforms, log-probs and ends."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import VOCAB, drive, generated, new_engine, ordinary_logprobs, prompt, request, sampling, smaller

from rlt_train.engine.engine import Engine
from rlt_train.engine.request import Request, Sequence
from rlt_train.engine.sampling import SamplingParams, inverse_cdf, sample, truncate, uniforms
from rlt_train.errors import RequestError


def draws(uniform: float | list[float]) -> torch.Tensor:
    return torch.tensor(uniform, dtype=torch.float64).reshape(-1)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_new_tokens", 0, ">= 1"),
        ("temperature", -0.5, ">= 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "hot", "finite"),
        ("min_new_tokens", -1, ">= 0"),
        ("min_new_tokens", 65, "max_new_tokens=64"),
        ("repetition_penalty", 0.0, "> 0"),
        ("repetition_penalty", math.nan, "> 0"),
        ("presence_penalty", math.inf, "[-100, 100]"),
        ("frequency_penalty", -101.0, "[-100, 100]"),
        ("logit_bias", {3: math.nan}, "numbers"),
        ("logit_bias", {VOCAB: 1.0}, str(VOCAB)),
        ("bad_words", ((),), "at least one token id"),
        ("bad_words", ((1, VOCAB),), str(VOCAB)),
        ("allowed_token_ids", (), "at least one token id"),
        ("stop_strings", ("",), "at least one character"),
        ("stop_strings", "###", "a sequence of strings"),
        ("top_logprobs", VOCAB + 1, f"vocabulary size {VOCAB}"),
        ("priority", 1.5, "integer"),
        ("deadline", 0.0, "seconds > 0"),
        ("top_k", -1, "0 (off)"),
        ("top_k", VOCAB + 1, f"vocabulary size {VOCAB}"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.5, "(0, 1]"),
        ("top_p", math.nan, "(0, 1]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.1, "[0, 1]"),
        ("stop_token_ids", (5, VOCAB), str(VOCAB)),
        ("eos_token_ids", (-1,), str(VOCAB)),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_what_is_allowed(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(RequestError) as raised:
        sampling(**{field: value}).validate(VOCAB)
    assert field in str(raised.value) and allowed in str(raised.value)
    if not isinstance(value, (tuple, dict)):
        assert str(value) in str(raised.value)


def test_the_extreme_valid_parameters_pass() -> None:
    sampling(max_new_tokens=1, temperature=0.0, top_k=VOCAB, top_p=1.0, min_p=1.0).validate(VOCAB)
    sampling(stop_token_ids=(0, VOCAB - 1), eos_token_ids=()).validate(VOCAB)


def oracle_kept(logprobs: list[float], params: SamplingParams) -> set[int]:
    """Top-k, then top-p and min-p of what is left, spelled out on Python floats."""
    order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])  # stable: ties by token id
    if params.top_k:
        order = order[: params.top_k]
    total = math.fsum(math.exp(logprobs[token]) for token in order)
    probability = {token: math.exp(logprobs[token]) / total for token in order}
    kept, before = set(), 0.0
    for rank, token in enumerate(order):
        inside = params.top_p >= 1 or before < params.top_p
        likely = probability[token] >= params.min_p * probability[order[0]]
        if rank == 0 or (inside and likely):
            kept.add(token)
        before += probability[token]
    return kept


def test_truncation_keeps_what_the_oracle_keeps() -> None:
    rng = random.Random(5)
    params = [
        sampling(
            top_k=rng.choice([0, 1, 2, 5, 20]),
            top_p=rng.choice([1.0, 0.95, 0.5, 0.05]),
            min_p=rng.choice([0.0, 0.01, 0.3, 1.0]),
        )
        for _ in range(200)
    ]
    logits = torch.randn(len(params), 20, generator=torch.Generator().manual_seed(1)) * 2
    logprobs = torch.log_softmax(logits.double(), -1).float()
    result = truncate(logprobs, params)
    for row, spec in enumerate(params):
        kept = set(torch.isfinite(result[row]).nonzero().flatten().tolist())
        assert kept == oracle_kept(logprobs[row].tolist(), spec), spec
        assert all(result[row, token] == logprobs[row, token] for token in kept)


def test_without_truncation_nothing_is_touched() -> None:
    logprobs = torch.log_softmax(torch.randn(3, 7), -1)
    assert truncate(logprobs, [sampling()] * 3) is logprobs


def test_ties_are_broken_by_token_id_and_top_p_counts_exactly() -> None:
    quarter = torch.full((1, 4), math.log(0.25))

    def kept(**spec: Any) -> list[int]:
        return torch.isfinite(truncate(quarter, [sampling(**spec)]))[0].nonzero().flatten().tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.5) == [0, 1]  # the first two reach a half exactly
    assert kept(top_p=0.500001) == [0, 1, 2]
    assert kept(min_p=1.0) == [0, 1, 2, 3]
    assert kept(top_k=3, top_p=0.6) == [0, 1]  # of the three that are left, two thirds


def test_top_p_of_a_long_flat_tail_is_counted_in_float64() -> None:
    # 65,536 equal tokens: in float32 the running sum drifts by more than one token's probability.
    logprobs = torch.log_softmax(torch.zeros(1, 65536), -1)
    kept = torch.isfinite(truncate(logprobs, [sampling(top_p=0.75)])).sum().item()
    assert abs(kept - 0.75 * 65536) <= 1


def test_the_inverse_cdf_takes_the_right_token_at_every_edge() -> None:
    logprobs = torch.tensor(
        [[0.0, -math.inf, 0.0, -math.inf, 0.0, 0.0, -math.inf]]
    )  # four equal weights of 1
    below = {edge: math.nextafter(edge, 0.0) for edge in (0.25, 0.5, 0.75, 1.0)}
    expected = {
        0.0: 0,
        below[0.25]: 0,
        0.25: 2,
        below[0.5]: 2,
        0.5: 4,
        below[0.75]: 4,
        0.75: 5,
        below[1.0]: 5,
    }
    for uniform, token in expected.items():
        assert inverse_cdf(logprobs, draws(uniform)).item() == token, uniform


def test_the_inverse_cdf_never_takes_a_token_without_probability() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(2))
    logits[:, ::3] = -math.inf
    logits[:, -1] = -math.inf
    for uniform in (0.0, 2**-53, 0.5, 1 - 2**-53):
        tokens = inverse_cdf(torch.log_softmax(logits, -1), draws([uniform] * 64))
        assert torch.isfinite(logits.gather(1, tokens[:, None])).all()


def test_the_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    count = 20_000
    tokens = sample(
        probabilities.log().expand(count, -1),
        [sampling()] * count,
        uniforms(0, range(count), [0] * count),
    ).tokens
    observed = torch.bincount(tokens, minlength=4)
    chi_square = ((observed - count * probabilities) ** 2 / (count * probabilities)).sum().item()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_uniforms_are_a_pure_function_of_run_seed_request_seed_and_position() -> None:
    batch = uniforms(7, [3, 5, 2**40], [0, 9, 4])
    assert batch.dtype == torch.float64
    alone = [uniforms(7, [seed], [position]) for seed, position in ((3, 0), (5, 9), (2**40, 4))]
    assert batch.tolist() == torch.cat(alone).tolist()
    others = torch.cat(
        [batch, uniforms(8, [3], [0]), uniforms(7, [4], [0]), uniforms(7, [3], [1]), uniforms(3, [7], [0])]
        + [uniforms(7, [seed], [0]) for seed in (-1, 3 + 2**32, 3 + 2**64, 3 - 2**64)]
    )
    assert len(set(others.tolist())) == len(others)


@pytest.mark.parametrize("varying", ["run", "request", "position"])
def test_uniforms_are_uniform_and_uncorrelated_along_each_argument(varying: str) -> None:
    count = 6400
    numbers = range(count)
    if varying == "run":
        values = torch.cat([uniforms(number, [1], [2]) for number in numbers])
    elif varying == "request":
        values = uniforms(1, numbers, [2] * count)
    else:
        values = uniforms(1, [2] * count, numbers)
    assert 0 <= values.min() and values.max() < 1
    observed = torch.histc(values.float(), bins=64, min=0, max=1)
    assert ((observed - count / 64) ** 2 / (count / 64)).sum() < 103.4  # 63 degrees of freedom, p = 0.001
    lagged = torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1]
    assert lagged.abs() < 4 / math.sqrt(count)


def test_logprobs_are_raw_and_processed_ones_are_of_the_distribution_drawn_from() -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(3)) * 3
    params = sampling(temperature=0.7, top_k=8, top_p=0.9)
    drawn = sample(logits, [params] * 40, uniforms(0, range(40), [0] * 40))
    raw = torch.log_softmax(logits / 0.7, -1)
    kept = truncate(raw, [params] * 40)
    renormalised = torch.log_softmax(kept, -1)
    pick = drawn.tokens[:, None]
    torch.testing.assert_close(drawn.logprobs, raw.gather(1, pick)[:, 0])
    torch.testing.assert_close(drawn.processed_logprobs, renormalised.gather(1, pick)[:, 0])
    assert torch.isfinite(drawn.processed_logprobs).all() and drawn.finite.all()
    assert (drawn.processed_logprobs > drawn.logprobs).all()


def test_without_truncation_the_two_logprobs_are_the_same() -> None:
    drawn = sample(torch.randn(5, 30), [sampling(temperature=1.3)] * 5, draws([0.1, 0.3, 0.5, 0.7, 0.9]))
    assert drawn.logprobs.tolist() == drawn.processed_logprobs.tolist()


def test_greedy_rows_take_the_likeliest_token_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    drawn = sample(logits, [sampling(temperature=0.0), sampling()], draws([0.999, 0.999]))
    assert drawn.tokens.tolist() == [1, 2]
    assert drawn.logprobs[0] == torch.log_softmax(logits[0], -1)[1]
    assert drawn.processed_logprobs[0] == 0.0


@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf", "all nan"])
@pytest.mark.parametrize("params", [sampling(), sampling(top_k=3), sampling(temperature=0.0)])
def test_a_row_without_usable_logits_is_marked_and_the_others_are_drawn_as_ever(
    bad: str, params: SamplingParams
) -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(4))
    uniform = draws([0.2, 0.5, 0.8])
    clean = sample(logits, [params] * 3, uniform)
    spoiled = logits.clone()
    spoiled[1, slice(None) if "all" in bad else 4] = float(bad.removeprefix("all "))
    drawn = sample(spoiled, [params] * 3, uniform)
    assert drawn.finite.tolist() == [True, False, True]
    assert drawn.tokens[::2].tolist() == clean.tokens[::2].tolist()
    assert drawn.logprobs[::2].tolist() == clean.logprobs[::2].tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-300])
def test_a_temperature_that_overflows_float32_marks_its_row_only(temperature: float) -> None:
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(4))
    drawn = sample(logits, [sampling(temperature=temperature), sampling()], draws([0.2, 0.5]))
    assert drawn.finite.tolist() == [False, True]


# -- through the engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return smaller()


def run(engine: Engine, *requests: Request) -> dict[str, Sequence]:
    for item in requests:
        engine.add(item)
    return drive(engine)


def test_a_request_does_not_depend_on_its_batch_mates_or_their_order(model: Any) -> None:
    params = sampling(max_new_tokens=20, ignore_eos=True)
    requests = [request(f"r{i}", prompt(3 + 5 * i, i), params, seed=i) for i in range(5)]
    together = run(new_engine(model), *requests)
    backwards = run(new_engine(model, rollouts_in_flight=2, max_tokens_per_step=7), *reversed(requests))
    for item in requests:
        alone = run(new_engine(model), item)[item.request_id]
        for other in (together[item.request_id], backwards[item.request_id]):
            assert generated(other) == generated(alone)
            torch.testing.assert_close(
                torch.tensor(other.logprobs), torch.tensor(alone.logprobs), atol=1e-4, rtol=0
            )


def test_other_seeds_give_other_tokens(model: Any) -> None:
    params = sampling(max_new_tokens=20)
    one, two = (request(f"r{i}", prompt(6), params, seed=i) for i in range(2))
    result = run(new_engine(model), one, two)
    assert generated(result["r0"]) != generated(result["r1"])
    other_run = run(new_engine(model, seed=1), one)
    assert generated(other_run["r0"]) != generated(result["r0"])


def test_the_engine_records_tempered_full_vocabulary_logprobs(model: Any) -> None:
    params = sampling(max_new_tokens=12, temperature=0.6, top_k=4)
    sequence = run(new_engine(model), request("r", prompt(9), params))["r"]
    expected = ordinary_logprobs(model, prompt(9), generated(sequence), temperature=0.6)
    torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=1e-4, rtol=0)


def test_what_ends_a_sequence(model: Any) -> None:
    params = sampling(max_new_tokens=12, temperature=0.0)
    free = generated(run(new_engine(model), request("r", prompt(9), params))["r"])
    assert len(free) == 12
    at = next(i for i, token in enumerate(free) if i >= 2 and token not in free[:i])

    def ends(spec: SamplingParams, eos: tuple[int, ...]) -> tuple[list[int], str | None]:
        sequence = run(new_engine(model), request("r", prompt(9), spec, eos=eos))["r"]
        return generated(sequence), sequence.finish_reason

    absent = next(token for token in range(VOCAB) if token not in free)
    assert ends(params, (absent, free[at])) == (free[: at + 1], "stop")  # the EOS token is part of the output
    assert ends(replace(params, stop_token_ids=(free[at],)), (absent,)) == (free[: at + 1], "stop")
    assert ends(replace(params, max_new_tokens=at), (free[at],)) == (free[:at], "length")
    assert ends(replace(params, max_new_tokens=at + 1), (free[at],)) == (free[: at + 1], "stop")
    assert ends(replace(params, max_new_tokens=1), ()) == (free[:1], "length")
