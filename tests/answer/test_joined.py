"""Joins placed by one integer program: against every choice there is, and against what papers do by hand."""

import json
from itertools import product
from pathlib import Path

import msgspec
import pytest

from meshwright.answer.join_work import step_seconds
from meshwright.answer.joined import placed_joins
from meshwright.answer.placed_prices import PlacedPrices
from meshwright.cli import main
from meshwright.cost import standard
from meshwright.errors import Infeasible, MeshwrightError
from meshwright.layers.algebra import PARTIAL, REPLICATE, AxisMesh
from meshwright.layers.derivative import derived
from meshwright.layers.joins import einsum_signatures, homes, signatures
from meshwright.layers.signatures import SIGNATURES
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.computation import UPDATE
from meshwright.spec.computation_file import load, read

pytest.importorskip("highspy")
EXAMPLES = Path(__file__).parents[2] / "examples"


def own(steps, dims, **inputs):
    return read({"steps": steps, "dims": dims, "inputs": inputs})


def product_of(i, k, j, **more):
    steps = "C[i,j] = A[i,k] * B[k,j]\nloss = C[i,j] * Y[i,j]"
    sides = {"A": {"keys": ["i", "k"]}, "B": {"keys": ["k", "j"], "trained": True}, "Y": {"keys": ["i", "j"]}}
    return own(steps, {"i": i, "k": k, "j": j}, **sides | more)


def taken(found):
    return {w.join: w.way for w in found.ways if w.taken}


def test_signatures_of_a_matrix_product_are_those_of_its_einsum():
    made = einsum_signatures((("b", "s", "k"), ("k", "n")), ("b", "s", "n"))
    assert set(SIGNATURES["product"]) == set(made) - {(REPLICATE, PARTIAL, PARTIAL)}
    assert (REPLICATE, PARTIAL, PARTIAL) in made


@pytest.mark.parametrize("sizes", [(512, 64, 256), (64, 16384, 64), (20000, 32, 8)])
def test_the_program_finds_the_best_of_all_choices(sizes):
    """Every signature of every step with every home of every input, priced one by one: a copy is made once for all who
    read it."""
    computation, cluster = product_of(*sizes), load_cluster("4xh100")
    whole, mesh = derived(computation), AxisMesh.of(x=4)
    prices = PlacedPrices(mesh, cluster, "fp32", standard())
    updated = {s.inputs[0] for s in whole.steps if s.kind == UPDATE}
    given = [t.name for t in whole.inputs if t.name not in updated]
    places = [list(homes(whole, name, mesh.sizes)) for name in given]
    choices = [list(signatures(step, whole, mesh.sizes)) for step in whole.steps]
    seconds = {
        (n, c): step_seconds(step, whole, *c, prices)
        for n, (step, some) in enumerate(zip(whole.steps, choices))
        for c in some
    }
    moved = {}

    def move(name, source, target):
        key = (name, source, target)
        if key not in moved:
            moved[key] = sum(s for *_, s in prices.exchanges(mesh, source, target, whole.shape(name), 1.0))
        return moved[key]

    best = float("inf")
    for chosen in product(*choices):
        compute = sum(seconds[n, c] for n, c in enumerate(chosen))
        if compute >= best:
            continue
        at = {s.output: out for s, (_, out) in zip(whole.steps, chosen)}
        at |= {s.inputs[0]: ins[0] for s, (ins, _) in zip(whole.steps, chosen) if s.kind == UPDATE}
        reads = {(name, p) for s, (ins, _) in zip(whole.steps, chosen) for name, p in zip(s.inputs, ins)}
        reads.add(("loss", (REPLICATE,)))
        for some in product(*places):
            where = at | dict(zip(given, some))
            best = min(best, compute + sum(move(n, where[n], p) for n, p in reads if p != where[n]))
    found = placed_joins(computation, cluster, standard())
    assert found.step_s == pytest.approx(best, rel=1e-6) and found.gap == 0.0
    assert found.bound_s == pytest.approx(best, rel=1e-5)
    assert all(w.step_s >= found.step_s * (1 - 1e-6) for w in found.ways)


def test_a_small_side_is_copied_and_of_two_large_ones_both_are_cut_on_the_shared_key():
    """Tang et al., 2306.00088, section 1: the optimiser of a database broadcasts a matrix that is small, and
    co-partitions two large ones on the join's predicate."""
    cluster = load_cluster("8xh100")
    small = placed_joins(product_of(4_000_000, 256, 64), cluster, standard())
    assert taken(small)["C"] == "cut along i, B copied"
    large = placed_joins(product_of(2048, 8_000_000, 64), cluster, standard())
    assert taken(large)["C"] == "co-partitioned on k, results summed"
    for found in (small, large):
        assert [m for m in found.moves if m.tensor in ("A", "Y")] == []


