"""Reward functions under TRL's contract: calling them, sync or async, and checking what they return."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

_CONTRACT = (
    "A reward function is called as f(prompts=..., completions=..., completion_ids=..., <dataset columns>, "
    "trainer_state=...) with keyword arguments and returns one number or None per completion"
)


class RewardFunction:
    """A reward function with a name and a weight, under the contract of TRL 1.16.

    The function is called with keyword arguments only: `prompts`, `completions`, `completion_ids`, every
    further dataset column by its name, each a list with one entry per completion, and `trainer_state`. A
    function that does not name them all must take `**kwargs`. It returns one number (bool is a number) or
    None per completion; None means that it does not apply to that completion. It may be an `async def`.

    Attributes:
        function: the callable.
        name: for metrics and messages; default: the function's own name.
        weight: its factor in the sum of all reward functions.

    Raises:
        TypeError: not a callable, or a reward model (a module or a hub id), which is not supported yet.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, weight: float = 1.0) -> None:
        if isinstance(function, nn.Module | str):
            what = (
                f"hub id {function!r}" if isinstance(function, str) else f"module {type(function).__name__}"
            )
            raise TypeError(
                f"reward models are not supported yet, and the {what} is one; supported are Python "
                "callables, sync or async. To use a reward model now, call it inside a function of your own"
            )
        if not callable(function):
            raise TypeError(f"a reward must be a callable, got {type(function).__name__}. {_CONTRACT}")
        self.function = function
        self.name = name if name is not None else _callable_name(function)
        self.weight = float(weight)

    def __repr__(self) -> str:
        return f"RewardFunction({self.name!r}, weight={self.weight})"

    def score(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        trainer_state: Any = None,
        **columns: Any,
    ) -> list[float]:
        """One reward per completion; NaN where the function returned None.

        Args:
            prompts, completions: text, or lists of chat messages; one entry per completion.
            completion_ids: token ids of each completion.
            trainer_state: transformers' `TrainerState`.
            columns: the dataset's other columns, and whatever else the function is to be given.

        Raises:
            TypeError: the function cannot take these arguments, or returned something that is not a number or
                None.
            ValueError: a wrong number of rewards, or one that is NaN or infinite.
            Exception: what the function itself raised, with a note that names it.
        """
        inputs = dict(prompts=prompts, completions=completions, completion_ids=completion_ids)
        returned = self._call(inputs | columns | {"trainer_state": trainer_state})
        if inspect.isawaitable(returned):
            returned = _run(self._wait(returned))
        return self._checked(returned, len(completions))

    def _call(self, arguments: dict[str, Any]) -> Any:
        self._check_signature(arguments)
        try:
            return self.function(**arguments)
        except Exception as error:
            error.add_note(f"raised by the reward function {self.name!r}")
            raise

    async def _wait(self, returned: Awaitable[Any]) -> Any:
        try:
            return await returned
        except Exception as error:
            error.add_note(f"raised by the reward function {self.name!r}")
            raise

    def _check_signature(self, arguments: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # some builtins do not tell; the call itself will
            return
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise TypeError(
                f"the reward function {self.name!r}{signature} cannot be called with {', '.join(arguments)}: "
                f"{error}. {_CONTRACT}. If it does not use them all it must accept **kwargs; "
                "what else it requires must be a column of the dataset"
            ) from error

    def _checked(self, returned: Any, expected: int) -> list[float]:
        if hasattr(returned, "tolist"):  # tensors and arrays
            shape = list(getattr(returned, "shape", ()))
            if shape != [expected]:
                raise ValueError(
                    f"the reward function {self.name!r} returned a {type(returned).__name__} of shape "
                    f"{shape}; expected [{expected}], one number per completion"
                )
            returned = returned.tolist()
        if not isinstance(returned, list | tuple):
            raise TypeError(
                f"the reward function {self.name!r} returned {_described(returned)}; "
                f"expected a list of {expected} numbers or None, one per completion"
            )
        if len(returned) != expected:
            raise ValueError(
                f"the reward function {self.name!r} returned {len(returned)} rewards; "
                f"expected {expected}, one per completion"
            )
        return [self._number(value, position) for position, value in enumerate(returned)]

    def _number(self, value: Any, position: int) -> float:
        if value is None:
            return math.nan
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        elif type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            value = value.item()  # NumPy's own bool is not a `numbers.Real`
        where = f"the reward function {self.name!r} returned {_described(value)} for completion {position}"
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{where}; expected a number, a bool, or None where it does not apply")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{where}; expected a finite number, or None where the function does not apply")
        return number


def score_all(
    functions: Sequence[RewardFunction],
    *,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    trainer_state: Any = None,
    **columns: Any,
) -> Tensor:
    """The rewards of several functions, [completions, functions] float32, NaN for None. Arguments as `score`.

    As in TRL, sync functions run one after the other, and the async ones then wait together.

    Raises:
        ValueError: no function was given; otherwise as `RewardFunction.score`.
    """
    if not functions:
        raise ValueError("no reward function was given; give at least one")
    inputs = dict(prompts=prompts, completions=completions, completion_ids=completion_ids)
    arguments = inputs | columns | {"trainer_state": trainer_state}
    # Coroutines are created last: if a sync function fails, none is left behind that was never awaited.
    order = sorted(range(len(functions)), key=lambda index: _is_async(functions[index].function))
    returned = {index: functions[index]._call(arguments) for index in order}
    waiting = [index for index in order if inspect.isawaitable(returned[index])]
    if waiting:
        results = _run(_gather([functions[index]._wait(returned[index]) for index in waiting]))
        returned.update(zip(waiting, results, strict=True))
    rewards = [
        function._checked(returned[index], len(completions)) for index, function in enumerate(functions)
    ]
    return torch.tensor(rewards, dtype=torch.float32).T.contiguous()


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end from a sync call, also inside a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards") as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _is_async(function: Callable[..., Any]) -> bool:
    # An object may have an async `__call__`; a function's own is a plain method, and says no.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _callable_name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _callable_name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _described(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
