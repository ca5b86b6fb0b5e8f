"""Words behind the count of a short name: ``4x4xa100,25gbe,nics=2``, ``nodes=4,gpus=4,device=a100,nvlink=600,nic=hdr``.

Reading says what the words are and which of them contradict each other; :mod:`meshwright.spec.cluster_levels` builds
them into the standard node and levels of a device or machine. Speeds are catalog data (:mod:`meshwright.spec.links`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from meshwright.errors import Diagnostic, nearest
from meshwright.spec import cluster_tiers
from meshwright.spec import wired_words as wired
from meshwright.spec.cluster_tiers import Tiers
from meshwright.spec.hardware import Device, Near, Optics
from meshwright.spec.links import LinkKind, by_word, named, networks
from meshwright.spec.rate_words import delay_s

#: The key of what a packet between nodes takes besides, and the longest that it says: a way around the world.
DELAY, MOST_DELAY_S = "delay", 10.0
KEYS = (
    "nodes",
    "gpus",
    "device",
    "nvlink",
    "nic",
    "nics",
    "meet",
    DELAY,
    "near",
    "optics",
    *wired.KEYS,
    *cluster_tiers.EXAMPLES,
)
ALIASES = {"gpus_per_node": "gpus", "devices": "gpus", "net": "nic", "network": "nic", "gpu": "device"}
INSIDE = ("nvlink", "nvswitch", "nonvlink", "pcie")
#: Largest number that any of the words takes: above, a slip of the keyboard.
MOST = 10**7
EXAMPLE = "nodes=4,gpus=4,device=a100,nvlink=600,nic=25gbe"
#: The word of ports that exchanges share, as files of clusters call it; and of memory that starts exchanges by itself.
SHARED, TRIGGERS = "shared_ports", "triggers"
#: Ports of a node and their network: ``8xib400``.
PORTS = re.compile(r"(\d+)\s*x\s*(\w[\w.-]*)")
#: Bandwidth in GB/s and peak in TFLOP/s of a processor near memory: ``13000:100``.
NEAR = re.compile(r"(\d{1,7}(?:\.\d{1,4})?):(\d{1,6}(?:\.\d{1,4})?)")
#: Keys of a second processor of each device, each with what its two numbers are and such words.
SECOND = {
    "near": ("bandwidth in GB/s and peak in TFLOP/s of a processor near each device's memory", "near=13000:100"),
    "optics": ("rate in 1e12 operations/s and power in W of a processor of light", "optics=1500:30"),
}


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """Meaning of an island's words; "" or None where they say nothing.

    Attributes:
        nodes, gpus: machines, and devices in each.
        device: the device or machine, where a key names it.
        inside: what joins the devices of a node: ``nvlink``, ``nvswitch``, ``nonvlink``, ``pcie`` or a PCIe link.
        nvlink_gb_s: NVLink of one device, both directions together, as datasheets give it.
        nic, nics: the network, by the word used, and its ports in a node.
        delay_s: what a packet from one node to another takes on its way besides the network's own latency.
        meet: the network on which this island meets others, where that is not its own.
        near: memory bandwidth in GB/s and peak in TFLOP/s of a processor near each device's memory.
        optics: rate in 1e12 operations/s and power in W of a processor of light beside each device.
        shared: exchanges that are under way at once share a port.
        triggers: memory starts the exchange of what a kernel has finished, and sums what arrives.
        wired: what is said of the network's switches.
        tiers: memory and drives of a node.
    """

    nodes: int | None = None
    gpus: int | None = None
    device: str = ""
    inside: str = ""
    nvlink_gb_s: float | None = None
    nic: str = ""
    nics: int | None = None
    delay_s: float | None = None
    meet: str = ""
    near: tuple[float, float] | None = None
    optics: tuple[float, float] | None = None
    shared: bool = False
    triggers: bool = False
    wired: wired.SwitchWords = wired.SwitchWords()
    tiers: Tiers = Tiers()

    @property
    def link(self) -> LinkKind | None:
        """The network between nodes, if one is named."""
        return named(self.nic) if self.nic else None

    def device_of(self, device: Device) -> Device:
        """The device with what the words say of it."""
        if self.triggers:
            device = msgspec.structs.replace(device, triggers=True)
        if self.near is not None:
            rate, peak = self.near
            peaks = dict.fromkeys(("bf16", "fp16"), peak * 1e12)
            device = device.beside(Near(memory_gb_s=rate, peak_flops=peaks, source=f"said: near={rate:g}:{peak:g}"))
        if self.optics is not None:
            rate, watts = self.optics
            said = f"said: optics={rate:g}:{watts:g}"
            device = device.lit(Optics(peak_flops=rate * 1e12, power_w=watts, source=said))
        return device

    def text(self) -> str:
        """The words after the count, each behind a comma, as :func:`read` takes them."""
        said = [self.inside] if self.inside else []
        if self.nvlink_gb_s is not None:
            said = [f"nvlink={self.nvlink_gb_s:g}", *(word for word in said if word != "nvlink")]
        said += [self.nic] if self.nic else []
        said += [f"nics={self.nics}"] if self.nics is not None else []
        said += [f"{DELAY}={self.delay_s * 1e3:g}ms"] if self.delay_s is not None else []
        said += [f"meet={self.meet}"] if self.meet else []
        said += [f"near={self.near[0]:g}:{self.near[1]:g}"] if self.near is not None else []
        said += [f"optics={self.optics[0]:g}:{self.optics[1]:g}"] if self.optics is not None else []
        said += [SHARED] if self.shared else []
        said += [TRIGGERS] if self.triggers else []
        said += self.wired.words()
        said += self.tiers.said
        return "".join(f",{word}" for word in said)


def bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=f"cluster = {place}", help=help)


def all_words() -> list[str]:
    """Every word, for suggestions."""
    return [*by_word(), *INSIDE, *wired.PLAIN, SHARED, TRIGGERS, *(f"{key}=" for key in (*KEYS, *ALIASES))]


def read(items: Iterable[str], place: str) -> tuple[Words, list[Diagnostic]]:
    """The words of one island and everything that is wrong with them: unknown ones, values of another kind, and those
    that contradict each other."""
    said: dict[str, dict[str, object]] = {}
    wrong: list[Diagnostic] = []
    for item in items:
        for field, value, word in _meanings(item.strip().lower(), place, wrong):
            said.setdefault(field, {}).setdefault(word, value)
    _narrow(said.get("inside", {}))
    for field, ways in said.items():
        if len(set(map(str, ways.values()))) > 1:
            keep = "keep the one that your nodes have" if field in ("nic", "inside") else "keep one of them"
            what = {"nic": "two networks", "inside": "two ways to join the devices of a node"}.get(
                field, "two ways to wire a network" if field == "kind" else field + " twice"
            )
            wrong.append(bad("C013", f"{' and '.join(ways)} contradict each other: {what}", place, keep))
    values = {field: next(iter(ways.values())) for field, ways in said.items()}
    of_switches = {field: values.pop(field) for field in wired.FIELDS if field in values}
    values["wired"] = wired.SwitchWords(**of_switches)
    wrong += [bad("C013", *what[:1], place, what[1]) for what in wired.alone(values["wired"])]
    tiers = {key: values.pop(key) for key in cluster_tiers.EXAMPLES if key in values}
    if "nvlink_gb_s" in values and values.get("inside", "nvlink") not in ("nvlink", "nvswitch"):
        other = next(iter(said["inside"]))
        number = next(iter(said["nvlink_gb_s"]))
        wrong.append(bad("C013", f"{number} and {other} contradict each other", place, "keep the one your nodes have"))
    return Words(**values, tiers=cluster_tiers.said(tiers)), wrong


def _narrow(ways: dict[str, object]) -> None:
    """Leave out a way to join devices that another says more exactly: ``nonvlink,pcie4`` is ``pcie4``."""
    exact = {str(value) for value in ways.values()}
    for general, finer in (("nonvlink", "pcie"), ("pcie", "pcie"), ("nvlink", "nvswitch")):
        if any(value.startswith(finer) and value != general for value in exact):
            ways.pop(general, None)


def _meanings(word: str, place: str, wrong: list[Diagnostic]) -> Iterator[tuple[str, object, str]]:
    """(field, value, the word itself) for one word; what is wrong with it goes to `wrong`."""
    key, equals, value = (part.strip() for part in word.partition("="))
    key = ALIASES.get(key, key)
    if not word:
        wrong.append(bad("C014", "an empty word between commas", place, f"such as {EXAMPLE}"))
    elif not equals:
        yield from _plain(word, place, wrong)
    elif key not in KEYS:
        wrong.append(bad("C014", f"unknown key {key!r}", place, _near_key(f"{key}=")))
    elif key in cluster_tiers.EXAMPLES:
        size = cluster_tiers.read(key, value)
        if size is not None:
            yield key, size, word
        else:
            unit = "a rate in GB/s" if key == "copy" else "a size, and rates in GB/s"
            wrong.append(bad("C014", f"{key}={value} is not {unit}", place, f"such as {cluster_tiers.EXAMPLES[key]}"))
    elif key == "device":
        if value:
            yield key, value, word
        else:
            wrong.append(bad("C014", "device= names nothing", place, "device=a100; meshwright catalog devices"))
    elif key in SECOND:
        said, (what, example) = NEAR.fullmatch(value), SECOND[key]
        if said is not None and 0 < float(said[1]) <= 1e6 and 0 < float(said[2]) <= 1e5:
            yield key, (float(said[1]), float(said[2])), word
        else:
            wrong.append(bad("C014", f"{word} is no {what}", place, f"such as {example}"))
    elif key == DELAY:
        seconds = delay_s(value)
        if seconds is not None and seconds <= MOST_DELAY_S:
            yield "delay_s", seconds, word
        else:
            message = f"{word} is no time up to {MOST_DELAY_S:g} s that a packet takes from one node to another"
            wrong.append(bad("C014", message, place, f"such as {DELAY}=20ms"))
    elif key in wired.KEYS:
        field, read, help = wired.meaning(key, value)
        if help:
            wrong.append(bad("C014", f"{key} = {value!r} {read}", place, help))
        else:
            yield field, read, word
    elif key in ("nic", "meet"):
        if _is_network(value):
            yield key, value, word
        else:
            wrong.append(bad("C014", f"no network {value!r}", place, _network_near(value)))
    else:
        number = _number(value, key, place, wrong)
        if number is not None:
            yield ("nvlink_gb_s" if key == "nvlink" else key), number, word


def _plain(word: str, place: str, wrong: list[Diagnostic]) -> Iterator[tuple[str, object, str]]:
    counted = PORTS.fullmatch(word)
    if counted is not None and _is_network(counted[2]):
        yield "nic", counted[2], word
        yield from ((f, v, word) for f, v, _ in _meanings(f"nics={counted[1]}", place, wrong))
    elif word in INSIDE:
        yield "inside", word, word
    elif word in (SHARED, TRIGGERS):
        yield ("shared" if word == SHARED else TRIGGERS), True, word
    elif word in wired.PLAIN:
        yield *wired.PLAIN[word], word
    elif (link := named(word)) is not None:
        yield ("inside", link.name, word) if link.kind == "pcie" else ("nic", word, word)
    else:
        wrong.append(bad("C014", f"unknown word {word!r}", place, _near(word)))


def _is_network(word: str) -> bool:
    link = named(word)
    return link is not None and link.kind != "pcie"


def _number(value: str, key: str, place: str, wrong: list[Diagnostic]) -> float | int | None:
    """A number above 0 in the unit of its key; a count of NICs may be 0."""
    whole = key != "nvlink"
    given = value if whole else value.removesuffix("gb/s").removesuffix("gbps").strip()
    if re.fullmatch(r"\d{1,12}" if whole else r"\d{1,9}(\.\d{1,6})?", given):
        number = int(given) if whole else float(given)
        if (number > 0 or key == "nics") and number <= MOST:
            return number
    unit = "a whole number" if whole else "a number of GB/s, both directions of one device together"
    wrong.append(bad("C014", f"{key} = {value!r} is not {unit} up to {MOST:,}", place, f"such as {EXAMPLE}"))
    return None


def _near(word: str) -> str:
    """The nearest words; a family that lacks its speed is given all of them."""
    if rate := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(?:bps|bits?/s|bits|b/s)", word):
        return f"a rate in bits is written {rate[1]}{rate[2]}bit; meshwright explain cluster"
    stem = re.sub(r"[^a-z]", "", {"infiniband": "ib", "ethernet": "gbe", "rdma": "roce"}.get(word, word))
    family = [link.name for link in networks() if stem in (re.sub(r"[^a-z]", "", link.name),)]
    if family and word not in family:
        return f"which of {', '.join(family)}?"
    return nearest(word, all_words()) + "; meshwright explain cluster"


def _near_key(key: str) -> str:
    near = _near(key)
    return near if not near.startswith("known") else f"keys are {', '.join(KEYS)}; meshwright explain cluster"


def _network_near(value: str) -> str:
    near = _near(value)
    return near if near.startswith(("which", "did")) else f"one of {', '.join(link.name for link in networks())}"
