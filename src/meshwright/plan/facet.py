"""Facet: one group of decisions of a plan as data and pure functions, from its words to its rules.

A file of ``plan/facets/`` is a facet: the record that a plan holds, and a :class:`Facet` named ``FACET`` with one
:class:`Field` for everything that can be said of it. Text form, TOML, rules, executability, the space of a search, the
keys of its memos and the help walk those, so that a new field is said in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

    Rule = Callable[[Plan, Model, Cluster, Train], Iterator[Diagnostic]]
    Domain = Callable[[Model, Cluster, Train], tuple[Any, ...] | None]

#: Kinds of things that a field decides: which tasks there are and what they wait for, what a layer costs, what is
#: exchanged and stored around the layers, where ranks are on the cluster.
STRUCTURE, LAYER, EXCHANGE, PLACEMENT = "structure", "layer", "exchange", "placement"
#: Ways of saying a field: name and number (``tp8``), the value alone (``selective``), or ``grads=bf16``.
NUMBERED, ALONE, KEYED = "numbered", "alone", "keyed"
#: Values of a search for what an assignment works out: the same everywhere, or balanced by what each takes.
EVEN, BALANCED = "even", "balanced"
#: Digits of the longest number that is read: more are none that anything has.
DIGITS = 12
MOST = 10**7


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How the values of a field are written: ``read`` gives the value of a text, None where it has none, or raises a
    MeshwrightError that says more; ``write`` the text of a value; ``wanted`` names the values in an error. ``names``
    are all texts where they can be listed. ``whole``: commas are part of a value. ``open``: words are looked up, and
    more of them may come (schedules). ``kind`` is the type of a value, as files of a search keep it."""

    read: Callable[[str], Any]
    wanted: str
    write: Callable[[Any], str] = str
    names: tuple[str, ...] = ()
    whole: bool = False
    open: bool = False
    ordered: bool = False
    kind: Any = str


def number(text: str) -> int | None:
    """The whole number that a text says; None for any other text."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= DIGITS else None


def count(least: int = 1, most: int = MOST, wanted: str = "") -> Form:
    """Whole numbers."""

    def read(text: str) -> int | None:
        value = number(text)
        return value if value is not None and least <= value <= most else None

    return Form(read=read, wanted=wanted or f"at least {least} and at most {most}", ordered=True, kind=int)


def names(*known: str) -> Form:
    """Some names."""
    wanted = ", ".join(known[:-1]) + f" or {known[-1]}"
    return Form(read=lambda text: text if text in known else None, wanted=wanted, names=known)


def yes_no() -> Form:
    """Yes or no."""
    read = {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}.get
    write = lambda value: "yes" if value else "no"  # noqa: E731
    return Form(read=read, write=write, wanted="yes or no", names=("yes", "no"), kind=bool)


def counts(wanted: str, least: int = 1) -> Form:
    """Several whole numbers of at least `least`, joined by commas."""

    def read(text: str) -> tuple[int, ...] | None:
        values = tuple(map(number, text.split(",")))
        return values if all(value is not None and value >= least for value in values) else None

    write = lambda values: ",".join(map(str, values))  # noqa: E731
    return Form(read=read, write=write, wanted=wanted, whole=True, kind=str | tuple[int, ...])


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a plan says.

    ``name`` is its name in words, in ``--fix`` and in the report of a search, ``attribute`` that in the facet's record
    (several where one word says them all). ``place`` orders the words of a plan. ``decides`` are its kinds of
    consequences; what is decided by less than the whole value has a function in ``seen``, so that plans alike in that
    share what was worked out. ``size``: a size of the mesh, or of what its ranks hold, that a search chooses first.
    ``domain`` gives the values in the default space of a search, None those that follow from other fields; without it
    there is one, the plan's default. ``search`` are further values that only a search has, ``stored`` turns a value
    of a search into attributes and ``of`` an attribute back. ``with_sizes``: whether it is legal depends on the sizes.
    ``serving``: it is of serving alone, where ``served`` gives the values in the default space of a search.
    ``useful``: whether plans that differ in it alone differ, asked of one with the sizes, and with the fields of
    ``with_sizes`` if it is none of those. ``also`` are other words that say it, ``numbered`` other words with a
    number; ``say`` gives the words where they are not the plain ones.
    """

    name: str
    help: str
    form: Form
    spelled: str
    place: int
    decides: tuple[str, ...]
    attribute: str | tuple[str, ...] = ""
    facet: str = ""
    usual: Any = None
    seen: dict[str, Callable[[Plan], Any]] = {}
    size: bool = False
    domain: Domain | None = None
    search: tuple[str, ...] = ()
    stored: Callable[[Any], dict[str, Any]] | None = None
    of: Callable[[Any], Any] | None = None
    useful: Callable[[Plan], bool] | None = None
    with_sizes: bool = False
    also: dict[str, dict[str, Any]] = {}
    numbered: dict[str, Callable[[int], dict[str, Any]]] = {}
    say: Callable[[Plan], list[str]] | None = None
    serving: bool = False
    served: Callable[[Model, Cluster], tuple[Any, ...]] | None = None

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attributes of the facet's record that the field stands for."""
        return self.attribute if isinstance(self.attribute, tuple) else (self.attribute,)

    @property
    def part(self) -> str:
        """The part of a point of the search space that holds the field: ``core`` for sizes; else, for fields that
        change the graph of tasks and no layer, ``state`` if they change exchanges and ``piped`` if not; else
        ``inner``."""
        if self.size:
            return "core"
        if STRUCTURE not in self.decides or {LAYER, PLACEMENT} & {*self.decides}:
            return "inner"
        return "state" if EXCHANGE in self.decides else "piped"

    @property
    def kinds(self) -> str:
        """The kinds of decisions that the field makes, in words."""
        words = {
            STRUCTURE: "which tasks a step has",
            LAYER: "what a layer costs",
            EXCHANGE: "what is exchanged and stored",
            PLACEMENT: "where ranks are on the cluster",
        }
        return " and ".join(words[what] for what in self.decides)

    def sets(self, value: Any) -> dict[str, Any]:
        """The attributes of the facet's record for a value."""
        return {self.attribute: value} if self.stored is None else self.stored(value)

    def value(self, plan: Plan) -> Any:
        """The value that a plan has, as a search writes it."""
        record = getattr(plan, self.facet)
        return getattr(record, self.attribute) if self.of is None else self.of(record)

    def values(self, model: Model, cluster: Cluster, train: Train) -> tuple[Any, ...] | None:
        """The values in the default space of a search."""
        return (self.usual,) if self.domain is None else self.domain(model, cluster, train)

    def words(self, plan: Plan) -> list[str]:
        """Return the words of a plan for this field; none where it has its default."""
        if self.say is not None:
            return self.say(plan)
        value = self.value(plan)
        if value == self.usual:
            return []
        text = self.form.write(value)
        return [{NUMBERED: self.name + text, ALONE: text, KEYED: f"{self.name}={text}"}[self.spelled]]

    def why_not(self, value: Any) -> str:
        """Why no plan has a value of the right type; "" when one can."""
        try:
            if value == self.usual or self.form.read(self.form.write(value)) == value:
                return ""
        except MeshwrightError as error:
            return error.diagnostics[0].message
        except TypeError:  # a list of other things
            pass
        if isinstance(value, int) and value < 0:
            return "is out of range"
        if self.spelled == ALONE:
            return f"unknown value {value!r}"
        if self.spelled == NUMBERED:
            return f"{self.name} is {self.form.wanted}"
        return f"is not {self.form.wanted} (as {self.name}=)"


