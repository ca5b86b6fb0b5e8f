"""Layout papers: placements, the collectives between them, and rules that place a whole model."""

from __future__ import annotations

from itertools import product as every
from statistics import geometric_mean

import numpy as np

from meshwright import catalog
from meshwright.answer.completion import complete
from meshwright.answer.serving import predict_serving
from meshwright.cost import standard
from meshwright.layers.algebra import (
    PARTIAL,
    REPLICATE,
    SIGNATURES,
    AxisMesh,
    carry_out,
    distribute,
    matmul,
    prove,
    transfers,
)
from meshwright.papers import trained
from meshwright.papers.outcome import WITHIN, Check, Fact, Figure, Outcome, at_most, by_processes, equal
from meshwright.papers.ranks import attention
from meshwright.plan import parse as parse_plan
from meshwright.plan.placements import read
from meshwright.plan.tensors import PlacedProgram, network
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.layers import Block
from meshwright.spec.model import Model
from meshwright.spec.model import load as load_model
from meshwright.spec.serve import parse as parse_serve
from meshwright.spec.workload import Train

ROUNDING = 1e-9
#: Every placement of a matrix on two axes.
ALL = tuple(every((0, 1, REPLICATE, PARTIAL), repeat=2))


def oneflow() -> Outcome:
    mesh, shape = AxisMesh.of(node=2, device=3), (7, 10)
    worst = max(prove(mesh, a, b, shape) for a in ALL for b in ALL)
    one = AxisMesh.of(device=4)
    boxing = {
        (a, b): "+".join(t.op for t in transfers(one, a, b, (8, 8)))
        for a, b in (("S0", "R"), ("S0", "S1"), ("P", "R"), ("P", "S0"), ("R", "S0"), ("S0", "P"))
    }
    said = {
        ("S0", "R"): "all_gather",
        ("S0", "S1"): "all_to_all",
        ("P", "R"): "all_reduce",
        ("P", "S0"): "reduce_scatter",
        ("R", "S0"): "slice",
        ("S0", "P"): "keep",
    }
    wrong = max(_product_error(a, b, z) for a, b, z in SIGNATURES)
    found = Outcome(
        figures=(
            Figure("placements on 2 x 3 devices turned into one another, pairs", None, len(ALL) ** 2),
            at_most("largest error of them on tensors with ragged shards", worst, ROUNDING),
            at_most("largest error of a product's signatures", wrong, ROUNDING),
        ),
        facts=(
            Fact("the boxing of its Table 2: what each pair of tags inserts", boxing == said),
            Fact("where producer and consumer agree nothing is inserted", transfers(one, "S0", "S0", (8, 8)) == ()),
            Fact("of a chosen signature and its alternatives none moves less", _chosen_moves_least()),
        ),
        baseline="the tensor on one device",
        assumptions=("the abstract gives no figures: the claim is the algebra",),
    )
    # every kind of tag on tensors of a layer, and cuts that leave the processes unequal parts
    return _by_processes(
        found, (7, 5), weights=["node:S(1)", "device:S(1)"], hidden=["node:S(1)", "device:S(0)"], headline=True
    )


def _by_processes(found: Outcome, shape: tuple[int, int], *, headline: bool = False, **said: list[str]) -> Outcome:
    """Return the outcome with figures of real processes, which turn every pair of placements into one another, and
    train a model whose MLP's first `weights` and `hidden` states are annotated."""

    def real() -> Outcome:
        from meshwright.run.annotated import start
        from meshwright.run.placements import apart

        worst = apart(AxisMesh.of(node=2, device=2), [(a, b) for a in ALL for b in ALL], shape)
        what = "collectives of 2 x 2 processes, furthest from simulated ones"
        program, model, train = _annotated(**said)
        trained = "a model trained by completed placements on 2 x 2 processes, uneven: furthest from one process"
        apart_by = start(program, model, train, 2).worst
        return Outcome(
            figures=(at_most(what, worst, ROUNDING), at_most(trained, apart_by, ROUNDING, headline=headline)),
        )

    return by_processes(found, "collectives of real processes", real)


