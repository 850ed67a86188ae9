"""Chunked log-probabilities: values and gradients against fp64, and the promise that [T, V] never exists."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_train.grpo import logprobs
from rlt_train.grpo.logprobs import chunked_logprobs, default_chunk, logprobs_of_logits


def problem(tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    states = torch.randn(tokens, hidden, generator=generator).to(dtype)
    head = nn.Linear(hidden, vocab, bias=True)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, hidden, generator=generator) / math.sqrt(hidden) * 3)
        head.bias.copy_(torch.randn(vocab, generator=generator))
    return states, head.to(dtype), torch.randint(vocab, (tokens,), generator=generator)


def oracle(states, head, targets, weights, temperature, softcap=None, scale=1.0):
    """Log-probabilities, entropies and gradients of sum(weights * logps), in fp64, over the whole [T, V]."""
    h = states.double().clone().requires_grad_()
    w = head.weight.detach().double().clone().requires_grad_()
    b = head.bias.detach().double().clone().requires_grad_()
    logits = (h @ w.T + b) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    p = (logits / temperature - (logits / temperature).max(dim=-1, keepdim=True).values).exp()
    p = p / p.sum(dim=-1, keepdim=True)
    logps = p[torch.arange(len(targets)), targets].log()
    (weights.double() * logps).sum().backward()
    return logps.detach(), -(p * p.log()).sum(dim=-1).detach(), h.grad, w.grad, b.grad


@pytest.mark.parametrize("chunk", [1, 2, 5, 13, 100])
@pytest.mark.parametrize(
    ("temperature", "softcap", "scale"),
    [(1.0, None, 1.0), (0.7, None, 1.0), (1.3, 4.0, 0.25), (1.0, 2.0, 1.0)],
)
def test_values_and_gradients_against_fp64(chunk, temperature, softcap, scale) -> None:
    states, head, targets = problem(13, 16, 97)
    weights = torch.linspace(-1, 1, 13)
    expected = oracle(states, head, targets, weights, temperature, softcap, scale)
    states.requires_grad_()
    logps, entropies = chunked_logprobs(
        states,
        head,
        targets,
        temperature=temperature,
        chunk_tokens=chunk,
        softcap=softcap,
        logit_scale=scale,
    )
    assert logps.dtype == entropies.dtype == torch.float32 and not entropies.requires_grad
    (weights * logps).sum().backward()
    actual = (logps.detach(), entropies, states.grad, head.weight.grad, head.bias.grad)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


def test_bf16_logits_are_normalised_in_fp32() -> None:
    states, head, targets = problem(40, 32, 1000, torch.bfloat16)
    with torch.no_grad():
        logits = head(states)
        logps, _ = chunked_logprobs(states, head, targets, temperature=0.9, chunk_tokens=40)
    exact = torch.log_softmax(logits.double() / 0.9, dim=-1).gather(1, targets[:, None]).squeeze(1)
    assert (logps.double() - exact).abs().max() < 1e-5
    # A log-sum-exp in bf16 would be off by more than a thousand times that.
    rounded = torch.log_softmax(logits / 0.9, dim=-1).gather(1, targets[:, None]).squeeze(1)
    assert (rounded.double() - exact).abs().max() > 1e-2


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements in any tensor an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def largest(tokens: int, chunk: int, grad: bool) -> tuple[int, int]:
    """The largest tensor seen in the forward, and in the backward."""
    states, head, targets = problem(tokens, 4, 2000)
    states.requires_grad_(grad)
    head.requires_grad_(grad)
    with LargestTensor() as forward:
        logps, _ = chunked_logprobs(states, head, targets, temperature=0.8, chunk_tokens=chunk, softcap=9.0)
    with LargestTensor() as backward:
        if grad:
            logps.sum().backward()
    return forward.numel, backward.numel


def test_the_logits_of_all_tokens_never_exist() -> None:
    chunk, vocab = 8, 2000
    assert largest(400, chunk, grad=True) == (chunk * vocab, chunk * vocab)
    assert largest(400, chunk, grad=False) == (chunk * vocab, 0)
    # The instrument does see a full [T, V] when there is one.
    assert largest(400, 400, grad=True) == (400 * vocab, 400 * vocab)


def test_the_forward_keeps_only_the_hidden_states_for_the_backward() -> None:
    states, head, targets = problem(400, 4, 2000)
    states.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        chunked_logprobs(states, head, targets, temperature=1.0, chunk_tokens=8)
    assert max(saved, default=0) <= 400 * 4


def test_the_entropy_is_not_computed_again_in_the_backward() -> None:
    states, head, targets = problem(6, 4, 50)
    calls = {"exp": 0}

    class CountExp(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls["exp"] += func is torch.ops.aten.clamp.default
            return func(*args, **(kwargs or {}))

    with CountExp():
        logps, _ = chunked_logprobs(states.requires_grad_(), head, targets, temperature=1.0, chunk_tokens=3)
        forward = calls["exp"]
        logps.sum().backward()
    assert forward == 2 and calls["exp"] == forward


def test_no_chunk_is_left_with_one_row() -> None:
    states, head, targets = problem(13, 4, 20)
    rows = []

    def spying_head(chunk: Tensor) -> Tensor:
        rows.append(chunk.shape[0])
        return head(chunk)

    with torch.no_grad():
        chunked_logprobs(states, spying_head, targets, temperature=1.0, chunk_tokens=12)
    assert rows == [7, 6]


def test_a_head_that_alone_is_trained_gets_its_gradient() -> None:
    states, head, targets = problem(9, 8, 30)
    logps, _ = chunked_logprobs(states, head, targets, temperature=1.0, chunk_tokens=4)
    logps.sum().backward()
    expected = oracle(states, head, targets, torch.ones(9), 1.0)
    torch.testing.assert_close(head.weight.grad.double(), expected[3], rtol=1e-5, atol=1e-5)


def test_the_global_random_stream_is_neither_read_nor_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another thread may draw from it between a read and the write that puts it back.
    def touched(*args, **kwargs):
        raise AssertionError("the global random state was touched")

    states, head, targets = problem(9, 8, 30)
    monkeypatch.setattr(torch, "get_rng_state", touched)
    monkeypatch.setattr(torch, "set_rng_state", touched)
    logps, _ = chunked_logprobs(states.requires_grad_(), head, targets, temperature=1.0, chunk_tokens=4)
    logps.sum().backward()


def test_a_forbidden_token_does_not_spoil_the_entropy() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0], [1.0, 1.0, 1.0]])
    logps, entropies = logprobs_of_logits(logits, torch.tensor([0, 1]), 1.0)
    assert logps.tolist() == pytest.approx([-math.log(2), -math.log(3)])
    assert entropies.tolist() == pytest.approx([math.log(2), math.log(3)])


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_scale_and_soft_cap_give_the_logits_of_transformers_bit_for_bit(family: str) -> None:
    import transformers

    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if family == "gemma2":
        config = transformers.Gemma2Config(**sizes, head_dim=16, final_logit_softcapping=0.5)
        model = transformers.Gemma2ForCausalLM(config)
        options = dict(softcap=config.final_logit_softcapping)
    else:
        config = transformers.CohereConfig(**sizes, logit_scale=0.3)
        model = transformers.CohereForCausalLM(config)
        options = dict(logit_scale=config.logit_scale)
    model = model.to(torch.bfloat16).eval()
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
        hidden = model.model(ids).last_hidden_state[0, :-1]
        expected, _ = logprobs_of_logits(logits, ids[0, 1:], 0.9)
        logps, _ = chunked_logprobs(
            hidden, model.lm_head, ids[0, 1:], temperature=0.9, chunk_tokens=100, **options
        )
        without, _ = chunked_logprobs(hidden, model.lm_head, ids[0, 1:], temperature=0.9, chunk_tokens=100)
    assert torch.equal(logps, expected) and not torch.equal(without, expected)


def test_no_tokens_give_an_empty_result_that_can_be_sent_backward() -> None:
    states, head, _ = problem(1, 4, 10)
    states = states[:0].requires_grad_()
    empty = torch.zeros(0, dtype=torch.int64)
    logps, entropies = chunked_logprobs(states, head, empty, temperature=1.0, chunk_tokens=4)
    logps.sum().backward()
    assert logps.shape == entropies.shape == (0,) and states.grad.shape == (0, 4)


def test_the_default_chunk_fits_16_mib() -> None:
    for vocab in (97, 50_257, 151_936, 262_144):
        assert default_chunk(vocab) * vocab * 4 <= 16 * 2**20 < (default_chunk(vocab) + 1) * vocab * 4
    assert default_chunk(10_000_000) == 8
    with pytest.raises(ValueError, match="vocab is 0"):
        default_chunk(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=0.0), "temperature is 0.0"),
        (dict(temperature=math.nan), "temperature is nan"),
        (dict(chunk_tokens=0), "chunk_tokens is 0"),
        (dict(softcap=0.0), "softcap is 0.0"),
        (dict(targets=torch.zeros(4, dtype=torch.int64)), r"targets \[4\]; expected \[T, H\] and \[T\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options, message) -> None:
    states, head, targets = problem(5, 4, 10)
    arguments = dict(hidden=states, lm_head=head, targets=targets, temperature=1.0, chunk_tokens=4)
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(**arguments | options)


class FakeKernel:
    """Stands in for `rlt_kernels.selective_logprob`, and says whether it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    @staticmethod
    def LogitTransform(logit_scale: float, softcap: float | None, temperature: float) -> dict:
        return dict(scale=logit_scale, softcap=softcap, temperature=temperature)

    def selective_logprob(self, hidden, weight, bias, targets, transform) -> tuple[Tensor, Tensor]:
        self.calls.append((hidden, weight, bias, targets, transform))
        return hidden.sum(dim=-1), torch.zeros(len(targets))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(logprobs, "_kernel_runs_on", lambda device: True)
    monkeypatch.setattr(logprobs, "_fused_kernel", lambda: fake)
    return fake


