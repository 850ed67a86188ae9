"""The float64 reference itself, against torch's attention where torch can do the same."""

from __future__ import annotations

import pytest
import torch
from paged_cases import Shape, problem
from torch.nn.functional import scaled_dot_product_attention

from rlt_kernels.reference import paged_attention


@pytest.mark.parametrize("visibility", ["all", "window over blocks", "small chunks"])
def test_reference_is_masked_attention(visibility: str) -> None:
    given = problem(Shape(heads=(6, 2), visibility=visibility), [(30, 40)])
    query, keys, values, tables, _ = given.arguments
    position = torch.arange(70)
    key, value = (
        store[:, tables[0, position // 16].long(), position % 16].double().nan_to_num(0)
        for store in (keys, values)
    )
    mask = position <= position[30:, None]
    if visibility == "window over blocks":
        mask &= position > position[30:, None] - 41
    if visibility == "small chunks":
        mask &= position // 24 == position[30:, None] // 24
    expected = scaled_dot_product_attention(
        query.double().transpose(0, 1),
        key,
        value,
        attn_mask=mask,
        scale=given.options["scale"],
        enable_gqa=True,
    )
    torch.testing.assert_close(given.answer(), expected.transpose(0, 1))


def test_softcap_bounds_scores_and_a_sink_takes_its_share() -> None:
    """Two keys with values 0 and 1: the output is the weight of the second."""
    query, keys = torch.tensor([[[3.0]]]), torch.tensor([[[[2.0], [5.0]]]])
    values = torch.tensor([[[[0.0], [1.0]]]])
    given = (
        query,
        keys,
        values,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([2]),
        torch.tensor([0, 1]),
    )
    scores = 4 * torch.tanh(torch.tensor([6.0, 15.0], dtype=torch.float64) * 0.5 / 4)
    weights = torch.cat([scores, torch.tensor([1.5], dtype=torch.float64)]).softmax(0)
    output = paged_attention(*given, scale=0.5, softcap=4.0, sinks=torch.tensor([1.5]))
    torch.testing.assert_close(output.squeeze(), weights[1])
