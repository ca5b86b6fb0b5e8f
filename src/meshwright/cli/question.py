"""A question: model, cluster, workload and plan as they were said, on the command line or in a .toml file.

A question file says the four in the words of the command line::

    format_version = 1
    model = "llama3-70b"
    on = "64xh100"
    train = "batch=512,seq=8192"
    plan = "tp8 pp4 vpp5 zero1"

or the first three, and the plan as the tables of a plan file (:mod:`meshwright.plan.toml`).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.feeding import read_feed
from meshwright.errors import Diagnostic, MeshwrightError, nearest

if TYPE_CHECKING:
    from meshwright.answer.prediction import Prediction
    from meshwright.cost import Framework
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.feed import Feed
    from meshwright.spec.goal import Goal
    from meshwright.spec.model import Model
    from meshwright.world.trace import JobWorld

FORMAT_VERSION = 1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The four texts, a framework profile if one is named, a ``title`` that says what it is, and what is asked of the
    whole training run: its tokens, a deadline, a budget, the price of a device-hour and the world it runs in; ``base``
    is the folder that paths in them are relative to."""

    model: str = ""
    on: str = ""
    train: str = ""
    plan: str = ""
    framework: str = ""
    title: str = ""
    tokens: str = ""
    days: str = ""
    budget: str = ""
    price: str = ""
    world: str = ""
    serve: str = ""
    denoise: str = ""
    rollout: str = ""
    feed: str = ""
    base: Path = Path()


#: What a question file may say besides; a number where it is one.
OPTIONAL = ("framework",)
GOAL = ("tokens", "days", "budget", "price")
WORLD = ("world",)
#: What is asked in place of a training step.
SERVE = ("serve",)
DENOISE = ("denoise",)
#: What is asked beside one, and what it may be fed by.
ROLLOUT = ("rollout",)
FEED = ("feed",)
#: Codes of a model that has or may have other words of a workload: one of another kind, or a file that says nothing of
#: what it is.
OTHER_WORDS = ("M007", "M010", "M011")
#: Field -> how it is written on the command line, for what is missing.
WANTED = {
    "model": "MODEL, a catalog name or a config.json (meshwright catalog models)",
    "on": "--on CLUSTER, such as 64xh100 (meshwright catalog clusters)",
    "train": "--train batch=512,seq=8192",
    "plan": '--plan "tp8 pp4 vpp5 zero1", or let meshwright search find one',
}
#: The same of a command that answers for requests, too.
OR_SERVED = {
    "train": "--train batch=512,seq=8192, or for requests in place of steps --serve rate=8,prompt=1024,output=256"
}


