"""Meshwright plans and predicts large-model training on any cluster, and runs the plan with torch.distributed.

    import meshwright as mw

    model, cluster = mw.load_model("llama3-70b"), mw.load_cluster("64xh100")
    train, plan = mw.parse_train("batch=512,seq=8192"), mw.parse_plan("tp8 pp4 vpp5 zero1")
    answer = mw.predict(model, cluster, train, plan)
    print(answer.step_time_s, answer.mfu, answer.fits)

The public names are below, in the order of the pipeline; each is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: What Meshwright does today, in one sentence, and what it is designed for and does not do yet. The package's
#: description, the help, the README and the book say the same.
SUMMARY = "Plan and predict large-model training and serving on any cluster, and train or serve the plan with torch"
NOT_YET = "Serving by several machines is predicted and planned, and not run yet"

#: Public name -> (module, name in it), in pipeline order: the question, the plan, the graph, the answer.
_PUBLIC = {
    "Model": ("meshwright.spec.model", "Model"),
    "load_model": ("meshwright.spec.model", "load"),
    "transformer": ("meshwright.spec.model", "transformer"),
    "Cluster": ("meshwright.spec.cluster", "Cluster"),
    "Device": ("meshwright.spec.cluster", "Device"),
    "load_cluster": ("meshwright.spec.cluster", "load"),
    "load_device": ("meshwright.spec.cluster", "load_device"),
    "Train": ("meshwright.spec.workload", "Train"),
    "parse_train": ("meshwright.spec.workload", "parse"),
    "parse_feed": ("meshwright.spec.feed", "parse"),
    "Plan": ("meshwright.plan", "Plan"),
    "parse_plan": ("meshwright.plan", "parse"),
    "check_plan": ("meshwright.plan", "check"),
    "TaskGraph": ("meshwright.graph", "TaskGraph"),
    "Timeline": ("meshwright.timeline", "Timeline"),
    "predict": ("meshwright.answer.predict", "predict"),
    "train": ("meshwright.run.api", "train"),
    "Prediction": ("meshwright.answer.prediction", "Prediction"),
    "Diagnostic": ("meshwright.errors", "Diagnostic"),
    "MeshwrightError": ("meshwright.errors", "MeshwrightError"),
    "Infeasible": ("meshwright.errors", "Infeasible"),
}

#: Packages with a public name of their own: ``mw.sync.hook``.
_PACKAGES = ("sync",)
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from meshwright.version import VERSION

        return VERSION
    if name in _PACKAGES:
        return import_module(f"meshwright.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
