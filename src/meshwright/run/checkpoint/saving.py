"""Saving a checkpoint beside training (DataStates-LLM, Maurya et al., 2406.10707).

Between two updates parameters and moments do not change, so copying them to host memory overlaps the whole of a forward
and a backward; training waits only if the copies are not done when the optimizer is about to write. Files are written
in a thread of their own while later steps run.

A checkpoint is written in a hidden folder and takes its name in one rename, after every process has its files on the
disk. That all have is learnt at a step's boundary, by one exchange of three numbers between the main threads while a
save is under way: the thread that writes makes no collectives (their order would differ from rank to rank, and gloo
deadlocks), and, unlike waiting for marker files, an exchange needs no timeout, and gives every rank the same error at
the same step when a disk is full on one of them.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run import safetensors_file
from meshwright.run.agree import CPU, agree, largest, share
from meshwright.run.checkpoint.commit import commit
from meshwright.run.checkpoint.format import HIDDEN, Meta
from meshwright.run.checkpoint.share import Holding, divide, holdings
from meshwright.run.checkpoint.write import shapes, write_rank
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import TensorPiece

#: Seconds after which a rank says that training waits for its disk, and between saying so again.
WORD_S, AGAIN_S = 3.0, 15.0


class AsyncSaver:
    """Saves checkpoints of one job into the folder `root`, which all processes see, and keeps the newest `keep`.

    Every rank makes one with the same `root`, and calls the same methods in the same order, on its main thread. Errors
    of any rank, the disk's above all, are raised on every rank by the next :meth:`poll`, :meth:`wait` or
    :meth:`begin`; what was written of that checkpoint is removed, and the next one may be begun.
    """

    def __init__(self, root: str | Path, group: AxisGroup, *, device: torch.device = CPU, keep: int = 2):
        if keep < 1:
            raise ValueError("keep at least one checkpoint")
        self.root, self.group, self.device, self.keep = Path(root), group, device, keep
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._count = 0
        self._everyone: list[list[Holding]] = []  # what every process holds, learnt at the first save
        self._temporary: Path | None = None  # of the save under way
        self._meta: Meta | None = None
        self._writing: Future | None = None
        self._committing: Future | None = None
        self._staged: threading.Event | None = None
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        wrong = []
        if group.index == 0:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                sweep(self.root)
            except OSError as error:
                wrong.append(cannot(self.root, error, group.index))
        agree(group, wrong, device)
        # names of this job's hidden folders; what an earlier job left behind is never mistaken for them
        self._token = share(group, secrets.token_hex(4).encode() if group.index == 0 else b"", device)[0].decode()

    @property
    def pending(self) -> bool:
        """Whether a save is under way; the same on every rank."""
        return self._temporary is not None

    def begin(self, pieces: Sequence[TensorPiece], meta: Meta) -> None:
        """Start saving the pieces, as they are now, the same ones every time; returns at once. What several processes
        hold is written by all of them, each a share.

        Nothing may write to them before :meth:`before_update`. A save still under way is waited for first, and a rank
        whose disk that waits for says so.

        Raises:
            MeshwrightError: what went wrong with the save before.
        """
        self.wait()
        mine = holdings(pieces)
        if not self._everyone:
            everyone = share(self.group, msgspec.json.encode(mine), self.device)
            self._everyone = [msgspec.json.decode(data, type=list[Holding]) for data in everyone]
        elif mine != self._everyone[self.group.index]:
            raise ValueError("a saver saves the same pieces every time")
        self._temporary = self.root / f"{HIDDEN}{meta.step:08d}.{self._token}-{self._count}.part"
        self._count += 1
        self._meta = meta
        self._staged = threading.Event()
        copies = [(p, self._buffer(p)) for p in divide(pieces, self._everyone, self.group.index)]
        self._event = self._copy_on_device([(p, b) for p, b in copies if p.values.is_cuda])
        self._writing = self._thread.submit(
            self._work, copies, shapes(pieces), self._temporary, self._staged, self._event
        )

    def before_update(self) -> None:
        """Return when the copies are made (on CUDA: have the current stream wait for them); the optimizer may write."""
        if self._staged is not None:
            self._staged.wait()
            self._staged = None
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
            self._event = None

    def poll(self) -> Path | None:
        """Take a save under way as far as it has come, without waiting for the disk; once a step, on every rank.

        Returns:
            The folder of the checkpoint that has become complete, if one has.

        Raises:
            MeshwrightError: H005 when a rank could not write; H004 when the pieces are not the model, once each.
        """
        if self._temporary is None:
            return None
        failed = any(
            f is not None and f.done() and f.exception() is not None for f in (self._writing, self._committing)
        )
        unwritten = not self._writing.done()
        uncommitted = self.group.index == 0 and (self._committing is None or not self._committing.done())
        failed, unwritten, uncommitted = largest(self.group, [failed, unwritten, uncommitted], self.device)
        if failed:
            self._give_up()
        if unwritten:
            return None
        if uncommitted:
            if self.group.index == 0 and self._committing is None:
                self._committing = self._thread.submit(
                    commit, self.root, self._temporary, self._meta, self.group.size, self.keep
                )
            return None
        # a generation is only known to the rank that made it
        name = share(self.group, self._committing.result().name.encode() if self._committing else b"", self.device)
        self._temporary = self._writing = self._committing = None
        return self.root / name[0].decode()

    def wait(self) -> Path | None:
        """Finish the save under way, if any; collective. Returns and raises as :meth:`poll`."""
        done = None
        while self.pending:
            for future in (self._writing, self._committing):
                if future is not None:
                    self._await(future)
            done = self.poll()
        return done

    def _await(self, future: Future) -> None:
        """Wait until the disk has what a save under way writes, and say so where that takes long."""
        begun, patience = time.monotonic(), WORD_S
        while True:
            try:
                future.exception(timeout=patience)
                return
            except TimeoutError:
                waited, patience = time.monotonic() - begun, AGAIN_S
                text = (
                    f"rank {self.group.index} has waited {waited:.0f} s for its disk: the checkpoint of step "
                    f"{self._meta.step} is still being written into {self.root}; save less often, or elsewhere"
                )
                print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the thread. A save under way is not committed; call :meth:`wait` first."""
        self._thread.shutdown(wait=True)
        self._buffers.clear()

    def _give_up(self) -> None:
        errors = [f.exception() for f in (self._writing, self._committing) if f is not None]
        wrong = [d for e in errors if e is not None for d in diagnostics(e, self._temporary, self.group.index)]
        temporary, self._temporary, self._writing, self._committing = self._temporary, None, None, None
        try:
            agree(self.group, wrong, self.device)  # nobody writes any more when this ends
        finally:
            if self.group.index == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def _buffer(self, piece: TensorPiece) -> torch.Tensor:
        """Host memory for a piece's values, the same at every save; page-locked when they are on a GPU."""
        key = (piece.key, piece.parameter.name, piece.start, piece.stop, piece.values.dtype, piece.values.is_cuda)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(
                piece.stop - piece.start, dtype=piece.values.dtype, pin_memory=piece.values.is_cuda
            )
        return self._buffers[key]

    def _copy_on_device(self, copies: list[tuple[TensorPiece, torch.Tensor]]) -> torch.cuda.Event | None:
        """Queue the copies of what is on a GPU, on a stream of their own behind what is queued now; what happens when
        they are made."""
        if not copies:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for piece, buffer in copies:
                buffer.copy_(piece.values, non_blocking=True)
                piece.values.record_stream(self._stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _work(
        self,
        copies: list[tuple[TensorPiece, torch.Tensor]],
        tensors: dict[str, tuple[int, ...]],
        temporary: Path,
        staged: threading.Event,
        event: torch.cuda.Event | None,
    ) -> None:
        try:
            for piece, buffer in copies:
                if not piece.values.is_cuda:
                    copy(buffer, piece.values)
        finally:
            staged.set()
        if event is not None:
            event.synchronize()
        write_rank(temporary, self.group.index, copies, tensors)


def save(
    root: str | Path, pieces: Sequence[TensorPiece], meta: Meta, group: AxisGroup, *, device: torch.device = CPU
) -> Path:
    """Save a checkpoint and wait until it is complete; collective. Keeps all older ones.

    Raises:
        MeshwrightError: as :meth:`AsyncSaver.poll`, on every rank.
    """
    saver = AsyncSaver(root, group, device=device, keep=1 << 30)
    try:
        saver.begin(pieces, meta)
        return saver.wait()
    finally:
        saver.close()


def copy(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Copy host memory on this thread alone: the cores are training's."""
    with torch.no_grad():
        if values.is_contiguous():
            safetensors_file.raw(buffer)[:] = safetensors_file.raw(values)
        else:
            buffer.copy_(values)


def sweep(root: Path) -> None:
    """Remove what killed jobs left of checkpoints they were writing or removing."""
    for left in root.glob(f"{HIDDEN}*"):
        shutil.rmtree(left, ignore_errors=True)


def diagnostics(error: BaseException, folder: Path, rank: int) -> tuple[Diagnostic, ...]:
    """An error of the writing thread as violations."""
    if isinstance(error, MeshwrightError):
        return error.diagnostics
    if isinstance(error, OSError):
        return (cannot(folder, error, rank),)
    # every rank has to come to the exchange, whatever went wrong on this one
    return (Diagnostic(code="H005", message=f"cannot save a checkpoint: {error!r}", place=f"{folder} (rank {rank})"),)


def cannot(folder: Path, error: OSError, rank: int) -> Diagnostic:
    """H005: the operating system's reason for a checkpoint that could not be written."""
    return Diagnostic(
        code="H005",
        message=f"cannot save a checkpoint: {error.strerror or error}",
        place=f"{error.filename or folder} (rank {rank})",
        help="the checkpoints before it are untouched; free some space, or save into another folder",
    )