def load(path: str) -> Question:
    """The question in a .toml file.

    Raises:
        MeshwrightError: X006 unreadable, X007 another format version, X008 for every key that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
        help = "a question or plan file: meshwright init and meshwright search --save write one"
        raise MeshwrightError.one("X006", f"cannot read {path}: {reason}", place=path, help=help) from None
    return loads(text, path)


def preset(name: str) -> Question:
    """The question of the catalog with that name.

    Raises:
        MeshwrightError: X011 when there is none; names the nearest.
    """
    from meshwright import catalog

    known = {plain(other): other for other in catalog.names("presets")}
    if plain(name) not in known:
        help = f"{nearest(name, list(known.values()))} (meshwright catalog presets)"
        raise MeshwrightError.one("X011", f"no preset {name!r}", place=f"preset {name}", help=help)
    file = known[plain(name)]
    return loads(catalog.folder("presets").joinpath(f"{file}.toml").read_text(encoding="utf-8"), file)


def is_preset(text: str) -> bool:
    """Whether a text that is no file names a question of the catalog; no model has the name of one."""
    from meshwright import catalog

    return plain(text) in {plain(name) for name in catalog.names("presets")}


def plain(name: str) -> str:
    """A name in small letters, its words joined by hyphens."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def loads(text: str, path: str) -> Question:
    """The question that a text says; `path` is the file it came from, in error messages and for the files it names.

    Raises:
        MeshwrightError: as :func:`load`.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeshwrightError.one("X006", f"cannot read {path}: not TOML: {error}", place=path) from None
    check_version(table.pop("format_version", None), path)
    tables = [key for key, value in table.items() if isinstance(value, dict)]
    if tables and "plan" not in table:  # the file is a plan file too, and says what is wrong with it as one
        of_plan = [*tables, *(["links"] if "pools" in tables else [])]
        table = {key: value for key, value in table.items() if key not in of_plan} | {"plan": Path(path).name}
    table |= {key: str(table[key]) for key in GOAL if _is_number(table.get(key))}
    wrong = [
        _wrong(key, value, path)
        for key, value in table.items()
        if key not in (*WANTED, *OPTIONAL, *GOAL, *WORLD, *SERVE, *DENOISE, *ROLLOUT, *FEED, "title")
        or not _is_text(value)
    ]
    if wrong:
        raise MeshwrightError(wrong)
    return Question(**table, base=Path(path).parent)


def asked(said: Mapping[str, str]) -> Question:
    """The question of a command's options: where the model is a .toml file or a preset of the catalog, what that says
    with the others put over it.

    Raises:
        MeshwrightError: as :func:`load`.
    """
    if not said["model"].endswith(".toml"):
        if not is_preset(said["model"]):
            return Question(**said)
        over = {field: text for field, text in said.items() if field != "model" and text}
        return msgspec.structs.replace(_less_tokens(preset(said["model"]), over), **over)
    over = {field: _from_here(text) for field, text in said.items() if field != "model" and text}
    return msgspec.structs.replace(_less_tokens(load(said["model"]), over), **over)


def _less_tokens(question: Question, over: Mapping[str, str]) -> Question:
    """A file's question without its tokens where options say them: as an option of their own, or in the workload."""
    in_workload = [part for part in over.get("train", "").split(",") if part.strip().lower().startswith("tokens=")]
    if "tokens" in over and question.train:
        kept = [part for part in question.train.split(",") if not part.strip().lower().startswith("tokens=")]
        return msgspec.structs.replace(question, train=",".join(kept))
    return msgspec.structs.replace(question, tokens="") if in_workload else question


def _from_here(text: str) -> str:
    """A path given as an option is relative to the working folder, not to the question file."""
    if text.endswith((".json", ".toml")):
        return str(Path(text).resolve())
    # a trace of a world may stand among other words, and a file of lengths among those of a workload
    parts = [part.strip() for part in with_lengths(text, lambda name: str(Path(name).resolve())).split(",")]
    return ",".join(str(Path(p).resolve()) if p.endswith(".csv") and "=" not in p else p for p in parts)


def with_lengths(text: str, change: Callable[[str], str]) -> str:
    """A workload's text with the names of its files of lengths and requests changed, if it has any."""
    from meshwright.spec.lengths import is_file

    parts = text.split(",")
    for i, part in enumerate(parts):
        key, _, value = part.partition("=")
        word = key.strip().lower()
        if not value and word.endswith(".toml"):  # a file of a serving workload's words, in front of others
            parts[i] = change(part.strip())
        elif (word in ("lengths", "trace", "windows") and is_file(value)) or (word == "data" and value):
            name, hash, column = value.strip().partition("#")
            parts[i] = f"{key.strip()}={change(name)}{hash}{column}"
    return ",".join(parts)


def beside(text: str, path: str) -> str:
    """How a file at `path` says `text`, which may name a file or a folder: relative to where it lies."""
    if "/" in text and Path(text).is_dir():
        text += "/config.json"
    folder = Path(path).resolve().parent
    text = with_lengths(text, lambda name: name if Path(name).is_absolute() else os.path.relpath(name, folder))
    if not text.endswith((".json", ".toml")) or Path(text).is_absolute():
        return text
    return os.path.relpath(text, folder)


