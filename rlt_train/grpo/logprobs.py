"""Log-probabilities of given tokens from hidden states, without ever holding the logits of the whole batch.

For a vocabulary of 150,000 the fp32 logits of 8,000 tokens take 4.8 GB, and autograd keeps several tensors of
that size. Here the head, the log-softmax and their backward run over a few tokens at a time, or on an NVIDIA
GPU in a kernel over a few tokens and vocabulary entries at a time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20
"""Size of a chunk's fp32 logits by default: small enough to stay near the caches, large enough to keep cores
busy.
"""

LEAST_CHUNK = 8
"""Fewer rows make the matrix product wasteful, and a single row takes another code path with other last bits.

"""


def default_chunk(vocab: int) -> int:
    """Tokens whose fp32 logits fit in 16 MiB, at least 8.

    Raises:
        ValueError: `vocab` is not positive.
    """
    if vocab < 1:
        raise ValueError(
            f"vocab is {vocab}; give the number of entries of the language-model head, at least 1"
        )
    return max(LEAST_CHUNK, CHUNK_BYTES // (4 * vocab))


def chunked_logprobs(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) over the full vocabulary, at the target; and the entropy of each
    position.

    At most `chunk_tokens` rows of logits exist at a time: the forward keeps only `hidden`, and the backward
    computes each chunk's logits again (activation checkpointing, Chen et al. 1604.06174). The tokens are
    split evenly, so that no chunk is left with a single row. The log-softmax is in fp32 whatever the head's
    dtype; scale and soft-cap are applied in the head's dtype and in transformers' order, so that the logits
    are the model's own, bit for bit.

    On an NVIDIA GPU with triton, a head that is an ordinary linear layer goes through the kernel of
    `rlt_kernels.selective_logprob` instead, which rounds at the same places and needs no chunks.

    Args:
        hidden: [T, H], last hidden states at the positions that predict `targets`.
        lm_head: [c, H] -> [c, V]; its parameters receive gradients. Called twice a chunk when gradients are
            on.
        targets: [T] int64, 0 <= target < V.
        temperature: > 0, the sampling temperature.
        chunk_tokens: >= 1, see `default_chunk`.
        softcap: c in c * tanh(logits / c) (Gemma 2), applied before the temperature; None: none.
        logit_scale: factor on the raw logits (Cohere), applied before the soft-cap.

    Returns:
        logps [T] fp32, differentiable, and entropies [T] fp32 in nats, detached.

    Raises:
        ValueError: shapes do not fit, or a temperature, chunk or soft-cap that is not positive.
    """
    _check(hidden, targets, temperature, chunk_tokens, softcap)
    if targets.numel() == 0:
        # Still joined to the graph, so that a loss over no tokens can be sent backward.
        return hidden.float().sum(dim=-1), torch.zeros(0, dtype=torch.float32, device=hidden.device)

    kernel = _fused_kernel() if _kernel_runs_on(hidden.device) and _is_plain_linear(lm_head) else None
    if kernel is not None:
        transform = kernel.LogitTransform(logit_scale, softcap, temperature)
        return kernel.selective_logprob(*_cast_as_linear(hidden, lm_head), targets, transform)

    def one_chunk(chunk_hidden: Tensor, chunk_targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = _transform(lm_head(chunk_hidden), softcap, logit_scale)
        return logprobs_of_logits(logits, chunk_targets, temperature)

    chunks = -(-targets.numel() // chunk_tokens)
    parts = []
    for chunk_hidden, chunk_targets in zip(
        hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True
    ):
        if torch.is_grad_enabled():
            # There is no dropout in the head, and saving and restoring the global random state would race
            # with another thread that draws from it.
            part = checkpoint(
                one_chunk, chunk_hidden, chunk_targets, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = one_chunk(chunk_hidden, chunk_targets)
        parts.append(part)
    logps, entropies = zip(*parts, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def logprobs_of_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same for logits [c, V] that exist already: logps [c] fp32, and entropies [c] fp32 detached."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    all_logps = torch.log_softmax(scaled, dim=-1)
    logps = all_logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    # Last on purpose: when the chunk is recomputed for the backward, checkpoint stops before it reaches this.
    with torch.no_grad():
        # A logit of -inf has probability 0 and adds nothing, but 0 * -inf would be NaN.
        entropies = -(all_logps.exp() * all_logps.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
    return logps, entropies


def _transform(logits: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


def _kernel_runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _fused_kernel() -> ModuleType | None:
    try:
        import rlt_kernels.selective_logprob as kernel
    except (ImportError, OSError) as error:
        logger.info("Log-probs are computed in chunks: the fused kernel cannot be imported (%s).", error)
        return None
    return kernel


def _is_plain_linear(lm_head: Callable[[Tensor], Tensor]) -> bool:
    """Whether weight and bias say all about the head: no subclass (adapters, quantisation, compilation), no
    hook, no parameter that is only a shard, and a dtype that the kernel knows."""
    if type(lm_head) is not nn.Linear or "forward" in vars(lm_head):
        return False
    if type(lm_head.weight) is not nn.Parameter or lm_head._forward_hooks or lm_head._forward_pre_hooks:
        return False
    return lm_head.weight.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _cast_as_linear(hidden: Tensor, lm_head: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias in the dtype in which autocast would multiply them."""
    weight, bias = lm_head.weight, lm_head.bias
    if not torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check(
    hidden: Tensor, targets: Tensor, temperature: float, chunk_tokens: int, softcap: float | None
) -> None:
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, targets {list(targets.shape)}; expected [T, H] and [T]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need a temperature above 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; give at least 1, or default_chunk(vocab)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; give a number above 0, or None for no soft-cap")
