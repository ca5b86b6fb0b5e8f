"""The Goal: by when a training run has to end and what it may cost, and the price of a device-hour.

``--days 30`` is a deadline, ``--budget 2M`` US dollars for the whole run, ``--price 2.10`` US dollars for one device
and hour, and ``--price h100=2.10,a100=1.2`` one price for each kind of device. A goal is of a whole run, so the
workload has to say its tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import parse_count, write_count
from meshwright.spec.cluster import Cluster, load_device
from meshwright.spec.workload import Train

#: Days of one unit of a deadline.
_UNITS = {"h": 1 / 24, "d": 1.0, "w": 7.0}
_DEADLINE = re.compile(r"(\d+(?:\.\d+)?)\s*(h(?:ours?)?|d(?:ays?)?|w(?:eeks?)?)?", re.IGNORECASE)
_MONEY = re.compile(r"\$?\s*(\d+(?:\.\d+)?(?:e\d{1,3})?)\s*([kmb])?(?:\s*usd)?", re.IGNORECASE)
_SCALE = {"k": 1e3, "m": 1e6, "b": 1e9}
#: Above these, a slip of the keyboard: a century of training, the dollars of all the world's products of a year, and
#: the price of an hour that no device has.
MOST_DAYS, MOST_USD, MOST_PRICE = 36_525.0, 1e14, 1e4
#: Where a price that was said comes from.
SAID = "as said (--price)"


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A deadline in days and a budget in US dollars for the whole run; None where there is no such limit."""

    days: float | None = None
    budget_usd: float | None = None


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """US dollars for one device and hour: ``of_device`` by catalog name, ``of_all`` for every device."""

    of_all: float | None = None
    of_device: dict[str, float] = {}


def read_days(text: str) -> float:
    """A deadline in days: ``30``, ``30d``, ``36h``, ``6w``.

    Raises:
        MeshwrightError: B001 when it is none.
    """
    match = _DEADLINE.fullmatch(text.strip())
    days = float(match[1]) * _UNITS[(match[2] or "d")[0].lower()] if match else 0.0
    if not 0 < days <= MOST_DAYS:
        raise _unreadable(text, "--days", "a deadline", "days above 0 and up to a century: --days 30, or 36h, or 6w")
    return days


def read_budget(text: str) -> float:
    """US dollars: ``2M``, ``750k``, ``$1,200,000``.

    Raises:
        MeshwrightError: B001 when it is none.
    """
    usd = _dollars(text)
    if usd is None or not 0 < usd <= MOST_USD:
        raise _unreadable(text, "--budget", "a budget", "US dollars above 0: --budget 2M, or 750k, or 1200000")
    return usd


def read_price(text: str) -> Price:
    """``2.10`` for every device, or ``h100=2.10,a100=1.2`` for each kind.

    Raises:
        MeshwrightError: B001 for every part that is no price, C001 for every device that is not known.
    """
    wrong: list[Diagnostic] = []
    of_all, of_device = None, {}
    for part in text.split(","):
        name, equals, figure = part.rpartition("=")
        usd = _dollars(figure)
        if usd is None or not 0 < usd <= MOST_PRICE or (equals and not name.strip()):
            help = "US dollars for a device and hour: --price 2.10, or --price h100=2.10,a100=1.2"
            wrong += _unreadable(part, "--price", "a price", help).diagnostics
        elif not equals:
            if of_all not in (None, usd):
                wrong += _twice(text, "every device", of_all, usd)
            of_all = usd
        else:
            try:
                device = load_device(name).name
            except MeshwrightError as error:
                wrong += [msgspec.structs.replace(d, place=f"--price {text}") for d in error.diagnostics]
                continue
            if of_device.get(device, usd) != usd:
                wrong += _twice(text, device, of_device[device], usd)
            of_device[device] = usd
    if wrong:
        raise MeshwrightError(wrong)
    return Price(of_all=of_all, of_device=of_device)