def check_version(version: Any, path: str, convert: str = "") -> None:
    """X007 unless `version` is the one this code reads; `convert` says how else to get there."""
    if version == FORMAT_VERSION:
        return
    newer = isinstance(version, int) and version > FORMAT_VERSION
    upgrade = "it was written by a newer version: pip install --upgrade meshwright"
    add = f"write format_version = {FORMAT_VERSION} at the top of the file"
    raise MeshwrightError.one(
        "X007",
        ("format_version is missing" if version is None else f"format_version is {version!r}")
        + f", this version reads {FORMAT_VERSION}",
        place=path,
        help=convert or (upgrade if newer else add),
    )


def read_all(questions: list[Question], *, also_wrong: Iterable[Diagnostic] = ()) -> list[Callable[[], Prediction]]:
    """One function per question that answers it. Everything that is wrong in any of them, and `also_wrong`, is
    raised at once; nothing is predicted before all can be."""
    wrong, ready, before = list(also_wrong), [], set()
    for question in questions:
        parts, found = read_parts(question)
        goal, unanswered = read_goal(question, parts)
        found += unanswered
        wrong += [d for d in found if d not in before]  # what two questions share is wrong once
        before.update(found)
        world, unreadable = read_world(question, parts)
        feed, unread = read_feed(question.feed)
        wrong += unreadable + unread
        ready.append((parts, question.framework, goal, world, feed))
    if wrong:
        raise MeshwrightError(wrong)
    return [_later(*one) for one in ready]


def _later(
    parts: list[Any], framework: str, goal: Goal, world: JobWorld | None, feed: Feed | None
) -> Callable[[], Prediction]:
    def answer() -> Prediction:
        from meshwright.answer.predict import predict
        from meshwright.cost import standard_on

        costs = standard_on(parts[1], framework, parts[2].dtype)
        prediction = predict(*parts, costs=costs, world=world, feed=feed)
        return msgspec.structs.replace(prediction, goal=goal)

    return answer


def read_parts(question: Question) -> tuple[list[Any], list[Diagnostic]]:
    """Model, cluster, train and plan as far as they could be read, and what was wrong with the others. The cluster is
    at the price that was said, the workload over the tokens that were."""
    from meshwright.plan import parse as read_plan
    from meshwright.spec.cluster import load as read_cluster
    from meshwright.spec.goal import absent, priced, read_price, read_tokens, with_tokens
    from meshwright.spec.model import load as read_model
    from meshwright.spec.workload import parse as read_train

    readers = {"model": _model_reader(read_model), "on": _one_cluster(read_cluster)}
    readers |= {"train": lambda text: read_train(text, base=question.base), "plan": read_plan}
    parts: dict[str, Any] = {}
    wrong: list[Diagnostic] = []

    def read(field: str, reader: Callable[[], Any]) -> Any:
        try:
            parts[field] = reader()
        except MeshwrightError as error:
            wrong.extend(error.diagnostics)
        return parts.get(field)

    for field, reader in readers.items():
        text = getattr(question, field)
        if field == "train" and any(one.code in OTHER_WORDS for one in wrong):
            continue
        if text:  # else it is reported as missing by the command
            read(field, lambda reader=reader, text=text: reader(path_of(text, question.base)))
    if question.framework:
        from meshwright.cost.framework import load as read_framework

        read("framework", lambda: read_framework(question.framework))
        if {"model", "on", "plan", "framework"} <= parts.keys():
            parts["plan"] = _overlapped(parts["plan"], parts["model"], parts["on"], question.plan, parts["framework"])
    if question.price and read("price", lambda: read_price(question.price)) and "on" in parts:
        wrong += absent(parts["price"], {i.device.name for i in parts["on"].islands}, question.on)
        read("on", lambda: priced(parts["on"], parts["price"]))
    if question.tokens and read("tokens", lambda: read_tokens(question.tokens)) and "train" in parts:
        read("train", lambda: with_tokens(parts["train"], parts["tokens"]))
    return [parts[field] for field in readers if field in parts], wrong


