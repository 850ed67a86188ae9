"""The generation view: a second module tree over the very same ``Parameter`` objects.

A forward on the view must never be visible to the training module tree, so everything that is not a weight is
the view's own: configs, train/eval flags, adapter switches, non-persistent buffers, hook dictionaries, and no
instance-level ``forward`` patches. Parameters and persistent buffers are shared by identity, never copied.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rlt_train.errors import SharedWeightsError, UnfencedWriteError
from rlt_train.weights.unwrap import causal_lm_of, refuse_unsupported, unwrap_model

# Set per instance by accelerate (mixed precision), torch.compile and the hook machinery; the view takes the
# class's.
_NEVER_COPIED = {"_original_forward", "_compiled_call_impl", "_hf_hook", "_old_forward"}


class GenerationView:
    """A structural clone of ``model`` that shares its parameters and persistent buffers, always in eval mode.

    Args:
        model: a ``transformers`` causal language model or a PEFT model around one, possibly wrapped by
            ``DistributedDataParallel`` or ``torch.compile`` (both are unwrapped).
        autocast_dtype: run the view's forwards under autocast to this dtype. accelerate's mixed precision is
            an instance-level ``forward`` patch, which the view drops, so it has to be named here.

    Raises:
        UnsupportedModelError: see ``unwrap_model`` and ``refuse_unsupported``.
    """

    def __init__(self, model: nn.Module, autocast_dtype: torch.dtype | None = None) -> None:
        self.training_model = unwrap_model(model)
        refuse_unsupported(self.training_model)
        self.module = clone_structure(self.training_model)
        self.module.eval()
        self.model: Any = causal_lm_of(self.module)
        self.autocast_dtype = autocast_dtype
        self._pairs = list(zip(self.training_model.modules(), self.module.modules(), strict=True))
        self._named = list(self.training_model.named_parameters())
        self._names = {module: name for name, module in self.training_model.named_modules()}

    def clone(self) -> GenerationView:
        """Another module tree over the same weights, in the state this view is in now."""
        twin = copy.copy(self)
        twin.module = clone_structure(self.module)
        twin.model = causal_lm_of(twin.module)
        twin._pairs = list(zip(self.training_model.modules(), twin.module.modules(), strict=True))
        return twin

    @property
    def config(self) -> Any:
        """The view's own config (its text config for a nested one is ``config.get_text_config()``)."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; one device is all a view supports."""
        return self._named[0][1].device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's EOS ids: its generation config's, else its config's, else none."""
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config, self.config.get_text_config()):
            eos = getattr(source, "eos_token_id", None)
            if eos is not None:
                return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        return ()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast of one forward.

        ``cache_enabled=False``: inside one open autocast block PyTorch keeps the cast weights, so a forward
        after an optimizer step would still run the old ones.
        """
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, cache_enabled=False)

    def verify_shared(self) -> None:
        """Check by identity that every parameter and persistent buffer of the training tree is still the
        view's.

        Raises:
            SharedWeightsError: names the first weight that was replaced, added or removed in the training
                tree.
        """
        names = {module: name for name, module in self.training_model.named_modules()}
        if added := [name for module, name in names.items() if module not in self._names]:
            raise SharedWeightsError(
                f"module {added[0]!r} was added to the training model after the manager was created, so the "
                f"engine would generate without it. Add adapters first, then create the manager."
            )
        if removed := [name for module, name in self._names.items() if module not in names]:
            raise SharedWeightsError(
                f"module {removed[0]!r} was removed from the training model after the manager was created, "
                f"but the engine still generates with it. Merge or unload adapters first, then create the "
                f"manager."
            )
        for theirs, ours in self._pairs:
            for kind in ("_parameters", "_buffers"):
                for key, tensor, other in _differences(theirs, ours, kind):
                    path = ".".join(part for part in (names[theirs], key) if part)
                    raise SharedWeightsError(
                        f"{path} of the training model is no longer the tensor the engine generates from "
                        f"(training holds {_describe(tensor)}, the view holds {_describe(other)}). Something "
                        f"replaced it (adapter loading, weight tying, .data swapping, to_empty); write into "
                        f"it in place inside manager.weight_update(), or make the change before the manager "
                        f"is created."
                    )

    def weight_versions(self) -> list[int]:
        """PyTorch's in-place version counter of every parameter, in ``named_parameters`` order."""
        return [parameter._version for _, parameter in self._named]

    def refuse_unfenced_write(self, versions: list[int]) -> None:
        """Compare the version counters with ``versions`` (taken at the last resume).

        ``p.data.add_()`` and PyTorch's fused optimizer kernels do not move the counter and cannot be seen
        here (``scripts/verify_weights.py`` sees them). Fenced steps of fused optimizers are safe: the fence
        moves the policy version whatever the counters say.

        Raises:
            UnfencedWriteError: names the first parameter that was written outside the fence.
        """
        current = self.weight_versions()
        if current == versions:
            return
        index = next(i for i, (now, then) in enumerate(zip(current, versions, strict=True)) if now != then)
        raise UnfencedWriteError(
            f"{self._named[index][0]} was written in place while the engine was free to generate. Wrap the "
            f"write in `with manager.weight_update():` (optimizer.step and load_state_dict are fenced for "
            f"you)."
        )


def clone_structure(model: nn.Module) -> nn.Module:
    """Clone a module tree without cloning its weights.

    Two passes: first an empty instance for each module, so that any attribute that refers to a module of the
    tree (a list of layers, a back reference) is re-pointed into the clone; then the state of each.
    """
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = module.__class__.__new__(module.__class__)
        for parameter in module._parameters.values():
            memo[id(parameter)] = parameter
        for _, buffer in persistent_buffers(module):
            memo[id(buffer)] = buffer
    for module in modules:
        memo[id(module)].__dict__.update(_cloned_state(module, memo))
    return memo[id(model)]


def _cloned_state(module: nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, value in module.__dict__.items():
        if key in _NEVER_COPIED or _is_method_patch(module, key, value):
            continue
        if key == "_parameters":
            state[key] = dict(value)
        elif key == "_modules":
            state[key] = {name: None if child is None else memo[id(child)] for name, child in value.items()}
        elif _is_hook_dictionary(key, value):
            state[key] = OrderedDict()
        else:  # buffers included: memo keeps the persistent ones, the others (RoPE tables) are copied
            state[key] = copy.deepcopy(value, memo)
    return state


def _is_method_patch(module: nn.Module, key: str, value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module) and callable(getattr(type(module), key, None))


def _is_hook_dictionary(key: str, value: Any) -> bool:
    return isinstance(value, dict) and (key.endswith("_hooks") or "_hooks_" in key)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of this one module that its state dict holds, by name."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _differences(theirs: nn.Module, ours: nn.Module, kind: str) -> Iterator[tuple[str, Any, Any]]:
    own: Callable[[nn.Module], dict[str, Any]] = (
        (lambda module: module._parameters)
        if kind == "_parameters"
        else (lambda module: dict(persistent_buffers(module)))
    )
    left, right = own(theirs), own(ours)
    for key in left.keys() | right.keys():
        if left.get(key) is not right.get(key):
            yield key, left.get(key), right.get(key)


def _describe(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype} at {id(tensor):#x}"