def _annotated(weights: list[str], hidden: list[str]) -> tuple[PlacedProgram, Model, Train]:
    """A small model's program from a few annotations, for 2 x 2 processes and parts that are unequal."""
    model = transformer(layers=2, hidden=30, heads=3, ffn=45, vocab=61, max_seq_len=64, gated=True, name="small")
    train = Train(global_batch=3, seq_len=11, dtype="fp32")
    table = {"mesh": {"node": 2, "device": 2}, "weights": {"mlp.up": weights}, "activations": {"hidden": hidden}}
    said = read(table, network(model, train.global_batch, train.seq_len), 4)
    whole = network(model, train.global_batch, train.seq_len, relayed=said.said)
    return complete(whole, said, load_cluster("4xh100"), train, standard()).program, model, train


def _product_error(a: int, b: int, z: int) -> float:
    """The error of a matrix product whose operands lie as a signature says, taken rank by rank."""
    mesh, rng = AxisMesh.of(device=3), np.random.default_rng(1)
    left, right = rng.standard_normal((6, 9)), rng.standard_normal((9, 5))
    x, y = distribute(mesh, (a,), left), distribute(mesh, (b,), right, seed=2)
    held = {at: x[at] @ y[at] for at in mesh.ranks}
    for one in transfers(mesh, (z,), "R", (6, 5)):
        held = carry_out(mesh, one, held)
    return max(float(np.abs(part - left @ right).max()) for part in held.values())


def _chosen_moves_least() -> bool:
    """Megatron's pair comes out by itself: a column-cut matrix, then a row-cut one, and one reduction at the end."""
    mesh = AxisMesh.of(tp=4)
    first = matmul(mesh, "R", "S1", 64, 16, 64)
    second = matmul(mesh, first.out, "S0", 64, 64, 16)
    return not first.moves and not second.moves and first.out == (1,) and second.out == (PARTIAL,)


def gspmd() -> Outcome:
    """GSPMD's dense layer on a two-dimensional mesh (section 5.1), and the cost of uneven shapes."""
    mesh = AxisMesh.of(X=2, Y=4)
    batch, hidden, wide = 64, 32, 128
    # Weights M H on (X, Y), activations B M on (X, Y): each product is completed to where the next one wants it.
    first = matmul(mesh, "S0 S1", "S0 S1", batch, hidden, wide, out="S0 S1")
    second = matmul(mesh, "S0 S1", "S1 S0", batch, wide, hidden, out="S0 S1")
    moves = [(t.op, t.axis) for t in (*first.moves, *second.moves)]
    plain = AxisMesh.of(Y=4)
    row = matmul(plain, "S1", "S0", batch, wide, hidden, out="R")
    uneven = max(prove(mesh, a, b, (13, 11)) for a in ALL for b in ALL)
    found = Outcome(
        figures=(
            at_most("largest error of resharding uneven shapes (13 x 11 on 2 x 4)", uneven, ROUNDING),
            Figure(
                "weights a device holds of the layer pair, of all", 1 / 8, _held(mesh, hidden, wide), "", WITHIN, 1e-9
            ),
        ),
        facts=(
            Fact("weights are gathered over X before a product", ("all_gather", "X") in moves),
            Fact("partial sums are reduced and scattered over Y", ("reduce_scatter", "Y") in moves),
            Fact("one axis gives Megatron's all-reduce", [t.op for t in row.moves] == ["all_reduce"]),
            Fact("annotating the weights alone completes the rest", _chosen_moves_least()),
        ),
        baseline="the tensor on one device; weights cut over one axis only",
        assumptions=(
            "uneven shards are ragged here, where GSPMD pads them",
            "what annotations leave open is placed where a step is shortest, not in GSPMD's order of propagation",
        ),
        missing=(
            "its 50% to 62% of peak on TPU v3 are not judged: that device is not in the catalog, and a step by "
            "placements is priced with nothing overlapped",
        ),
    )
    return _by_processes(found, (13, 11), weights=["device:S(1)"], hidden=["node:S(0)"])


