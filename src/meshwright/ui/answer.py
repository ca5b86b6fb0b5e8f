"""Answers of the page: the verdict on a question with its controls, and one section of the report about it."""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from typing import Any

import msgspec

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.papers.whatif import what_if
from meshwright.plan import Plan, check
from meshwright.plan.facets.overlap import overlapped
from meshwright.plan.text import says
from meshwright.plan.written import write
from meshwright.quantity import big, gibibytes, seconds
from meshwright.report import document, facts, html
from meshwright.report.remedies import remedies
from meshwright.search.found import OBJECTIVES, value_of
from meshwright.spec.toml_text import dumps
from meshwright.ui import controls
from meshwright.ui.asked import CLUSTER_FILE, CONFIG_FILE, AskedTexts, Read, read
from meshwright.ui.repair import RepairPlace, changed, nearest

#: Sections of the report that the page shows as its tabs.
PANELS = ("time", "memory", "step", "layers", "basis")
#: Numbers of the workload that have a control: name -> field.
WORKLOAD = {"batch": "global_batch", "seq": "seq_len"}
#: What is asked of the whole training run.
GOAL = ("tokens", "days", "budget", "price")
#: Field of a plan -> its control, where the two have different names.
RENAMED = {"microbatch": "mb", "ulysses": "algorithm", "shard": "zero", "etp": "ep"}


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question and what was done to it: ``moves`` are controls and their new values, in the order they were moved;
    with ``mend`` the plan is replaced by the nearest legal one."""

    asked: AskedTexts
    moves: dict[str, bool | int | str] = {}
    mend: bool = False


class PanelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question and the section of its report that is wanted."""

    asked: AskedTexts
    panel: str


def answer(request: AnswerRequest) -> dict[str, Any]:
    """The verdict, the controls with their legal values, all that is wrong, and ways to take the question away."""
    asked = request.asked
    found = read(asked)
    wrong = [_told(d, control) for control, d in found.wrong]
    asked, found = _with_moves(request, asked, found, wrong)
    out: dict[str, Any] = {"asked": msgspec.to_builtins(asked), "errors": wrong, "hints": _hints(found)}
    if found.complete:
        model, cluster, train, plan = found.parts
        illegal = check(plan, model, cluster, train)
        wrong += [_told(d, "plan") for d in illegal]
        out["controls"] = msgspec.to_builtins(controls.shown(plan, model, cluster, train))
        out["workload"] = {name: getattr(train, field) for name, field in WORKLOAD.items()}
        if illegal:
            mended = nearest(found.said, RepairPlace(model, cluster, train))
            out["mended"] = None if mended is None else write(mended)
        else:
            _verdict(asked, out, wrong)
    return out | _taken_away(asked, found)


def _with_moves(request: AnswerRequest, asked: AskedTexts, found: Read, wrong: list[dict]) -> tuple[AskedTexts, Read]:
    """The question after its controls were moved; a move that nothing legal follows from is an error of its own."""
    for name, value in request.moves.items():
        if name in WORKLOAD and found.train is not None and type(value) is int and value > 0:
            text = msgspec.structs.replace(found.train, **{WORKLOAD[name]: value}).text()
        elif name in controls.CONTROLS and found.complete and _suits(name, value):
            model, cluster, train, plan = found.parts
            overlap = name.startswith("overlap")  # the others leave open what a framework overlaps
            after = controls.moved(plan if overlap else found.said, name, value, model, cluster, train)
            if after is None:
                message, help = f"no legal plan has {name} = {value}", "take one of the values that are offered"
                wrong.append(_told(Diagnostic(code="I009", message=message, place=name, help=help), name))
                continue
            asked = msgspec.structs.replace(asked, plan=_words(after, said=overlap and bool(asked.framework)))
            found = read(asked)
            continue
        else:
            continue
        asked = msgspec.structs.replace(asked, train=text)
        found = read(asked)
    if request.mend and found.complete:
        model, cluster, train, _ = found.parts
        mended = nearest(found.said, RepairPlace(model, cluster, train))
        if mended is not None:
            asked = msgspec.structs.replace(asked, plan=write(mended))
            found = read(asked)
    return asked, found


