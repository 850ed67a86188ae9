"""How large an engine is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How large the engine is.

    Attributes:
        rollouts_in_flight: sequences that decode at once (the slots).
        max_length: prompt and generated tokens of one sequence at most.
        kv_cache_gib: KV memory in GiB; ``None`` sizes it to ``rollouts_in_flight`` sequences of
            ``max_length``.
        block_size: tokens a KV block.
        max_tokens_per_step: tokens a forward computes at most (chunked prefill beside decode); ``None`` picks
            the larger of 256 and ``rollouts_in_flight``, which bounds how long a pause waits.
        seed: the run's part of every request's random stream.
        fuse_modules: let the view's norms and MLPs run cheaper code where it gives the same to rounding (CPU,
            float32).
    """

    rollouts_in_flight: int = 64
    max_length: int = 1024
    kv_cache_gib: float | None = None
    block_size: int = 16
    max_tokens_per_step: int | None = None
    seed: int = 0
    fuse_modules: bool = True

    def __post_init__(self) -> None:
        for name in ("rollouts_in_flight", "max_length", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_tokens_per_step is not None and self.max_tokens_per_step < self.rollouts_in_flight:
            raise ValueError(
                f"max_tokens_per_step={self.max_tokens_per_step} cannot decode rollouts_in_flight="
                f"{self.rollouts_in_flight} sequences in one forward; raise the first or lower the second"
            )

    @property
    def tokens_per_step(self) -> int:
        """``max_tokens_per_step``, or its default."""
        return self.max_tokens_per_step or max(256, self.rollouts_in_flight)
