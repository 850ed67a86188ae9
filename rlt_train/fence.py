"""The fence on the optimizer itself: pause before a step, a new policy version after it, released whatever
happens.

Step hooks rather than trainer callbacks, because a callback sees no exception, and rather than a context
manager around ``optimizer.step``, because gradient scalers call the inner step on their own and skip it when
gradients overflow.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rlt_train.gate import Hold
from rlt_train.manager import RolloutManager
from rlt_train.weights.view import persistent_buffers

_UPDATES_IN_BACKWARD = {"Lomo", "AdaLomo"}


class UpdateFence:
    """One fenced write at a time: ``open`` pauses, ``close`` enters the next version and resumes."""

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager
        self._hold: Hold | None = None

    def open(self) -> None:
        """Pause the engine for a write to the weights; waits for its running forward."""
        self.abandon()
        self._hold = self._manager.begin_update()

    def close(self, written: bool = True) -> None:
        """Resume after the write; without ``written`` the version moves only if a weight did."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._manager.end_update(hold, only_if_written=not written)

    def abandon(self) -> None:
        """Resume after a write that raised; does nothing when none is open."""
        self.close(written=False)


def fence_optimizer(optimizer: torch.optim.Optimizer, manager: RolloutManager) -> Callable[[], None]:
    """Fence every step of ``optimizer`` (accelerate's wrapper is seen through); returns a function that
    removes it.

    A step that raises releases the pause, and raises the version only if it had moved a weight. A step that a
    gradient scaler skips is no step.

    Raises:
        TypeError: not a PyTorch optimizer.
        ValueError: an optimizer that updates weights inside ``backward`` (LOMO), where nothing can be fenced.
    """
    layers = list(_unwrapped(optimizer))
    innermost = layers[-1]
    if not isinstance(innermost, torch.optim.Optimizer):
        raise TypeError(
            f"{type(innermost).__name__} is not a torch.optim.Optimizer, so its step has no hooks"
        )
    if type(innermost).__name__ in _UPDATES_IN_BACKWARD:
        raise ValueError(
            f"{type(innermost).__name__} updates the weights inside backward, while the engine generates "
            f"from them; use an optimizer that updates in step()"
        )
    fence = UpdateFence(manager)
    before = innermost.register_step_pre_hook(lambda *_: fence.open())
    after = innermost.register_step_post_hook(lambda opt, *_: fence.close(written=not _overflowed(opt)))
    guards = [_release_on_error(layer, innermost, fence) for layer in layers]

    def remove() -> None:
        fence.abandon()
        before.remove()
        after.remove()
        for remove_guard in guards:
            remove_guard()

    return remove


def fence_loading(model: nn.Module, manager: RolloutManager) -> Callable[[], None]:
    """Fence ``model.load_state_dict`` (the best checkpoint at the end of training, adapter weights)."""
    fence = UpdateFence(manager)
    before = model.register_load_state_dict_pre_hook(lambda *_: fence.open())
    after = model.register_load_state_dict_post_hook(lambda *_: fence.close())

    def remove() -> None:
        fence.abandon()
        before.remove()
        after.remove()

    return remove


def refuse_buffer_broadcast(model: nn.Module, broadcast_buffers: bool | None) -> None:
    """Refuse data parallel training that would overwrite shared buffers in every forward.

    Raises:
        ValueError: ``model`` has persistent buffers (which the engine shares) and DDP broadcasts buffers.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1 or broadcast_buffers is False:
        return
    for name, module in model.named_modules():
        for key, _ in persistent_buffers(module):
            raise ValueError(
                f"DDP would broadcast the buffer {name}.{key} in every forward, outside the fence, while the "
                f"engine reads it: set ddp_broadcast_buffers=False in the training arguments"
            )


def _unwrapped(optimizer: Any) -> Iterator[Any]:
    while True:
        yield optimizer
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return
        optimizer = inner


def _overflowed(optimizer: torch.optim.Optimizer) -> bool:
    # Set by GradScaler around the step of an optimizer that decides about overflow itself (fused ones).
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _release_on_error(layer: Any, innermost: torch.optim.Optimizer, fence: UpdateFence) -> Callable[[], None]:
    """Wrap this instance's ``step`` so that an error in it, which skips the post-hook, releases the pause."""
    step, patched = layer.step, "step" in layer.__dict__

    @functools.wraps(step)
    def guarded(_: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:
            # A fused kernel does not move a parameter's version counter, so that it wrote cannot be seen.
            fence.close(written=any(group.get("fused") for group in innermost.param_groups))
            raise

    # A bound method, because learning rate schedulers wrap the function underneath.
    method = types.MethodType(guarded, layer)
    layer.step = method

    def remove() -> None:
        if layer.__dict__.get("step") is not method:
            return  # wrapped again since; with no fence to release, the guard does nothing
        if patched:
            layer.step = step
        else:
            del layer.step

    return remove
