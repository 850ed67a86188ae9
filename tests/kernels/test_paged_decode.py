"""The split-KV decode kernel against the float64 reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from paged_cases import HEADS, VISIBILITIES, Problem, Shape, assert_close, problem
from pairwise import label, pairwise

from rlt_kernels.paged_decode import MOST_SPLITS, SPLIT_TOKENS, Workspace, most_splits, paged_decode

CASES = pairwise(
    {
        "head_dim": [16, 24, 64, 80, 96, 128, 256],
        "visibility": list(VISIBILITIES),
        "heads": list(HEADS.values()),
        "block_size": [16, 32, 48, 256],
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "contexts": ["short and long", "around a block"],
        "softcap": [None, 8.0],
        "sinks": [False, True],
    }
)


def decode(given: Problem) -> torch.Tensor:
    """Launch with a NaN workspace and output."""
    output = given.poisoned_output()
    splits = most_splits(given.most_keys, given.options.get("window"), given.options.get("chunk"))
    rows, heads, dim = given.query.shape
    workspace = Workspace.allocate(rows, heads, splits, dim, output.device)
    for tensor in (workspace.output, workspace.maximum, workspace.total):
        tensor.fill_(torch.nan)
    paged_decode(*given.arguments, **given.options, workspace=workspace, output=output)
    return output


def decodes(shape: Shape, *contexts: int) -> Problem:
    return problem(shape, [(context - 1, 1) for context in contexts])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_matches_the_reference(case: dict) -> None:
    block, contexts = case["block_size"], case["contexts"]
    settings = {name: value for name, value in case.items() if name != "contexts"}
    around = (block - 1, block, block + 1)
    given = decodes(Shape(**settings), *((1, SPLIT_TOKENS + 45) if contexts == "short and long" else around))
    assert_close(decode(given), given)


def test_a_context_beyond_the_most_splits_gets_longer_splits() -> None:
    given = decodes(Shape(heads=(1, 1), block_size=256), MOST_SPLITS * SPLIT_TOKENS + 3)
    assert most_splits(given.most_keys) == MOST_SPLITS
    assert_close(decode(given), given)


@pytest.mark.parametrize("visibility", ["all", "window over blocks"])
def test_a_row_does_not_depend_on_the_batch(visibility: str) -> None:
    shape = Shape(dtype=torch.bfloat16, visibility=visibility, sinks=True)
    given = decodes(shape, 130, SPLIT_TOKENS + 9, 5)
    together = decode(given)
    for index in range(3):
        assert torch.equal(decode(given.sequence(index))[0], together[index])


@pytest.mark.parametrize("shape", [Shape(), Shape(sinks=True), Shape(visibility="window over blocks")])
def test_a_row_without_keys_gets_zeros_and_reads_nothing(shape: Shape) -> None:
    given = problem(shape, [(40, 1), (-1, 1)])
    output = decode(given)
    assert (output[1] == 0).all()
    assert_close(output, given)


@pytest.mark.parametrize("context", [SPLIT_TOKENS, SPLIT_TOKENS + 1, SPLIT_TOKENS + 130])
def test_a_window_that_begins_inside_a_tile_may_take_one_split_more(context: int) -> None:
    given = decodes(Shape(heads=(1, 1)), context, 7)
    given.options["window"] = SPLIT_TOKENS
    assert_close(decode(given), given)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # rows of padding: 0 * -inf
def test_keys_with_a_score_of_minus_infinity_count_for_nothing() -> None:
    shape = Shape(heads=(2, 1))
    given = decodes(shape, 30, 17)
    query, keys, values, tables, contexts = given.arguments
    query.abs_()
    keys[:, tables[0, 0], :8] = -torch.inf
    assert_close(decode(given)[:1], given.sequence(0))
    keys[:, tables[1, :2].long()] = -torch.inf
    assert (decode(given)[1] == 0).all()


def test_an_empty_batch_is_no_launch() -> None:
    given = problem(Shape(), [])
    assert decode(given).shape == (0, 4, 16)


def test_more_query_heads_than_a_tile_holds() -> None:
    given = decodes(Shape(heads=(71, 1)), 37)
    assert_close(decode(given), given)


def test_heads_with_gaps_are_refused_by_name() -> None:
    given = decodes(Shape(), 3)
    query = torch.zeros(1, 4, 32)[:, :, ::2]
    with pytest.raises(ValueError, match=r"query has strides .*query.contiguous\(\)"):
        decode(Problem(given.shape, (query, *given.arguments[1:]), given.query_starts, given.options))
