"""Rollouts of a reinforcement-learning job: what is generated for every training step, where, and how far ahead.

``prompts=512,samples=16,prompt=1024,output=lognormal:median=4000;sigma=1,cut=27648`` is a step that trains on 16
answers to each of 512 prompts. Without ``devices=`` the same devices generate, then train. ``devices=48,staleness=4``:
48 of them generate all the time, with parameters that are at most 4 updates older than those that train on the answers.
The words of lengths and of the engine are those of ``--serve``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.catalog import meant
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.engine_words import ENGINE_READERS
from meshwright.spec.serve import Serve
from meshwright.spec.serve import parse as parse_serve

#: Who waits for whom: everybody in turn; the next answers are generated while a step trains on the last ones, by the
#: parameters of exactly one update before; generation never waits but for the bound on the age of its parameters.
SYNC, ONE_STEP, ASYNC = "sync", "one-step", "async"
CONTROLS = (SYNC, ONE_STEP, ASYNC)
#: The number of generating devices that gives the most trajectories a second.
BEST = "best"
#: Largest numbers: above, a slip of the keyboard.
MOST, MOST_STALENESS, MOST_STEPS = 1 << 20, 1024, 1024
#: Words of ``--serve`` that rollouts say, besides those of the engine.
_OF_REQUESTS = ("prompt", "output", "lengths", "seed", "expert_routing")
#: Words of the engine that are of jobs beside requests, of replicas that know one another, or of adapters.
_ELSEWHERE = ("beside", "sharing", "power", "zoo", "peers", "borrow", "pairs", "kv_send", "chunk_cache")
_ELSEWHERE += ("lora", "adapter_slots", "adapter_pool")
_YES_NO = {"yes": True, "no": False}


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of a job. A step trains on ``samples`` answers to each of ``prompts`` prompts, in ``updates``
    optimizer steps of an equal share each, after ``forwards`` further forward passes over all of them (for PPO, the
    log-probabilities under the policy before its updates). Answers end at ``cut`` tokens (0: nowhere).

    ``devices`` generate under the words of ``plan`` (0: those that train do, in turn; ``best``: as many as are best).
    ``control`` is one of :data:`CONTROLS`, ``staleness`` the most updates that parameters may be older than those that
    train on their answers. ``interrupt``: new parameters interrupt answers that are generated, whose keys and values
    are computed again; without, they wait until all of these have ended. ``steps`` training steps are simulated (0: as
    many as it takes). ``against`` says what it is laid beside: ``sync``, the same job where all devices generate, then
    train. ``serve`` has the lengths and the engine.
    """

    prompts: int
    serve: Serve
    samples: int = 1
    cut: int = 0
    devices: int | str = 0
    plan: str = ""
    control: str = SYNC
    staleness: int = 0
    interrupt: bool = True
    updates: int = 1
    forwards: int = 1
    steps: int = 0
    against: str = ""
    words: str = ""

    @property
    def trajectories(self) -> int:
        """Answers that a step trains on."""
        return self.prompts * self.samples

    @property
    def apart(self) -> bool:
        """Whether other devices generate than train."""
        return self.devices != 0

    @property
    def bound(self) -> int:
        """The most updates that parameters may be older than those that train on their answers."""
        return {SYNC: 0, ONE_STEP: 1, ASYNC: self.staleness}[self.control]

    def text(self) -> str:
        """Return the form that :func:`parse` reads back."""
        return self.words

    def with_devices(self, devices: int) -> Rollout:
        """Return the same with so many generating devices."""
        return msgspec.structs.replace(self, devices=devices, words=_put(self.words, "devices", str(devices)))

    def synchronous(self) -> Rollout:
        """Return the same where all devices generate, then train."""
        kept = [w for w in self.words.split(",") if w.partition("=")[0].strip().lower() not in _OF_POOLS]
        return msgspec.structs.replace(self, devices=0, control=SYNC, staleness=0, against="", words=",".join(kept))


#: Words of rollouts on devices of their own.
_OF_POOLS = ("devices", "control", "staleness", "interrupt", "against")


def _put(words: str, key: str, value: str) -> str:
    kept = [w for w in words.split(",") if w.partition("=")[0].strip().lower() != key]
    return ",".join([*kept, f"{key}={value}"])


def _count(most: int, least: int = 1) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        return int(text) if text.isascii() and text.isdecimal() and least <= int(text[:12]) <= most else None

    return read


def _devices(text: str) -> int | str | None:
    return BEST if text.lower() == BEST else _count(MOST)(text)


