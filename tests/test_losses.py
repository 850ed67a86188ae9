"""The policy loss against TRL's formulas, written out here in Python floats over rows and tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_train.grpo.losses import policy_loss, token_weights

LOW, HIGH = 0.2, 0.28
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]


@dataclass
class Row:
    logps: list[float]
    behaviour: list[float]
    reference: list[float]
    advantage: float
    active: bool


def make_row(draw: random.Random, length: int, active: bool) -> Row:
    behaviour = [-draw.uniform(0.01, 4.0) for _ in range(length)]
    return Row(
        logps=[logp + draw.uniform(-0.6, 0.6) for logp in behaviour],
        behaviour=behaviour,
        reference=[logp + draw.uniform(-1.0, 1.0) for logp in behaviour],
        advantage=draw.choice([-1.5, 0.0, 0.7, draw.uniform(-2, 2)]),
        active=active,
    )


def token_losses(row: Row, level: str, beta: float) -> list[float]:
    """TRL's per_token_loss for one row."""
    differences = [new - old for new, old in zip(row.logps, row.behaviour, strict=True)]
    if level == "sequence":
        differences = [sum(differences) / max(len(differences), 1)] * len(differences)
    losses = []
    for difference, logp, reference in zip(differences, row.logps, row.reference, strict=True):
        ratio = math.exp(difference)
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        loss = -min(ratio * row.advantage, clipped * row.advantage)
        kl = math.exp(reference - logp) - (reference - logp) - 1
        losses.append(loss + beta * kl)
    return losses


def trl_step_loss(
    loss_type: str, processes: list[list[list[Row]]], level: str, beta: float, limit: int
) -> float:
    """TRL's loss of one optimizer step, averaged over processes as gradients are.

    `processes` holds, for each process, its micro-batches of rows. The mask of an inactive row is all zeros.
    """
    items = sum(
        len(row.logps) for batches in processes for rows in batches for row in rows if row.active
    )  # num_items_in_batch
    total = 0.0
    for batches in processes:
        accumulation = len(batches)
        for rows in batches:
            sums = [sum(token_losses(row, level, beta)) if row.active else 0.0 for row in rows]
            counts = [len(row.logps) if row.active else 0 for row in rows]
            if loss_type == "grpo":
                means = [value / max(count, 1) for value, count in zip(sums, counts, strict=True)]
                loss = sum(means) / len(rows) / accumulation
            elif loss_type == "bnpo":
                loss = sum(sums) / max(sum(counts), 1) / accumulation
            elif loss_type == "dr_grpo":
                loss = sum(sums) / (len(rows) * limit) / accumulation
            else:
                loss = sum(sums) / (max(items, 1) / len(processes))
            total += loss
    return total / len(processes)


def our_micro_batch(rows: list[Row], loss_type: str, level: str, beta: float, totals: dict) -> torch.Tensor:
    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in getattr(row, name)], dtype=torch.float64)

    lengths = torch.tensor([len(row.logps) for row in rows])
    active = torch.tensor([row.active for row in rows])
    row_of_token = torch.arange(len(rows)).repeat_interleave(lengths)
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
    output = policy_loss(
        flat("logps"),
        flat("behaviour"),
        advantages[row_of_token],
        active[row_of_token],
        epsilon_low=LOW,
        epsilon_high=HIGH,
        loss_weights=token_weights(loss_type, lengths, active=active, **totals).double(),
        ref_logps=flat("reference"),
        beta=beta,
        importance_level=level,
        row_of_token=row_of_token,
    )
    return output.loss