def hooked(head: nn.Linear) -> nn.Linear:
    head.register_forward_hook(lambda module, inputs, output: output + 1)
    return head


def patched(head: nn.Linear) -> nn.Linear:
    head.forward = lambda rows: nn.functional.linear(rows, head.weight, head.bias) + 1  # type: ignore[method-assign]
    return head


OTHER_HEADS = {
    "hook": hooked,
    "patched forward": patched,
    "adapter": lambda head: nn.Sequential(head, nn.Identity()),
    "parametrized": lambda head: nn.utils.parametrizations.weight_norm(head),
    "float64": lambda head: head.double(),
}


def test_a_plain_head_on_a_gpu_goes_through_the_kernel(kernel: FakeKernel) -> None:
    states, head, targets = problem(9, 8, 30)
    chunked_logprobs(states, head, targets, temperature=0.7, chunk_tokens=4, softcap=3.0, logit_scale=0.5)
    hidden, weight, bias, ids, transform = kernel.calls[0]
    assert hidden is states and weight is head.weight and bias is head.bias and ids is targets
    assert transform == dict(scale=0.5, softcap=3.0, temperature=0.7)


def test_the_kernel_multiplies_in_the_dtype_of_autocast(kernel: FakeKernel) -> None:
    states, head, targets = problem(9, 8, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked_logprobs(states, head, targets, temperature=1.0, chunk_tokens=4)
    assert {tensor.dtype for tensor in kernel.calls[0][:3]} == {torch.bfloat16}
    assert kernel.calls[0][1].grad_fn is not None  # the gradient comes back in the weight's own dtype


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_a_head_that_is_more_than_a_linear_layer_is_called(kernel: FakeKernel, name: str) -> None:
    states, head, targets = problem(9, 8, 30)
    head = OTHER_HEADS[name](head)
    states = states.to(next(head.parameters()).dtype)
    logps, _ = chunked_logprobs(states, head, targets, temperature=1.0, chunk_tokens=4)
    assert not kernel.calls
    torch.testing.assert_close(logps, logprobs_of_logits(head(states), targets, 1.0)[0])


def test_without_the_kernel_a_gpu_computes_in_chunks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logprobs, "_kernel_runs_on", lambda device: True)
    monkeypatch.setitem(sys.modules, "rlt_kernels.selective_logprob", None)
    logprobs._fused_kernel.cache_clear()
    states, head, targets = problem(9, 8, 30)
    with caplog.at_level("INFO", logger="rlt_train"):
        logps, _ = chunked_logprobs(states, head, targets, temperature=1.0, chunk_tokens=4)
    logprobs._fused_kernel.cache_clear()
    torch.testing.assert_close(logps, logprobs_of_logits(head(states), targets, 1.0)[0])
    assert "the fused kernel cannot be imported" in caplog.text


def test_a_cpu_computes_in_chunks() -> None:
    assert not logprobs._kernel_runs_on(torch.device("cpu"))
