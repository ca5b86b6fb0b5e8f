"""Routing statistics: how often a router chose each expert of each mixture, and which experts tokens chose next.

``routing=zipf:s=1.2`` is a skew: of E experts the one of rank r gets a share in proportion to r^-s, experts ranked
anew in every layer; with ``affinity=0.5`` half of an expert's tokens go on to the expert of the same rank in the next
layer, the others to all by their shares. ``near=0.6``: that share of all tokens goes to experts on their own node,
however experts lie, as a loss of locality teaches a router. A ``.json`` file is what ``meshwright run --routing``
wrote: ``counts`` [layers][experts] and, where they were counted, ``follows`` [layers - 1][experts][experts]. It may
also say where experts lie, ``placement`` [layers][ranks][experts of a rank], which a plan takes with
``placement=given``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import Diagnostic, MeshwrightError

ZIPF = "zipf"
#: Ways to place experts on ranks (:mod:`meshwright.assign.placing`), and the placement that a file of routing says.
PLACEMENTS, GIVEN = ("contiguous", "balanced", "moetuner", "exflow"), "given"
SUFFIX = ".json"
FORMAT = "meshwright routing 1"
#: Bytes of a file that are read: 60 layers of 256 experts with all that follows take 20 million.
MOST_BYTES = 1 << 28
#: Steepest skew: beyond it one expert gets every token.
STEEPEST = 8.0


class Routing(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The choices of a model's routers. A skew has no sizes of its own; of a file ``counted`` are float64
    [``layers``, ``experts``] as bytes, and ``followed`` [``layers`` - 1, ``experts``, ``experts``], b"" where nobody
    counted them; ``given`` int64 [``layers``, ``ranks``, ``experts`` / ``ranks``] are the experts of each rank.
    ``near`` is the share of tokens that go to experts on their own node, 0 where nobody said it. ``said`` is how a user
    wrote all of this."""

    said: str
    skew: float = 0.0
    affinity: float = 0.0
    near: float = 0.0
    layers: int = 0
    experts: int = 0
    counted: bytes = b""
    followed: bytes = b""
    given: bytes = b""
    ranks: int = 0

    def text(self) -> str:
        """Return the form that :func:`read` reads back."""
        return self.said

    def fits(self, layers: int, experts: int) -> bool:
        """Return whether these can be the choices of so many mixtures of so many experts."""
        return not self.counted or (self.layers, self.experts) == (layers, experts)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    counts: list[list[float]]
    follows: list[list[list[float]]] | None = None
    near: float = 0.0
    placement: list[list[list[int]]] | None = None


@lru_cache(maxsize=16)
def shares(routing: Routing, layers: int, experts: int) -> Any:
    """Return the share of all choices that each expert gets, float64 [layers, experts], each layer's summing to 1."""
    import numpy as np

    if routing.counted:
        counted = np.frombuffer(routing.counted).reshape(layers, experts)
        return counted / counted.sum(axis=1, keepdims=True)
    ranked = np.arange(1, experts + 1) ** -routing.skew
    return np.stack([ranked[_rank_of(layer, experts)] for layer in range(layers)]) / ranked.sum()


@lru_cache(maxsize=16)
def follows(routing: Routing, layers: int, experts: int) -> Any:
    """Return the share of all choices that are expert i in a layer and then j in the next, float64 [layers - 1,
    experts, experts], each layer's summing to 1; what chance would give where nobody counted them."""
    import numpy as np

    if routing.followed:
        counted = np.frombuffer(routing.followed).reshape(layers - 1, experts, experts)
        return counted / counted.sum(axis=(1, 2), keepdims=True)
    each = shares(routing, layers, experts)
    found = each[:-1, :, None] * each[1:, None, :] * (1 - routing.affinity)
    for layer in range(layers - 1 if routing.affinity else 0):
        same = np.argsort(_rank_of(layer + 1, experts))[_rank_of(layer, experts)]  # the expert of the same rank
        found[layer, np.arange(experts), same] += routing.affinity * each[layer]
    return found


def given_ranks(routing: Routing) -> Any:
    """Return the rank of each expert as the file says, int64 [layers, experts]."""
    import numpy as np

    lists = np.frombuffer(routing.given, np.int64).reshape(routing.layers, routing.ranks, -1)
    found = np.empty((routing.layers, routing.experts), np.int64)
    ranks = np.broadcast_to(np.arange(routing.ranks)[None, :, None], lists.shape)
    np.put_along_axis(found, lists.reshape(routing.layers, -1), ranks.reshape(routing.layers, -1), axis=1)
    return found


def _rank_of(layer: int, experts: int) -> Any:
    """The rank of each expert of a layer by popularity, from 0: in no order, and the same in every process."""
    import numpy as np

    return np.random.default_rng(layer).permutation(experts)


def read(value: str, base: Path = Path()) -> Routing | None:
    """Return the routing that a text says, None where it has neither form; a file lies in `base`.

    Raises:
        MeshwrightError: W018 for a file that cannot be read or has wrong entries, and for parameters out of range; all
            of them at once.
    """
    if value.partition(":")[0].strip().lower() == ZIPF:
        return _zipf(value)
    return _file(value, base / value) if value.endswith(SUFFIX) else None