def test_memory_decides_where_time_would_not():
    """With room for a part of the wide side alone, the copy that is fastest is not made."""
    computation, cluster = product_of(65536, 4096, 16384), load_cluster("8xh100")
    free = placed_joins(computation, cluster, standard())
    tight = placed_joins(computation, cluster, standard(), room=0.85 * free.held_bytes)
    assert tight.held_bytes <= 0.85 * free.held_bytes and tight.step_s > free.step_s
    with pytest.raises(Infeasible, match="A005"):
        placed_joins(computation, cluster, standard(), room=1e5)


def test_lengths_that_no_device_could_hold_are_said_not_to_fit():
    """2**53 - 1 is the longest dim that is read: bytes of its square are beyond what a solver takes as a number."""
    with pytest.raises(Infeasible, match="GiB at least and has 79"):
        placed_joins(product_of(2**53 - 1, 2**53 - 1, 2**53 - 1), load_cluster("8xh100"), standard())


def test_bytes_of_a_sparse_relation_go_with_its_rows():
    """A copy of 1,000,000 rows: two keys of 4 bytes and a value of 4 each; the fp32 table beside it is dense."""
    steps = "Z[u,f] = R[u,v] * W[v,f]\nloss = Z[u,f] * Z[u,f]"
    sides = {"R": {"keys": ["u", "v"], "nonzeros": 1_000_000}, "W": {"keys": ["v", "f"], "trained": True}}
    found = placed_joins(own(steps, {"u": 10_000, "v": 10_000, "f": 8}, **sides), load_cluster("8xh100"), standard())
    cut = found.computation.row_bytes("R", 4.0) * found.computation.numbers("R")
    assert cut == 12e6
    words = {w.way for w in found.ways if w.join == "Z"}
    assert words >= {
        "cut along u, W copied",
        "co-partitioned on v, results summed",
        "rows cut by number, W copied, results summed",
    }


def test_two_axes_are_decided_together():
    computation = own(
        "C[i,j] = A[i,k] * B[k,j]\nloss = C[i,j] * Y[i,j]", {"i": 4096, "k": 4096, "j": 4096},
        A={"keys": ["i", "k"], "trained": True}, B={"keys": ["k", "j"], "trained": True}, Y={"keys": ["i", "j"]},
    )  # fmt: skip
    square = msgspec.structs.replace(computation, mesh=(("a", 2), ("b", 4)))
    both = placed_joins(square, load_cluster("8xh100"), standard(), ways=False)
    one = placed_joins(computation, load_cluster("8xh100"), standard(), ways=False)
    assert both.gap == 0.0 and both.mesh.sizes == (2, 4) and one.gap == 0.0


def test_what_is_said_of_joins_is_kept_and_costs_what_was_shown():
    computation, cluster = product_of(4096, 4096, 4096), load_cluster("8xh100")
    free = placed_joins(computation, cluster, standard())
    shown = {w.way: w.step_s for w in free.ways if w.join == "C"}
    bound = placed_joins(msgspec.structs.replace(computation, joins={"C": {"x": "k"}}), cluster, standard())
    assert taken(bound)["C"] == "co-partitioned on k, results summed"
    assert bound.step_s == pytest.approx(shown["co-partitioned on k, results summed"], rel=1e-5)
    assert [w.way for w in bound.ways if w.join == "C"] == [taken(bound)["C"]]
    wrong = {"D": {"": "i"}, "C": {"y": "i", "": "q"}, "d(B)": {"": "k"}}
    with pytest.raises(MeshwrightError) as error:
        placed_joins(msgspec.structs.replace(computation, joins=wrong), cluster, standard())
    said = [(d.message, d.code) for d in error.value.diagnostics]
    assert said == [
        ("no join makes 'D'", "A004"),
        ("no axis of the mesh is called 'y'", "A004"),
        ("C is not cut along 'q' here", "A004"),
    ]


def test_the_command_shows_choices_and_what_is_derived(capsys):
    argv = ["place", str(EXAMPLES / "factorisation.toml"), "--on", "8xh100", "--backward"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "d(U)[user,rank] = sum(item) d(E)[user,item] * here[user,item] * V[item,rank]" in text
    assert "co-partitioned on user, V copied" in text and "nothing is faster" in text and "100000000 rows" in text
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == pytest.approx(found["compute_s"] + found["exchange_s"]) and found["run"] is None
    assert any(not way["taken"] and way["step_s"] > found["step_s"] for way in found["joins"])
    assert load(EXAMPLES / "gcn.toml").nonzeros == {"A": 61859140}
