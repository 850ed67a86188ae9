"""The rollout manager for any Hugging Face ``Trainer``: one callback."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rlt_train.fence import fence_loading, fence_optimizer, refuse_buffer_broadcast
from rlt_train.manager import RolloutManager
from rlt_train.threads import split_threads

_WATCH_SECONDS = 0.5


class RolloutSession:
    """A manager that runs, with its fences up, from ``open`` to ``close``.

    Args:
        manager: runs during the session.
        training_threads: intra-op threads of the thread that opens the session, until it closes; default on a
            CPU: half of the cores.
    """

    def __init__(self, manager: RolloutManager, training_threads: int | None = None) -> None:
        self._manager = manager
        self._training_threads = training_threads
        self._cleanup = ExitStack()

    def open(self, optimizer: torch.optim.Optimizer, args: TrainingArguments) -> ExitStack:
        """Start the manager and fence the optimizer and ``load_state_dict``; returns what closes this
        session.

        Raises:
            As ``RolloutManager.start``, ``fence_optimizer`` and ``refuse_buffer_broadcast`` do; nothing is
            left running.
        """
        self.close()
        manager = self._manager
        model = manager.view.training_model
        refuse_buffer_broadcast(model, args.ddp_broadcast_buffers)
        with ExitStack() as stack:  # what is already up comes down if the rest fails
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(split_threads(manager.view.device, self._training_threads).training)
            manager.start()
            stack.callback(manager.stop)
            stack.callback(fence_optimizer(optimizer, manager))
            stack.callback(fence_loading(model, manager))
            self._cleanup = stack.pop_all()
        return self._cleanup

    def close(self) -> None:
        """Stop the manager and take the fences down; harmless when that has happened."""
        self._cleanup.close()


class RolloutCallback(TrainerCallback):
    """Runs a ``RolloutManager`` from train begin to the end of training, however it ends.

    ``optimizer.step`` and ``load_state_dict`` are fenced; forwards and backwards are not, so the engine
    generates while they run. ``callback.manager`` is there from train begin on.

    Args:
        manager: a manager to run; by default one is made of the trainer's model and ``options``.
        training_threads: see ``RolloutSession``.
        **options: of ``RolloutManager``, e.g. ``rollouts_in_flight=16, max_length=512``.
    """

    def __init__(
        self, manager: RolloutManager | None = None, *, training_threads: int | None = None, **options: Any
    ) -> None:
        if manager is not None and options:
            raise ValueError(
                f"options {sorted(options)} have no effect beside a manager; give one or the other"
            )
        self.manager = manager
        self._options = options
        self._training_threads = training_threads
        self._session: ExitStack = ExitStack()
        self._compute = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the manager and put up the fences."""
        if self.manager is None:
            self.manager = RolloutManager(
                kwargs["model"], autocast_dtype=autocast_dtype_of(args), **self._options
            )
        self._session.close()  # of a run that has just failed, if the watch has not seen that yet
        self._session = RolloutSession(self.manager, self._training_threads).open(kwargs["optimizer"], args)
        self._session.callback(self._compute.close)
        # Callbacks are not told of exceptions, so somebody has to look whether the training loop still runs.
        _watch_frame(_training_frame(), self._session.close)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Training compute begins: engine forwards from here on overlap it."""
        if self.manager is not None:
            self._compute.close()
            self._compute.enter_context(self.manager.overlap.training())

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Training compute ends: the optimizer step is fenced."""
        self._compute.close()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the manager and take the fences down."""
        self._session.close()


def autocast_dtype_of(args: TrainingArguments) -> torch.dtype | None:
    """The dtype of accelerate's mixed precision under these arguments."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def _training_frame() -> FrameType:
    """The frame that runs the training loop: the first one outside this file and transformers' callback
    handler."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__
        or frame.f_globals.get("__name__") == "transformers.trainer_callback"
    ):
        frame = frame.f_back
    return frame


def _watch_frame(frame: FrameType, gone: Callable[[], None]) -> None:
    """Call ``gone`` when ``frame`` has left its thread's stack: an exception passed through the training
    loop.

    Looks twice a second; waits for nothing else, and a daemon thread, so it never keeps the process alive.
    """
    thread, identity, code = threading.get_ident(), id(frame), frame.f_code

    def on_stack() -> bool:
        current = sys._current_frames().get(thread)
        while current is not None:
            if id(current) == identity and current.f_code is code:
                return True
            current = current.f_back
        return False

    def watch() -> None:
        clock = threading.Event()
        while on_stack():
            clock.wait(_WATCH_SECONDS)
        gone()

    threading.Thread(target=watch, name="rlt-training-watch", daemon=True).start()
