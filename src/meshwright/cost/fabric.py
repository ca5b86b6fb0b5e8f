"""The fabrics collectives run on: a few physical constants each, fitted from measurements, kept as catalog data.

A fabric is one kind of level (NVLink 4 through switches, PCIe over a host bridge, EFA). Its constants are
dimensionless where they can be (fractions of a port's bandwidth, multiples of a level's latency), so that they
carry over to a level of other width; what no measurement tells is the kind's. The profiles are written by
``meshwright calibrate`` and say what they were fitted to.
"""

from __future__ import annotations

from functools import cache

import msgspec

from meshwright import catalog
from meshwright.errors import MeshwrightError
from meshwright.spec.links import SOCKETS
from meshwright.spec.rate_words import rate_bits_s
from meshwright.work import Hop

FORMAT_VERSION = 2


class Constants(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fitted constants of a fabric, from which collectives over it are priced.

    Attributes:
        start_ll_us, start_ll128_us, start_simple_us: launch to first byte of NCCL's three protocols.
        step_ll, step_ll128, step_simple: one step of a ring or tree over this level, as a multiple of its latency.
        all_gather, reduce_scatter, all_reduce, in_network, all_to_all, send: fraction of a port's bandwidth a large
            message reaches; ``in_network`` is an all-reduce the switches add up (NVLS).
        ll, ll128: what the two small-message protocols reach of that.
        tree: what a tree over nodes reaches of a ring's.
        own_copy: rate of a rank's copy of its own block into the result, over the port's bandwidth.
        in_network_start_us: launch to first byte of an all-reduce the switches add up.
        message_start_us, message_simple_us: start of point-to-point exchange, small and large messages.
        peer_us: each further peer of an exchange.
        send_connection, exchange_connection: what one connection's small messages reach of a port's bandwidth.
        contention: n children get ``(2/n) ** contention`` of a port each: a shared host bridge (PCIe without
            switches), or flows that collide on a network's links.
        host: devices of the host that was measured, where its bridges are shared: a host with fewer of them has as many
            bridges (one for each socket), on each of which fewer contend. 0 where that is nothing.
        gather_us: what a connection needs for each message it passes on in a ring of all-gather or reduce-scatter,
            whatever its size: every one of a ring's steps waits for its slowest connection. 0 unless measured at scale:
            then steps pay their latencies alone.
        reduce_us: the same in the ring of an all-reduce.
        tree_nodes: most nodes over which all-reduce runs as trees or in the switches, 0 for any number.
    """

    start_ll_us: float
    start_ll128_us: float
    start_simple_us: float
    step_ll: float
    step_ll128: float
    step_simple: float
    ll: float
    ll128: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    tree: float
    in_network: float
    own_copy: float
    in_network_start_us: float
    message_start_us: float
    message_simple_us: float
    peer_us: float
    send_connection: float
    exchange_connection: float
    send: float
    all_to_all: float
    contention: float
    host: float = 0.0
    gather_us: float = 0.0
    reduce_us: float = 0.0
    tree_nodes: float = 0.0


def uncontended(hop: Hop, fabric: Constants) -> float:
    """Return the share of its port that a child of a level gets while the group's others send too."""
    crowd = hop.children / fabric.host if hop.children and fabric.host else 1.0
    return min(1.0, (2 / (hop.members * crowd)) ** fabric.contention)


class Custom(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce kernel of a serving engine: every rank reads its peers' buffers over NVLink.

    Attributes:
        start_us: launch, barrier and first byte.
        one_shot: fraction of the port when each rank reads all buffers whole.
        two_shot: the same when each reduces its share, then gathers the others' after one more barrier.
        barrier_us: that barrier.
        eager_us: by device ("*": others), host time of one call outside a CUDA graph, which then bounds it below;
            the call also copies its input, at memory bandwidth.
        max_bytes: by ranks, the largest buffer it is used for; larger ones go to NCCL.
    """

    start_us: float
    one_shot: float
    two_shot: float
    barrier_us: float
    eager_us: dict[str, float]
    max_bytes: dict[int, float]


class FabricProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fabric's constants and what they were fitted to.

    Attributes:
        kind: ``nvlink``, ``pcie`` or ``network``: whose profile stands in where a fabric has none.
        answers: names this profile answers to: ``device.level``, ``scale_up.topology``, a level's name, a kind.
        sigma: relative spread of measured over predicted, by operation; "*" for those without measurements.
        rows, bytes_range, ranks: what was measured. median_error: of the fit, in sample, by operation.
    """

    format_version: int
    name: str
    kind: str
    answers: tuple[str, ...]
    source: str
    constants: Constants
    sigma: dict[str, float]
    custom: dict[str, Custom] = {}
    rows: int = 0
    bytes_range: tuple[float, float] = (0.0, 0.0)
    ranks: tuple[int, ...] = ()
    median_error: dict[str, float] = {}


class Fabrics:
    """A set of profiles and which of them a level gets."""

    def __init__(self, profiles: tuple[FabricProfile, ...]):
        self.profiles = {p.name: p for p in profiles}
        self._by_answer = {answer: p for p in profiles for answer in p.answers}
        self._found: dict[tuple[str, str, str], tuple[FabricProfile, bool]] = {}

    def find(self, hop: Hop, device: str = "", scale_up: str = "") -> tuple[FabricProfile, bool]:
        """The profile of a level as a device sees it, and whether only its kind was measured."""
        key = device, hop.name, hop.topology
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._search(hop, device, scale_up)
        return found

    def _search(self, hop: Hop, device: str, scale_up: str) -> tuple[FabricProfile, bool]:
        for answer in names_of(hop, device, scale_up):
            profile = self._by_answer.get(answer)
            if profile is not None:
                return profile, False
        return self.profiles[kind_of(hop)], True


def names_of(hop: Hop, device: str, scale_up: str) -> tuple[str, ...]:
    """Return the names under which a level's constants are looked up, the most specific first."""
    exact = f"{device}.{hop.name}.{hop.topology}"
    if hop.scale_out:
        return exact, f"{device}.{hop.name}", hop.name, *((SOCKETS,) if rate_bits_s(hop.name) else ())
    return exact, f"{device}.{hop.name}", f"{scale_up}.{hop.name}.{hop.topology}", f"{scale_up}.{hop.name}", hop.name


def kind_of(hop: Hop) -> str:
    """The class of fabrics a level belongs to."""
    if hop.scale_out:
        return "network"
    return "pcie" if hop.topology == "pcie" else "nvlink"


def profile_text(profile: FabricProfile) -> bytes:
    """A profile as the catalog keeps it: JSON, numbers to four digits, keys in a fixed order."""
    return msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(profile))), indent=1) + b"\n"


def rounded(value):
    """Plain data with every number to four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def read_profile(data: bytes, place: str) -> FabricProfile:
    """A profile from its JSON.

    Raises:
        MeshwrightError: N001 when the file is of another format version or is not a network profile.
    """
    try:
        profile = msgspec.json.decode(data, type=FabricProfile)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MeshwrightError.one("N001", f"not a network profile: {error}", place=place, help=_AGAIN) from error
    if profile.format_version != FORMAT_VERSION:
        found = f"network profile of format {profile.format_version}, this version reads {FORMAT_VERSION}"
        raise MeshwrightError.one("N001", found, place=place, help=_AGAIN)
    return profile


_AGAIN = "write it again with `meshwright calibrate --only network`"


@cache
def shipped() -> Fabrics:
    """The profiles of the catalog."""
    folder = catalog.folder("profiles").joinpath("network")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return Fabrics(tuple(read_profile(f.read_bytes(), f"catalog profile {f.name}") for f in files))
