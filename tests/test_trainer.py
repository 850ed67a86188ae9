"""``GRPOTrainer`` end to end on the embedded policy: formats, losses, pacing, evaluation, resuming."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from grpo_runs import RecordingTrainer, arithmetic_trainer, chat_tokenizer, token_logprobs
from tiny import smaller
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from rlt_train import SamplingParams
from rlt_train.embedded import exact_match_reward, held_out_problems, load_dataset, load_policy
from rlt_train.grpo.packing import PaddedBatch
from rlt_train.weights.fingerprint import fingerprint

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Something that differs within a group."""
    return [float(len(completion)) for completion in completions]


# -- data formats and rewards --------------------------------------------------------------------------------


def test_text_prompts_and_extra_columns_reach_the_reward_function(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def reward(**kwargs: Any) -> list[float]:
        calls.append(kwargs)
        return exact_match_reward(**kwargs)

    rows = [problem | {"place": i} for i, problem in enumerate(load_dataset("train", 8, 0))]
    trainer = arithmetic_trainer(tmp_path, reward=reward, dataset=Dataset.from_list(rows))
    before = fingerprint(trainer.model)
    trainer.train()
    assert fingerprint(trainer.model) != before
    assert sum(len(call["completions"]) for call in calls) == 16
    for call in calls:
        assert set(call) == {"prompts", "completions", "completion_ids", "answer", "place", "trainer_state"}
        assert call["trainer_state"] is trainer.state
        for prompt, completion, ids, place in zip(
            call["prompts"], call["completions"], call["completion_ids"], call["place"], strict=True
        ):
            assert prompt == rows[place]["prompt"]
            assert trainer.processing_class.decode(ids, skip_special_tokens=True) == completion
        assert call["prompts"][0] == call["prompts"][3]


@pytest.mark.parametrize("continues", [False, True])
def test_chat_prompts_give_chat_completions(tmp_path: Path, continues: bool) -> None:
    seen = []

    def reward(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        assert len(prompts) == len(completions) == len(answer)
        for prompt, completion in zip(prompts, completions, strict=True):
            assert prompt[-1]["role"] == ("assistant" if continues else "user")
            [message] = completion
            assert message["role"] == "assistant" and isinstance(message["content"], str)
            seen.append((prompt, message["content"]))
        texts = [completion[0]["content"] for completion in completions]
        return [float(text == gold) for text, gold in zip(texts, answer, strict=True)]

    ending = [{"role": "assistant", "content": "1"}] if continues else []
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+9"}, *ending], "answer": str(n + 9)[continues:]}
        for n in range(1, 9)
    ]
    trainer = arithmetic_trainer(
        tmp_path,
        reward=reward,
        dataset=Dataset.from_list(rows),
        tokenizer=chat_tokenizer(),
        max_steps=1,
    )
    trainer.train()
    assert len(seen) == 8
    # The policy knows such sums, so a template that went wrong would show in the reward.
    # The policy does about half of such sums; after a template that went wrong it would do none.
    assert trainer.logged("reward")[0] > 0.2
    tokenizer = trainer.processing_class
    expected = {tuple(p.token_ids) for p in trainer._train_prompts}
    trained = {prompt for micro in trainer.recorded for prompt in micro.prompts}
    assert trained <= expected
    ends = {tokenizer.convert_ids_to_tokens(prompt[-1]) for prompt in trained}
    assert ends == ({"1"} if continues else {"="})


def test_weighted_rewards_of_which_one_does_not_always_apply(tmp_path: Path) -> None:
    returned: dict[str, list[Any]] = defaultdict(list)

    def even_only(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
        values = [None if ids[0] % 2 else 1.0 + ids[0] for ids in completion_ids]
        returned["even"] += values
        return values

    async def first_token(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        values = [float(ids[0]) for ids in completion_ids]
        returned["first"] += values
        return values

    trainer = arithmetic_trainer(
        tmp_path,
        reward=[even_only, first_token],
        reward_weights=[2.0, -0.5],
        scale_rewards="none",
        temperature=3.0,  # at random, so that there are both even and odd tokens
        max_steps=1,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
    )
    trainer.train()
    even, first = returned["even"], returned["first"]
    assert len(first) == 16 and None in even and any(value is not None for value in even)
    expected = [2.0 * (e or 0.0) - 0.5 * f for e, f in zip(even, first, strict=True)]
    assert trainer.logged("reward") == [pytest.approx(sum(expected) / 16)]
    applied = [value for value in even if value is not None]
    assert trainer.logged("rewards/even_only/mean") == [pytest.approx(sum(applied) / len(applied), rel=1e-5)]
    assert trainer.logged("rewards/first_token/mean") == [pytest.approx(sum(first) / 16)]
    by_group = [expected[i : i + 4] for i in range(0, 16, 4)]
    advantages = sorted(value - sum(group) / 4 for group in by_group for value in group)
    [micro] = trainer.recorded
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), micro.batch.lengths.cumsum(0)[:-1]])
    assert sorted(micro.batch.advantages[starts].tolist()) == pytest.approx(advantages, abs=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_scale_rewards(tmp_path: Path, scale: str) -> None:
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        values = [float(sum(ids)) for ids in completion_ids]
        rewards.extend(values)
        return values

    trainer = arithmetic_trainer(
        tmp_path, reward=reward, scale_rewards=scale, temperature=3.0, max_steps=1, num_generations=4
    )
    trainer.train()
    groups = torch.tensor(rewards).view(-1, 4)
    divisor: Any = {"group": groups.std(dim=1, keepdim=True), "batch": groups.std(), "none": 1.0}[scale]
    expected = (groups - groups.mean(dim=1, keepdim=True)) / (divisor + (0.0 if scale == "none" else 1e-4))
    [micro] = trainer.recorded
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), micro.batch.lengths.cumsum(0)[:-1]])
    trained = micro.batch.advantages[starts]
    assert trained.sort().values.tolist() == pytest.approx(
        expected.flatten().sort().values.tolist(), abs=1e-4
    )


