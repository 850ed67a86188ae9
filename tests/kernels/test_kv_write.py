"""The kernel that writes keys and values to their slots, against plain torch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from paged_cases import spread
from pairwise import label, pairwise

from rlt_kernels.kv_write import kv_write, write_reference

CASES = pairwise(
    {
        "head_dim": [16, 24, 80, 128, 256],
        "kv_heads": [1, 3, 8, 40],
        "block_size": [16, 48, 256],
        "dtypes": [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.float32, torch.bfloat16),
        ],
        "rows": [1, 5],
    }
)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_writes_the_slots_and_nothing_else(case: dict) -> None:
    heads, dim, block_size, rows = (case[name] for name in ("kv_heads", "head_dim", "block_size", "rows"))
    new_dtype, dtype = case["dtypes"]
    generator = torch.Generator().manual_seed(0)
    key, value = (spread((rows, heads, dim), new_dtype, padding) for padding in ((0, 3, 1), (0, 0, 7)))
    key.copy_(torch.randn(key.shape, generator=generator))
    value.copy_(torch.randn(value.shape, generator=generator))
    slots = torch.randperm(3 * block_size, generator=generator)[:rows]
    stores = [spread((heads, 3, block_size, dim), dtype, padding) for padding in ((1, 0, 1, 3), (0, 2, 0, 1))]
    expected = [store.contiguous() for store in stores]
    kv_write(*stores, slots, key, value)
    for store, want, new in zip(stores, expected, (key, value), strict=True):
        write_reference(want, slots, new)
        assert want.isfinite().sum() == new.numel()
        torch.testing.assert_close(store, want, rtol=0, atol=0, equal_nan=True)


def test_keys_and_values_of_one_fused_projection() -> None:
    """Slices of a larger row, as a model with one product for query, key and value passes them."""
    fused = torch.randn(4, 6, 16)
    key, value = fused[:, 2:4], fused[:, 4:6]
    keys, values = torch.zeros(2, 2, 16, 16), torch.zeros(2, 2, 16, 16)
    kv_write(keys, values, torch.tensor([17, 0, 31, 5]), key, value)
    assert torch.equal(keys[:, 1, 1], key[0]) and torch.equal(values[:, 1, 15], value[2])


def test_no_rows_is_no_launch() -> None:
    keys = torch.full((1, 1, 16, 16), torch.nan)
    new = torch.zeros(0, 1, 16)
    kv_write(keys, keys, torch.zeros(0, dtype=torch.int64), new, new)
    assert keys.isnan().all()


def test_heads_with_gaps_are_refused_by_name() -> None:
    keys, new = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 32)
    with pytest.raises(ValueError, match=r"value has strides .*value.contiguous\(\)"):
        kv_write(keys, keys, torch.zeros(1, dtype=torch.int64), new[..., :16], new[..., ::2])