def _held(mesh: AxisMesh, hidden: int, wide: int) -> float:
    """Share of both weight matrices on a device."""
    parts = distribute(mesh, "S0 S1", np.empty((hidden, wide)))
    return parts[(0, 0)].size / (hidden * wide)


# ---- Redco


def redco_rules(block: Block, hidden: int) -> dict[str, tuple[int, int, int]]:
    """The two rules on a block's matrices: name -> (rows, columns, dim that is sharded).

    Fully connected layers alternate the dim, so that a column cut is followed by a row cut; attention cuts q, k and v
    by heads (columns) and o by its input (rows). Of latent attention what leads up to the heads is placed.
    """
    a, mlp = block.attention, block.mlp
    placed = {"q": (a.q_lora_rank or hidden, a.heads * a.head_dim, 1), "o": (a.heads * a.v_head_dim, hidden, 0)}
    if a.kv_lora_rank:
        placed["kv"] = (a.kv_lora_rank, a.heads * _width(block, "kv"), 1)
    else:
        placed["k"] = (hidden, a.kv_heads * a.head_dim, 1)
        if not a.key_as_value:
            placed["v"] = (hidden, a.kv_heads * a.v_head_dim, 1)
    width = mlp.ffn
    depth = [["up", "gate"] if mlp.gated else ["up"], ["down"]]
    for level, names in enumerate(depth):
        for name in names:
            placed[name] = (hidden, width, 1) if level % 2 == 0 else (width, hidden, 0)
    return placed


def _width(block: Block, name: str) -> int:
    """Columns that one head has of a projection."""
    a = block.attention
    return {"v": a.v_head_dim, "kv": a.head_dim - a.rope_head_dim + a.v_head_dim}.get(name, a.head_dim)


#: Ranks that catalog models are placed on.
PLACED = 4


def redco() -> Outcome:
    """Every catalog model placed by the rules; then a block computed on simulated ranks."""
    kinds, once, whole = 0, 0, 0
    names = catalog.names("models")
    for name in names:
        model = load_model(name)
        for block in (b for b in model.blocks if b.attention is not None and hasattr(b.mlp, "ffn")):
            placed = redco_rules(block, model.hidden)
            kinds += 1
            once += _reductions(placed) == (1, 1)
            whole += _whole_heads(placed, block)
    of = f"of {kinds} kinds of block with attention and MLP in {len(names)} models"
    return Outcome(
        figures=(
            equal(f"one reduction after attention and one after the MLP, {of}", kinds, once),
            equal(f"q, k and v cut at whole heads by {PLACED} ranks, {of}", kinds, whole, why=PART_OF_A_HEAD),
            at_most("largest error of a sharded block on 4 simulated ranks", _block_error(4), ROUNDING),
        ),
        baseline="a placement written by hand (Megatron's)",
        assumptions=("latent attention: the rules place its up-projections, the small down-projections stay whole",),
    )


PART_OF_A_HEAD = (
    "they have a number of heads, mostly of keys and values, that the ranks do not divide: cut by columns a rank gets "
    "a part of one, and the rules do not say what then"
)


def _reductions(placed: dict[str, tuple[int, int, int]]) -> tuple[int, int]:
    """All-reduces of attention and of the MLP that the placements imply; 99 where anything else is exchanged, or where
    what is between two layers (a head's attention, the product with a gate) has not all that it needs on its rank."""
    mesh = AxisMesh.of(tp=PLACED)

    def ends(firsts: tuple[str, ...], last: str) -> int:
        inner = [matmul(mesh, "R", (dim,), 256, rows, columns) for rows, columns, dim in map(placed.get, firsts)]
        rows, columns, dim = placed[last]
        outer = matmul(mesh, (1,), (dim,), 256, rows, columns)
        moved = [t.op for found in (*inner, outer) for t in found.moves]
        moved += [t.op for t in transfers(mesh, outer.out, "R", (256, columns))]
        return moved.count("all_reduce") if len(moved) == 1 and {found.out for found in inner} == {(1,)} else 99

    def there(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if n in placed)

    return ends(there("q", "k", "v", "kv"), "o"), ends(there("up", "gate"), "down")