def write(path: Path, counts: Any, follows: Any = None, near: float = 0.0) -> None:
    """Write counts [layers, experts] and those of pairs [layers - 1, experts, experts] as a file of routing."""
    found = _File(FORMAT, counts.tolist(), None if follows is None else follows.tolist(), near)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, msgspec.json.encode(found) + b"\n")


def _bad(messages: list[str], place: str) -> MeshwrightError:
    help = "say routing=zipf:s=1.2, zipf:s=1.2;affinity=0.5;near=0.6, or a .json file of meshwright run --routing"
    return MeshwrightError([Diagnostic(code="W018", message=m, place=place, help=help) for m in messages])


def _zipf(value: str) -> Routing:
    given = dict(part.partition("=")[::2] for part in value.partition(":")[2].split(";") if part)
    limits = {"s": (0.0, STEEPEST), "affinity": (0.0, 1.0), "near": (0.0, 1.0)}
    found, wrong = {}, [f"unknown word {key!r}" for key in given if key not in limits]
    for key, (least, most) in limits.items():
        try:
            found[key] = float(given.get(key, 0.0))
        except ValueError:
            found[key] = -1.0
        if not least <= found[key] <= most:
            wrong.append(f"{key}={given[key]} is not a number from {least:g} to {most:g}")
    if "s" not in given:
        wrong.append("s= is missing: how steeply popularity falls from expert to expert, 0 for even")
    if wrong:
        raise _bad(wrong, f"routing={value}")
    return Routing(said=value, skew=found["s"], affinity=found["affinity"], near=found["near"])


def _file(value: str, path: Path) -> Routing:
    place = f"routing={value}"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _bad([f"{path} has more than {MOST_BYTES:,} bytes"], place)
        held = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise _bad([f"cannot read {path}: {error.strerror or error}"], place) from None
    except msgspec.DecodeError as error:
        raise _bad([f"{path} is no file of routing: {error}"], place) from None
    if wrong := list(_wrong(held)):
        raise _bad([f"{path}: {one}" for one in wrong[:20]], place)
    import numpy as np

    counts = np.array(held.counts, np.float64)
    after = b"" if held.follows is None else np.array(held.follows, np.float64).tobytes()
    layers, experts = counts.shape
    given = b"" if held.placement is None else np.array(held.placement, np.int64).tobytes()
    return Routing(
        said=value,
        near=held.near,
        layers=layers,
        experts=experts,
        counted=counts.tobytes(),
        followed=after,
        given=given,
        ranks=len(held.placement[0]) if held.placement else 0,
    )


def _wrong(held: _File) -> list[str]:
    """Everything that keeps the numbers of a file from being routing."""
    found = []
    if held.format != FORMAT:
        found.append(f"its format is {held.format!r}, not {FORMAT!r}")
    widths = sorted({len(row) for row in held.counts})
    if len(widths) != 1 or not widths[0]:
        return [*found, f"layers have {widths} experts: counts need one number for each expert of each layer"]
    experts, layers = widths[0], len(held.counts)
    found += [
        f"counts of layer {i} have entries below 0 or sum to 0"
        for i, row in enumerate(held.counts)
        if min(row) < 0 or not sum(row) > 0
    ]
    if not 0 <= held.near <= 1:
        found.append(f"near={held.near:g} is not a share from 0 to 1")
    found += _misplaced(held.placement, layers, experts)
    if held.follows is None:
        return found
    if len(held.follows) != layers - 1:
        found.append(f"follows has {len(held.follows)} layers, and {layers} layers of counts have {layers - 1} between")
    for i, table in enumerate(held.follows):
        if len(table) != experts or any(len(row) != experts for row in table):
            found.append(f"follows of layer {i} is not {experts} x {experts}")
        elif min(map(min, table)) < 0 or not sum(map(sum, table)) > 0:
            found.append(f"follows of layer {i} has entries below 0 or sums to 0")
    return found


def _misplaced(placement: list[list[list[int]]] | None, layers: int, experts: int) -> list[str]:
    """Everything that keeps lists of experts from being a placement: each on one rank, as many on every rank."""
    if placement is None:
        return []
    if len(placement) != layers:
        return [f"placement has {len(placement)} layers, and counts have {layers}"]
    found, everyone = [], set(range(experts))
    for i, ranks in enumerate(placement):
        named = [e for rank in ranks for e in rank]
        if left := sorted(everyone - set(named)):
            found.append(f"placement of layer {i} leaves out experts {_some(left)}")
        if twice := sorted({e for e in named if named.count(e) > 1}):
            found.append(f"placement of layer {i} names experts {_some(twice)} more than once")
        if beyond := sorted(set(named) - everyone):
            found.append(f"placement of layer {i} names {_some(beyond)}, and there are {experts} experts from 0")
        if len(ranks) != len(placement[0]) or len({len(rank) for rank in ranks}) > 1:
            sizes = ", ".join(map(str, sorted({len(rank) for rank in ranks})))
            found.append(f"placement of layer {i} has {len(ranks)} ranks of {sizes} experts: all need as many")
    return found


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
