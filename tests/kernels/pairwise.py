"""All pairs of settings in few cases: most faults need two settings at once, and a full product is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

_Pair = tuple[str, int, str, int]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases (one value a factor) in which every pair of values of two factors occurs, greedily and in a fixed
    order."""
    uncovered: dict[_Pair, None] = {}
    for a, b in combinations(factors, 2):
        uncovered.update(
            dict.fromkeys((a, i, b, j) for i, j in product(_indices(factors[a]), _indices(factors[b])))
        )
    cases = []
    while uncovered:
        a, i, b, j = next(iter(uncovered))
        chosen = {a: i, b: j}
        for name, values in factors.items():
            if name not in chosen:
                chosen[name] = max(_indices(values), key=lambda k: _gain(chosen, name, k, uncovered))  # noqa: B023
        for a, b in combinations(factors, 2):
            uncovered.pop((a, chosen[a], b, chosen[b]), None)
        cases.append({name: values[chosen[name]] for name, values in factors.items()})
    return cases


def _indices(values: Sequence[Any]) -> range:
    return range(len(values))


def _gain(chosen: Mapping[str, int], name: str, index: int, uncovered: Mapping[_Pair, None]) -> int:
    pairs = ((other, value, name, index) for other, value in chosen.items())
    return sum(pair in uncovered or (pair[2:] + pair[:2]) in uncovered for pair in pairs)


def label(case: Mapping[str, Any]) -> str:
    """A short test id of a case."""
    return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in case.items())