#: Word -> what reads its value, and what that is.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "prompts": (_count(MOST), f"a whole number from 1 to {MOST:,}"),
    "samples": (_count(10_000), "a whole number from 1 to 10,000"),
    "cut": (_count(MOST), f"a number of tokens from 1 to {MOST:,}"),
    "devices": (_devices, "a number of devices, or best"),
    "plan": (lambda text: text or None, "words of a plan, such as tp2"),
    "control": (lambda text: text if text in CONTROLS else None, f"one of {', '.join(CONTROLS)}"),
    "staleness": (_count(MOST_STALENESS, 0), f"a whole number from 0 to {MOST_STALENESS:,}"),
    "interrupt": (_YES_NO.get, "yes or no"),
    "updates": (_count(1024), "a whole number from 1 to 1,024"),
    "forwards": (_count(16, 0), "a whole number from 0 to 16"),
    "steps": (_count(MOST_STEPS, 2), f"a whole number from 2 to {MOST_STEPS:,}"),
    "against": (lambda text: text if text == SYNC else None, SYNC),
}
_ENGINE = tuple(key for key in ENGINE_READERS if key not in _ELSEWHERE)
#: Keys that rollouts may say.
KEYS = (*READERS, *_OF_REQUESTS, *_ENGINE)


def parse(text: str, *, place: str = "--rollout", base: Path = Path()) -> Rollout:
    """Return the rollouts that a text such as ``prompts=512,samples=16,prompt=1024,output=8192`` says; files of lengths
    lie in `base`.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 without prompts or lengths, W005 contradiction, and the
            codes of :func:`meshwright.spec.serve.parse`; all at once.
    """
    found: list[Diagnostic] = []
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    where = f"{place} {text!r}"

    def bad(code: str, message: str, help: str) -> None:
        found.append(Diagnostic(code=code, message=message, place=where, help=help))

    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        key = key.lower()
        if key not in KEYS:
            bad("W001", f"unknown key {key!r} of rollouts", meant(key, list(KEYS)))
        elif given.setdefault(key, value) != value:
            bad("W005", f"{key}={given[key]} and {key}={value} contradict each other", "keep one of them")
        elif key in READERS:
            reader, wanted = READERS[key]
            read = reader(value)
            if read is None:
                bad("W002", f"{key} = {value!r} is not {wanted}", f"write {key}=<{wanted}>")
            else:
                values[key] = read
    if "prompts" not in given:
        bad("W003", "the rollouts do not say prompts", "for example prompts=512,samples=16,prompt=1024,output=8192")
    _contradictions(given, values, bad)
    served = ",".join(f"{key}={value}" for key, value in given.items() if key not in READERS)
    try:
        serve = parse_serve(f"batch=1,{served}", place=place, base=base)
    except MeshwrightError as error:
        found += [
            msgspec.structs.replace(d, place=d.place.replace(f"batch=1,{served}", text)) for d in error.diagnostics
        ]
    if found:
        raise MeshwrightError(found)
    if "control" not in values:
        values["control"] = ASYNC if values.get("staleness") else SYNC
    if values["control"] == ONE_STEP:
        values |= {"staleness": 1, "interrupt": False}
    return Rollout(**values, serve=serve, words=",".join(f"{key}={value}" for key, value in given.items()))


def _contradictions(given: dict[str, str], values: dict[str, Any], bad: Callable[[str, str, str], None]) -> None:
    control, staleness = values.get("control"), values.get("staleness")
    for key in ("control", "staleness", "interrupt"):
        said = given.get(key)
        if said and "devices" not in given and said not in (SYNC, "0"):
            help = "say devices= too, such as devices=48 or devices=best; or drop it: all devices generate, then train"
            bad("W005", f"{key}={said} is of devices that generate while others train", help)
    if "against" in given and "devices" not in given:
        bad("W005", "against=sync, and all devices generate, then train", "say devices=, or drop against=")
    if control == ASYNC and not staleness:
        help = "for example staleness=4: parameters may be 4 updates older than those that train on their answers"
        bad("W003", "control=async does not say how old parameters may be", help)
    if control == SYNC and staleness:
        bad("W005", f"control=sync and staleness={staleness}: nothing is old", "drop one of them")
    if control == ONE_STEP and staleness not in (None, 1):
        bad("W005", f"control=one-step and staleness={staleness}: it is exactly 1", "drop staleness=")
    if "interrupt" in given and (control in (SYNC, ONE_STEP) or (control is None and not staleness)):
        help = "drop it, or say staleness= of 1 or more"
        bad("W005", "interrupt= is of answers that are generated across updates", help)
    prompts, updates = values.get("prompts"), values.get("updates", 1)
    if prompts and prompts % updates:
        bad("W005", f"updates={updates} does not divide prompts={prompts}", "each update trains an equal share")
