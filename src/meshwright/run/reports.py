"""Reports of every step beside ``metrics.jsonl``: TensorBoard, Weights & Biases, and a function of the user's own.

All of it happens on the first rank, behind the step. A function that the user names gets a :class:`StepReport`; if it
returns True the run ends in order after the next step, as it does on SIGTERM. One that fails ends the run likewise:
what was trained is saved first.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.run.job import Job

#: What a hook needs beside the package itself, as pip calls it.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step that is done, of so many in all: mean ``loss`` a token, the gradient's norm, the learning rate, tokens
    of the run so far, the step's seconds, and ``values``: everything of its line in ``metrics.jsonl``."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    values: dict[str, Any]


#: A function of the user's own: True ends the run in order.
Told = Callable[[StepReport], bool | None]


class CallbackFailed(MeshwrightError):
    """A function of the user's own raised."""

    exit_code = 1


class Reporter(Protocol):
    """Something that is told of every step."""

    def tell(self, report: StepReport) -> None:
        """One step is done."""

    def close(self) -> None:
        """The run is over."""


class TensorBoardFiles:
    """Numbers of every step as TensorBoard's scalars, without TensorFlow; steps behind the one that a run goes on from
    are dropped."""

    def __init__(self, folder: str, done: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=done + 1 if done else None)

    def tell(self, report: StepReport) -> None:
        for name, value in numbers(report.values).items():
            self.writer.add_scalar(f"train/{name}", value, report.step)

    def close(self) -> None:
        self.writer.close()


class WandbRun:
    """Numbers of every step in a project of Weights & Biases, in the mode that its own environment says
    (``WANDB_MODE=offline`` sends nothing)."""

    def __init__(self, project: str, job: Job, done: int):
        import wandb

        said = {"model": job.model.name, "plan": job.plan.text(), "workload": job.train.text()}
        config = said | msgspec.to_builtins(job.settings)
        self.run = wandb.init(project=project, dir=job.out or None, config=config | {"begun_at_step": done})

    def tell(self, report: StepReport) -> None:
        self.run.log(numbers(report.values), step=report.step)

    def close(self) -> None:
        self.run.finish()


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return those of some values that are numbers, but the step."""
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}


def reporters(job: Job, done: int) -> list[Reporter]:
    """Open what a job wants its steps told to, from the one after `done` on.

    Raises:
        MeshwrightError: X104 where a folder cannot be written; L003 without the package.
    """
    out: list[Reporter] = []
    try:
        if job.tensorboard:
            out.append(TensorBoardFiles(job.tensorboard, done))
        if job.wandb:
            out.append(WandbRun(job.wandb, job, done))
    except ImportError as error:
        raise MeshwrightError(missing(job.tensorboard, job.wandb) or [_not_begun(error)]) from None
    except OSError as error:
        place = f"--tensorboard {job.tensorboard}"
        help = "name a folder that may be written to and has room"
        why = f"cannot write {job.tensorboard}: {error.strerror or error}"
        raise MeshwrightError.one("X104", why, place=place, help=help) from None
    except Exception as error:  # of wandb's own kinds: no key, no network
        raise MeshwrightError([_not_begun(error)]) from None
    return out


def _not_begun(error: Exception) -> Diagnostic:
    help = "WANDB_MODE=offline writes to the disk alone; or leave the option out"
    return Diagnostic(code="L008", message=f"cannot begin to report: {type(error).__name__}: {error}", help=help)


def missing(tensorboard: str, wandb: str) -> list[Diagnostic]:
    """L003 for each package that an option needs and that is not installed; nothing is imported."""
    from importlib.util import find_spec

    wanted = {"tensorboard": tensorboard, "wandb": wandb}
    return [
        Diagnostic(
            code="L003",
            message=f"--{name} needs the package {name}, not installed here",
            place=f"--{name} {value}",
            help=f"pip install {PACKAGES[name]}, or leave the option out: metrics.jsonl has the same numbers",
        )
        for name, value in wanted.items()
        if value and find_spec(name) is None
    ]


def callback(name: str) -> Told:
    """The function that ``module:function`` names, of the folder that the run is started in or of a package.

    Raises:
        MeshwrightError: L008 when there is none, or the module does not load.
    """
    module, _, function = name.partition(":")
    place, help = f"--callback {name}", "write MODULE:FUNCTION of a file MODULE.py here, or of an installed package"
    if not all(part.isidentifier() for part in module.split(".")) or not function.isidentifier():
        raise MeshwrightError.one("L008", f"{name!r} is not MODULE:FUNCTION", place=place, help=help)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever the user's module raises when it loads
        why = f"{type(error).__name__}: {error}"
        raise MeshwrightError.one("L008", f"the callback does not load: {why}", place=place, help=help) from None
    if not callable(found):
        raise MeshwrightError.one("L008", f"{function} of {module} is no function", place=place, help=help)
    if inspect.iscoroutinefunction(found):
        help = "write def in place of async def: it is called behind each step, and nothing awaits what it returns"
        raise MeshwrightError.one("L008", f"{function} of {module} is asynchronous", place=place, help=help)
    return found


class StepHook:
    """A function of the user's own with what came of it: whether it asks to stop, or why it failed."""

    def __init__(self, function: Told):
        self.function = function
        self.stops = False
        self.failed: list[Diagnostic] = []

    def tell(self, report: StepReport) -> None:
        """Call it, unless it has failed."""
        if self.failed:
            return
        try:
            self.stops = bool(self.function(report)) or self.stops
        except (Exception, SystemExit) as error:  # anything that the user's code raises
            last = traceback.extract_tb(error.__traceback__)[-1]
            message = f"the callback failed after step {report.step}: {type(error).__name__}: {error}"
            help = "what was trained is saved where --out is given: mend the function, and --resume"
            self.failed = [Diagnostic(code="L008", message=message, place=f"{last.filename}:{last.lineno}", help=help)]
            self.stops = True

    def close(self) -> None:
        """Nothing is open."""
