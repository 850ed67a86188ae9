"""``GRPOConfig``: ``TrainingArguments`` plus what GRPO and the rollout engine need, under TRL's names where
TRL has them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_args

from transformers import TrainingArguments

from rlt_train.attention.selection import BACKENDS
from rlt_train.checks import one_of
from rlt_train.engine.params import BUILT_IN, SamplingParams
from rlt_train.grpo.advantages import ScaleRewards
from rlt_train.grpo.losses import ImportanceLevel, LossType
from rlt_train.manager import IN_FLIGHT


@dataclass
class GRPOConfig(TrainingArguments):
    """Arguments of ``GRPOTrainer``.

    ``per_device_train_batch_size`` counts completions, as in TRL: one optimizer step of one process trains
    ``per_device_train_batch_size * gradient_accumulation_steps`` completions, which must be whole groups of
    ``num_generations``.

    Raises:
        ValueError: on construction, for values outside their range or a batch that does not divide into
        groups.
    """

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Log every this many optimizer steps."})
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Keep False: reward functions get the dataset's columns."}
    )
    ddp_broadcast_buffers: bool | None = field(
        default=False, metadata={"help": "Keep False: a broadcast would write buffers that the engine reads."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained, when the model is given by name."}
    )
    disable_dropout: bool = field(default=False, metadata={"help": "Set every dropout of the policy to 0."})

    # Data and generation
    num_generations: int = field(
        default=8, metadata={"help": "Completions a prompt (the group), at least 2."}
    )
    num_generations_eval: int | None = field(
        default=None, metadata={"help": "Completions a prompt in evaluation; default: num_generations."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Tokens a completion at most."})
    max_prompt_length: int | None = field(
        default=None,
        metadata={"help": "Refuse a dataset with a longer prompt; default: the longest prompt is the limit."},
    )
    shuffle_dataset: bool = field(
        default=True, metadata={"help": "Shuffle the prompts, anew in every epoch."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of the chat template."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature, above 0."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling; 1 is off."})
    top_k: int = field(default=0, metadata={"help": "Sample from the k likeliest tokens; 0 is off."})
    min_p: float | None = field(
        default=None, metadata={"help": "Drop tokens below this share of the likeliest."}
    )

    repetition_penalty: float = field(
        default=1.0, metadata={"help": "Penalty on tokens of prompt and completion; 1 is off."}
    )

    # Objective
    beta: float = field(
        default=0.0, metadata={"help": "Weight of the KL to the reference model; 0 loads none."}
    )
    epsilon: float = field(default=0.2, metadata={"help": "Lower clip range of the importance ratio."})
    epsilon_high: float | None = field(default=None, metadata={"help": "Upper clip range; default: epsilon."})
    loss_type: str = field(default="dapo", metadata={"help": "grpo, bnpo, dr_grpo or dapo."})
    importance_sampling_level: str = field(default="token", metadata={"help": "token or sequence (GSPO)."})
    scale_rewards: str = field(
        default="group", metadata={"help": "Divide advantages by the std of the group or batch, or none."}
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight a reward function; default: 1 each."}
    )
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave completions that hit max_completion_length out of the loss."}
    )
    skip_zero_advantages: bool = field(
        default=False,
        metadata={
            "help": "Leave rows of advantage 0 out of forward and backward: without a KL term they give no "
            "gradient. "
            "Entropy and ratio metrics then leave them out too."
        },
    )

    # Training while generating
    max_staleness: int = field(
        default=1,
        metadata={"help": "A trained token is at most this many updates old; 0 is strictly on-policy."},
    )
    rollouts_in_flight: int | None = field(
        default=None, metadata={"help": "Decoding sequences at once; default: the completions of one step."}
    )
    kv_cache_gib: float | None = field(
        default=None,
        metadata={"help": "KV cache in GiB; default: rollouts_in_flight sequences of full length."},
    )
    in_flight: str = field(
        default="keep", metadata={"help": "Running requests at an update: keep, recompute, finish or abort."}
    )
    engine_threads: int | None = field(
        default=None,
        metadata={"help": "Intra-op threads of the engine; default on a CPU: half of the cores."},
    )
    training_threads: int | None = field(
        default=None, metadata={"help": "Intra-op threads of training; default on a CPU: half of the cores."}
    )
    attention_backend: str = field(
        default="auto", metadata={"help": "Paged attention backend: " + ", ".join(BACKENDS) + "."}
    )
    kv_block_size: int = field(
        default=16, metadata={"help": "Tokens of a KV block (flash2 takes multiples of 256 only)."}
    )
    max_tokens_per_step: int | None = field(
        default=None, metadata={"help": "Tokens of one engine forward at most; default: 256 or more."}
    )
    logprob_chunk_tokens: int | None = field(
        default=None,
        metadata={"help": "Completion tokens whose logits exist at once; default: about 16 MiB."},
    )

    # Logging
    log_completions: bool = field(
        default=False, metadata={"help": "Print (and log to wandb) sample completions."}
    )
    num_completions_to_print: int | None = field(
        default=None, metadata={"help": "Completions to print; default: all."}
    )

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "chat_template_kwargs"]

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss_type", self.loss_type, get_args(LossType))
        one_of("importance_sampling_level", self.importance_sampling_level, get_args(ImportanceLevel))
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        one_of("scale_rewards", self.scale_rewards, get_args(ScaleRewards))
        one_of("in_flight", self.in_flight, [policy for policy in IN_FLIGHT if policy != "abort"])
        one_of("attention_backend", self.attention_backend, BACKENDS)
        _at_least("num_generations", self.num_generations, 2, "a group of one has no relative advantage")
        _at_least("max_completion_length", self.max_completion_length, 1)
        _at_least("max_staleness", self.max_staleness, 0, "0 is strictly on-policy")
        for name in ("rollouts_in_flight", "max_prompt_length", "num_generations_eval"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.skip_zero_advantages and self.beta:
            raise ValueError(
                f"skip_zero_advantages with beta={self.beta}: the KL term gives every row a gradient; unset "
                f"one of them"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} must be above 0: greedy completions of a group are all the "
                f"same"
            )
        if self.completions_per_step % self.num_generations:
            raise ValueError(
                f"one optimizer step of one process trains per_device_train_batch_size * "
                f"gradient_accumulation_steps = {self.per_device_train_batch_size} * "
                f"{self.gradient_accumulation_steps} = {self.completions_per_step} completions, which is not "
                f"a multiple of num_generations={self.num_generations}. Valid num_generations for this "
                f"batch: {_divisors(self.completions_per_step)}."
            )

    @property
    def completions_per_step(self) -> int:
        """Completions that one process trains in one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def groups_per_step(self) -> int:
        """Groups that one process trains in one optimizer step."""
        return self.completions_per_step // self.num_generations

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters of training rollouts, with ``changes``."""
        values = {
            "max_new_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_k": max(0, self.top_k or 0),  # -1 is "off" too, as in vLLM
            "top_p": self.top_p,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
        }
        # Over BUILT_IN: a model's generation config must not change what is trained on behind the config's
        # back.
        return replace(BUILT_IN, **(values | changes))


def _at_least(name: str, value: int, least: int, why: str = "") -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}{': ' + why if why else ''}")


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(2, number + 1) if number % candidate == 0]