def _whole_heads(placed: dict[str, tuple[int, int, int]], block: Block) -> bool:
    """Whether every rank's columns are whole heads, of queries and of the keys and values that they look at."""
    return all(
        placed[name][2] == 1 and placed[name][1] % (PLACED * _width(block, name)) == 0
        for name in ("q", "k", "v", "kv")
        if name in placed
    )


def _block_error(ranks: int) -> float:
    """Attention and MLP of a small block by the rules, rank by rank, against the whole."""
    rng = np.random.default_rng(7)
    heads, dim, hidden, tokens, wide = 8, 4, 32, 12, 64
    x = rng.standard_normal((tokens, hidden))
    w = {n: rng.standard_normal((hidden, heads * dim)) / 6 for n in "qkv"}
    o, up, down = (rng.standard_normal(s) / 6 for s in ((heads * dim, hidden), (hidden, wide), (wide, hidden)))

    def one(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> np.ndarray:
        split = [np.stack(np.split(x @ m, m.shape[1] // dim, axis=1)) for m in (q, k, v)]
        return np.concatenate(list(attention(*split)), axis=1) @ o

    cut = {n: np.split(m, ranks, axis=1) for n, m in w.items()}
    attended = sum(one(cut["q"][r], cut["k"][r], cut["v"][r], np.split(o, ranks)[r]) for r in range(ranks))
    error = np.abs(attended - one(w["q"], w["k"], w["v"], o)).max()
    parts = zip(np.split(up, ranks, axis=1), np.split(down, ranks))
    passed = sum(np.maximum(x @ u, 0) @ d for u, d in parts)
    return float(max(error, np.abs(passed - np.maximum(x @ up, 0) @ down).max()))


#: Models of GPT-3 and the ranks that each is on: Kraken's mean is over sizes and degrees that could not be read.
KRAKEN_CASES = (("6.7b", 4), ("6.7b", 8), ("13b", 4), ("13b", 8), ("175b", 8))


def kraken() -> Outcome:
    """Time of a prompt in the engine, by usual blocks and by those of parts with streams of their own; and such blocks
    trained, a process for each part, against all parts in one process."""
    node, one = load_cluster("8xa100-80"), parse_serve("batch=1,prompt=1024,output=1")

    def seconds(model: str, ranks: int) -> float:
        plan = parse_plan(f"tp{ranks}").on(node.num_devices)
        causes = predict_serving(load_model(model), node, one, plan, detail=False).attribution
        return sum(value for cause, value in causes.items() if cause != "idle")

    found = []
    for size, ranks in KRAKEN_CASES:
        ratio = seconds(f"gpt3-{size}", ranks) / seconds(f"gpt3-{size},kraken{ranks}", ranks)
        found.append(Figure(f"GPT-3 {size.upper()} over {ranks} devices", None, ratio, "x"))
    head = Figure(
        "time to first token over Kraken's form, geometric mean", 1.356, geometric_mean(f.ours for f in found), "x",
        WITHIN, 0.1, headline=True,
    )  # fmt: skip
    outcome = Outcome(
        figures=(head, *found),
        baseline="usual blocks under as much tensor parallelism, on the same devices with the same kernels",
        assumptions=(
            "prompts of 1,024 tokens one at a time on 8 or 4 A100 of one node with NVSwitch, timed in the engine: "
            "without what a server's clients wait for beside it",
        ),
        missing=(
            "which sizes, contexts and degrees its mean is over, its rule for widths at equal parameters and how the "
            "sum enters a stream could not be read: here widths are the nearest in whole heads, with one table of "
            "tokens, and each part takes what the others' MLPs found",
            "in serving a sum hides behind the projections of attention and not behind its core, and no engine serves "
            "such models",
        ),
    )
    return by_processes(outcome, "training blocks of two parts", trained.of_parts)


CHECKS = {"oneflow": Check(oneflow), "gspmd": Check(gspmd), "redco": Check(redco), "kraken": Check(kraken)}
