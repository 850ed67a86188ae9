"""``python -m rlt_train.attention``: which attention backends this machine can use, and why not the
others."""

from __future__ import annotations

import argparse

import torch

from rlt_train.attention.contract import AttentionBackend, LayerSpec
from rlt_train.attention.hardware import Hardware, detect_hardware
from rlt_train.attention.selection import AUTO_ORDER, BACKENDS, find_backend, import_problem, incompatibility


def problem(
    backend: type[AttentionBackend], hardware: Hardware, dtype: torch.dtype, spec: LayerSpec, block_size: int
) -> str | None:
    """Why the backend cannot serve such a layer here, or ``None``."""
    obstacle = incompatibility(backend.capabilities, hardware, dtype, [spec], block_size)
    return obstacle or import_problem(backend)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m rlt_train.attention", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="of keys and values; default: the device's usual one")
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--block_size", type=int, default=16)
    parser.add_argument("--window", type=int, default=None, help="sliding window of the layers")
    parser.add_argument("--softcap", type=float, default=None)
    parser.add_argument("--sinks", action="store_true")
    arguments = parser.parse_args()
    hardware = detect_hardware(torch.device(arguments.device))
    dtype = getattr(torch, arguments.dtype or ("float32" if hardware.kind == "cpu" else "bfloat16"))
    spec = LayerSpec(
        query_heads=8,
        kv_heads=8,
        head_dim=arguments.head_dim,
        scale=1.0,
        sliding_window=arguments.window,
        softcap=arguments.softcap,
        has_sinks=arguments.sinks,
        dtype=dtype,
    )
    order = AUTO_ORDER[hardware.kind]
    print(f"{hardware}, {dtype}, head_dim {spec.head_dim}, KV blocks of {arguments.block_size} tokens")
    for name in sorted(BACKENDS[1:], key=lambda name: order.index(name) if name in order else len(order)):
        obstacle = problem(find_backend(name), hardware, dtype, spec, arguments.block_size)
        place = f"auto {order.index(name) + 1}" if name in order else "by name"
        print(f"  {name:<8} {place:<8} {'usable' if obstacle is None else obstacle}")


if __name__ == "__main__":
    main()
