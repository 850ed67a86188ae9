"""The embedded policy: where its files are, and how the model and its character-level tokenizer are loaded.

The files in ``weights/`` are made by ``scripts/pretrain_tiny.py`` and are never edited by hand.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM


def policy_path() -> Path:
    """The folder with the policy's config, weights and tokenizer, as `from_pretrained` takes it."""
    return Path(str(files("rlt_train.embedded"))) / "weights"


def load_policy(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """A fresh copy of the embedded policy in `dtype`, on the CPU, in evaluation mode."""
    return Qwen3ForCausalLM.from_pretrained(policy_path(), dtype=dtype)


def load_tokenizer() -> PreTrainedTokenizerFast:
    """The policy's tokenizer: one token a character, `bos` before every text, padding on the left."""
    return AutoTokenizer.from_pretrained(policy_path())