# -- the objective against plain loops -----------------------------------------------------------------------


class OracleTrainer(RecordingTrainer):
    """Computes every loss a second time, by plain loops over whole logits under TRL's formulas."""

    def compute_loss(self, model: nn.Module, inputs: PaddedBatch, *args: Any, **kwargs: Any) -> Tensor:
        reference: Any = self.objective._reference
        with torch.no_grad():
            ours = token_logprobs(self.model, inputs, self.args.temperature).tolist()
            if reference is not None:
                theirs = token_logprobs(reference, inputs, self.args.temperature).tolist()
            else:
                with self.model.disable_adapter():
                    theirs = token_logprobs(self.model, inputs, self.args.temperature).tolist()
        self.oracle: dict[int, list[list[list[float]]]] = getattr(self, "oracle", {})
        self.oracle.setdefault(self.state.global_step, []).append(self._rows(inputs, ours, theirs))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _rows(self, batch: PaddedBatch, ours: list[float], theirs: list[float]) -> list[list[float]]:
        rows: list[list[float]] = [[] for _ in batch.lengths]
        for t, row in enumerate(batch.row_of_token.tolist()):
            advantage = float(batch.advantages[t])
            ratio = math.exp(ours[t] - float(batch.behaviour_logps[t]))
            surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            kl = math.exp(theirs[t] - ours[t]) - (theirs[t] - ours[t]) - 1
            rows[row].append(-surrogate + self.args.beta * kl)
        cut = batch.truncated.tolist() if self.args.mask_truncated_completions else [False] * len(rows)
        return [[] if gone else row for row, gone in zip(rows, cut, strict=True)]

    def expected_loss(self, step: int) -> float:
        batches, args = self.oracle[step], self.args
        tokens = sum(len(row) for rows in batches for row in rows)
        total = 0.0
        for rows in batches:
            sums = [sum(row) for row in rows]
            if args.loss_type == "grpo":
                means = [value / max(len(row), 1) for value, row in zip(sums, rows, strict=True)]
                total += sum(means) / len(rows) / len(batches)
            elif args.loss_type == "bnpo":
                total += sum(sums) / max(sum(map(len, rows)), 1) / len(batches)
            elif args.loss_type == "dr_grpo":
                total += sum(sums) / (len(rows) * args.max_completion_length) / len(batches)
            else:
                total += sum(sums) / max(tokens, 1)
        return total


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_is_trls_with_a_reference_model(tmp_path: Path, loss_type: str) -> None:
    trainer = arithmetic_trainer(
        tmp_path,
        kind=OracleTrainer,
        reward=length_reward,
        loss_type=loss_type,
        beta=0.3,
        temperature=1.5,
        max_completion_length=4,
        mask_truncated_completions=True,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
    )
    trainer.train()
    losses = trainer.logged("loss")
    expected = [trainer.expected_loss(step) for step in range(3)]
    assert losses == pytest.approx(expected, abs=2e-5, rel=1e-4)
    assert all(map(math.isfinite, losses)) and len(set(losses)) == 3
    assert trainer.logged("kl")[0] == pytest.approx(0.0, abs=1e-6) and trainer.logged("kl")[2] > 1e-4
    cut = sum(int(micro.batch.truncated.sum()) for micro in trainer.recorded)
    assert 0 < cut < 48, "some completions, and not all, must be cut off for this to show anything"


