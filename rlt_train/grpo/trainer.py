"""``GRPOTrainer``: a ``transformers.Trainer`` whose batches are rollouts that the policy itself keeps
generating.

The loop waits in one place, ``RolloutQueue.take``, for the engine to finish the groups of the next
micro-batch; everything else runs while the engine decodes. The optimizer step is fenced by
``RolloutSession``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from rlt_train.callback import RolloutSession, autocast_dtype_of
from rlt_train.engine.sizes import EngineConfig
from rlt_train.errors import EngineDeadError, PeerFailedError
from rlt_train.grpo import setup
from rlt_train.grpo.config import GRPOConfig
from rlt_train.grpo.evaluation import evaluate_prompts
from rlt_train.grpo.metrics import (
    CompletionLog,
    MetricStore,
    completion_metrics,
    describe_run,
    over_processes,
    reward_metrics,
)
from rlt_train.grpo.objective import Objective
from rlt_train.grpo.packing import PaddedBatch, TrainingRow, pad_rows
from rlt_train.grpo.processes import Processes
from rlt_train.grpo.prompts import Prompt, PromptStream, load_prompts
from rlt_train.grpo.rollouts import RolloutGroup, RolloutQueue
from rlt_train.grpo.scoring import score_groups, training_rows
from rlt_train.manager import RolloutManager


class GRPOTrainer(Trainer):
    """Group-relative policy optimisation (Shao et al. 2024, 2402.03300) that trains and generates at once.

    Args:
        model: a causal language model, its path or hub id.
        reward_funcs: one or several functions under TRL's contract (see ``RewardFunction``).
        args: the configuration.
        train_dataset, eval_dataset: map-style datasets with a column "prompt", text or messages; the other
            columns go to the reward functions. ``eval_dataset`` may be a dictionary of datasets.
        processing_class: the tokenizer; default: the model's own.
        callbacks, optimizers: as for ``Trainer``.
        peft_config: wrap the model by PEFT first.

    Raises:
        UnsupportedModelError, ValueError, TypeError: anything wrong with the above, before anything starts.
    """

    _tag_names = ["rlt_train", "grpo"]

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: setup.RewardFunctions,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: Any = None,
    ) -> None:
        args = args or GRPOConfig("grpo_output")
        model = setup.load_policy(model, args, peft_config)
        tokenizer = setup.load_tokenizer(processing_class, model)
        self.reward_functions = setup.reward_functions(reward_funcs, args.reward_weights)
        self._train_prompts = self._load_prompts(train_dataset, "train_dataset", tokenizer, args)
        self._eval_prompts = {
            name: self._load_prompts(dataset, f"eval_dataset {name}".strip(), tokenizer, args)
            for name, dataset in _named(eval_dataset).items()
        }
        reference = setup.load_reference(model, args.beta)
        super().__init__(
            model=model,
            args=args,
            data_collator=_ticket,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if reference is not None:
            reference.to(args.device)
        self.processes = Processes()
        self.manager = RolloutManager(
            self.model,
            self._engine_config(),
            in_flight=args.in_flight,
            engine_threads=args.engine_threads,
            autocast_dtype=autocast_dtype_of(args),
            attention_backend=args.attention_backend,
        )
        self.session = RolloutSession(self.manager, args.training_threads)
        self.metrics = MetricStore()
        self.objective = Objective(args, self.model, reference, self.processes, self.metrics)
        self._completions = CompletionLog(args.num_completions_to_print)
        stop_ids = dict.fromkeys([*self.manager.view.eos_token_ids, tokenizer.eos_token_id])
        self._params = args.sampling_params(eos_token_ids=tuple(i for i in stop_ids if i is not None))
        self._queue: RolloutQueue | None = None
        self._micro_batch = 0
        # First, so that other callbacks find the engine running and the fence up.
        self.callback_handler.callbacks.insert(0, _TrainerHooks(self))

    # -- set-up ----------------------------------------------------------------------------------------------

    @staticmethod
    def _load_prompts(
        dataset: Any, name: str, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
    ) -> list[Prompt]:
        if dataset is None:
            return []
        return load_prompts(
            dataset,
            tokenizer,
            name=name,
            max_prompt_length=args.max_prompt_length,
            chat_template_kwargs=setup.template_kwargs(args),
        )

    def _engine_config(self) -> EngineConfig:
        args = self.args
        prompts = [*self._train_prompts, *(p for prompts in self._eval_prompts.values() for p in prompts)]
        longest = args.max_prompt_length or max((len(prompt.token_ids) for prompt in prompts), default=512)
        return EngineConfig(
            rollouts_in_flight=args.rollouts_in_flight or args.completions_per_step,
            max_length=longest + args.max_completion_length,
            kv_cache_gib=args.kv_cache_gib,
            block_size=args.kv_block_size,
            max_tokens_per_step=args.max_tokens_per_step,
            seed=args.seed,
        )

    def get_train_dataloader(self) -> DataLoader:
        """One ticket a micro-batch: the rollouts themselves are fetched when the micro-batch is due."""
        if not self._train_prompts:
            raise ValueError("GRPOTrainer needs a train_dataset to train")
        steps = self._stream().steps_per_epoch
        return DataLoader(
            range(steps * self.args.gradient_accumulation_steps), batch_size=1, collate_fn=_ticket
        )

    def _stream(self) -> PromptStream:
        groups = self.args.groups_per_step * self.processes.count
        return PromptStream(self._train_prompts, groups, self.args.seed, self.args.shuffle_dataset)

    def _new_queue(self) -> RolloutQueue:
        stream, processes, per_step = self._stream(), self.processes, self.args.groups_per_step

        def prompt_of(group: int) -> tuple[int, Prompt]:
            step, position = divmod(group, per_step)
            everywhere = (step * processes.count + processes.rank) * per_step + position
            return everywhere, stream[everywhere]

        return RolloutQueue(
            self.manager,
            prompt_of,
            groups_per_step=per_step,
            num_generations=self.args.num_generations,
            params=self._params,
            max_staleness=self.args.max_staleness,
            last_step=self.state.max_steps,
            score=self._score,
            whole_step=self.args.scale_rewards == "batch",
        )

    # -- the loop --------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As ``Trainer.train``; the engine stops with it, however it ends."""
        self._queue = None
        self._micro_batch = 0
        try:
            return super().train(*args, **kwargs)
        finally:
            self.session.close()

    def begin_step(self) -> None:
        """Admit the rollouts that may be sampled during the step that comes next."""
        if self._queue is None:
            self._queue = self._new_queue()
        self._queue.begin_step(self.state.global_step)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Fetch a micro-batch of rollouts, then forward and backward; ``inputs`` is only its ticket."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        rows = self._next_rows()
        trained = self.objective.admit(rows)
        batch = pad_rows(trained, self.processing_class.pad_token_id).to(self.args.device)
        with self.manager.overlap.training():
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, batch)
            self.accelerator.backward(loss)
        self.state.num_input_tokens_seen += sum(row.total_length for row in rows) * self.processes.count
        self._micro_batch += 1
        step_loss = 0.0  # reported once a step, when its normaliser is known
        if self._micro_batch == self.args.gradient_accumulation_steps:
            self._micro_batch = 0
            step_loss = self.objective.end_step(self.model.parameters())
        return torch.tensor(step_loss, device=self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: PaddedBatch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The loss of one micro-batch of rollouts (see ``Objective.loss``)."""
        if return_outputs:
            raise ValueError("GRPOTrainer returns no model outputs: they never exist as a whole")
        with self.accelerator.autocast():
            return self.objective.loss(model, inputs, self.manager.policy_version)

    def _next_rows(self) -> list[TrainingRow]:
        error: Exception | None = None
        rows: list[TrainingRow] = []
        try:
            self.begin_step()
            assert self._queue is not None
            rows = self._queue.take(self.state.global_step, self.args.per_device_train_batch_size)
        except PeerFailedError:
            raise  # agreed on already
        except Exception as caught:  # one process's failure must not leave the others waiting in a collective
            error = caught
        self.processes.agree(error)
        return rows

    def agree_alive(self) -> None:
        """Raise on every process if the engine of any of them is dead."""
        error: Exception | None = None
        try:
            self.manager.check_alive()
        except EngineDeadError as caught:
            error = caught
        self.processes.agree(error)

    def _score(self, groups: Sequence[RolloutGroup]) -> list[TrainingRow]:
        error: Exception | None = None
        try:
            scored = score_groups(groups, self.reward_functions, self.processing_class, self.state)
        except Exception as caught:
            error = caught
        if self.args.scale_rewards == "batch":
            self.processes.agree(error)  # the others are about to exchange rewards with this process
        elif error is not None:
            raise error
        gather, rank = self.processes.gather, self.processes.rank
        rows = training_rows(scored, self.args.num_generations, self.args.scale_rewards, gather, rank)
        names = [function.name for function in self.reward_functions]
        weight = len(groups)
        self.metrics.update(reward_metrics(names, scored.rewards, scored.combined, len(groups)), weight)
        self.metrics.update(completion_metrics(scored.outputs), weight)
        if self.args.log_completions:
            prompts = [group.prompt.prompt for group in groups for _ in group.outputs]
            for prompt, completion, reward, row in zip(
                prompts, scored.completions, scored.combined.tolist(), rows, strict=True
            ):
                self._completions.add(self.state.global_step, prompt, completion, reward, row.advantage)
        return rows

    def floating_point_ops(self, inputs: Any) -> int:
        """0: tickets carry no tensors to count."""
        return 0

    # -- reporting -------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the rollouts and the objective reported since the last line, over all processes."""
        if "loss" in logs:
            stats = self.manager.stats()
            self.metrics.add("rollout/overlap_share", self.manager.overlap.share)
            self.metrics.add("rollout/wait_seconds", self._queue.wait_seconds if self._queue else 0.0)
            self.metrics.add("rollout/tokens_generated", stats["tokens_generated"])
            self.metrics.add("num_tokens", self.state.num_input_tokens_seen)
            logs = logs | over_processes(self.metrics.drain(), self.processes.gather)
            if self.is_world_process_zero():
                self._completions.flush(self.args.report_to)
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Sample the held-out prompts under the present weights; reports ``eval_reward`` and its kin.

        Runs beside rollouts of training; outside ``train`` it starts and stops the engine itself.

        Raises:
            ValueError: there is no evaluation dataset.
        """
        prompts = self._eval_prompts
        if eval_dataset is not None:
            prompts = {
                name: self._load_prompts(dataset, "eval_dataset", self.processing_class, self.args)
                for name, dataset in _named(eval_dataset).items()
            }
        if not prompts:
            raise ValueError("evaluate() needs an eval_dataset, here or in the trainer")
        metrics: dict[str, float] = {}
        with nullcontext() if self.manager.running else self.manager:
            for name, share in prompts.items():
                prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
                metrics |= self._evaluate_share(share[self.processes.rank :: self.processes.count], prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate_share(self, prompts: list[Prompt], prefix: str) -> dict[str, float]:
        return evaluate_prompts(
            self.manager,
            prompts,
            self.args.num_generations_eval or self.args.num_generations,
            self._params,
            self.reward_functions,
            self.processing_class,
            self.state,
            self.processes.gather,
            prefix,
        )


class _TrainerHooks(TrainerCallback):
    """Opens the trainer's session when training begins, and admits rollouts as soon as a step has ended."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._described = False

    def on_train_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.session.open(kwargs["optimizer"], args)
        self._trainer.begin_step()

    def on_step_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and "wandb" in args.report_to and not self._described:
            self._described = True
            describe_run({"attention": self._trainer.manager.attention_info})

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        # The fence of a dead engine raises inside the step, on this process alone: raise here, on all of
        # them.
        self._trainer.agree_alive()

    def on_step_end(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer.manager.running and state.global_step < state.max_steps:
            self._trainer.begin_step()


def _ticket(items: list[int]) -> dict[str, int]:
    return {"ticket": items[0]}


def _named(dataset: Dataset | dict[str, Dataset] | None) -> dict[str, Dataset]:
    if dataset is None:
        return {}
    return dataset if isinstance(dataset, dict) else {"": dataset}
