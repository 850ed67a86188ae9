"""The trainer's side of a token's log-prob: one ordinary forward, then the head on completion tokens only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlt_train.grpo.logprobs import chunked_logprobs, default_chunk, logprobs_of_logits
from rlt_train.grpo.packing import PaddedBatch
from rlt_train.weights.unwrap import causal_lm_of, unwrap_model


class PolicyHead:
    """How a causal language model gets from last hidden states to logits, as far as this can be done outside
    it.

    The head module with transformers' two usual follow-ups, a soft-cap (Gemma 2) and a scale (Cohere,
    Granite), is tried against the model's own logits on the first batch. A model that does something else
    falls back to whole logits, ``[tokens, vocab]`` of one micro-batch at a time.
    """

    def __init__(self, model: nn.Module, chunk_tokens: int | None) -> None:
        causal_lm = causal_lm_of(unwrap_model(model))
        config = causal_lm.config.get_text_config()
        self._module = causal_lm.get_output_embeddings()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        scaling = getattr(config, "logits_scaling", None)
        self._scale = float(getattr(config, "logit_scale", None) or (1 / scaling if scaling else 1.0))
        self._chunk = chunk_tokens or default_chunk(config.vocab_size)
        self._reproduces: bool | None = None

    def logprobs(self, model: nn.Module, batch: PaddedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-softmax(logits / temperature) of every completion token, and the entropy there.

        Args:
            model: the policy as the trainer calls it (wrapped by DDP, autocast, ``torch.compile``).
            batch: padded on the right, so causal attention needs no padding mask.
            temperature: of sampling.

        Returns:
            log-probs ``[T]`` float32 with gradient (under ``enable_grad``) and detached entropies ``[T]``, in
            nats.
        """
        if self._reproduces is False:
            return self._from_logits(model, batch, temperature)
        output = self._forward(model, batch, output_hidden_states=True, logits_to_keep=1)
        hidden = output.hidden_states[-1]
        if self._reproduces is None:
            self._reproduces = self._matches(hidden[:, -1], output.logits[:, -1])
            if not self._reproduces:
                return self._from_logits(model, batch, temperature)
        rows = hidden.flatten(0, 1).index_select(0, batch.predict_index)
        return chunked_logprobs(
            rows,
            self._module,
            batch.targets,
            temperature=temperature,
            chunk_tokens=self._chunk,
            softcap=self._softcap,
            logit_scale=self._scale,
        )

    def _forward(self, model: nn.Module, batch: PaddedBatch, **kwargs: Any) -> Any:
        return model(input_ids=batch.input_ids, use_cache=False, **kwargs)

    def _from_logits(self, model: nn.Module, batch: PaddedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self._forward(model, batch).logits.flatten(0, 1).index_select(0, batch.predict_index)
        return logprobs_of_logits(logits, batch.targets, temperature)

    @torch.no_grad()
    def _matches(self, hidden: Tensor, logits: Tensor) -> bool:
        own = self._module(hidden) * self._scale
        if self._softcap is not None:
            own = torch.tanh(own / self._softcap) * self._softcap
        tolerance = 1e-4 if own.dtype == torch.float32 else 2e-2
        return own.shape == logits.shape and torch.allclose(
            own.float(), logits.float(), rtol=tolerance, atol=tolerance
        )
