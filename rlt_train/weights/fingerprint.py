"""sha256 of a model's weights, and a ledger of one such hash per optimizer step.

Two runs that claim to have trained the same weights write a ledger each; `first_divergence` names the first
step at which they differ, and `tensor_digests` the parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module, *, workers: int | None = None) -> str:
    """sha256 (hex) over name, dtype, shape and bytes of every parameter and persistent buffer.

    Names are sorted, so the order in which modules were registered does not matter. A tied tensor counts
    under every name it has, as in `state_dict()`; it is read once. So tying two tensors of equal content
    changes nothing, and renaming one does. Nothing is stripped from the names: pass the unwrapped model (no
    DDP, no compiled wrapper).

    Nobody may write to the weights meanwhile: call it where the optimizer does not run.

    Args:
        model: the unwrapped model, on any device.
        workers: hashing threads; default: the number of cores, at most 8.
    """
    return combine_digests(tensor_digests(model, workers=workers))


def combine_digests(digests: Mapping[str, str]) -> str:
    """The fingerprint that belongs to the result of `tensor_digests`, without reading the weights again."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def tensor_digests(model: nn.Module, *, workers: int | None = None) -> dict[str, str]:
    """sha256 (hex) of dtype, shape and bytes of each parameter and persistent buffer, by name, sorted.

    Contiguous CPU tensors are hashed in place. A non-contiguous or accelerator tensor is copied first,
    `workers` at a time. hashlib releases the interpreter lock, so the threads run in parallel; one tensor is
    one task.

    Raises:
        ValueError: a tensor has no data (meta device), or `workers` is not positive.
    """
    workers = min(8, os.cpu_count() or 1) if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers is {workers}; give 1 or more, or None for the number of cores")
    named = dict(_named_state(model))
    for name, tensor in named.items():
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name!r} is on the meta device and has no data: load the weights before hashing them"
            )
    unique = {id(tensor): tensor for tensor in named.values()}
    # Largest first: the last task to start is then a small one, and no thread waits long for another.
    by_size = sorted(unique.values(), key=lambda tensor: tensor.numel() * tensor.element_size(), reverse=True)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="fingerprint") as pool:
        digests = dict(zip(map(id, by_size), pool.map(_digest, by_size), strict=True))
    return {name: digests[id(named[name])] for name in sorted(named)}


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) that makes up the weights; what is tied or shared, under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield dot + name, parameter
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield dot + name, buffer


def _digest(tensor: Tensor) -> str:
    header = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # NumPy has no bfloat16 or float8; bytes are bytes, whatever they mean.
    content = plain.reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(header)
    digest.update(content)
    return digest.hexdigest()


class WeightLedger:
    """Appends one JSON line per optimizer step, `{"step": int, "sha256": str}`, to a file.

    Each line is flushed when it is written, so the file is complete up to the last step even if the process
    is killed. An existing file is continued; a line torn by a kill is removed first. Use it as a context
    manager.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def record(self, step: int, model: nn.Module) -> str:
        """Hash the (unwrapped) model, write the line, return the hash."""
        sha256 = fingerprint(model)
        self.write(step, sha256)
        return sha256

    def write(self, step: int, sha256: str) -> None:
        """Write one line. `step` counts finished optimizer steps; a resumed run may write a step again."""
        # One write call a line: another process appending to the same file cannot land inside it.
        self._file.write(json.dumps({"step": step, "sha256": sha256}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> WeightLedger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_ledger(path: str | os.PathLike[str]) -> dict[int, str]:
    """The sha256 of each step in a ledger file, in the order in which the steps were first written.

    A step written twice (a run resumed from an earlier checkpoint) has its later value. A torn last line, the
    sign of a killed writer, is left out.

    Raises:
        ValueError: a complete line that is not a ledger line; the message names it.
    """
    entries: dict[int, str] = {}
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            entries[int(entry["step"])] = str(entry["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: {line!r} is not a ledger line; "
                'expected {"step": int, "sha256": str}'
            ) from error
    return entries


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step at which two ledgers differ. None: that ledger has no such step."""

    step: int
    sha256_a: str | None
    sha256_b: str | None


def first_divergence(a: Mapping[int, str], b: Mapping[int, str]) -> Divergence | None:
    """The lowest step at which two ledgers (see `read_ledger`) differ, or None if they are the same.

    A step that only one of them has is a difference: a run that stopped early did not do the same.

    Raises:
        ValueError: both are empty, so that agreement would mean nothing.
    """
    if not a and not b:
        raise ValueError("both ledgers are empty, there is nothing to compare: did the runs take a step?")
    for step in sorted(a.keys() | b.keys()):
        if a.get(step) != b.get(step):
            return Divergence(step, a.get(step), b.get(step))
    return None


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)