def uneven(*, balanced: bool = False, **said: Any) -> Field:
    """Return a field of a value for each part of a plan: an empty tuple of its attribute is ``even``. Where it is
    `balanced`, a search may leave its values to an assignment too."""
    name = said["name"]
    return Field(
        spelled=KEYED,
        search=(EVEN, BALANCED) if balanced else (EVEN,),
        stored=lambda value: {name: value if isinstance(value, tuple) else ()},
        of=lambda record: getattr(record, name) or EVEN,
        **said,
    )


class Facet(msgspec.Struct, frozen=True, kw_only=True):
    """One group of decisions: the ``record`` a plan holds under ``name``, its ``fields``, the ``rules`` of what is
    legal, and what a legal plan still has that the executor does not do (``unexecutable``). ``implied`` gives the
    record that the words said (its attributes) imply, over a fresh plan or another; ``usual`` the record where no word
    says any of it, but for the attributes ``beside``, and other facets decide.
    """

    name: str
    help: str
    record: type[msgspec.Struct]
    fields: tuple[Field, ...]
    rules: tuple[Rule, ...] = ()
    unexecutable: Callable[[Plan, Model, Train], Iterator[Diagnostic]] | None = None
    implied: Callable[[Plan, set[str], bool], Any] | None = None
    usual: Callable[[Plan], Any] | None = None
    beside: tuple[str, ...] = ()

    def complete(self) -> Facet:
        """Return the facet with its fields completed: their attribute, their facet, their default."""
        record = self.record()
        fields = []
        for field in self.fields:
            field = msgspec.structs.replace(field, attribute=field.attribute or field.name, facet=self.name)
            usual = getattr(record, field.attribute) if field.of is None else field.of(record)
            fields.append(msgspec.structs.replace(field, usual=usual))
        return msgspec.structs.replace(self, fields=tuple(fields))


def wrong(code: str, message: str, place: str, help: str) -> Diagnostic:
    """A violation by a plan."""
    return Diagnostic(code=code, message=message, place=f"plan.{place}", help=help)


def unrun(code: str, message: str, plan: Plan, facet: str, shown: str, **nearest: Any) -> Diagnostic:
    """A refusal of the executor: of the value `shown` of a facet, whose values `nearest` can be run instead."""
    record = msgspec.structs.replace(getattr(plan, facet), **nearest)
    help = f"the nearest plan that runs: {msgspec.structs.replace(plan, **{facet: record}).text()!r}"
    return Diagnostic(code=code, message=message, place=f"{facet}.{shown}", help=help)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def listed(number: int, most: int) -> str:
    """The divisors of a number up to `most` and to 65,536, in words."""
    return ", ".join(str(d) for d in range(1, min(number, most, 1 << 16) + 1) if number % d == 0)
