"""Cheaper modules in the view: the same numbers, the same parameters, and nothing that training can see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, drive, generate_greedy, generated, new_engine, prompt, qwen3, request
from torch import nn

from rlt_train.engine.fusion import fuse_modules
from rlt_train.weights.view import GenerationView

SILU_FAMILIES = ("llama", "qwen3")


def replaced(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_views_give_the_models_logits(family: str) -> None:
    model = FAMILIES[family]()
    with torch.no_grad():  # not all ones, as norms begin
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.3)
    view = GenerationView(model)
    fused = fuse_modules(view.model)
    ids = torch.tensor([prompt(40)])
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids).logits for m in (view.model, model))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    names = replaced(view.model)
    assert len(names) == fused and replaced(model) == []
    assert any(name.endswith("mlp") for name in names) == (family in SILU_FAMILIES)
    # Gemma's norm multiplies by 1 + weight, so that the replacement does not agree and is not taken.
    assert any(name.endswith("norm") for name in names) == (family != "gemma2")
    view.verify_shared()


def test_a_norm_of_the_same_name_that_computes_something_else_is_left_alone() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.variance_epsilon = 1e-6

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.weight * hidden_states

    class ColdMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            gate = self.act_fn(self.gate_proj(hidden_states))
            return self.down_proj(gate * self.up_proj(hidden_states)) + 1

    model = nn.ModuleList([OddRMSNorm(), ColdMLP()])
    assert fuse_modules(model) == 0 and replaced(model) == []


def test_the_engine_fuses_unless_told_otherwise_and_sees_later_weights() -> None:
    model = qwen3()
    engine, plain = new_engine(model), new_engine(model, fuse_modules=False)
    assert len(replaced(engine.served.model)) == 4 * 5 + 1 and replaced(plain.served.model) == []
    assert replaced(engine.view.model) == [], "the ordinary forward of the view must stay as it is"
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(1.7)
        model.model.layers[1].mlp.up_proj.weight.mul_(-1.3)
    engine.add(request("r", prompt(9)))
    assert generated(drive(engine)["r"]) == generate_greedy(model, prompt(9), 8)
