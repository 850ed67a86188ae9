"""Makes ``accelerate launch --cpu --num_processes N`` start N processes.

With ``--cpu`` accelerate leaves several processes to ``mpirun`` and otherwise starts one, which then trains
alone without a word. It does set the rendezvous address, though, so the case can be told apart and handed to
torch's own launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import psutil


def launched_for_several(environment: Mapping[str, str]) -> bool:
    """accelerate's ``--cpu`` launcher was asked for several processes and started this one only."""
    return (
        environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
        and "MASTER_ADDR" in environment
        and not environment.keys() & {"WORLD_SIZE", "RANK", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"}
    )


def requested_processes(command: Sequence[str]) -> int | None:
    """``--num_processes`` on a launcher's command line; ``None`` if it is not there."""
    for index, argument in enumerate(command):
        name, _, value = argument.replace("-", "_").partition("=")
        if name == "__num_processes":
            value = value or (command[index + 1] if index + 1 < len(command) else "")
            return int(value) if value.isdigit() else None
    return None


def start_all_processes(script: str, arguments: Sequence[str]) -> None:
    """Replace this process by torch's launcher if accelerate was asked for more than it started; else do
    nothing.

    Raises:
        SystemExit: how many processes were asked for cannot be found out (they are in an accelerate config
        file).
    """
    if not launched_for_several(os.environ):
        return
    count = requested_processes(psutil.Process().parent().cmdline())
    if count is None:
        raise SystemExit(
            "accelerate was told to start several CPU processes but started one. Give --num_processes on its "
            "command "
            "line, or use: torchrun --standalone --nproc_per_node N recipes/grpo.py"
        )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, script, *arguments])
