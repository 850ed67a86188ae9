"""Exact held-out accuracy of a policy on the embedded task, without drawing a sample.

A completion is right only if it is the answer followed by the end of the sequence. So the probability that a
sample at temperature 1 is right is the product of the teacher-forced probabilities of those tokens, and
greedy decoding is right exactly if each of them is its position's most probable token. One forward gives
both, free of sampling noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Accuracy:
    """Accuracies in [0, 1] on one set of problems.

    Attributes:
        sampled: the expected accuracy of one sample a problem at temperature 1.
        greedy: the accuracy of greedy decoding.
    """

    sampled: float
    greedy: float


def encode_solutions(
    tokenizer: PreTrainedTokenizerBase, problems: list[dict[str, str]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Problems with answers and the end token, padded on the right, and which positions hold the answer.

    Returns:
        input_ids: (problems, length) int64, attention_mask: (problems, length) int64, 1 on real tokens, and
        answer_mask: (problems, length) bool, true on the answer's characters and on the end token.
    """
    prompts = tokenizer([problem["prompt"] for problem in problems])["input_ids"]
    answers = tokenizer([problem["answer"] for problem in problems], add_special_tokens=False)["input_ids"]
    answers = [answer + [tokenizer.eos_token_id] for answer in answers]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(problems), length), tokenizer.pad_token_id)
    attention_mask = torch.zeros(len(problems), length, dtype=torch.int64)
    answer_mask = torch.zeros(len(problems), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        attention_mask[row, :end] = 1
        answer_mask[row, len(prompt) : end] = True
    return input_ids, attention_mask, answer_mask


@torch.no_grad()
def measure_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[dict[str, str]],
    batch_size: int = 250,
) -> Accuracy:
    """Sampled and greedy accuracy of `model` on `problems`; touches neither the model nor the random state.

    The model is used in the mode (training or evaluation) that it is in; the embedded policy has no dropout.

    Raises:
        ValueError: `problems` is empty.
    """
    if not problems:
        raise ValueError(
            "problems is empty, at least one is needed: pass held_out_problems() or a part of it"
        )
    sampled, greedy = 0.0, 0
    for start in range(0, len(problems), batch_size):
        encoded = encode_solutions(tokenizer, problems[start : start + batch_size])
        input_ids, attention_mask, answer_mask = (tensor.to(model.device) for tensor in encoded)
        logits = (
            model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1].float()
        )
        targets, scored = input_ids[:, 1:], answer_mask[:, 1:]
        log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        sampled += log_probs.masked_fill(~scored, 0.0).sum(1).exp().sum().item()
        greedy += int(((logits.argmax(-1) == targets) | ~scored).all(1).sum())
    return Accuracy(sampled=sampled / len(problems), greedy=greedy / len(problems))
