"""The rollout manager: generation from a model's own weights beside its training, and the fence around weight
updates."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from rlt_train.attention.selection import BACKENDS
from rlt_train.checks import one_of
from rlt_train.engine.engine import Engine
from rlt_train.engine.params import SamplingParams
from rlt_train.engine.probe import probe_architecture
from rlt_train.engine.refusals import refuse_unservable
from rlt_train.engine.request import RolloutOutput
from rlt_train.engine.sizes import EngineConfig
from rlt_train.engine.stopping import Decode
from rlt_train.errors import EngineStoppedError
from rlt_train.gate import ForwardGate, Hold
from rlt_train.handle import RolloutHandle
from rlt_train.hooks import Event, Hooks
from rlt_train.overlap import OverlapMeter
from rlt_train.requests import RequestFactory
from rlt_train.threads import split_threads
from rlt_train.weights.view import GenerationView
from rlt_train.worker import EngineWorker

logger = logging.getLogger(__name__)

InFlight = Literal["keep", "recompute", "finish", "abort"]
IN_FLIGHT: tuple[InFlight, ...] = ("keep", "recompute", "finish", "abort")
_EXIT_TIMEOUT = 10.0  # seconds that interpreter exit waits for a running forward


class RolloutManager:
    """Generates from ``model``'s own weights on a background thread, beside training.

    Args:
        model: a ``transformers`` causal language model or a PEFT model around one; DDP and ``torch.compile``
            wrappers are seen through.
        config: sizes of the engine; fields of ``EngineConfig`` may also be given as keyword arguments.
        in_flight: what ``weight_update()`` does with running requests by default: "keep" their keys and
            values, "recompute" them under the new weights, "finish" them first, or "abort" them.
        engine_threads: intra-op threads of the engine thread; default on a CPU: half of the cores.
        autocast_dtype: see ``GenerationView``.
        attention_backend: "auto" (the best that fits, see ``python -m rlt_train.attention``) or a backend's
            name, which must fit.
        defaults: sampling parameters where a request sets none; before the model's generation config.
        tokenizer: needed for ``stop_strings`` only.
        max_queued: requests that may wait at once; further ones wait in ``submit``. Default: any number.
        **sizes: fields of ``EngineConfig``, e.g. ``rollouts_in_flight=64, max_length=512``.

    Raises:
        UnsupportedModelError: the model cannot be served (here or in ``start``).
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig | None = None,
        *,
        in_flight: InFlight = "keep",
        engine_threads: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        attention_backend: str = "auto",
        defaults: SamplingParams | None = None,
        tokenizer: Any = None,
        max_queued: int | None = None,
        **sizes: Any,
    ) -> None:
        one_of("in_flight", in_flight, IN_FLIGHT)
        one_of("attention_backend", attention_backend, BACKENDS)
        self.config = replace(config or EngineConfig(), **sizes)
        self.view = GenerationView(model, autocast_dtype)
        self.overlap = OverlapMeter()
        self.attention_info: dict[str, Any] = {"requested": attention_backend}
        self._in_flight = in_flight
        self._requests = RequestFactory(self.view, defaults)
        self._decode = None if tokenizer is None else _decoder(tokenizer)
        self._max_queued = max_queued
        self._engine_threads = split_threads(self.view.device, engine=engine_threads).engine
        self._gate = ForwardGate(on_release=self._before_resume)
        self._hooks = Hooks()
        self._engine: Engine | None = None
        self._version_before = 0  # the policy version with which the next engine begins
        self._worker: EngineWorker | None = None
        self._weight_versions: list[int] = []
        self._updates: list[Hold] = []  # updates being written now; another one inside them is no surprise
        _stop_at_exit(self)

    # -- life ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Started, and neither stopped nor dead."""
        return self._worker is not None and self._worker.state == "running" and self._worker.dead is None

    def start(self) -> RolloutManager:
        """Probe the architecture, allocate the KV cache, let the attention backends compile, and start the
        thread. A second call does nothing.

        Raises:
            UnsupportedModelError, BackendSelectionError, ValueError: before anything is started.
            EngineDeadError: the engine died before.
        """
        self.check_alive()
        if self._worker is not None and self._worker.state != "stopped":
            return self
        if self._engine is None:
            refuse_unservable(self.view.model, self.config)
            probe_architecture(self.view)
            engine = Engine(self.view, self.config, self.attention_info["requested"], decode=self._decode)
            engine.weights_changed(self._version_before, "keep")
            engine.warmup()
            self._engine = engine
            self.attention_info |= engine.attention_info()
        else:
            # Nobody watched the weights while stopped: what is cached may belong to others.
            self._engine.weights_changed(self.policy_version + 1, "keep")
        self.view.verify_shared()
        self._weight_versions = self.view.weight_versions()
        self._worker = EngineWorker(
            self._engine,
            self._gate,
            self.overlap,
            self._engine_threads,
            self._guard,
            self._hooks.finished,
            self.submit,
            self._max_queued,
        )
        cache = self._engine.cache
        logger.info(
            "rollout engine: %d slots of %d tokens, KV %d blocks of %d (%.1f MiB), %d thread(s), attention "
            "%s",
            self.config.rollouts_in_flight,
            self.config.max_length,
            self._engine.blocks.num_blocks,
            cache.block_size,
            cache.nbytes() / 2**20,
            self._engine_threads,
            self.attention_info,
        )
        return self

    def stop(self, drain: bool = False, timeout: float | None = 60.0) -> None:
        """Stop the thread; with ``drain`` finish every request first, else they end as "cancelled".

        Waits for the running forward (and, draining, for the requests), ``timeout`` seconds at most. A
        manager that is not running stays as it is.

        Raises:
            RuntimeError: called on the engine thread (from a hook), or draining while this thread holds a
                pause.
            TimeoutError: the requests or the thread did not end in time.
            EngineDeadError: the engine died while draining.
        """
        worker = self._worker
        if worker is None or worker.state == "stopped":
            return
        if worker.is_current_thread:
            raise RuntimeError("stop() on the engine thread (from a 'finished' hook) would wait for itself")
        worker.stop(drain, timeout)

    def warmup(self, timeout: float | None = None) -> None:
        """Let the attention backends compile anew, with the engine paused: after a compile that failed at the
        start, say. What came of it is in ``attention_info``, under "warmup" of each group.

        Call it on the training thread, or while nothing trains: a compiler saves and restores the global
        random stream, so that a training step beside it would draw the same numbers twice. Waits and raises
        as ``pause`` does, and:

        Raises:
            EngineStoppedError: the manager is not started.
        """
        self._running_worker()
        assert self._engine is not None
        with self.pause(timeout):
            self._engine.warmup()
            self.attention_info |= self._engine.attention_info()

    def restart(self, timeout: float | None = 60.0) -> RolloutManager:
        """Start anew after ``stop`` or after the engine died, with an empty cache and the next policy
        version; call it when the cause is gone. What was in flight stays failed. A running manager is left as
        it is.

        Raises:
            TimeoutError: the dead engine's thread is still in a forward after ``timeout`` seconds.
            As ``start`` does.
        """
        worker = self._worker
        if worker is not None and worker.dead is not None:
            worker.join(timeout)
            self._version_before = self.policy_version + 1
            self._engine = self._worker = None
        return self.start()

    def __enter__(self) -> RolloutManager:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def defaults(self) -> SamplingParams:
        """What a request that sets nothing gets: the given defaults, then the model's generation config, then
        ``BUILT_IN``."""
        return self._requests.defaults

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        metadata: Any = None,
        timeout: float | None = None,
    ) -> RolloutHandle:
        """Queue one sample of one prompt; waits for room if the queue is full, ``timeout`` seconds at most
        (0: not at all).

        Raises:
            RequestError: bad prompt or parameters, or an id in use; nothing is queued then.
            QueueFullError: no room within ``timeout``.
            EngineDeadError, EngineStoppedError: nothing can be queued.
        """
        return self._submit(prompt_ids, params, None, request_id, metadata, timeout)[0]

    def submit_group(
        self,
        prompt_ids: Sequence[int],
        n: int,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        metadata: Any = None,
        timeout: float | None = None,
    ) -> list[RolloutHandle]:
        """Queue ``n`` samples of one prompt, which is computed once. Member ``i`` is called
        ``<request_id>-<i>``.

        With ``params.seed`` given, each member draws from a stream of its own under that seed. Raises as
        ``submit`` does.
        """
        return self._submit(prompt_ids, params, n, request_id, metadata, timeout)

    def _submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None,
        n: int | None,
        request_id: str | None,
        metadata: Any,
        timeout: float | None,
    ) -> list[RolloutHandle]:
        worker = self._running_worker()
        assert self._engine is not None
        requests = self._requests.build(self._engine, prompt_ids, params, n, request_id, metadata)
        return worker.submit(requests, timeout)

    def as_completed(
        self, handles: Iterable[RolloutHandle] | None = None, timeout: float | None = None
    ) -> Iterator[RolloutOutput]:
        """Yield outputs in the order in which requests finish; ``timeout`` bounds the wait for each. A failed
        request is an output with ``finish_reason="error"`` here, so that the others still come.

        Args:
            handles: default: everything in flight now.

        Raises:
            TimeoutError, EngineDeadError, EngineStoppedError: the next one does not come.
        """
        worker = self._running_worker()
        pending = list(worker.handles.values() if handles is None else handles)
        while pending:
            worker.wait_for(lambda: any(handle.done for handle in pending), timeout, "the next request")
            for handle in [handle for handle in pending if handle.done]:
                pending.remove(handle)
                yield handle.output

    def cancel(self, request_id: str) -> None:
        """End a request as "cancelled"; unknown and finished ids are ignored."""
        self._running_worker().cancel(request_id)

    def wait_for(
        self, predicate: Callable[[], bool], timeout: float | None = None, what: str = "rollouts"
    ) -> None:
        """Wait until ``predicate`` holds; it is evaluated under the manager's lock whenever a request
        finishes.

        Raises:
            TimeoutError, EngineDeadError, EngineStoppedError: it does not hold in time, or cannot any more.
        """
        self._running_worker().wait_for(predicate, timeout, what)

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` from its cause if the engine died."""
        if self._worker is not None:
            self._worker.check_alive()

    # -- weights ---------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """How many weight updates the policy has seen under this manager."""
        return self._version_before if self._engine is None else self._engine.policy_version

    def pause(self, timeout: float | None = None) -> Hold:
        """Stop the engine at its next forward boundary. Several threads, and one thread several times, may
        hold.

        Waits for the running forward to end; an interrupt or a timeout gives the hold back.

        Raises:
            PauseTimeoutError: not granted within ``timeout`` seconds.
            EngineDeadError: the engine died.
            RuntimeError: called on the engine thread.
        """
        if self._worker is not None and self._worker.is_current_thread:
            raise RuntimeError("pause() on the engine thread (from a 'finished' hook) would wait for itself")
        hold = self._gate.pause(timeout, _granted_at_once if self._worker is None else self._worker_wait)
        try:
            self._hooks.emit("paused")
        except BaseException:
            hold.release()
            raise
        return hold

    def resume(self) -> None:
        """Release the hold that this thread took last.

        Raises:
            RuntimeError: this thread holds none.
        """
        self._gate.latest_of_this_thread().release()

    @contextmanager
    def weight_update(
        self, in_flight: InFlight | None = None, timeout: float | None = None
    ) -> Iterator[None]:
        """Fence a write to the weights: pause, run the body, enter the next policy version, resume.

        If the body raises, the pause is released all the same, and the version moves only if a weight did.
        Raises as ``pause`` does, and:

        Raises:
            UnfencedWriteError: a weight had been written before, outside any fence; the engine is dead then.
            SharedWeightsError: the body replaced a ``Parameter``; the engine is dead then.
        """
        hold = self.begin_update(in_flight, timeout)
        try:
            yield
        except BaseException:
            self.end_update(hold, in_flight, only_if_written=True)
            raise
        self.end_update(hold, in_flight)

    def begin_update(self, in_flight: InFlight | None = None, timeout: float | None = None) -> Hold:
        """First half of ``weight_update``, for hooks that cannot keep a context manager open."""
        policy = one_of("in_flight", in_flight or self._in_flight, IN_FLIGHT)
        with ExitStack() as stack:
            if policy == "finish" and self._worker is not None and self._worker.state == "running":
                stack.enter_context(self._worker.drained(timeout))
            hold = self.pause(timeout)
        try:
            with self._gate.lock:
                if not self._updates:
                    self._guard()
                self._updates.append(hold)
        except BaseException as error:
            self._kill(error)
            hold.release()
            raise
        return hold

    def end_update(
        self, hold: Hold, in_flight: InFlight | None = None, only_if_written: bool = False
    ) -> None:
        """Second half of ``weight_update``; with ``only_if_written`` the version moves only if a weight
        did."""
        self._updates.remove(hold)
        versions = self.view.weight_versions()
        moved = versions != self._weight_versions
        self._weight_versions = versions
        try:
            if self._engine is not None and (moved or not only_if_written):
                with self._gate.lock:
                    ended = self._engine.weights_changed(
                        self.policy_version + 1, in_flight or self._in_flight
                    )
                    outputs = self._worker.deliver(ended) if self._worker is not None else []
                for output in outputs:
                    self._hooks.finished(output)
                self._hooks.emit("weights_updated", self.policy_version)
        finally:
            hold.release()

    # -- observation -----------------------------------------------------------------------------------------

    def on(self, event: Event, function: Callable[..., Any]) -> Callable[[], None]:
        """Call ``function`` at an event; returns a function that removes it again.

        "paused", "resumed" (no arguments) and "weights_updated" (the new version) run on the thread that
        pauses or updates, and their errors reach it. "finished" (a ``RolloutOutput``) runs on the engine
        thread; its errors are logged.
        """
        return self._hooks.add(event, function)

    def stats(self) -> dict[str, float]:
        """Counts since the manager was made: forwards, tokens, overlap, KV blocks, reused prompt tokens,
        preemptions."""
        engine, worker = self._engine, self._worker
        counts: dict[str, float] = {
            "policy_version": self.policy_version,
            "forwards": self.overlap.forwards,
            "overlapping_forwards": self.overlap.overlapping_forwards,
            "forward_seconds": self.overlap.forward_seconds,
            "training_seconds": self.overlap.training_seconds,
            "pause_seconds": self._gate.paused_seconds,
            "forward_tokens": engine.forward_tokens if engine is not None else 0,
            "tokens_generated": engine.tokens_generated if engine is not None else 0,
            "unfinished": len(worker.handles) if worker is not None else 0,
        }
        if engine is not None:
            counts |= {
                "kv_blocks": engine.blocks.num_blocks,
                "kv_blocks_used": engine.blocks.num_used,
                "kv_bytes": engine.cache.nbytes(),
                "prompt_tokens": engine.scheduler.prompt_tokens,
                "prompt_tokens_reused": engine.scheduler.prompt_tokens_reused,
                "prefix_hit_rate": engine.scheduler.prompt_tokens_reused
                / max(1, engine.scheduler.prompt_tokens),
                "preemptions": engine.scheduler.preemptions,
                "queued": engine.queued,
            }
        return counts

    # -- internals -------------------------------------------------------------------------------------------

    def _running_worker(self) -> EngineWorker:
        if self._worker is None:
            raise EngineStoppedError(
                "the rollout manager is not started: call start(), or use `with manager:`"
            )
        self._worker.check_alive()
        if self._worker.state == "stopped":
            raise EngineStoppedError("the rollout manager was stopped; call start() to run it again")
        return self._worker

    def _worker_wait(self, *arguments: Any) -> None:
        assert self._worker is not None
        self._worker.check_alive()
        self._worker.wait(*arguments)
        self._worker.check_alive()  # a dead engine stands at a boundary, too

    def _guard(self) -> None:
        if self._worker is not None and self._worker.state != "stopped":
            self.view.refuse_unfenced_write(self._weight_versions)

    def _before_resume(self) -> None:
        try:
            self._guard()
            self.view.verify_shared()
        except BaseException as error:
            self._kill(error)
            raise
        self._hooks.emit("resumed")

    def _kill(self, error: BaseException) -> None:
        if self._worker is not None:
            self._worker.kill(error)


def _decoder(tokenizer: Any) -> Decode:
    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode


def _granted_at_once(*_: Any) -> None:
    """The wait of a pause when no engine thread exists."""


def _stop_at_exit(manager: RolloutManager) -> None:
    # Interpreter exit freezes daemon threads wherever they are, possibly inside a kernel: end the thread
    # before.
    reference = weakref.ref(manager)

    def stop() -> None:
        alive = reference()
        if alive is not None:
            alive.stop(timeout=_EXIT_TIMEOUT)

    atexit.register(stop)
