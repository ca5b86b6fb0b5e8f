"""A plan's text form: words such as ``tp8 pp4 dp2 zero1 interleaved vpp2 mb1 selective``, in any order.

The table of words is the grammar: reading and writing both walk it, so they cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from meshwright import schedules
from meshwright.catalog import meant
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.facets import (
    ATTENTION_KERNELS,
    CP_ALGORITHMS,
    DEFAULT_ORDER,
    GATHERED,
    LOSS_KERNELS,
    OVERLAPS,
    RECOMPUTE_MODES,
    Overlap,
)
from meshwright.spec.workload import DTYPE_BYTES

_INTEGER = re.compile(r"([a-z]+)(\d+)")
#: Digits of the longest number that is read: more are none that anything has.
DIGITS = 18
#: Words that are a name and a whole number: (facet, field).
INTEGER_WORDS: dict[str, tuple[str, str]] = {
    "tp": ("layout", "tp"),
    "pp": ("layout", "pp"),
    "vpp": ("pipeline", "vpp"),
    "dp": ("layout", "dp"),
    "cp": ("layout", "cp"),
    "ep": ("experts", "ep"),
    "etp": ("experts", "etp"),
    "zero": ("layout", "zero"),
    "shard": ("layout", "shard"),
    "mb": ("pipeline", "microbatch"),
    "ulysses": ("sequence", "ulysses"),
}
#: Words that stand alone: what they set.
PLAIN_WORDS: dict[str, tuple[tuple[str, str, object], ...]] = {
    "sp": (("layout", "sp", True),),
    "nosp": (("layout", "sp", False),),
    "fsdp": (("layout", "zero", 3),),
    **{mode: (("memory", "recompute", mode),) for mode in RECOMPUTE_MODES if mode != "none"},
    "norecompute": (("memory", "recompute", "none"),),
    **{name: (("precision", "compute", name),) for name in DTYPE_BYTES},
    **{name: (("memory", "attention", name),) for name in ATTENTION_KERNELS},
    **{name: (("sequence", "algorithm", name),) for name in CP_ALGORITHMS},
}
#: Words of the form key=value: (facet, field, reader, writer, what is wanted).
Reader = Callable[[str], object]


def _numbers(text: str) -> tuple[int, ...] | None:
    numbers = tuple(map(_number, text.split(",")))
    return None if None in numbers else numbers


def _order(text: str) -> tuple[str, ...] | None:
    read = tuple(text.split("-"))
    return read if sorted(read) == sorted(DEFAULT_ORDER) else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= DIGITS else None


def _ratio(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 1.0 <= value < 1e6 else None


def _stored(text: str) -> str | None:
    return text if text in ("fp32", "bf16", "fp16", "fp8", "none") else None


def _working(text: str) -> str | None:
    return text if text in ("bf16", "fp8") else None


def _loss(text: str) -> str | None:
    return text if text in LOSS_KERNELS else None


def _gathered(text: str) -> str | None:
    return text if text in GATHERED else None


#: Words with a value in them, as they are proposed to who misspelt one.
_WITH_VALUE = ("zero0", "zero1", "zero2", "hsdp8", "overlap=dp,pp")
_STORED = "fp32, bf16, fp16, fp8 or none"
VALUE_WORDS: dict[str, tuple[str, str, Reader, Callable, str]] = {
    "stages": ("layout", "stages", _numbers, lambda v: ",".join(map(str, v)), "layers per stage such as 9,10,10,9"),
    "shares": (
        "layout",
        "shares",
        _numbers,
        lambda v: ",".join(map(str, v)),
        "microbatches per kind of slice such as 5,11",
    ),
    "order": ("layout", "order", _order, "-".join, "an order of tp, cp, dp, pp such as tp-cp-dp-pp"),
    "recompute_layers": ("memory", "layers", _number, str, "a number of layers per chunk"),
    "loss": ("memory", "loss", _loss, str, " or ".join(LOSS_KERNELS)),
    "gathered": ("memory", "gathered", _gathered, str, " or ".join(GATHERED)),
    "imbalance": ("experts", "imbalance", _ratio, lambda v: repr(v).removesuffix(".0"), "a ratio of at least 1"),
    "params": ("precision", "params", _working, str, "bf16 or fp8"),
    "grads": ("precision", "grads", _stored, str, _STORED),
    "master": ("precision", "master", _stored, str, _STORED),
    "moments": ("precision", "moments", _stored, str, _STORED),
}


def read(text: str, *, place: str = "--plan") -> Plan:
    """The plan that the words say; what they leave open keeps its default, ``dp`` 0 (to be filled in).

    Raises:
        MeshwrightError: P001 unknown word, P002 bad value, P003 contradiction; all at once.
    """
    return _put_over(Plan(), _said(text, place))


def over(plan: Plan, text: str, *, place: str = "--plan") -> Plan:
    """`plan` with what the words say in place of what it said; a schedule brings its own number of chunks along.

    Raises:
        MeshwrightError: as :func:`read`.
    """
    return _put_over(plan, _said(text, place))


def says_overlap(text: str) -> bool:
    """Whether the words of a plan say what overlaps; errors as :func:`read`."""
    return ("overlap", "dp") in _said(text, "--plan")


def _put_over(base: Plan, said: dict[tuple[str, str], tuple[str, object]]) -> Plan:
    """`base` with what was said in place of its own, and with what that implies."""
    plan = _with_said(base, said)
    if base == Plan() or ("pipeline", "schedule") in said:
        plan = _with_implied(plan, said)
    if ("overlap", "dp") in said or base.overlap != _usual_overlap(base):
        return plan
    return msgspec.structs.replace(plan, overlap=_usual_overlap(plan))


def _said(text: str, place: str) -> dict[tuple[str, str], tuple[str, object]]:
    """What the words say: (facet, field) -> (word, value)."""
    found: list[Diagnostic] = []
    said: dict[tuple[str, str], tuple[str, object]] = {}
    for word in text.lower().split():
        try:
            settings = _settings(word)
        except MeshwrightError as error:
            found += [msgspec.structs.replace(d, place=f"{place} {text!r}: {word}") for d in error.diagnostics]
            continue
        for facet, field, value in settings:
            before = said.get((facet, field))
            if before and before[1] != value:
                found.append(
                    Diagnostic(
                        code="P003",
                        message=f"{before[0]!r} and {word!r} contradict each other",
                        place=f"{place} {text!r}",
                        help="keep one of them",
                    )
                )
            said[facet, field] = (word, value)
    if found:
        raise MeshwrightError(found)
    return said


def _with_said(base: Plan, said: dict[tuple[str, str], tuple[str, object]]) -> Plan:
    facets: dict[str, dict[str, object]] = {}
    for (facet, field), (_, value) in said.items():
        facets.setdefault(facet, {})[field] = value
    changed = {facet: msgspec.structs.replace(getattr(base, facet), **fields) for facet, fields in facets.items()}
    return msgspec.structs.replace(base, **changed)


def _with_implied(plan: Plan, said: dict) -> Plan:
    """`vpp` of more than one under plain ``1f1b`` is the interleaved schedule, as every framework names it; a
    schedule with its own number of chunks brings it along."""
    pipeline = plan.pipeline
    if ("pipeline", "schedule") not in said and pipeline.vpp > 1:
        pipeline = msgspec.structs.replace(pipeline, schedule="interleaved")
    if pipeline.schedule == "1f1b" and pipeline.vpp > 1:
        pipeline = msgspec.structs.replace(pipeline, schedule="interleaved")
    if ("pipeline", "vpp") not in said:
        pipeline = msgspec.structs.replace(pipeline, vpp=schedules.get(pipeline.schedule).default_vpp)
    return msgspec.structs.replace(plan, pipeline=pipeline)


def _usual_overlap(plan: Plan) -> Overlap:
    """Overlap of a plan whose words say none: the default, and the experts' exchange under a schedule made to hide
    it (DualPipe)."""
    hidden = plan.experts.ep > 1 and schedules.get(plan.pipeline.schedule).hides_experts
    return Overlap(ep=True) if hidden else Overlap()


def _settings(word: str) -> tuple[tuple[str, str, object], ...]:
    """What one word sets: (facet, field, value) each."""
    if word in PLAIN_WORDS:
        return PLAIN_WORDS[word]
    if (match := re.fullmatch(r"hsdp(\d+)", word)) and _number(match[1]):
        return ("layout", "zero", 3), ("layout", "shard", _number(match[1]))
    if word.startswith("overlap="):
        return _overlap(word)
    key, equals, value = word.partition("=")
    if equals:
        return (_value(key, value),)
    if (match := _INTEGER.fullmatch(word)) and match[1] in INTEGER_WORDS:
        facet, field = INTEGER_WORDS[match[1]]
        number = _number(match[2])
        least, most = (0, 3) if field == "zero" else (1, 10**7)
        if number is None or not least <= number <= most:
            raise MeshwrightError.one("P002", f"{word}: {match[1]} is at least {least} and at most {most}")
        return ((facet, field, number),)
    try:
        name = schedules.get(word).name
    except MeshwrightError:
        if word == "2bp":
            help = "2BP goes over a schedule: write 2bp:1f1b, or 2bp: and another schedule"
            raise MeshwrightError.one("P001", "'2bp' does not say over which schedule", help=help) from None
        known = [
            *PLAIN_WORDS,
            "zero0",
            "zero1",
            "zero2",
            *schedules.families(),
            "hsdp8",
            "overlap=dp,pp",
            *(f"{w}2" for w in INTEGER_WORDS),
        ]
        raise MeshwrightError.one("P001", f"unknown word {word!r} in a plan", help=meant(word, known)) from None
    return (("pipeline", "schedule", name),)


def _overlap(word: str) -> tuple[tuple[str, str, object], ...]:
    asked = [a for a in word.removeprefix("overlap=").split(",") if a and a != "none"]
    unknown = [a for a in asked if a not in OVERLAPS]
    if unknown:
        raise MeshwrightError.one(
            "P002", f"overlap={','.join(unknown)} is unknown", help=f"choose among {', '.join(OVERLAPS)}, or none"
        )
    return tuple(("overlap", name, name in asked) for name in OVERLAPS)


def _value(key: str, value: str) -> tuple[str, str, object]:
    if key not in VALUE_WORDS:
        raise MeshwrightError.one("P001", f"unknown key {key!r} in a plan", help=meant(key, [*VALUE_WORDS, "overlap"]))
    facet, field, reader, _, wanted = VALUE_WORDS[key]
    parsed = reader(value)
    if parsed is None:
        raise MeshwrightError.one("P002", f"{key}={value} is not {wanted}")
    return facet, field, parsed


def write(plan: Plan) -> str:
    """The shortest words that :func:`read` turns back into `plan`."""
    layout, pipeline, default = plan.layout, plan.pipeline, Plan()
    words = []
    for word, (facet, field) in INTEGER_WORDS.items():
        value = getattr(getattr(plan, facet), field)
        if word in ("zero", "shard"):
            continue
        shown = value != getattr(getattr(default, facet), field) or word == "mb"
        if word == "vpp":
            shown = value != schedules.get(pipeline.schedule).default_vpp or pipeline.schedule == "interleaved"
        if shown:
            words.append(f"{word}{value}")
    words += _zero_words(layout)
    if not layout.sp:
        words.append("nosp")
    if pipeline.schedule != "1f1b" or layout.pp > 1:
        words.append(pipeline.schedule)
    words += _plain_words(plan, default)
    for key, (facet, field, _, writer, _) in VALUE_WORDS.items():
        value = getattr(getattr(plan, facet), field)
        if value != getattr(getattr(default, facet), field):
            words.append(f"{key}={writer(value)}")
    if plan.overlap != _usual_overlap(plan):
        words.append("overlap=" + (",".join(n for n in OVERLAPS if getattr(plan.overlap, n)) or "none"))
    return " ".join(words)


def _zero_words(layout) -> list[str]:
    if layout.zero == 3:
        return [f"hsdp{layout.shard}" if layout.shard else "fsdp"]
    scope = [f"shard{layout.shard}"] if layout.shard else []
    return ([f"zero{layout.zero}"] if layout.zero else []) + scope


def _plain_words(plan: Plan, default: Plan) -> list[str]:
    words = []
    for facet, field in (
        ("memory", "recompute"),
        ("memory", "attention"),
        ("sequence", "algorithm"),
        ("precision", "compute"),
    ):
        value = getattr(getattr(plan, facet), field)
        if value != getattr(getattr(default, facet), field):
            words.append(value)
    return words
