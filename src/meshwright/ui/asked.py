"""Asked: a question as the page sends it, read without ever opening a file that the page names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from meshwright.cost import load_framework, standard_on
from meshwright.cost.chain import Costs
from meshwright.cost.framework import overlapped_as_usual
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan import Plan
from meshwright.plan.pool import several
from meshwright.plan.pool_words import is_several
from meshwright.plan.pool_words import read as read_pools
from meshwright.plan.text import read as read_plan
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models
from meshwright.spec.cluster import Cluster
from meshwright.spec.goal import (
    Goal,
    priced,
    read_budget,
    read_days,
    read_price,
    read_tokens,
    unanswerable,
    with_tokens,
)
from meshwright.spec.model import Model
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as read_train

#: Longest text of a field and of a pasted file, in characters.
MAX_TEXT, MAX_PASTED = 2_000, 100_000
#: What would open a file in a reader of texts: a path, or a name that ends as one.
FILE = re.compile(r"[/\\]|\.(toml|jsonl?|csv|txt|gz)\b|^\s*~", re.IGNORECASE)
#: What a file that was pasted is called in errors, commands and downloads.
CONFIG_FILE, CLUSTER_FILE = "config.json", "cluster.toml"

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Pasted = Annotated[str, msgspec.Meta(max_length=MAX_PASTED)]
Id = Annotated[str, msgspec.Meta(max_length=100)]


class AskedTexts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The texts of a question. ``config`` and ``cluster`` are the text of a ``config.json`` and of a cluster's TOML,
    which go before the names in ``model`` and ``on``; ``tokens``, ``days``, ``budget`` and ``price`` are of the whole
    training run; ``tries`` are papers whose recipes are put over the plan."""

    model: Text = ""
    config: Pasted = ""
    on: Text = ""
    cluster: Pasted = ""
    train: Text = ""
    plan: Text = ""
    framework: Id = ""
    tokens: Id = ""
    days: Id = ""
    budget: Id = ""
    price: Text = ""
    tries: Annotated[tuple[Id, ...], msgspec.Meta(max_length=20)] = ()


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """The question as far as it could be read, and what is wrong with the rest, by the control it concerns. ``said`` is
    the plan as its words say it; ``plan`` has the overlap of a named framework where they leave that open."""

    model: Model | None = None
    cluster: Cluster | None = None
    train: Train | None = None
    plan: Plan | None = None
    said: Plan | None = None
    costs: Costs | None = None
    goal: Goal = Goal()
    wrong: tuple[tuple[str, Diagnostic], ...] = ()

    @property
    def complete(self) -> bool:
        return not self.wrong

    @property
    def parts(self) -> tuple[Model, Cluster, Train, Plan]:
        """The four of a complete question."""
        assert self.model and self.cluster and self.train and self.plan
        return self.model, self.cluster, self.train, self.plan


def read(asked: AskedTexts) -> Read:
    """Every part that can be read; nothing is raised, so that one answer tells everything that is wrong."""
    wrong: list[tuple[str, Diagnostic]] = []

    def part(control: str, reader: Callable[[], Any]) -> Any:
        try:
            return reader()
        except MeshwrightError as error:
            wrong.extend((control, d) for d in error.diagnostics)
            return None

    model = part("model", lambda: _model(asked.model, asked.config))
    cluster = part("on", lambda: _cluster(asked.on, asked.cluster))
    train = part("train", lambda: _train(asked.train))
    said = plan = part("plan", lambda: _plan(asked.plan))
    framework = part("framework", lambda: load_framework(asked.framework)) if asked.framework else None
    if plan and model and cluster and framework:
        plan = overlapped_as_usual(framework, plan, asked.plan, model, cluster)
    price = part("price", lambda: read_price(asked.price)) if asked.price else None
    if price and cluster:
        cluster = part("price", lambda: priced(cluster, price))
    tokens = part("tokens", lambda: read_tokens(asked.tokens)) if asked.tokens else None
    if tokens and train:
        train = part("tokens", lambda: with_tokens(train, tokens))
    goal = Goal(
        days=part("days", lambda: read_days(asked.days)) if asked.days else None,
        budget_usd=part("budget", lambda: read_budget(asked.budget)) if asked.budget else None,
    )
    wrong += [(d.place.removeprefix("--"), d) for d in unanswerable(goal, train, [cluster] if cluster else [])]
    costs = None
    if cluster and not (asked.framework and framework is None):
        costs = part("on", lambda: standard_on(cluster, asked.framework, train.dtype if train else "bf16"))
    return Read(
        model=model, cluster=cluster, train=train, plan=plan, said=said, costs=costs, goal=goal, wrong=tuple(wrong)
    )


def _missing(what: str, help: str) -> MeshwrightError:
    return MeshwrightError.one("X004", f"{what} is missing", place=what, help=help)


def _no_files(text: str, place: str, help: str) -> None:
    """I007 for a text that names a file: a page must not make this machine's files readable."""
    if FILE.search(text):
        raise MeshwrightError.one(
            "I007", f"the page opens no files, and {text[:80]!r} names one", place=place, help=help
        )


@lru_cache(maxsize=64)
def _model(name: str, config: str) -> Model:
    if config:
        try:
            table = json.loads(config)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            help = "paste the whole config.json, from { to }"
            raise MeshwrightError.one("M007", f"cannot read it: {reason}", place=CONFIG_FILE, help=help) from None
        return models.from_config(table, name=name or "pasted", place=CONFIG_FILE)
    if not name.strip():
        raise _missing("model", "choose one, such as llama3-70b, or paste a config.json")
    found = models.in_catalog(name.strip())
    if found is None:
        _no_files(name, f"model = {name[:80]}", "choose a name of the catalog, or paste the config.json")
        help = nearest(name[:80], models.known_names())
        raise MeshwrightError.one("M006", f"no model {name[:80]!r} in the catalog", place="model", help=help)
    return found


@lru_cache(maxsize=64)
def _cluster(text: str, pasted: str) -> Cluster:
    if pasted:
        return clusters.from_toml(pasted, place=CLUSTER_FILE)
    if not text.strip():
        raise _missing("cluster", "say one, such as 64xh100, or paste a cluster file")
    _no_files(text, f"cluster = {text[:80]}", "write 64xh100 or a name of the catalog, or paste the file's text")
    return clusters.load(text)


def _train(text: str) -> Train:
    if not text.strip():
        raise _missing("workload", "say for example batch=512,seq=8192")
    _no_files(text, f"workload = {text[:80]}", "write lengths with their shares: lengths=512:0.5;2048:0.5")
    return read_train(text, place="workload")


def _plan(text: str) -> Plan:
    _no_files(text, f"plan = {text[:80]}", "write words such as tp8 pp4 vpp5 zero1")
    if is_several(text):
        pools = read_pools(text, place="plan").pools
        raise several(tuple(pool.name for pool in pools), "this page")
    return read_plan(text, place="plan")
