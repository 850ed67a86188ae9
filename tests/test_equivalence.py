"""The alone-versus-together comparison passes for the manager, and finds a disturbance where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlt_train.errors import EngineDeadError, UnfencedWriteError
from rlt_train.overlap import OverlapMeter
from rlt_train.weights.equivalence import Beside, TrainingRecord, compare, run_alone, run_together
from scripts.bench_overlap import failed_claims
from scripts.verify_weights import (
    EngineReport,
    VerifyArguments,
    beside_manager,
    build_task,
    draw_prompts,
    figures,
    verify,
)

VICTIM = "model.layers.1.mlp.up_proj.weight"


def small(steps: int = 6, **changes: Any) -> VerifyArguments:
    return VerifyArguments(steps=steps, hidden=32, layers=2, batch_size=4, length=32, **changes)


class Disturbing(OverlapMeter):
    """Runs ``action(model)`` after the ``step``-th backward, before that optimizer step."""

    def __init__(self, action: Callable[[Any], None], model: nn.Module, step: int) -> None:
        super().__init__()
        self._action, self._model, self._step = action, model, step

    @contextmanager
    def training(self) -> Iterator[None]:
        with super().training():
            yield
        if self._sections == self._step:
            self._action(self._model)


def disturb(action: Callable[[Any], None], step: int) -> Beside:
    return lambda model, optimizer: nullcontext(Disturbing(action, model, step))


@pytest.mark.parametrize(
    ("family", "attn", "sampling"), [("dense", "sdpa", "sampled"), ("moe", "eager", "greedy")]
)
def test_training_beside_the_manager_gives_the_same_weights(
    tmp_path: Path, family: str, attn: str, sampling: str
) -> None:
    steps = 20
    arguments = VerifyArguments(steps=steps, family=family, attn=attn, sampling=sampling, dropout=0.1)
    verdict = verify(arguments, tmp_path)
    result = figures(arguments, verdict)
    assert verdict.failures == []
    assert result["equal"] and result["passed"] and result["first_divergent_step"] is None
    assert len(set(verdict.together.ledger.values())) == steps, "training stood still"
    assert result["policy_version"] == steps, "a step was not fenced"
    assert 2 * result["overlapping_forwards"] > result["engine_forwards"] > steps
    assert result["requests_finished"] > 0 and result["tokens_generated"] > result["requests_finished"]


def test_dropout_is_really_part_of_the_comparison(tmp_path: Path) -> None:
    """Another dropout stream gives other weights, so equal weights mean an untouched stream."""
    task = build_task(small(steps=1, dropout=0.1))
    record = run_alone(task, tmp_path / "a.jsonl")
    drawing = disturb(lambda model: None, step=1)

    def draws_at_start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        torch.rand(1)
        return drawing(model, optimizer)

    assert compare(record, run_together(task, tmp_path / "b.jsonl", drawing)).equal
    assert compare(record, run_together(task, tmp_path / "c.jsonl", draws_at_start)).first_divergent_step == 1


def test_eval_mode_left_by_an_engine_is_found(tmp_path: Path) -> None:
    task = build_task(small(dropout=0.1))
    alone = run_alone(task, tmp_path / "alone.jsonl")
    together = run_together(task, tmp_path / "together.jsonl", disturb(lambda model: model.eval(), step=2))
    assert compare(alone, together).first_divergent_step == 3


def test_a_disturbed_weight_is_named_with_its_step(tmp_path: Path) -> None:
    task = build_task(small())
    alone = run_alone(task, tmp_path / "alone.jsonl")
    nudge = disturb(lambda model: model.get_parameter(VICTIM).data.view(-1)[7].mul_(1.001), step=3)
    comparison = compare(alone, run_together(task, tmp_path / "together.jsonl", nudge))
    assert not comparison.equal
    assert comparison.first_divergent_step == 3
    assert comparison.divergent_parameters == (VICTIM,)


def test_a_run_that_stopped_early_is_not_equal(tmp_path: Path) -> None:
    task = build_task(small(steps=3))
    alone = run_alone(task, tmp_path / "alone.jsonl")
    shorter = TrainingRecord(
        ledger={step: sha for step, sha in alone.ledger.items() if step < 3}, digests=alone.digests
    )
    assert compare(alone, shorter).first_divergent_step == 3
    with pytest.raises(ValueError, match="empty"):
        compare(TrainingRecord(), TrainingRecord())


def test_an_older_ledger_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run_alone(build_task(small(steps=4)), path)
    record = run_alone(build_task(small(steps=2, seed=5)), path)
    assert list(record.ledger) == [1, 2]


def test_a_changed_thread_count_is_refused(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    changed = disturb(lambda model: torch.set_num_threads(before + 1), step=2)
    with pytest.raises(RuntimeError, match="after step 2: something called torch.set_num_threads"):
        run_together(build_task(small(threads=before)), tmp_path / "ledger.jsonl", changed)
    assert torch.get_num_threads() == before


def test_the_global_random_stream_is_given_back(tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    run_alone(build_task(small(steps=1, dropout=0.1)), tmp_path / "ledger.jsonl")
    assert torch.equal(torch.rand(3), expected)


def beside_careless(arguments: VerifyArguments, action: Callable[[Any], None]) -> Beside:
    """The busy manager, and a training loop that runs ``action`` outside the fence before step 3."""

    @contextmanager
    def beside(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[OverlapMeter]:
        with beside_manager(draw_prompts(arguments), EngineReport(), model, optimizer):
            yield Disturbing(action, model, step=3)

    return beside


def test_an_unfenced_write_that_pytorch_counts_kills_the_engine_and_names_the_weight(tmp_path: Path) -> None:
    arguments = small()

    @torch.no_grad()
    def write(model: Any) -> None:
        model.get_parameter(VICTIM).add_(1e-3)

    with pytest.raises((EngineDeadError, UnfencedWriteError), match=VICTIM):
        run_together(build_task(arguments), tmp_path / "together.jsonl", beside_careless(arguments, write))


def test_an_unfenced_write_that_pytorch_does_not_count_is_found_by_the_comparison(tmp_path: Path) -> None:
    arguments = small()
    task = build_task(arguments)
    alone = run_alone(task, tmp_path / "alone.jsonl")
    write = beside_careless(arguments, lambda model: model.get_parameter(VICTIM).data.add_(1e-3))
    comparison = compare(alone, run_together(task, tmp_path / "together.jsonl", write))
    assert (comparison.first_divergent_step, comparison.divergent_parameters) == (3, (VICTIM,))


def test_an_engine_that_breaks_training_is_reported_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(model: Any) -> None:
        raise FloatingPointError("no luck")

    monkeypatch.setattr(
        "scripts.verify_weights.beside_manager",
        lambda prompts, report, model, optimizer: nullcontext(Disturbing(breaks, model, step=3)),
    )
    arguments = small()
    verdict = verify(arguments, tmp_path)
    result = figures(arguments, verdict)
    assert (result["passed"], result["equal"], result["first_divergent_step"]) == (False, False, 3)
    assert result["error"] == "FloatingPointError: no luck"
    assert result["alone_repeats"] is True
    assert any("0.0% of the engine's forwards" in failure for failure in verdict.failures)


def test_transformers_own_engine_is_compared_in_the_same_way(tmp_path: Path) -> None:
    """Whatever its verdict in the installed release, it is reached by the same means and reported in full."""
    arguments = small(steps=12, engine="transformers", sampling="greedy", dropout=0.0)
    verdict = verify(arguments, tmp_path)
    result = figures(arguments, verdict)
    assert result["error"] is None and result["requests_failed"] == 0
    assert result["engine_forwards"] > 0 and result["tokens_generated"] > 0
    assert result["passed"] == (not verdict.failures)
    assert result["equal"] == (verdict.alone.ledger == verdict.together.ledger)
    if not result["equal"]:
        assert result["divergent_parameter"] in dict(task_parameters(arguments))
        assert result["alone_repeats"] is True


def task_parameters(arguments: VerifyArguments) -> Iterator[tuple[str, nn.Parameter]]:
    return build_task(arguments).model().named_parameters(remove_duplicate=False)


@pytest.mark.parametrize(
    ("measured", "failures"),
    [
        ({}, 0),
        ({"overlap_efficiency": 0.84}, 1),
        ({"alone_ratio": 0.89}, 1),
        ({"alone_ratio": 1.11, "pause_p99_forwards": 1.51}, 2),
    ],
)
def test_the_overlap_benchmark_fails_when_a_claim_does(measured: dict[str, float], failures: int) -> None:
    good = {"overlap_efficiency": 0.86, "alone_ratio": 1.0, "pause_p99_forwards": 1.5}
    assert len(failed_claims(good | measured)) == failures
