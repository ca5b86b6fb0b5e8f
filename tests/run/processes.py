"""Real processes for tests: forked, joined by gloo over a file, one torch thread each."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining

from meshwright.run.ahead import load_ahead
from tests.run import plain

load_ahead()


def launch(num_ranks: int, function, *args, timeout_s: float = 120.0) -> list[Any]:
    """`function(rank, *args)` in `num_ranks` joined processes; what each returned, by rank.

    The children are forked, so nothing has to be importable; results are what :mod:`tests.run.plain` writes.

    Raises:
        AssertionError: with the traceback of the first process that failed, or when one hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(num_ranks):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _child(rank, num_ranks, function, args, folder)
            children.append(child)
        _wait(children, folder, timeout_s)
        return [plain.read(Path(folder) / f"{r}.out") for r in range(num_ranks)]


def _child(rank: int, num_ranks: int, function, args, folder: str) -> None:
    code = 1
    gc.freeze()  # as ranks of the product do
    try:
        torch.set_num_threads(1)
        if num_ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        out = function(rank, *args)
        temporary = Path(folder) / f"{rank}.part"
        plain.write(temporary, out)
        temporary.rename(Path(folder) / f"{rank}.out")
        if num_ranks > 1:
            dist.barrier()
        code = 0
    except BaseException:
        (Path(folder) / f"{rank}.err").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a process group's threads make an orderly exit unsafe


def _wait(children: list[int], folder: str, timeout_s: float) -> None:
    waiting, deadline, failed = dict(enumerate(children)), time.monotonic() + timeout_s, None
    while waiting and failed is None:
        for rank, child in list(waiting.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del waiting[rank]
                if status:
                    failed = rank
        if time.monotonic() > deadline:
            failed = min(waiting)
        time.sleep(0.002)
    if failed is None:
        return
    time.sleep(0.2)  # the others' own errors, if they have any
    for child in waiting.values():
        os.kill(child, 9)
        os.waitpid(child, 0)
    errors = sorted(Path(folder).glob("*.err"), key=lambda file: file.stat().st_mtime)
    text = "\n".join(f"rank {file.stem}:\n{file.read_text()}" for file in errors)
    raise AssertionError(text or f"rank {failed} ended or hung without an error")
