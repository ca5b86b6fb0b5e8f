"""The step after a search: commands that train, serve or export the plan it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.requests import Requests
    from meshwright.spec.serve import Serve
    from meshwright.spec.workload import Train


def after_search(path: str, engines: Sequence[str], asked: str = "") -> str:
    """The line that says what follows a search whose plan is saved at `path`, "" where it is not saved yet.

    `engines` are those that run the whole plan, ``meshwright`` for its own executor; `asked` is the one that the user
    named, which is then the only one.
    """
    file = path or "plan.toml"
    ways = _ways(file, [asked] if asked else list(engines))
    if not ways:
        return f"next: no engine runs this plan as it is; --for ENGINE searches those that one runs{_saving(path)}"
    return f"next: {'' if path else f'add --save {file}, then '}{' or '.join(ways)}"


def _saving(path: str) -> str:
    return "" if path else ", --save plan.toml keeps it"


def _ways(file: str, engines: list[str]) -> list[str]:
    """Commands by which engines get the plan of a file."""
    others = [name for name in engines if name != "meshwright"]
    ways = [f"meshwright run {file} --data PATH"] if "meshwright" in engines else []
    if others:
        more = f" ({', '.join(others[1:])} too)" if others[1:] else ""
        ways.append(f"meshwright export {file} --to {others[0]}{more}")
    return ways


def training_engines(model: Model, cluster: Cluster, train: Train, plan: Plan) -> list[str]:
    """The engines that run the whole of a legal training plan."""
    from meshwright.export.engines import ENGINES, refusals
    from meshwright.export.request import ExportRequest

    if plan.several:
        return ["meshwright"]  # which alone knows pools; what it cannot run of them it says
    request = ExportRequest(model=model, cluster=cluster, train=train, plan=plan.on(cluster.num_devices))
    return [name for name in ENGINES if not refusals(name, request)]


def serving_engines(model: Model, cluster: Cluster, serve: Serve, plan: Plan, requests: Requests) -> list[str]:
    """The serving engines that a plan can be exported to."""
    from meshwright.export.engines import SERVING_TARGETS
    from meshwright.export.serving import export_serving

    found = []
    for name in SERVING_TARGETS:
        try:
            export_serving(name, model, cluster, serve, plan, requests=requests)
        except MeshwrightError:
            continue
        found.append(name)
    return found