def _model_reader(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of models that names the presets whose names are near, where no model is meant."""

    def read(text: str) -> Any:
        try:
            return reader(text)
        except MeshwrightError as error:
            from meshwright import catalog

            near = [name for name in catalog.names("presets") if text and name.startswith(plain(text)[:8])]
            if not near or any(d.code != "M006" for d in error.diagnostics):
                raise
            wrong = [
                msgspec.structs.replace(d, help=f"{d.help}; presets: {', '.join(near)}") for d in error.diagnostics
            ]
            raise MeshwrightError(wrong) from None

    return read


def _one_cluster(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of clusters that says where ranges are read."""

    def read(text: str) -> Any:
        from meshwright.spec.cluster_range import is_range

        if not is_range(text):
            return reader(text)
        help = f"one cluster here; meshwright search ... --on {text} compares all of them"
        raise MeshwrightError.one("B005", f"{text!r} is a range of clusters", place=f"--on {text}", help=help)

    return read


def read_world(question: Question, parts: Iterable[Any]) -> tuple[JobWorld | None, list[Diagnostic]]:
    """The world that the run of a question meets, None where none is said, and what is wrong with it, also for the
    workload among the `parts`."""
    from meshwright.plan import Plan
    from meshwright.spec.workload import Train
    from meshwright.world.trace import read

    if not question.world:
        return None, []
    wrong: list[Diagnostic] = []
    try:
        world = read(question.world, base=question.base)
    except MeshwrightError as error:
        world = None
        wrong += error.diagnostics
    job = world is None or world.of_job
    parts = tuple(parts)
    if any(isinstance(part, Plan) and part.asks_peers for part in parts):
        return world, wrong  # whose steps meet it
    if job and any(isinstance(part, Train) and not part.tokens for part in parts):
        help = "add --tokens 15t, or tokens=15t to the workload"
        message = "a world is of a whole run, and its tokens are not said"
        wrong.insert(0, Diagnostic(code="B003", message=message, place="--world", help=help))
    return world, wrong


def read_goal(question: Question, parts: Iterable[Any]) -> tuple[Goal, list[Diagnostic]]:
    """The deadline and the budget of a question, and what is wrong with them, also for the clusters and the workload
    among its `parts`."""
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.goal import Goal, read_budget, read_days, unanswerable
    from meshwright.spec.workload import Train

    values: dict[str, float] = {}
    wrong: list[Diagnostic] = []
    for field, text, reader in (
        ("days", question.days, read_days),
        ("budget_usd", question.budget, read_budget),
    ):
        try:
            values |= {field: reader(text)} if text else {}
        except MeshwrightError as error:
            wrong += error.diagnostics
    parts, goal = list(parts), Goal(**values)
    train = next((part for part in parts if isinstance(part, Train)), None)
    clusters = [part for part in parts if isinstance(part, Cluster)]
    return goal, wrong + unanswerable(goal, train, clusters)


def unserved(given: Any, names: Iterable[str], command: str) -> list[Diagnostic]:
    """Return X004 for options of serving that are given where requests are not said."""
    return [
        Diagnostic(
            code="X004",
            message=f"--{name.replace('_', '-')} is of requests, and nothing is served",
            place=f"meshwright {command}",
            help="say --serve, or drop it",
        )
        for name in names
        if getattr(given, name)
    ]


def _overlapped(plan: Plan, model: Model, cluster: Cluster, text: str, framework: Framework) -> Plan:
    """Return the plan with the overlap of the named framework, where the plan is words that leave that open."""
    from meshwright.cost.framework import overlapped_as_usual

    return plan if text.endswith(".toml") else overlapped_as_usual(framework, plan, text, model, cluster)


def path_of(text: str, base: Path) -> str:
    """The path of a text that may name a file; files named in a question file lie beside it."""
    if text.endswith((".json", ".toml")) and not Path(text).is_absolute():
        return str(base / text)
    return text


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(key: str, value: Any, path: str) -> Diagnostic:
    known = ["format_version", *WANTED, *OPTIONAL, *GOAL, *WORLD, *SERVE, *DENOISE, *ROLLOUT, *FEED, "title"]
    if key not in known:
        return Diagnostic(code="X008", message=f"unknown key {key!r}", place=path, help=nearest(key, known))
    return Diagnostic(
        code="X008", message=f"{key} = {value!r} is not a text", place=path, help=f'write {key} = "..." in quotes'
    )
