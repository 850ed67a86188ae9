"""How many KV blocks: from the workload or an explicit budget, never from a fraction of the host's memory."""

from __future__ import annotations

from collections.abc import Iterable

from rlt_train.attention.contract import LayerSpec


def bytes_per_block(specs: Iterable[LayerSpec], block_size: int) -> int:
    """Bytes that one block takes over all layers, keys and values together."""
    return sum(2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize * block_size for spec in specs)


def blocks_for_workload(rollouts_in_flight: int, max_length: int, block_size: int) -> int:
    """Blocks with which ``rollouts_in_flight`` sequences of ``max_length`` tokens fit at once."""
    return rollouts_in_flight * -(-max_length // block_size)


def blocks_for_budget(
    kv_cache_gib: float, specs: Iterable[LayerSpec], block_size: int, max_length: int
) -> int:
    """Blocks that fit in ``kv_cache_gib`` GiB.

    Raises:
        ValueError: the budget cannot hold even one sequence of ``max_length`` tokens.
    """
    per_block = bytes_per_block(specs, block_size)
    blocks = int(kv_cache_gib * 2**30 // per_block)
    needed = -(-max_length // block_size)
    if blocks < needed:
        raise ValueError(
            f"kv_cache_gib={kv_cache_gib} holds {blocks} blocks of {block_size} tokens, but one sequence of "
            f"{max_length} tokens needs {needed}: give at least {needed * per_block / 2**30:.4f} GiB, or "
            f"lower the maximum length."
        )
    return blocks
