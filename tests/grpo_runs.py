"""Short GRPO runs on the embedded policy: arguments, a chat tokenizer, and a trainer that records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from rlt_train.embedded import exact_match_reward, load_dataset, load_policy, load_tokenizer
from rlt_train.grpo import GRPOConfig, GRPOTrainer
from rlt_train.grpo.packing import PaddedBatch

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ m['content'] }}={% else %}{{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def config(folder: Path | str, **changes: Any) -> GRPOConfig:
    """A short quiet run on the CPU, one thread a side."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "engine_threads": 1,
        "training_threads": 1,
    }
    return GRPOConfig(**(values | changes))


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The embedded tokenizer with a chat template: "<user text>=" and the assistant's answer after it."""
    tokenizer = load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass
class Recorded:
    """One micro-batch as it was trained."""

    step: int
    version: int
    batch: PaddedBatch
    loss: float

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The prompt of each row."""
        first = [int((self.batch.row_of_token < row).sum()) for row in range(len(self.batch.lengths))]
        width = self.batch.input_ids.shape[1]
        lengths = [int(self.batch.predict_index[i]) % width + 1 for i in first]
        return [tuple(ids[:n].tolist()) for ids, n in zip(self.batch.input_ids, lengths, strict=True)]


class RecordingTrainer(GRPOTrainer):
    """Keeps every micro-batch that it trains."""

    recorded: list[Recorded]

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not hasattr(self, "recorded"):
            self.recorded = []
        version = self.manager.policy_version
        self.recorded.append(Recorded(self.state.global_step, version, inputs, loss.item()))
        return loss

    def logged(self, name: str) -> list[float]:
        """The values of a metric, line by line."""
        return [line[name] for line in self.state.log_history if name in line]


def arithmetic_trainer(
    folder: Path | str,
    *,
    reward: Any = exact_match_reward,
    dataset: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    kind: type[GRPOTrainer] = RecordingTrainer,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer of the embedded policy on the embedded task, unless told otherwise."""
    return kind(
        load_policy() if model is None else model,
        reward,
        config(folder, **changes),
        load_dataset("train", 32, 0) if dataset is None else dataset,
        processing_class=tokenizer or load_tokenizer(),
        **(extra or {}),
    )


def token_logprobs(model: nn.Module, batch: PaddedBatch, temperature: float = 1.0) -> Tensor:
    """Log-probs of the completion tokens ``[T]`` from whole logits, the plain way."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits.float() / temperature
    rows = torch.log_softmax(logits, dim=-1).flatten(0, 1)[batch.predict_index]
    return rows.gather(1, batch.targets[:, None])[:, 0]