def _words(plan: Plan, *, said: bool) -> str:
    """The words of a plan; what overlaps too when that has to be `said`, usual or not."""
    words = write(plan)
    if not said or says(words, "overlap"):
        return words
    return f"{words} overlap={','.join(overlapped(plan.overlap)) or 'none'}"


def _suits(name: str, value: Any) -> bool:
    """Whether a value is of the control's type, and a number is one a plan can have."""
    usual = controls.CONTROLS[name].of(Plan())
    if type(value) is not type(usual):
        return False
    least, most = (0, 3) if name == "zero" else (1, 10**7)
    return least <= value <= most if type(value) is int else True


def _verdict(asked: AskedTexts, out: dict[str, Any], wrong: list[dict]) -> None:
    try:
        prediction, tried = predicted(asked)
    except MeshwrightError as error:
        wrong += [_told(d, "tries" if asked.tries else "plan") for d in error.diagnostics]
        return
    verdict = facts.verdict(prediction)
    out["verdict"] = {
        "fits": prediction.fits,
        "fit": verdict[0],
        "remedies": list(remedies(prediction)),
        "step_time_s": prediction.step_time_s,
        "values": objectives(prediction),
        "title": f"{verdict[1].split('/')[0]} a step, {prediction.model.name} on {prediction.cluster.name}",
        "said": _said(prediction),
        "short": _short(prediction),
        "plan": prediction.plan.text(),
        "run": [list(line) for line in facts.training_run(prediction)[:1]],
        "limits": [
            {"said": ", ".join(text for text in facts.limit(limit, prediction.fits) if text), "met": limit.met}
            for limit in prediction.limits
        ],
        "tried": tried,
    }
    out["html"] = section("verdict", prediction)
    out["warnings"] = [*prediction.cautions, *prediction.warnings]


def objectives(p: Prediction) -> dict[str, float | None]:
    """The plan's values of a search's objectives, less being better: a place among the plans of a Pareto front."""
    return {name: value_of(name, p) for name in OBJECTIVES}


def _short(p: Prediction) -> str:
    """The verdict where there is little room."""
    usd = p.money.usd_per_million_tokens
    parts = ["fits" if p.fits else "does not fit", seconds(p.step_time_s), f"MFU {p.mfu:.0%}"]
    return " · ".join([*parts, *([] if usd is None else [f"{facts.usd(usd)}/{facts.priced_per(p.train)}"])])


def _said(p: Prediction) -> str:
    """The verdict as one sentence, for who listens."""
    usd = p.money.usd_per_million_tokens
    cost = "" if usd is None else f", {facts.usd(usd)} per million {p.train.counted}"
    return f"{facts.fit(p)}. {seconds(p.step_time_s)} a step, MFU {p.mfu:.0%}{cost}."


@lru_cache(maxsize=4)
def predicted(asked: AskedTexts, *, detail: bool = False) -> tuple[Prediction, dict[str, Any] | None]:
    """The prediction of a question with its recipes over the plan, and what these bring.

    Raises:
        MeshwrightError: everything that is wrong with the question.
    """
    found = read(asked)
    if found.wrong:
        raise MeshwrightError([d for _, d in found.wrong])
    model, cluster, train, plan = found.parts
    if not asked.tries:
        prediction = predict(model, cluster, train, plan, costs=found.costs, detail=detail)
        return msgspec.structs.replace(prediction, goal=found.goal), None
    tried = what_if(asked.tries, model, cluster, train, plan, costs=found.costs)
    after = tried.after
    if detail:
        after = predict(model, cluster, train, after.plan, costs=found.costs, detail=True)
    return msgspec.structs.replace(after, goal=found.goal), {
        "gain": tried.gain,
        "memory": _difference(tried.memory_bytes / 2**30),
        "exact": tried.exact,
        "before": seconds(tried.before.step_time_s),
        "plan": write(changed(after.plan, "layout", dp=0)),
    }


def _difference(gib: float) -> str:
    return "the same memory" if abs(gib) < 0.05 else f"{gib:+.1f} GiB"


def panel(request: PanelRequest) -> dict[str, Any]:
    """One section of the report as HTML.

    Raises:
        MeshwrightError: I001 for a section that there is not, and what is wrong with the question.
    """
    if request.panel not in PANELS:
        help = f"one of {', '.join(PANELS)}"
        raise MeshwrightError.one("I001", f"no section {request.panel[:80]!r}", place="panel", help=help)
    prediction, _ = predicted(request.asked, detail=True)
    return {"panel": request.panel, "html": section(request.panel, prediction)}


