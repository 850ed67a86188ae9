"""From a dataset to prompts: tokenised once, checked before anything starts, and a stream of groups in a
fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset.

    Attributes:
        prompt: text, or a list of chat messages.
        token_ids: the tokenised prompt, chat template applied.
        columns: the row's other columns, for reward functions.
    """

    prompt: Any
    token_ids: list[int]
    columns: dict[str, Any]

    @property
    def conversational(self) -> bool:
        """The prompt is a list of messages, so a completion is one too."""
        return isinstance(self.prompt, list)

    def completion(self, text: str) -> Any:
        """A completion in the prompt's format: text, or one assistant message."""
        return [{"role": "assistant", "content": text}] if self.conversational else text


def load_prompts(
    dataset: Dataset | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    max_prompt_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Tokenise every prompt of ``dataset``.

    Raises:
        ValueError, TypeError: no rows, no "prompt" column, an empty or too long prompt, or one that is
        neither
            text nor messages; the message names the row.
    """
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is a streaming dataset, which is not supported yet: take(n) rows of it into a Dataset"
        )
    rows = list(dataset)
    if not rows:
        raise ValueError(f"{name} is empty")
    if "prompt" not in rows[0]:
        raise ValueError(f"{name} has no column 'prompt'; its columns are {sorted(rows[0])}")
    texts = [row["prompt"] for row in rows]
    for index, text in enumerate(texts):
        _check_format(text, f"{name} row {index}")
    ids = _tokenise(texts, tokenizer, chat_template_kwargs or {})
    for index, tokens in enumerate(ids):
        if not tokens:
            raise ValueError(
                f"{name} row {index}: the prompt {texts[index]!r} has no tokens; give it at least one"
            )
        if max_prompt_length is not None and len(tokens) > max_prompt_length:
            raise ValueError(
                f"{name} row {index}: the prompt has {len(tokens)} tokens, more than max_prompt_length="
                f"{max_prompt_length}. Filter or shorten such prompts, or raise the limit."
            )
    return [
        Prompt(text, tokens, {key: value for key, value in row.items() if key != "prompt"})
        for row, text, tokens in zip(rows, texts, ids, strict=True)
    ]


def _check_format(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{where}: the prompt is empty")
        return
    if not isinstance(prompt, list) or not all(
        isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt
    ):
        raise TypeError(
            f"{where}: a prompt is text or a list of messages with 'role' and 'content', got "
            f"{type(prompt).__name__}: {str(prompt)[:80]!r}"
        )
    if not prompt:
        raise ValueError(f"{where}: the prompt is an empty list of messages")


def _tokenise(
    prompts: list[Any], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]
) -> list[list[int]]:
    if all(isinstance(prompt, str) for prompt in prompts):
        return tokenizer(prompts, return_attention_mask=False)["input_ids"]
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(tokenizer(prompt, return_attention_mask=False)["input_ids"])
            continue
        continues = prompt[-1]["role"] == "assistant"
        encoded = tokenizer.apply_chat_template(
            prompt,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **template,
        )
        ids.append(list(encoded["input_ids"]))
    return ids


class PromptStream:
    """Which prompt group number ``g`` of the run is: a pure function of the seed and ``g``, so a run can
    resume.

    Epoch ``e`` is a permutation of the prompts drawn from (seed, e); its last ``len(prompts) %
    groups_per_step`` prompts are left out, so that no step spans two epochs.
    """

    def __init__(self, prompts: list[Prompt], groups_per_step: int, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self.steps_per_epoch = max(1, len(prompts) // groups_per_step)
        self._groups_per_epoch = self.steps_per_epoch * groups_per_step
        self._order: dict[int, list[int]] = {}

    def __getitem__(self, group: int) -> Prompt:
        epoch, position = divmod(group, self._groups_per_epoch)
        if epoch not in self._order:
            self._order = {epoch: self._permutation(epoch)} | {
                e: o for e, o in self._order.items() if e == epoch - 1
            }
        order = self._order[epoch]
        return self._prompts[order[position % len(order)]]  # fewer prompts than one step takes: go round

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._prompts)))
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
        return torch.randperm(len(self._prompts), generator=generator).tolist()