def test_with_lora_the_reference_is_the_policy_without_adapters(tmp_path: Path) -> None:
    """While the reference's forward runs with the adapters off, rollouts keep them on."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    trainer = arithmetic_trainer(
        tmp_path,
        kind=OracleTrainer,
        reward=length_reward,
        extra={"peft_config": lora},
        beta=0.1,
        learning_rate=0.0,
        max_steps=4,
        gradient_accumulation_steps=2,
        max_completion_length=8,
    )
    assert trainer.objective._reference is None
    trainer.train()
    assert trainer.logged("loss") == pytest.approx(
        [trainer.expected_loss(step) for step in range(4)], abs=2e-5, rel=1e-4
    )
    assert min(trainer.logged("kl")) > 0.01
    assert max(trainer.logged("sampling/sampling_logp_difference/max")) < 1e-4
    assert trainer.manager.stats()["overlapping_forwards"] > 0
    assert any("lora" in name for name, p in trainer.model.named_parameters() if p.requires_grad)
    assert all("lora" in name for name, p in trainer.model.named_parameters() if p.requires_grad)


class GradientsBeforeTheStep(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_accumulated_gradients_are_those_of_one_batch(tmp_path: Path, loss_type: str) -> None:
    gradients = []
    for accumulation in (1, 4):
        keep = GradientsBeforeTheStep()
        arithmetic_trainer(
            tmp_path,
            reward=length_reward,
            loss_type=loss_type,
            per_device_train_batch_size=16 // accumulation,
            gradient_accumulation_steps=accumulation,
            temperature=2.0,
            max_steps=1,
            max_grad_norm=0.0,
            extra={"callbacks": [keep]},
        ).train()
        gradients.append(keep.gradients)
    assert len(gradients[0]) == len(list(load_policy().parameters()))
    assert max(float(g.abs().max()) for g in gradients[0]) > 1e-3
    for one, four in zip(*gradients, strict=True):
        torch.testing.assert_close(four, one, rtol=1e-4, atol=1e-5)


def test_truncated_completions_may_be_left_out(tmp_path: Path) -> None:
    """With a limit of one token nearly everything is cut off, so nothing is learnt."""
    trainer = arithmetic_trainer(
        tmp_path,
        reward=lambda completion_ids, **kwargs: [float(ids[0]) for ids in completion_ids],
        mask_truncated_completions=True,
        max_completion_length=1,
        max_steps=1,
        temperature=1.0,
    )
    before = fingerprint(trainer.model)
    trainer.train()
    assert all(bool(micro.batch.truncated.all()) for micro in trainer.recorded)
    assert trainer.logged("loss") == [0.0]
    assert fingerprint(trainer.model) == before


class LargestTensor(TorchDispatchMode):
    """Entries of the largest tensor, by its memory, that an operation gives out."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor):
                entries = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.entries = max(self.entries, entries)
        return out


