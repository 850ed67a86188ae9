"""Rebuild the embedded policy: a character-level Qwen3 model, taught small additions and subtractions until it is half right.

    python scripts/pretrain_tiny.py

Supervised learning on freshly drawn training problems, on one core, evaluated every ten steps on the held-out problems.
It stops as soon as the held-out sampled accuracy is in the window that leaves GRPO something to do, and fails if the
accuracy jumps over the window or never reaches it. The result depends only on the seed (and on the machine's
arithmetic): the same seed on the same machine gives the same sha256. What is left out: checkpoints, a learning-rate
schedule beyond the warm-up, and any use of the held-out problems other than to stop.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import (  # noqa: E402
    GenerationConfig,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlt_train.embedded import MAX_ANSWER_TOKENS, held_out_problems, make_problems  # noqa: E402
from rlt_train.embedded.evaluation import Accuracy, encode_solutions, measure_accuracy  # noqa: E402

EVALUATE_EVERY = 10


@dataclass
class PretrainArguments:
    """What to train, how, and where to put it. The defaults rebuild the artefacts of the package."""

    output: Path = field(
        default=Path(__file__).resolve().parents[1] / "rlt_train" / "embedded" / "weights",
        metadata={"help": "folder that the policy is written to"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the initial weights and of the problems"})
    max_steps: int = field(default=1000, metadata={"help": "give up after this many optimizer steps"})
    batch_size: int = field(default=256, metadata={"help": "problems in a step"})
    learning_rate: float = field(default=2e-3, metadata={"help": "AdamW learning rate after the warm-up"})
    warmup_steps: int = field(default=20, metadata={"help": "steps of linear warm-up"})
    window_low: float = field(
        default=0.40, metadata={"help": "stop at this held-out sampled accuracy or above"}
    )
    window_high: float = field(default=0.50, metadata={"help": "fail above this held-out sampled accuracy"})
    hidden_size: int = field(default=128, metadata={"help": "width of the model"})
    layers: int = field(default=4, metadata={"help": "number of layers"})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, `<bos>` before every text, distinct pad, bos and eos, padding on the left."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *"0123456789+-="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.decoder = decoders.Fuse()  # joins the characters without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, arguments: PretrainArguments) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 model with grouped-query attention (4 heads, 2 of keys and values) in fp32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden_size // 4,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, arguments: PretrainArguments
) -> tuple[int, Accuracy]:
    """Train until the accuracy is in the window.

    Returns:
        The number of steps taken and the held-out accuracy after them.

    Raises:
        RuntimeError: the accuracy jumped over the window, or was still below it after the last step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    held_out = held_out_problems()
    start = time.perf_counter()
    accuracy = Accuracy(sampled=0.0, greedy=0.0)
    print(f"{'step':>6} {'loss':>8} {'sampled':>8} {'greedy':>8} {'seconds':>8}")
    for step in range(1, arguments.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * min(1.0, step / arguments.warmup_steps)
        # Each step draws its own problems from its own seed, so a step's batch does not depend on the earlier steps.
        problems = make_problems(arguments.batch_size, arguments.seed * 1_000_000 + step, "train")
        input_ids, _, answer_mask = encode_solutions(tokenizer, problems)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits[answer_mask[:, 1:]], input_ids[:, 1:][answer_mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVALUATE_EVERY:
            continue
        accuracy = measure_accuracy(model, tokenizer, held_out)
        seconds = time.perf_counter() - start
        print(
            f"{step:6d} {loss.item():8.4f} {accuracy.sampled:8.4f} {accuracy.greedy:8.4f} {seconds:8.1f}",
            flush=True,
        )
        if accuracy.sampled > arguments.window_high:
            raise RuntimeError(
                f"held-out sampled accuracy jumped to {accuracy.sampled:.3f} at step {step}, over the window of "
                f"{arguments.window_low}-{arguments.window_high}: take another --seed or a lower --learning_rate"
            )
        if accuracy.sampled >= arguments.window_low:
            return step, accuracy
    raise RuntimeError(
        f"held-out sampled accuracy is {accuracy.sampled:.3f} after {arguments.max_steps} steps, the window is "
        f"{arguments.window_low}-{arguments.window_high}: raise --max_steps"
    )


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    arguments: PretrainArguments,
    steps: int,
    accuracy: Accuracy,
) -> dict[str, int | float | str]:
    """Write the policy, its tokenizer and ``training.json``; returns the content of ``training.json``."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=MAX_ANSWER_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    # No times in here: the same seed gives the same file.
    record: dict[str, int | float | str] = {
        "seed": arguments.seed,
        "steps": steps,
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "warmup_steps": arguments.warmup_steps,
        "held_out_sampled": accuracy.sampled,
        "held_out_greedy": accuracy.greedy,
        "held_out_problems": len(held_out_problems()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sha256": hashlib.sha256((arguments.output / "model.safetensors").read_bytes()).hexdigest(),
    }
    (arguments.output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def main() -> None:
    """Train the policy, save it, and print one JSON object on the last line."""
    (arguments,) = HfArgumentParser(PretrainArguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    start = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments)
    steps, accuracy = train(model, tokenizer, arguments)
    record = save(model, tokenizer, arguments, steps, accuracy)
    keys = ("held_out_sampled", "held_out_greedy", "steps", "parameters", "sha256")
    print(
        json.dumps({**{key: record[key] for key in keys}, "seconds": round(time.perf_counter() - start, 1)})
    )


if __name__ == "__main__":
    main()