@settings(deadline=None, max_examples=120)
@given(
    loss_type=st.sampled_from(LOSS_TYPES),
    level=st.sampled_from(["token", "sequence"]),
    beta=st.sampled_from([0.0, 0.04]),
    num_processes=st.integers(1, 2),
    micro_batches=st.integers(1, 3),
    rows=st.integers(1, 3),
    inactive=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_a_step_sums_to_the_loss_of_trl(
    loss_type, level, beta, num_processes, micro_batches, rows, inactive, seed
) -> None:
    draw = random.Random(seed)
    limit = 9
    processes = [
        [
            [make_row(draw, draw.randint(0 if rows > 1 else 1, limit), draw.random() >= inactive)]
            + [make_row(draw, draw.randint(0, limit), draw.random() >= inactive) for _ in range(rows - 1)]
            for _ in range(micro_batches)
        ]
        for _ in range(num_processes)
    ]
    tokens = sum(len(row.logps) for bs in processes for rs in bs for row in rs if row.active)
    totals = {
        "grpo": dict(rows_in_step=rows * micro_batches),
        "bnpo": dict(micro_batches=micro_batches),
        "dr_grpo": dict(rows_in_step=rows * micro_batches, max_completion_length=limit),
        "dapo": dict(tokens_in_step=tokens, num_processes=num_processes),
    }[loss_type]
    ours = 0.0
    for batches in processes:
        for batch in batches:
            ours += our_micro_batch(batch, loss_type, level, beta, totals).item() / num_processes
    # The weights are fp32, hence the tolerance.
    expected = trl_step_loss(loss_type, processes, level, beta, limit)
    assert ours == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_weights_of_a_worked_example() -> None:
    def weights(loss_type: str, **totals: int) -> list[float]:
        return token_weights(loss_type, [2, 1, 3], active=[True, True, False], **totals).tolist()

    f32 = torch.tensor
    assert weights("grpo", rows_in_step=6) == f32([1 / 12, 1 / 12, 1 / 6, 0, 0, 0]).tolist()
    assert weights("bnpo", micro_batches=2) == f32([1 / 6, 1 / 6, 1 / 6, 0, 0, 0]).tolist()
    assert (
        weights("dr_grpo", rows_in_step=6, max_completion_length=4)
        == f32([1 / 24, 1 / 24, 1 / 24, 0, 0, 0]).tolist()
    )
    assert weights("dapo", tokens_in_step=10, num_processes=2) == f32([1 / 5, 1 / 5, 1 / 5, 0, 0, 0]).tolist()


def test_weights_of_rows_without_tokens() -> None:
    assert token_weights("grpo", [], rows_in_step=4).shape == (0,)
    assert token_weights("bnpo", [0, 0], micro_batches=1).shape == (0,)
    assert token_weights("dapo", [2], active=[False], tokens_in_step=0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(loss_type="ppo"), "loss_type is 'ppo'; allowed: grpo, bnpo, dr_grpo, dapo"),
        (dict(loss_type="grpo"), "'grpo' needs rows_in_step"),
        (dict(loss_type="bnpo"), "'bnpo' needs micro_batches"),
        (dict(loss_type="dr_grpo", rows_in_step=4), "'dr_grpo' needs max_completion_length"),
        (dict(loss_type="dapo", tokens_in_step=-1), "'dapo' needs tokens_in_step"),
        (dict(loss_type="grpo", rows_in_step=0), "at least 1; got 0"),
        (dict(loss_type="grpo", rows_in_step=4, active=[True]), r"shapes \[2\] and \[1\]"),
    ],
)
def test_a_missing_or_impossible_total_is_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        token_weights(lengths=[1, 2], **arguments)


def numeric_gradient(function, at: list[float]) -> list[float]:
    step, gradient = 1e-6, []
    for index in range(len(at)):
        up, down = list(at), list(at)
        up[index] += step
        down[index] -= step
        gradient.append((function(up) - function(down)) / (2 * step))
    return gradient


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_is_that_of_the_formula(level: str) -> None:
    rows = [make_row(random.Random(seed), 4, True) for seed in range(6)]
    weights = [0.1 + 0.05 * index for index in range(24)]
    flat = [logp for row in rows for logp in row.logps]

    def loss(values: list[float]) -> float:
        total, position = 0.0, 0
        for row in rows:
            moved = Row(values[position : position + 4], row.behaviour, row.reference, row.advantage, True)
            for value in token_losses(moved, level, beta=0.1):
                total += weights[position] * value
                position += 1
        return total

    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    logps = tensor(flat).requires_grad_()
    output = policy_loss(
        logps,
        tensor([x for row in rows for x in row.behaviour]),
        tensor([row.advantage for row in rows for _ in range(4)]),
        epsilon_low=LOW,
        epsilon_high=HIGH,
        loss_weights=tensor(weights),
        ref_logps=tensor([x for row in rows for x in row.reference]),
        beta=0.1,
        importance_level=level,
        row_of_token=torch.arange(6).repeat_interleave(4),
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss(flat), rel=1e-12)
    torch.testing.assert_close(logps.grad, tensor(numeric_gradient(loss, flat)), rtol=1e-6, atol=1e-8)
    for name in ("per_token_loss", "ratio", "kl", "clipped_low", "clipped_high"):
        assert not getattr(output, name).requires_grad
    assert not any(value.requires_grad for value in output.metrics.values())


def loss_of(ratios: list[float], advantages: list[float], **options):
    logps = torch.tensor(ratios, dtype=torch.float64).log()
    defaults = dict(epsilon_low=LOW, epsilon_high=HIGH, loss_weights=torch.ones(len(ratios)))
    return policy_loss(
        logps, torch.zeros_like(logps), torch.tensor(advantages).double(), **defaults | options
    )