def read_tokens(text: str) -> float:
    """Tokens of a whole run: ``15t``, ``300b``, ``1.5e12``.

    Raises:
        MeshwrightError: B001 when it is none.
    """
    count = parse_count(text)
    if not count:
        raise _unreadable(text, "--tokens", "a number of tokens", "such as --tokens 15t, 300b or 1.5e12")
    return float(count)


def with_tokens(train: Train, tokens: float) -> Train:
    """The workload over so many tokens.

    Raises:
        MeshwrightError: W005 when the workload itself says another number.
    """
    if train.tokens not in (0.0, tokens):
        said, other = write_count(train.tokens), write_count(tokens)
        raise MeshwrightError.one(
            "W005",
            f"tokens={said} and --tokens {other} contradict each other",
            place=f"--train ...,tokens={said} --tokens {other}",
            help="keep one of them",
        )
    return msgspec.structs.replace(train, tokens=tokens)


def absent(price: Price, devices: Collection[str], where: str) -> list[Diagnostic]:
    """B004 for every device that has a price and is none of `devices`, those of what `where` names."""
    return [
        Diagnostic(
            code="B004",
            message=f"{name} has a price and {where} has none of it",
            place=f"--price {name}={usd:g}",
            help=f"its devices are {', '.join(sorted(devices))}",
        )
        for name, usd in price.of_device.items()
        if name not in devices
    ]


def priced(cluster: Cluster, price: Price) -> Cluster:
    """The cluster at the prices that were said; devices without one keep the catalog's."""
    if not any(price.of_all is not None or i.device.name in price.of_device for i in cluster.islands):
        return cluster
    hourly = 0.0
    for island in cluster.islands:
        usd = price.of_device.get(island.device.name, price.of_all)
        usd = island.device.price_usd_hour if usd is None else usd
        if usd is None:  # the others' price alone is not the cluster's
            return msgspec.structs.replace(cluster, price_usd_hour=None)
        hourly += usd * island.num_devices
    sources = {**cluster.sources, "price_usd_hour": SAID}
    return msgspec.structs.replace(cluster, price_usd_hour=hourly, sources=sources)


def unanswerable(goal: Goal, train: Train | None, clusters: list[Cluster]) -> list[Diagnostic]:
    """B003 for a goal of a run whose tokens nobody said, B002 for a budget on devices without a price: all of them."""
    wrong = []
    if train is not None and not train.tokens:
        wrong += [
            Diagnostic(
                code="B003",
                message=f"{what} is of a whole run, and its tokens are not said",
                place=option,
                help="add --tokens 15t, or tokens=15t to the workload",
            )
            for what, option, value in (
                ("a deadline", "--days", goal.days),
                ("a budget", "--budget", goal.budget_usd),
            )
            if value is not None
        ]
    if goal.budget_usd is None:
        return wrong
    unpriced: dict[str, str] = {}
    for cluster in clusters:
        if cluster.total_price_usd_hour() is None:
            without = [i.device for i in cluster.islands if i.device.price_usd_hour is None]
            unpriced |= {d.name: d.sources.get("price_usd_hour", "no price in its description") for d in without}
    return wrong + [
        Diagnostic(
            code="B002",
            message=f"a budget cannot be held: {device} has {reason}",
            place="--budget",
            help=f"say what a device costs an hour: --price 2.10, or --price {device}=2.10",
        )
        for device, reason in unpriced.items()
    ]


def _dollars(text: str) -> float | None:
    match = _MONEY.fullmatch(text.strip().replace("_", "").replace(",", ""))
    if not match:
        return None
    value = float(match[1]) * _SCALE.get((match[2] or "").lower(), 1.0)
    return value if math.isfinite(value) else None


def _unreadable(text: str, option: str, what: str, help: str) -> MeshwrightError:
    return MeshwrightError.one("B001", f"{text.strip()!r} is not {what}", place=f"{option} {text}", help=help)


def _twice(text: str, what: str, before: float, after: float) -> list[Diagnostic]:
    message = f"{what} costs {before:g} and {after:g} US dollars an hour"
    return [Diagnostic(code="B001", message=message, place=f"--price {text}", help="keep one of them")]