def test_the_logits_of_a_batch_never_exist_as_a_whole(tmp_path: Path) -> None:
    vocabulary, watch = 4000, LargestTensor()

    class WatchedTrainer(RecordingTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with watch:
                return super().training_step(*args, **kwargs)

    model = smaller(vocab_size=vocabulary)
    trainer = arithmetic_trainer(
        tmp_path,
        kind=WatchedTrainer,
        model=model,
        reward=lambda completion_ids, **kwargs: [float(ids[0] % 7) for ids in completion_ids],
        max_completion_length=20,
        logprob_chunk_tokens=16,
        max_steps=2,
        beta=0.1,
    )
    trainer.train()
    tokens = min(int(micro.batch.lengths.sum()) for micro in trainer.recorded)
    assert tokens > 100
    # Weights are the largest tensors, as large as the logits of 32 tokens.
    assert watch.entries == model.lm_head.weight.numel() == 32 * vocabulary


# -- pacing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_is_bounded_and_groups_train_in_admission_order(tmp_path: Path, bound: int) -> None:
    trainer = arithmetic_trainer(
        tmp_path,
        max_staleness=bound,
        gradient_accumulation_steps=2,
        rollouts_in_flight=48,
        max_completion_length=6,
        max_steps=5,
    )
    trainer.train()
    lags = [int((micro.version - micro.batch.versions).max()) for micro in trainer.recorded]
    assert all(micro.version == micro.step for micro in trainer.recorded)
    assert all((micro.batch.versions <= micro.version).all() for micro in trainer.recorded)
    assert max(lags) <= bound
    assert (max(lags) >= 1) == (bound >= 1)
    assert max(trainer.logged("staleness/max")) == max(lags)
    stream = trainer._stream()
    for step in range(5):
        trained = [p for micro in trainer.recorded if micro.step == step for p in micro.prompts]
        expected = [tuple(stream[group].token_ids) for group in range(4 * step, 4 * step + 4)]
        assert sorted(trained) == sorted(prompt for prompt in expected for _ in range(4))


def test_with_bound_0_training_begins_before_the_step_has_decoded(tmp_path: Path) -> None:
    """The engine is held at the end of the first group until a micro-batch has been trained; a trainer that
    waits for the whole step would wait in vain."""
    trained, held_in_vain = threading.Event(), []

    class Watched(RecordingTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            trained.set()
            return loss

    trainer = arithmetic_trainer(
        tmp_path,
        kind=Watched,
        max_staleness=0,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        rollouts_in_flight=4,  # one group after the other
        max_steps=1,
    )
    finished: Counter[str] = Counter()
    held_at: list[int] = []

    def hold(output: Any) -> None:
        group = output.request_id.rpartition("-")[0]
        finished[group] += 1
        if finished[group] == 4 and not held_at:
            held_at.append(finished.total())
            if not trained.wait(20):
                held_in_vain.append(True)

    trainer.manager.on("finished", hold)
    trainer.train()
    assert finished.total() == 16 and held_at[0] < 16
    assert not held_in_vain


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 0), (0.7, 2)])
def test_behaviour_logprobs_are_the_trainers_own_at_learning_rate_0(
    tmp_path: Path, temperature: float, top_k: int
) -> None:
    trainer = arithmetic_trainer(
        tmp_path, learning_rate=0.0, temperature=temperature, top_k=top_k, max_steps=3
    )

    def generate() -> list[tuple[list[int], list[float]]]:
        params = SamplingParams(max_new_tokens=6, temperature=temperature, seed=7)
        with trainer.manager as manager:
            handles = manager.submit_group(trainer._train_prompts[0].token_ids, 4, params)
            outputs = [handle.result(20) for handle in handles]
        return [(output.token_ids, output.logprobs) for output in outputs]

    before, print_before = generate(), fingerprint(trainer.model)
    trainer.train()
    assert fingerprint(trainer.model) == print_before
    assert generate() == before
    assert max(trainer.logged("staleness/max")) == 1
    assert max(trainer.logged("sampling/sampling_logp_difference/max")) < 1e-4
    for micro in trainer.recorded:
        with torch.no_grad():
            expected = token_logprobs(trainer.model, micro.batch, temperature)
        torch.testing.assert_close(micro.batch.behaviour_logps, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("in_flight", ["recompute", "finish"])
def test_other_policies_for_running_requests(tmp_path: Path, in_flight: str) -> None:
    trainer = arithmetic_trainer(tmp_path, in_flight=in_flight, rollouts_in_flight=16, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert max(trainer.logged("staleness/max")) <= 1


def test_a_resumed_run_trains_the_prompts_that_come_next(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    whole = arithmetic_trainer(tmp_path, **options)
    whole.train()
    resumed = arithmetic_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4

    def prompts(trainer: Any, step: int) -> list[tuple[int, ...]]:
        return sorted(p for micro in trainer.recorded if micro.step == step for p in micro.prompts)

    assert {micro.step for micro in resumed.recorded} == {2, 3}
    for step in (2, 3):
        assert prompts(resumed, step) == prompts(whole, step)
    assert prompts(whole, 2) != prompts(whole, 0)


def test_two_runs_of_one_trainer(tmp_path: Path) -> None:
    trainer = arithmetic_trainer(tmp_path, max_steps=2)
    trainer.train()
    trainer.train()
    assert [micro.step for micro in trainer.recorded] == [0, 1, 0, 1]
    assert not trainer.manager.running
    assert not [t for t in threading.enumerate() if t.name == "rlt-rollouts"]


# -- evaluation and reports ----------------------------------------------------------------------------------


def test_evaluation_inside_and_outside_training(tmp_path: Path) -> None:
    held_out = Dataset.from_list(held_out_problems(6))
    trainer = arithmetic_trainer(
        tmp_path,
        extra={"eval_dataset": held_out},
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=2,
        max_steps=4,
        learning_rate=0.0,
    )
    before = trainer.evaluate()
    assert not trainer.manager.running
    trainer.train()
    assert trainer.logged("eval_reward") == [before["eval_reward"]] * 2, "equal weights, equal samples"
    assert before["eval_samples"] == 12
    assert 0 < before["eval_reward"] < 1
    assert before["eval_rewards/exact_match_reward/mean"] == pytest.approx(before["eval_reward"])
    assert trainer.evaluate(held_out.select(range(2)), metric_key_prefix="two")["two_samples"] == 4


def test_evaluation_of_named_datasets(tmp_path: Path) -> None:
    problems = held_out_problems(5)
    sets = {"first": Dataset.from_list(problems[:2]), "rest": Dataset.from_list(problems[2:])}
    trainer = arithmetic_trainer(tmp_path, extra={"eval_dataset": sets})
    for metrics in (trainer.evaluate(), trainer.evaluate(sets)):
        assert (metrics["eval_first_samples"], metrics["eval_rest_samples"]) == (8, 12)
        assert 0 <= metrics["eval_rest_reward"] <= 1


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = arithmetic_trainer(
        tmp_path,
        extra={"eval_dataset": Dataset.from_list(held_out_problems(4))},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        learning_rate=1.0,  # ruins the policy at the first step with a rate above 0
        warmup_steps=1,
        reward=length_reward,
        max_steps=2,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.manager.policy_version == 3
    assert not trainer.manager.running


def test_completions_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = arithmetic_trainer(
        tmp_path, log_completions=True, num_completions_to_print=3, max_steps=1, learning_rate=0.0
    )
    trainer.train()
    printed = capsys.readouterr().out
    assert "completions" in printed and "advantage" in printed
    prompts = {p.prompt for p in trainer._train_prompts}
    assert sum(line.count(prompt) for line in printed.splitlines() for prompt in prompts) >= 3


def test_a_wandb_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    import wandb

    logged: dict[str, Any] = {}
    log = wandb.Run.log

    def spy(run: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        logged.update(data)
        return log(run, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", spy)
    trainer = arithmetic_trainer(
        tmp_path / "out", report_to=["wandb"], log_completions=True, max_steps=1, run_name="offline"
    )
    try:
        trainer.train()
        assert wandb.run is not None
        assert wandb.run.config["num_generations"] == 4 and wandb.run.config["max_staleness"] == 1
    finally:
        wandb.finish()
    assert isinstance(logged["completions"], wandb.Table) and len(logged["completions"].data) == 8
    assert "train/reward" in logged and "train/staleness/max" in logged
    assert list(tmp_path.glob("**/offline-run-*/*.wandb"))