def test_clipping_counts_only_where_the_clip_holds_the_token_back() -> None:
    ratios = [0.7, 0.7, 1.5, 1.5, 1.0, 0.5]
    output = loss_of(ratios, [-1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    assert output.clipped_low.tolist() == [True, False, False, False, False, True]
    assert output.clipped_high.tolist() == [False, False, True, False, False, False]
    torch.testing.assert_close(
        output.per_token_loss, torch.tensor([0.8, -0.7, -1.28, 1.5, -1.0, 0.8], dtype=torch.float64)
    )
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics["clip_ratio/low_mean"] == pytest.approx(2 / 6)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 6)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(3 / 6)
    assert metrics["ratio/mean"] == pytest.approx(sum(ratios) / 6)
    assert (metrics["ratio/min"], metrics["ratio/max"]) == pytest.approx((0.5, 1.5))
    k3 = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 6
    assert metrics["behaviour_kl"] == pytest.approx(k3) and "kl" not in metrics and output.kl is None


def test_masked_tokens_touch_neither_loss_nor_metrics_nor_gradient_even_when_infinite() -> None:
    logps = torch.tensor([-1.0, -math.inf, -2.0], dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        logps,
        torch.tensor([-1.0, -0.5, -2.5], dtype=torch.float64),
        torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64),
        torch.tensor([True, False, True]),
        epsilon_low=LOW,
        epsilon_high=2.0,
        loss_weights=torch.ones(3),
        ref_logps=torch.tensor([-1.0, math.inf, -2.0], dtype=torch.float64),
        beta=0.5,
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.0 - math.exp(0.5))
    assert logps.grad.tolist() == pytest.approx([-1.0, 0.0, -math.exp(0.5)])
    assert output.active_tokens.item() == 2 and output.per_token_loss[1] == 0
    assert output.metrics["ratio/min"].item() == pytest.approx(1.0)
    assert output.metrics["ratio/mean"].item() == pytest.approx((1 + math.exp(0.5)) / 2)
    assert output.metrics["kl"].item() == pytest.approx(0.0)


def test_the_extremes_of_the_ratio_are_those_of_active_tokens() -> None:
    for ratios in ([0.5, 1.0, 0.7], [1.5, 1.0, 1.3]):
        metrics = loss_of(ratios, [1.0, 1.0, 1.0], mask=torch.tensor([True, False, True])).metrics
        extremes = (metrics["ratio/min"].item(), metrics["ratio/max"].item())
        assert extremes == pytest.approx((min(ratios[0], ratios[2]), max(ratios[0], ratios[2])))


def test_exactly_on_policy_means_ratio_one_and_kl_zero_to_the_last_bit() -> None:
    logps = torch.randn(50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    output = policy_loss(
        logps,
        logps.detach(),
        torch.ones(50),
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_weights=torch.full((50,), 0.02),
    )
    output.loss.backward()
    assert output.ratio.eq(1.0).all() and output.metrics["behaviour_kl"].item() == 0.0
    # The gradient is not zero although the loss does not depend on the values: -weight * advantage.
    torch.testing.assert_close(logps.grad, torch.full((50,), -0.02))


def test_sequence_level_counts_clipped_sequences_not_tokens() -> None:
    output = loss_of(
        [1.6, 1.6, 1.6, 1.0],
        [1.0, 1.0, 1.0, 1.0],
        importance_level="sequence",
        row_of_token=torch.tensor([0, 0, 0, 1]),
    )
    assert output.metrics["clip_ratio/high_mean"].item() == pytest.approx(0.5)
    assert output.clipped_high.tolist() == [True, True, True, False]


def test_half_precision_logps_are_subtracted_in_fp32() -> None:
    a, b = torch.tensor([-1.0078125]).bfloat16(), torch.tensor([-0.003])
    output = policy_loss(a, b, torch.ones(1), epsilon_low=0.9, epsilon_high=0.9, loss_weights=torch.ones(1))
    assert output.ratio.dtype == torch.float32
    assert output.ratio.item() == pytest.approx(math.exp(-1.0078125 + 0.003), rel=1e-6)


def test_an_empty_micro_batch_has_loss_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    output = policy_loss(
        empty, empty.detach(), torch.zeros(0), epsilon_low=0.2, epsilon_high=0.2, loss_weights=torch.zeros(0)
    )
    output.loss.backward()
    assert output.loss.item() == 0.0 and all(value.isfinite() for value in output.metrics.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(beta=0.1), "needs ref_logps"),
        (dict(importance_level="sequence"), "needs row_of_token"),
        (dict(importance_level="word"), "allowed: 'token', 'sequence'"),
        (dict(loss_weights=torch.ones(3)), r"loss_weights has shape \[3\]; expected \[2\]"),
        (dict(mask=torch.ones(2, 1)), r"mask has shape \[2, 1\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of([1.0, 1.0], [1.0, 1.0], **options)
