"""The parity probe: before a model is served, its architecture must give the same log-probs paged as it does
ordinarily.

The probe builds a small random model of the same class whose window, chunk and RoPE limits are low enough to
be crossed, runs mixed-length requests through the whole engine (chunked prefill, prefix hits, decode), and
compares each generated token's log-prob with one ordinary forward. It catches what no list of architectures
knows.
"""

from __future__ import annotations

import math

import torch

from rlt_train.engine.engine import Engine
from rlt_train.engine.params import BUILT_IN, SamplingParams
from rlt_train.engine.request import Request, Sequence
from rlt_train.engine.shrink import shrunken_model
from rlt_train.engine.sizes import EngineConfig
from rlt_train.errors import UnsupportedModelError
from rlt_train.weights.view import GenerationView

TOLERANCE = 5e-4  # nats; float32 rounding stays near 1e-5, a wrong mask or position is off by tenths
HALF_TOLERANCE = 0.5  # nats, for real weights in half precision, whose rounding alone reached 0.15
_PROMPT_LENGTHS = (1, 5, 21, 37)
_NEW_TOKENS = 6
_LONGEST = max(_PROMPT_LENGTHS) + _NEW_TOKENS


def probe_architecture(view: GenerationView) -> float:
    """Compare paged with ordinary log-probs on a shrunken model of the view's class; returns the largest
    difference.

    Where no shrunken model can be built (unusual configs), the real weights are probed at short lengths.

    Raises:
        UnsupportedModelError: names the architecture and how it differs.
    """
    name = type(view.model).__name__
    small = shrunken_model(view.model)
    probed = GenerationView(small) if small is not None else view
    difference = largest_difference(probed)
    tolerance = TOLERANCE if _in_float32(probed) else HALF_TOLERANCE
    if not difference <= tolerance:  # NaN fails too
        lengths = ", ".join(map(str, _PROMPT_LENGTHS))
        raise UnsupportedModelError(
            f"{name} cannot be served: its paged log-probs differ from an ordinary forward's by "
            f"{difference:.3g} nats (allowed: {tolerance:g}) on packed sequences of {lengths} prompt tokens. "
            "Its attention depends on something the paged cache does not carry (position biases, its own "
            "mask, recurrent state)."
        )
    return difference


def _in_float32(view: GenerationView) -> bool:
    dtypes = {parameter.dtype for parameter in view.model.parameters()}
    return view.autocast_dtype is None and dtypes.isdisjoint({torch.float16, torch.bfloat16})


def largest_difference(view: GenerationView) -> float:
    """Largest |paged - ordinary| log-prob over the generated tokens of a mixed-length batch."""
    engine = Engine(
        view,
        EngineConfig(rollouts_in_flight=4, max_length=_LONGEST, block_size=4, max_tokens_per_step=16),
        attention_backend="torch",
    )
    finished: list[Sequence] = []
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(engine.vocab_size, (max(_PROMPT_LENGTHS),), generator=generator).tolist()
    for index, length in enumerate(_PROMPT_LENGTHS):
        prompt = base[:length]  # each a prefix of the next: later ones hit the prefix index
        params = SamplingParams(max_new_tokens=_NEW_TOKENS).over(BUILT_IN)
        engine.add(Request(f"probe-{index}", prompt, params, seed=index, eos_token_ids=frozenset()))
    while engine.unfinished:
        finished += engine.step().finished
    # Not max() of Python: it drops a NaN that is not the first.
    return torch.tensor([_difference(view, sequence) for sequence in finished]).max().item()


@torch.inference_mode()
def _difference(view: GenerationView, sequence: Sequence) -> float:
    if sequence.error is not None:
        return math.nan
    start = len(sequence.request.prompt_ids)
    tokens = torch.tensor([sequence.tokens], device=view.device)
    with view.autocast():
        logits = view.model(input_ids=tokens, use_cache=False).logits[0, start - 1 : -1].float()
    ordinary = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, start:, None]).squeeze(1)
    return (ordinary.cpu() - torch.tensor(sequence.logprobs)).abs().max().item()
