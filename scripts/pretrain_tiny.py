"""Rebuild the embedded policy: a small Qwen3 model that has half learned to add and subtract.

    python scripts/pretrain_tiny.py

Supervised learning on freshly drawn training problems, on one core, stopped early: at the first evaluation,
every ten steps, whose held-out sampled accuracy is in the window. The rest is left to reinforcement learning.

The result depends only on the seed (and on the machine's arithmetic): the same seed on the same machine gives
the same sha256. What is left out: a learning rate decay, checkpoints, and any use of the held-out problems
other than to stop.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from rlt_train.embedded import (
    HELD_OUT_PROBLEMS,
    MAX_ANSWER_TOKENS,
    held_out_problems,
    make_problems,
)
from rlt_train.embedded.evaluation import Accuracy, encode_solutions, measure_accuracy

EVALUATE_EVERY = 10
WARMUP_STEPS = 20


@dataclass
class PretrainArguments:
    """What to train, how, and where to put it. The defaults rebuild the artefacts of the package."""

    output: Path = field(
        default=Path(__file__).resolve().parents[1] / "rlt_train" / "embedded" / "weights",
        metadata={"help": "folder that the policy is written to"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the initial weights and of the problems"})
    max_steps: int = field(default=1000, metadata={"help": "give up after this many optimizer steps"})
    batch_size: int = field(default=64, metadata={"help": "problems in a step"})
    learning_rate: float = field(default=3e-3, metadata={"help": "AdamW's learning rate after warm-up"})
    window_low: float = field(default=0.50, metadata={"help": "lowest held-out sampled accuracy to stop at"})
    window_high: float = field(
        default=0.55, metadata={"help": "highest held-out sampled accuracy to stop at"}
    )
    hidden_size: int = field(default=96, metadata={"help": "width of the model, a multiple of 8"})
    layers: int = field(default=2, metadata={"help": "number of layers"})


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
    """A randomly initialised fp32 Qwen3 model with grouped-query attention (4 query heads, 2 KV heads)."""
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


def take_step(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    step: int,
    arguments: PretrainArguments,
) -> float:
    """One optimizer step on the cross-entropy of the answers' tokens and the end token; returns the loss."""
    for group in optimizer.param_groups:
        group["lr"] = arguments.learning_rate * min(1.0, step / WARMUP_STEPS)
    # Each step draws its own problems from its own seed, so no batch depends on the steps before it.
    problems = make_problems(arguments.batch_size, arguments.seed * 1_000_000 + step, "train")
    input_ids, _, answer_mask = encode_solutions(tokenizer, problems)
    # Right padding needs no attention mask under causal attention: no scored position sees it.
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits[answer_mask[:, 1:]], input_ids[:, 1:][answer_mask[:, 1:]])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, arguments: PretrainArguments
) -> tuple[int, Accuracy]:
    """Train until the held-out sampled accuracy is in the window; returns the steps taken and the accuracy.

    Raises:
        RuntimeError: the accuracy jumped over the window, or did not reach it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    held_out = held_out_problems()
    start = time.perf_counter()
    accuracy = Accuracy(sampled=0.0, greedy=0.0)
    print(f"{'step':>6} {'loss':>8} {'sampled':>8} {'greedy':>8} {'seconds':>8}")
    for step in range(1, arguments.max_steps + 1):
        loss = take_step(model, tokenizer, optimizer, step, arguments)
        if step % EVALUATE_EVERY:
            continue
        accuracy = measure_accuracy(model, tokenizer, held_out)
        seconds = time.perf_counter() - start
        print(
            f"{step:6d} {loss:8.4f} {accuracy.sampled:8.4f} {accuracy.greedy:8.4f} {seconds:8.1f}", flush=True
        )
        if arguments.window_low <= accuracy.sampled <= arguments.window_high:
            return step, accuracy
        if accuracy.sampled > arguments.window_high:
            break
    raise RuntimeError(
        f"held-out sampled accuracy is {accuracy.sampled:.3f} after {step} steps, but must be in the window "
        f"{arguments.window_low}-{arguments.window_high}: lower --learning_rate or raise --max_steps"
    )


def save(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path, record: dict[str, int | float]
) -> str:
    """Write the policy, its tokenizer and ``training.json``; returns the weights' sha256.

    No times, paths or host names are written, so that the same seed gives the same files.
    """
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=MAX_ANSWER_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    weights = output / "model.safetensors"
    weights.chmod(0o644)  # safetensors writes files that only the owner may read
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    text = json.dumps({**record, "sha256": sha256}, indent=2) + "\n"
    (output / "training.json").write_text(text, encoding="utf-8")
    return sha256


def main() -> None:
    """Train the policy, save it, and print one JSON object on the last line."""
    (arguments,) = HfArgumentParser(PretrainArguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    disable_progress_bar()
    start = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments)
    steps, accuracy = train(model, tokenizer, arguments)
    summary = {
        "held_out_sampled": accuracy.sampled,
        "held_out_greedy": accuracy.greedy,
        "steps": steps,
        "parameters": model.num_parameters(),
    }
    record = {key: value for key, value in asdict(arguments).items() if key != "output"}
    record["held_out_problems"] = HELD_OUT_PROBLEMS
    sha256 = save(model, tokenizer, arguments.output, {**record, **summary})
    print(json.dumps({**summary, "seconds": round(time.perf_counter() - start, 1), "sha256": sha256}))


if __name__ == "__main__":
    main()
