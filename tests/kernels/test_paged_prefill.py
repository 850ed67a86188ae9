"""The packed prefill kernel against the float64 reference, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from paged_cases import HEADS, VISIBILITIES, Problem, Shape, assert_close, problem
from pairwise import label, pairwise

from rlt_kernels.paged_prefill import paged_prefill

SPANS: dict[str, Callable[[int], list[tuple[int, int]]]] = {
    "one row": lambda block: [(block - 1, 1), (0, 1)],
    "a block and its neighbours": lambda block: [(0, block - 1), (0, block), (0, block + 1)],
    "continued chunks": lambda block: [(block, 3), (block - 1, 2), (2 * block + 5, 26)],
}
CASES = pairwise(
    {
        "head_dim": [16, 24, 64, 80, 96, 128, 256],
        "visibility": list(VISIBILITIES),
        "heads": list(HEADS.values()),
        "block_size": [16, 32, 48, 256],
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "spans": list(SPANS),
        "softcap": [None, 8.0],
        "sinks": [False, True],
    }
)


def prefill(given: Problem) -> torch.Tensor:
    """Launch with a NaN output."""
    output = given.poisoned_output()
    paged_prefill(*given.arguments, given.query_starts, given.most_queries, **given.options, output=output)
    return output


@pytest.mark.parametrize("case", CASES, ids=label)
def test_matches_the_reference(case: dict) -> None:
    settings = {name: value for name, value in case.items() if name != "spans"}
    spans = SPANS[case["spans"]](case["block_size"])
    given = problem(Shape(**settings), [(start, min(length, 40)) for start, length in spans])
    assert_close(prefill(given), given)


@pytest.mark.parametrize("visibility", ["all", "window over blocks", "small chunks"])
def test_a_row_depends_neither_on_the_batch_nor_on_how_its_prompt_was_cut(visibility: str) -> None:
    shape = Shape(heads=(3, 1), dtype=torch.bfloat16, visibility=visibility, sinks=True)
    given = problem(shape, [(0, 90), (7, 30)])
    together = prefill(given)
    whole = given.sequence(0)
    assert torch.equal(prefill(whole), together[:90])
    query, keys, values, tables, _ = whole.arguments
    for begin, end in ((0, 31), (31, 60), (60, 61), (61, 90)):
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        context = torch.tensor([end], dtype=torch.int32)
        part = Problem(shape, (query[begin:end], keys, values, tables, context), starts, given.options)
        assert torch.equal(prefill(part), together[begin:end])


def test_rows_of_other_sequences_are_left_alone() -> None:
    """A mixed batch gives its decodes, which come first, to another kernel."""
    given = problem(Shape(), [(20, 1), (4, 9), (0, 3)])
    query, keys, values, tables, contexts = given.arguments
    output = given.poisoned_output()
    later = (keys, values, tables[1:], contexts[1:], given.query_starts[1:])
    paged_prefill(query, *later, given.most_queries, **given.options, output=output)
    assert output[0].isnan().all()
    assert_close(output[1:], _without_first(given))


def _without_first(given: Problem) -> Problem:
    query, keys, values, tables, contexts = given.arguments
    arguments = (query[1:], keys, values, tables[1:], contexts[1:])
    return Problem(given.shape, arguments, given.query_starts[1:] - 1, given.options)


def test_sequences_without_rows_and_an_empty_batch() -> None:
    given = problem(Shape(), [(0, 5), (9, 0), (3, 4)])
    assert_close(prefill(given), given)
    empty = given.poisoned_output()
    query, keys, values, tables, contexts = given.arguments
    nothing = (query, keys, values, tables[:0], contexts[:0], given.query_starts[:1])
    paged_prefill(*nothing, 0, **given.options, output=empty)
    assert empty.isnan().all()


def test_more_query_heads_than_a_tile_holds() -> None:
    given = problem(Shape(heads=(71, 1)), [(15, 3)])
    assert_close(prefill(given), given)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # rows of padding: 0 * -inf
def test_a_row_whose_scores_are_all_minus_infinity_gets_zeros() -> None:
    given = problem(Shape(heads=(2, 1)), [(0, 6)])
    query, keys, _, tables, _ = given.arguments
    query.abs_()
    keys[:, tables[0, 0], :2] = -torch.inf
    output = prefill(given)
    assert (output[:2] == 0).all()
    answer = given.answer()
    assert answer[:2].isnan().all()  # a softmax of nothing but -inf
    torch.testing.assert_close(output[2:].double(), answer[2:], atol=1e-5, rtol=1e-5)


def test_heads_with_gaps_are_refused_by_name() -> None:
    given = problem(Shape(), [(0, 3)])
    query, keys, *rest = given.arguments
    gaps = torch.zeros(*keys.shape[:3], 2 * keys.shape[3])[..., ::2]
    with pytest.raises(ValueError, match=r"keys has strides .*keys.contiguous\(\)"):
        prefill(Problem(given.shape, (query, gaps, *rest), given.query_starts, given.options))
