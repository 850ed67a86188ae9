"""One forward of the generation view over a scheduled step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlt_train.attention.call import PagedCall
from rlt_train.attention.contract import AttentionBackend, SequenceSpan
from rlt_train.attention.dispatch import placeholder_mask
from rlt_train.attention.planner import Planner
from rlt_train.engine.scheduler import ScheduledStep
from rlt_train.kv.cache import PagedCache
from rlt_train.weights.view import GenerationView


class ModelRunner:
    """Runs scheduled steps. Writes nothing but the KV cache."""

    def __init__(self, view: GenerationView, cache: PagedCache, backends: Sequence[AttentionBackend]) -> None:
        self._view = view
        self._cache = cache
        self._backends = backends
        self._planner = Planner(len(backends), cache.block_size, cache.device)
        self._mask = placeholder_mask(view.device)

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> torch.Tensor:
        """Copy blocks, run the packed forward, and return logits ``[wanted rows, vocab]``: span by span, the
        rows it echoes and the one it samples from."""
        for group in range(len(self._backends)):
            self._cache.copy_blocks(group, [copy[1:] for copy in step.copies if copy[0] == group])
            self._cache.clear(group, unused_slots(step, group, self._cache.block_size))
        if not step.spans:
            return torch.empty((0, self._view.config.get_text_config().vocab_size), device=self._view.device)
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for span in step.spans:
            end = span.start + span.length
            tokens += span.sequence.tokens[span.start : end]
            positions += range(span.start, end)
            first = len(tokens) - span.length
            rows += range(first, first + span.echoes)
            if span.samples:
                rows.append(len(tokens) - 1)
        device = self._view.device
        spans = [SequenceSpan(span.sequence.tables, span.start, span.length) for span in step.spans]
        with self._view.autocast():
            output = self._view.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                attention_mask=self._mask,
                use_cache=False,
                # 0 keeps every row: a pure decode step needs no selection.
                logits_to_keep=0
                if len(rows) == len(tokens)
                else torch.tensor(rows, dtype=torch.long, device=device),
                paged_call=PagedCall(self._cache.layers, self._backends, self._planner.plan(spans)),
            )
        return output.logits[0]


def unused_slots(step: ScheduledStep, group: int, block_size: int) -> list[int]:
    """The slots of a group after a sequence's end in each block that it begins in this step."""
    begun = [(span.sequence, span.start + span.length, span.length) for span in step.spans]
    # A fork takes its whole prompt over, so its copied last block is new to it from the first slot on.
    begun += [(sequence, sequence.computed, sequence.computed) for sequence, _ in step.forked]
    slots: list[int] = []
    for sequence, end, length in begun:
        full, used = divmod(end, block_size)
        if used and length >= used:
            first = sequence.tables[group][full] * block_size
            slots += range(first + used, first + block_size)
    return slots
