"""The fence on the optimizer: one version a step, no forward inside it, released whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from tiny import prompt, smaller
from torch import nn

from rlt_train import RolloutManager, SamplingParams, UnfencedWriteError
from rlt_train.fence import fence_loading, fence_optimizer, refuse_buffer_broadcast
from rlt_train.weights.fingerprint import fingerprint

ENDLESS = SamplingParams(max_new_tokens=3900, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
WAIT = 20.0


@pytest.fixture
def model() -> nn.Module:
    return smaller(max_position_embeddings=4096)


@pytest.fixture
def manager(model: nn.Module) -> Iterator[RolloutManager]:
    with RolloutManager(model, rollouts_in_flight=2, max_length=4000, engine_threads=1) as manager:
        yield manager


class Injected(Exception):
    """The fault of these tests."""


class FaultySGD(torch.optim.SGD):
    """Raises in its step, before or after the write."""

    when = "never"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.when == "before":
            raise Injected("before writing")
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad
        if self.when == "after":
            raise Injected("after writing")
        return None


class SlowSGD(torch.optim.SGD):
    """Takes a while, and counts the engine's forwards meanwhile."""

    manager: RolloutManager
    counts: tuple[int, int] = (0, 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = self.manager.overlap.forwards
        time.sleep(0.15)
        self.counts = before, self.manager.overlap.forwards
        return super().step(closure)


def set_gradients(model: nn.Module, value: float = 1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def forwards_go_on(manager: RolloutManager) -> bool:
    """The engine, which has work without end, runs further forwards."""
    seen, deadline = manager.overlap.forwards, time.monotonic() + WAIT
    while manager.overlap.forwards < seen + 3:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_a_step_enters_one_version_and_no_forward_runs_inside(
    model: nn.Module, manager: RolloutManager
) -> None:
    optimizer = SlowSGD(model.parameters(), lr=1e-3)
    optimizer.manager = manager
    remove = fence_optimizer(optimizer, manager)
    manager.submit(prompt(5), ENDLESS)
    for version in (1, 2):
        assert forwards_go_on(manager)
        set_gradients(model)
        optimizer.step()
        before, after = optimizer.counts
        assert 0 < before == after
        assert manager.policy_version == version
    assert forwards_go_on(manager)
    remove()


def test_a_step_that_raises_before_writing_leaves_the_version(
    model: nn.Module, manager: RolloutManager
) -> None:
    optimizer = FaultySGD(model.parameters(), lr=1e-3)
    fence_optimizer(optimizer, manager)
    manager.submit(prompt(5), ENDLESS)
    set_gradients(model)
    optimizer.when = "before"
    with pytest.raises(Injected):
        optimizer.step()
    assert manager.policy_version == 0
    assert forwards_go_on(manager)
    optimizer.when = "never"
    optimizer.step()
    assert manager.policy_version == 1


def test_a_step_that_raises_after_writing_enters_a_version(model: nn.Module, manager: RolloutManager) -> None:
    optimizer = FaultySGD(model.parameters(), lr=1e-3)
    fence_optimizer(optimizer, manager)
    manager.submit(prompt(5), ENDLESS)
    set_gradients(model)
    optimizer.when = "after"
    with pytest.raises(Injected):
        optimizer.step()
    assert manager.policy_version == 1
    assert forwards_go_on(manager)


def test_a_fused_step_followed_by_an_error_enters_a_version(
    model: nn.Module, manager: RolloutManager
) -> None:
    """Fused kernels do not move ``Parameter._version``, so the write cannot be seen there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def fail(*_: Any) -> None:
        raise Injected("in a hook after the write")

    optimizer.register_step_post_hook(fail)
    fence_optimizer(optimizer, manager)
    before = fingerprint(model)
    set_gradients(model)
    with pytest.raises(Injected):
        optimizer.step()
    assert fingerprint(model) != before
    assert manager.policy_version == 1
    assert manager.submit(prompt(5), SHORT).result(WAIT).policy_versions == [1] * 4


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_trains_beside_the_engine(model: nn.Module, manager: RolloutManager, fused: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    fence_optimizer(optimizer, manager)
    for version in range(3):
        output = manager.submit(prompt(5), SHORT).result(WAIT)
        assert output.policy_versions == [version] * 4
        before = fingerprint(model)
        set_gradients(model)
        optimizer.step()
        assert fingerprint(model) != before
        assert manager.policy_version == version + 1


def test_a_closure_runs_inside_the_fence(model: nn.Module, manager: RolloutManager) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fence_optimizer(optimizer, manager)
    manager.submit(prompt(5), ENDLESS)
    counts = []
    ids = torch.tensor([prompt(8)])

    def closure() -> float:
        optimizer.zero_grad()
        counts.append(manager.overlap.forwards)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        time.sleep(0.1)
        counts.append(manager.overlap.forwards)
        return loss.item()

    assert forwards_go_on(manager)
    loss = optimizer.step(closure)
    assert loss is not None and loss > 0
    assert counts[0] == counts[1]
    assert manager.policy_version == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradient_scaler_skips_is_no_step(
    model: nn.Module, manager: RolloutManager, fused: bool
) -> None:
    Accelerator(cpu=True)  # AcceleratedOptimizer reads its shared state
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    fence_optimizer(optimizer, manager)
    scaler.scale(torch.ones(1))
    manager.submit(prompt(5), ENDLESS)
    before = fingerprint(model)
    for version, gradient in ((0, float("inf")), (1, 4.0), (1, float("inf")), (2, 4.0)):
        set_gradients(model, gradient)
        optimizer.step()
        assert manager.policy_version == version
        assert forwards_go_on(manager)
        if version == 0:
            assert fingerprint(model) == before
    assert fingerprint(model) != before


def test_an_error_under_accelerate_and_a_scaler_releases_the_pause(
    model: nn.Module, manager: RolloutManager
) -> None:
    Accelerator(cpu=True)
    inner = FaultySGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    fence_optimizer(optimizer, manager)
    scaler.scale(torch.ones(1))
    manager.submit(prompt(5), ENDLESS)
    for when, versions in (("never", 1), ("before", 1), ("after", 2)):
        inner.when = when
        set_gradients(model, 4.0)
        if when == "never":
            optimizer.step()
        else:
            with pytest.raises(Injected):
                optimizer.step()
            scaler.update()
        assert manager.policy_version == versions
        assert forwards_go_on(manager)


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_a_learning_rate_scheduler_may_wrap_the_step_before_or_after(
    model: nn.Module, manager: RolloutManager, scheduler_first: bool
) -> None:
    optimizer = FaultySGD(model.parameters(), lr=1e-3)

    def schedule() -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    scheduler = schedule() if scheduler_first else None
    remove = fence_optimizer(optimizer, manager)
    scheduler = scheduler or schedule()
    set_gradients(model)
    optimizer.step()
    scheduler.step()
    assert manager.policy_version == 1
    assert optimizer.param_groups[0]["lr"] == 5e-4
    optimizer.when = "before"
    with pytest.raises(Injected):
        optimizer.step()
    manager.submit(prompt(5), SHORT).result(WAIT)
    remove()
    optimizer.when = "never"
    with manager.weight_update():
        optimizer.step()
    assert manager.policy_version == 2


def test_remove_restores_the_optimizer(model: nn.Module, manager: RolloutManager) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    remove = fence_optimizer(optimizer, manager)
    assert "step" in optimizer.__dict__
    remove()
    assert "step" not in optimizer.__dict__
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    set_gradients(model)
    optimizer.step()
    assert manager.policy_version == 0
    remove()  # harmless


def test_remove_releases_a_pause_that_was_left_open(model: nn.Module, manager: RolloutManager) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    remove = fence_optimizer(optimizer, manager)
    manager.submit(prompt(5), ENDLESS)
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})
    remove()
    assert forwards_go_on(manager)


def test_two_fences_in_turn_do_not_disturb_each_other(model: nn.Module, manager: RolloutManager) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for version in (1, 2):
        remove = fence_optimizer(optimizer, manager)
        set_gradients(model)
        optimizer.step()
        assert manager.policy_version == version
        remove()


def test_optimizers_that_write_in_backward_are_refused(model: nn.Module, manager: RolloutManager) -> None:
    lomo = type("Lomo", (torch.optim.SGD,), {})
    with pytest.raises(ValueError, match="Lomo updates the weights inside backward"):
        fence_optimizer(lomo(model.parameters(), lr=1e-3), manager)
    with pytest.raises(TypeError, match="str is not a torch.optim.Optimizer"):
        fence_optimizer("adamw", manager)  # type: ignore[arg-type]


def test_an_unfenced_write_is_named(model: nn.Module) -> None:
    with RolloutManager(model, rollouts_in_flight=2, max_length=4000, engine_threads=1) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        fence_optimizer(optimizer, manager)
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.up_proj.weight").add_(1.0)
        set_gradients(model)
        with pytest.raises(UnfencedWriteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            optimizer.step()


def test_load_state_dict_is_fenced(model: nn.Module, manager: RolloutManager) -> None:
    remove = fence_loading(model, manager)
    state = {name: tensor.clone() * 1.5 for name, tensor in model.state_dict().items()}
    manager.submit(prompt(5), ENDLESS)
    assert forwards_go_on(manager)
    model.load_state_dict(state)
    assert manager.policy_version == 1
    assert forwards_go_on(manager)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "lm_head.weight": torch.zeros(1)})
    assert forwards_go_on(manager), "a failed load must not keep the pause"
    remove()
    assert not model._load_state_dict_post_hooks and not model._load_state_dict_pre_hooks


def test_loading_an_adapter_is_fenced() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(smaller(), config)
    state = {name: tensor.clone() * 2 for name, tensor in peft.get_peft_model_state_dict(model).items()}
    with RolloutManager(model, rollouts_in_flight=2, max_length=64, engine_threads=1) as manager:
        remove = fence_loading(model, manager)
        first = manager.submit(prompt(5), SHORT).result(WAIT)
        peft.set_peft_model_state_dict(model, state)
        second = manager.submit(prompt(5), SHORT).result(WAIT)
        remove()
    assert first.policy_versions == [0] * 4 and second.policy_versions == [1] * 4
    assert first.logprobs != second.logprobs


def test_one_thread_holds_the_fence_while_another_waits(model: nn.Module, manager: RolloutManager) -> None:
    """Somebody else's pause delays the step; the step ends it no sooner."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fence_optimizer(optimizer, manager)
    manager.submit(prompt(5), ENDLESS)
    hold = manager.pause(WAIT)
    set_gradients(model)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join(WAIT)
    assert manager.policy_version == 1
    seen = manager.overlap.forwards
    time.sleep(0.05)
    assert manager.overlap.forwards == seen, "the other hold was still there"
    hold.release()
    assert forwards_go_on(manager)


def test_buffer_broadcast_is_refused_only_where_it_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, buffered = nn.Linear(2, 2), nn.BatchNorm1d(2)
    refuse_buffer_broadcast(buffered, None)  # one process: nothing is broadcast
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    refuse_buffer_broadcast(plain, None)
    refuse_buffer_broadcast(buffered, False)
    with pytest.raises(ValueError, match=r"running_mean.*ddp_broadcast_buffers=False"):
        refuse_buffer_broadcast(nn.Sequential(buffered), None)
