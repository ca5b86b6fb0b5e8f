"""Refusals: the parts of a plan that an engine cannot run, as a pure function, cheap enough for every plan of a search.

Engines are the targets of an export and Meshwright's own executor (:mod:`meshwright.plan.executable`).
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.export.gap import Gap
from meshwright.export.limits import all_limits
from meshwright.export.request import ExportRequest
from meshwright.plan.executable import unexecutable

#: Target -> the file of this package that writes it. A new target is a file, its keys in ``data/`` and a line here.
TARGETS = {
    "torchtitan": "torchtitan",
    "torchtitan-toml": "torchtitan_toml",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "torch-ddp": "torch_ddp",
    "torchft": "torchft",
}
#: Serving target -> the file of this package that writes it (:mod:`meshwright.export.serving`).
SERVING_TARGETS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "llm-d": "llm_d", "dynamo": "dynamo"}
#: The executor of this package, which is exported to by saving the plan.
OWN = "meshwright"
#: Everything that runs plans.
ENGINES = (*TARGETS, OWN)


def refusals(engine: str, request: ExportRequest) -> tuple[Gap, ...]:
    """Return everything that `engine` cannot run of a legal plan; empty when it runs the whole of it.

    Pure, and about 15 microseconds: a search asks it of every plan that it keeps (``search --for``). ``request.plan``
    is legal and has its dp filled in (:meth:`meshwright.plan.Plan.on`); that it fits in memory is another question.
    A :class:`Gap` says the facet, the value and the reason, and ``mend`` the fields of the nearest plan without it.
    :func:`meshwright.export.export` refuses a plan for exactly these gaps.

    Raises:
        MeshwrightError: E002 for an engine that is none of :data:`ENGINES`; names the nearest.
    """
    if engine == OWN:
        return tuple(_own(d) for d in unexecutable(request.plan, request.model, request.train))
    return tuple(all_limits(exporter(engine, ENGINES))(request))


def exporter(name: str, known: tuple[str, ...] = tuple(TARGETS)) -> ModuleType:
    """The module that writes a target.

    Raises:
        MeshwrightError: E002 for a name that is none of `known`.
    """
    if name not in TARGETS:
        own = "it runs the plan as it is: meshwright run plan.toml --data PATH"
        serves = "it serves: say --serve rate=8,prompt=1024,output=256 in place of --train"
        help = own if name == OWN else serves if name in SERVING_TARGETS else nearest(name, known)
        raise MeshwrightError.one("E002", f"no export to {name!r}", place=f"--to {name}", help=help)
    return import_module(f"meshwright.export.{TARGETS[name]}")


def _own(found: Diagnostic) -> Gap:
    """A plan that the executor does not run, as a gap; its help names the nearest plan whole."""
    facet, _, value = found.place.removeprefix("plan.").partition(" = ")
    return Gap(facet=facet, value=value, reason=found.message, help=found.help)