def section(name: str, prediction: Prediction) -> str:
    """A section of the report whose styles wait for the page's script, as its policy forbids those of attributes."""
    return html.section(name, prediction).replace(' style="', ' data-style="')


def _told(d: Diagnostic, control: str) -> dict[str, Any]:
    """A violation with the controls it concerns."""
    return {**msgspec.to_builtins(d), "controls": _concerned(d, control)}


def _concerned(d: Diagnostic, control: str) -> list[str]:
    if control == "train":
        return [name for name in WORKLOAD if re.search(rf"\b{name}\w*=", d.place)][:1] or ["train"]
    if control != "plan" or d.place.startswith("plan '"):  # a word of the plan that cannot be read
        return [control]
    words = re.findall(r"(?:layout|pipeline|sequence|experts|memory|precision|overlap)\.(\w+)", d.place)
    words += re.findall(r"\b([a-z]+)\d+\b", d.place) if not words else []
    named = [RENAMED.get(word, word) for word in words]
    if d.code.startswith("S") and "vpp" in d.place + d.message:
        named.append("vpp")
    elif d.code.startswith("S"):
        named.append("schedule")
    return [name for name in dict.fromkeys(named) if name in controls.CONTROLS] or ["plan"]


def _hints(found: Read) -> dict[str, str]:
    """Summarise how each text was understood, in a few words."""
    hints = {}
    if found.model is not None:
        m = found.model
        active = f", {big(m.active_params)} active" if m.active_params < 0.95 * m.num_params else ""
        hints["model"] = f"{big(m.num_params)} parameters{active}, {m.num_layers} layers"
    if found.cluster is not None:
        c = found.cluster
        kinds = " + ".join(dict.fromkeys(i.device.name for i in c.islands))
        memory = min(i.device.memory_bytes for i in c.islands)
        nodes = sum(i.num_nodes for i in c.islands)
        hints["on"] = f"{c.num_devices:,} {kinds}, {gibibytes(memory)} each, {nodes:,} node{'s'[: nodes > 1]}"
    if found.train is not None:
        hints["train"] = f"{big(found.train.tokens_per_step)} {found.train.counted} a step"
    if found.plan is not None and found.cluster is not None and found.train is not None:
        layout = found.plan.on(found.cluster.num_devices).layout
        axes = [f"{axis}{n}" for axis in ("tp", "cp", "pp", "dp") if (n := getattr(layout, axis)) > 1]
        ranks = f"{' × '.join(axes) or 'one rank'} = {layout.num_ranks:,} rank{'s'[: layout.num_ranks > 1]}"
        waves, rest = divmod(found.train.global_batch, layout.dp * found.plan.pipeline.microbatch)
        hints["plan"] = ranks if rest else f"{ranks}, {waves:,} microbatch{'es'[: 2 * (waves > 1)]}"
    return hints


def _taken_away(asked: AskedTexts, found: Read) -> dict[str, Any]:
    """The question as a command and as a file. What was pasted is named as the files it has to be saved as."""
    said = {
        "model": CONFIG_FILE if asked.config else asked.model,
        "on": CLUSTER_FILE if asked.cluster else asked.on,
        "train": asked.train,
        "plan": asked.plan,
        "framework": asked.framework,
        **{name: getattr(asked, name) for name in GOAL},
    }
    words = ["meshwright", "whatif" if asked.tries else "predict", said["model"]]
    goal = () if asked.tries else GOAL  # which whatif does not take
    for option in ("on", "train", "plan", "framework", *goal):
        words += [f"--{option}", said[option]] if said[option] else []
    words += ["--try", ",".join(asked.tries)] if asked.tries else []
    table = {"format_version": 1, **{key: text for key, text in said.items() if text}}
    return {"command": shlex.join(words), "toml": dumps(table), "complete": found.complete}


def warm_up() -> None:
    """Answer a small question once, so that a user's first one does not wait for compiled code and templates."""
    asked = AskedTexts(model="llama3-8b", on="8xh100", train="batch=64,seq=4096", plan="pp2 vpp2")
    answer(AnswerRequest(asked=asked))
    for name in PANELS:
        panel(PanelRequest(asked=asked, panel=name))
    document.static("base.css")
