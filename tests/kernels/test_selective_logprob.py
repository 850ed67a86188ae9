"""Selective log-probs and entropies against float64, in Triton's interpreter, and their kernels compiled for
GPUs in a process of its own.

Every buffer that the launchers allocate is poisoned, so a number that no program wrote shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pairwise import label, pairwise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rlt_kernels.selective_logprob as module
from rlt_kernels.logit_tiles import LogitTransform
from rlt_kernels.selective_logprob import selective_logprob, selective_logprob_reference
from rlt_train.grpo import logprobs

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INPUTS = ("hidden", "weight", "bias")
TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.6),
    "softcap": LogitTransform(softcap=3.0, temperature=1.3),
    "scale": LogitTransform(logit_scale=-0.3),
    "all": LogitTransform(logit_scale=0.5, softcap=4.0, temperature=0.7),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(allocate: Any) -> Any:
        def allocated(*args: Any, **options: Any) -> Tensor:
            tensor = allocate(*args, **options)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return allocated

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few splits of several tiles each in the forward, and a run of one tile at a time in the backward."""
    monkeypatch.setattr(module, "MOST_SPLITS", 2)
    monkeypatch.setattr(module, "GRADIENT_BYTES", 1)
    monkeypatch.setattr(module, "LEAST_RUN", 64)


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    upstream: Tensor
    transform: LogitTransform

    def run(self, function: Any = selective_logprob, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Results and gradients of ``sum(upstream * logps)``, all float64."""
        inputs = {name: getattr(self, name) for name in INPUTS if getattr(self, name) is not None}
        inputs = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in inputs.items()}
        logps, entropies = function(*(inputs.get(name) for name in INPUTS), self.targets, self.transform)
        (logps * self.upstream).sum().backward()
        found = {"logps": logps, "entropies": entropies} | {name: t.grad for name, t in inputs.items()}
        return {name: tensor.detach().double() for name, tensor in found.items()}

    def expected(self) -> dict[str, Tensor]:
        return self.run(selective_logprob_reference, torch.float64)

    def chunked(self) -> dict[str, Tensor]:
        """The same by the trainer's chunked torch version."""

        def function(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: Any) -> Any:
            return logprobs.chunked_logprobs(
                hidden,
                lambda rows: nn.functional.linear(rows, weight, bias),
                targets,
                temperature=how.temperature,
                chunk_tokens=64,
                softcap=how.softcap,
                logit_scale=how.logit_scale,
            )

        return self.run(function)


def problem(
    tokens: int = 7,
    width: int = 24,
    vocab: int = 150,
    dtype: torch.dtype = FP32,
    bias: bool = True,
    transform: str = "plain",
    strided: bool = False,
) -> Problem:
    generator = torch.Generator().manual_seed(1000 * tokens + vocab)

    def normal(*shape: int) -> Tensor:
        if not strided:
            return torch.randn(shape, generator=generator)
        # Neither the first element nor a row is aligned, and the last dimension has gaps.
        padded = torch.randn((*shape[:-1], 2 * shape[-1] + 3), generator=generator)
        return padded[..., 1 : 2 * shape[-1] + 1 : 2]

    return Problem(
        hidden=normal(tokens, width).to(dtype),
        weight=(normal(vocab, width) / math.sqrt(width) * 3).to(dtype),
        bias=normal(vocab).to(dtype) if bias else None,
        targets=torch.randint(vocab, (tokens,), generator=generator),
        upstream=normal(tokens),
        transform=TRANSFORMS[transform],
    )


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


CASES = pairwise(
    {
        # Around a tile of 64 rows, 64 entries and 32 dimensions, and below each.
        "tokens": [1, 7, 64, 65],
        "vocab": [1, 64, 150, 321],
        "width": [1, 32, 45],
        "transform": list(TRANSFORMS),
        "bias": [False, True],
        "strided": [False, True],
    }
)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("case", CASES, ids=label)
def test_values_and_gradients_match_float64(case: dict[str, Any]) -> None:
    given = problem(**case)
    assert_close(given.run(), given.expected())


def test_values_and_gradients_match_the_chunked_torch_version() -> None:
    given = problem(tokens=20, transform="all")
    assert_close(given.run(), given.chunked())


@pytest.mark.parametrize("transform", ["plain", "all"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_half_precision_rounds_where_the_chunked_version_does(dtype: torch.dtype, transform: str) -> None:
    given = problem(tokens=33, width=80, vocab=300, dtype=dtype, transform=transform)
    found, chunked, exact = given.run(), given.chunked(), given.expected()
    for name in ("logps", "entropies"):
        rounding = (chunked[name] - exact[name]).abs().max()
        # A logit between two numbers of the dtype seldom falls to the other one.
        assert (found[name] - chunked[name]).abs().mean() < 0.05 * rounding
    for name in INPUTS:
        error, usual = ((run[name] - exact[name]).norm() / exact[name].norm() for run in (found, chunked))
        assert error < 1.5 * usual and error < 0.02, name


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_logits_of_ten_thousand(dtype: torch.dtype) -> None:
    given = problem(tokens=9, width=16, vocab=130, bias=False)
    given.weight.div_(given.weight.norm(dim=1, keepdim=True))
    given.hidden.mul_(1e4 / (given.hidden @ given.weight.T).abs().amax(dim=1, keepdim=True))
    given.targets[:4] = (given.hidden @ given.weight.T)[:4].argmax(dim=1)
    given = replace(given, hidden=given.hidden.to(dtype), weight=given.weight.to(dtype))
    found = given.run()
    assert all(tensor.isfinite().all() for tensor in found.values())
    # A float32 logit of 1e4 is known to 1e-3, and bfloat16 rounds it as the torch version does.
    torch.testing.assert_close(found["logps"], given.chunked()["logps"], rtol=1e-5, atol=1e-2)
    if dtype == FP32:
        assert_close(found, given.expected(), 1e-2)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("transform", ["plain", "temperature"])
def test_forbidden_entries(transform: str) -> None:
    """-inf for the whole first split, and for targets."""
    given = problem(vocab=321, transform=transform)
    assert given.bias is not None
    given.bias[:200] = -math.inf
    given.bias[300] = -math.inf
    given.targets[:] = torch.tensor([300, 199, 0, 201, 320, 299, 301])
    found = given.run()
    assert found["logps"].isneginf().tolist() == [True] * 3 + [False] * 4
    assert_close(found, given.expected())
    # Forbidden entries have no probability, so only those that are targets have a gradient.
    assert found["bias"][:200].nonzero().flatten().tolist() == [0, 199]


def test_a_row_of_nan_spoils_only_itself() -> None:
    given, clean = problem(), problem()
    given.hidden[3] = math.nan
    found, expected = given.run(), clean.run()
    for name in ("logps", "entropies", "hidden"):
        assert found[name][3].isnan().all()
        others = [0, 1, 2, 4, 5, 6]
        assert torch.equal(found[name][others], expected[name][others])


def test_nothing_but_forbidden_entries_gives_nan_as_in_torch() -> None:
    given = problem()
    assert given.bias is not None
    given.bias.fill_(-math.inf)
    found = given.run()
    assert found["logps"].isnan().all() and found["entropies"].isnan().all()


def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    given = problem()
    given.targets[[1, 4]] = torch.tensor([150, -1])
    logps = given.run()["logps"]
    assert logps.isnan().tolist() == [False, True, False, False, True, False, False]


def test_no_tokens() -> None:
    given = problem()
    hidden = given.hidden[:0].requires_grad_()
    weight = given.weight.requires_grad_()
    logps, entropies = selective_logprob(hidden, weight, given.bias, given.targets[:0], given.transform)
    assert logps.shape == entropies.shape == (0,)
    logps.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 24) and weight.grad is None


def test_only_wanted_gradients_are_computed() -> None:
    given = problem()
    for name in INPUTS:
        inputs = {n: getattr(given, n).detach().requires_grad_(n == name) for n in INPUTS}
        logps, entropies = selective_logprob(**inputs, targets=given.targets, transform=given.transform)
        assert logps.requires_grad and not entropies.requires_grad
        (logps * given.upstream).sum().backward()
        torch.testing.assert_close(inputs[name].grad.double(), given.expected()[name], rtol=1e-5, atol=1e-5)
        assert [n for n in inputs if inputs[n].grad is not None] == [name]


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements in any tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # The interpreter copies whole storages as bytes; those are no tensors of ours.
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.usefixtures("small_pieces")
def test_the_logits_never_exist() -> None:
    given = problem(tokens=65, width=8, vocab=400, bias=False)
    with LargestTensor() as seen:
        given.run()
    assert seen.numel == 65 * 64  # a run of gradients; the weight has 400 * 8
    with LargestTensor() as seen:
        given.chunked()
    assert seen.numel >= 32 * 400  # the instrument sees logits where there are some


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_trainer_gets_the_same_from_the_kernel_as_in_chunks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(tokens=11, dtype=dtype)
    head = nn.Linear(24, 150, dtype=dtype)
    results = []
    for on_gpu in (False, True):
        monkeypatch.setattr(logprobs, "_kernel_runs_on", lambda device, on_gpu=on_gpu: on_gpu)
        hidden = given.hidden.detach().requires_grad_()
        head.zero_grad()
        logps, entropies = logprobs.chunked_logprobs(
            hidden, head, given.targets, temperature=0.8, chunk_tokens=4, softcap=5.0, logit_scale=0.7
        )
        assert ("SelectiveLogprob" in type(logps.grad_fn).__name__) == on_gpu
        (logps * given.upstream).sum().backward()
        gradients = [t.grad.clone() for t in (hidden, head.weight, head.bias)]
        results.append([logps.detach(), entropies, *gradients])
    tolerance = 1e-5 if dtype == FP32 else 2e-2
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(5, 23)}, r"shapes \[\[7, 24\], \[5, 23\], \[150\], \[7\]\]"),
        ({"bias": torch.zeros(3)}, r"shapes .*\[3\]"),
        ({"targets": torch.zeros(6, dtype=torch.int64)}, r"shapes .*\[6\]\]"),
        ({"weight": torch.zeros(0, 24), "bias": None}, "at least one vocabulary entry"),
        ({"hidden": torch.zeros(7, 24, dtype=BF16)}, "dtypes .*bfloat16.*float32"),
        ({"transform": LogitTransform(temperature=0.0)}, "temperature is 0.0"),
        ({"transform": LogitTransform(softcap=-1.0)}, "softcap is -1.0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    given = problem()
    arguments = {name: getattr(given, name) for name in ("hidden", "weight", "bias", "targets", "transform")}
    with pytest.raises(ValueError, match=message):
        selective_logprob(**arguments | changes)
