"""Placements of a user's own: what a file says, what completes it, and what is exchanged for it."""

import json
from pathlib import Path

import pytest

from meshwright.answer.completion import complete
from meshwright.cli import main
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.layers.algebra import words
from meshwright.layers.signatures import SIGNATURES, dual, wanted
from meshwright.plan import placements
from meshwright.plan.tensors import network
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse

EXAMPLE = Path(__file__).parents[2] / "examples" / "placements.toml"


def completed(table, on, model="llama3-8b", train="batch=8,seq=4096"):
    model, train = load_model(model), parse(train)
    cluster = load_cluster(on)
    known = network(model, train.global_batch, train.seq_len)
    said = placements.read(table, known, cluster.num_devices)
    whole = network(model, train.global_batch, train.seq_len, relayed=said.said)
    return complete(whole, said, cluster, train, standard())


def test_heads_and_columns_cut_and_the_rest_whole_are_megatrons_four_all_reduces_a_layer():
    """Of 256 tokens x 4096 numbers of 2 bytes, two forward and two backward, as Megatron has them (Shoeybi et al.
    1909.08053, section 3); tokens are few, so that what is exchanged are activations and no weights."""
    said = {"hidden": "B", "between": "B", "attention.in": "B", "mlp.in": "B", "attention.mixed": "S(2)"}
    table = {
        "mesh": {"tp": 8},
        "weights": {"mlp.up": ["tp:S(1)"]},
        "activations": {n: [f"tp:{tag}"] for n, tag in said.items()},
    }
    found = completed(table, "8xh100", train="batch=1,seq=256")
    homes = {n: words(p) for n, p in found.program.homes.items()}
    assert {n: homes[f"attention.{n}"] for n in "qkvo"} == {"q": "S1", "k": "S1", "v": "S1", "o": "S0"}
    assert (homes["mlp.gate"], homes["mlp.down"], homes["mlp.inner"], homes["mlp.out"]) == ("S1", "S0", "S2", "P")
    layer = {(m.tensor, m.op, m.num_bytes, m.times) for m in found.moves if m.times == 32}
    size = 256 * 4096 * 2.0
    assert layer == {
        ("between", "all_reduce", size, 32),
        ("hidden", "all_reduce", size, 32),
        ("attention.in", "all_reduce", size, 32),
        ("mlp.in", "all_reduce", size, 32),
    }


def test_a_weight_that_is_cut_over_replicas_is_gathered_and_its_gradient_scattered():
    """FSDP by one annotation: 4096 x 14336 numbers of 2 bytes in each of 32 layers, either way."""
    table = {"mesh": {"dp": 8}, "weights": {"mlp.up": ["dp:S(0)"]}, "activations": {"mlp.raised": ["dp:S(0)"]}}
    moves = [m for m in completed(table, "8xh100").moves if m.tensor == "mlp.up"]
    size = 4096 * 14336 * 2.0
    assert [(m.op, m.gradient, m.num_bytes, m.times) for m in moves] == [
        ("all_gather", False, size, 32),
        ("reduce_scatter", True, size, 32),
    ]


def test_nothing_said_is_cheaper_than_anything_said_against_it():
    free = completed({"mesh": {"x": 8}}, "8xh100")
    bound = completed({"mesh": {"x": 8}, "activations": {"mlp.inner": ["x:S(0)"], "hidden": ["x:S(2)"]}}, "8xh100")
    likewise = completed({"mesh": {"x": 8}, "activations": {"mlp.inner": ["x:S(2)"], "hidden": ["x:S(0)"]}}, "8xh100")
    assert free.step_s <= likewise.step_s
    assert free.step_s < bound.step_s and free.step_s == pytest.approx(free.compute_s + free.exchange_s)


def test_of_many_tokens_weights_are_replicas_and_of_few_no_rank_updates_them_all():
    """An update of a copy on each rank takes as long as one of all weights: only many tokens are worth it."""
    many, few = (completed({"mesh": {"x": 8}}, "8xh100", train=f"batch={n},seq=4096") for n in (64, 8))
    weights = [name for name, tensor in many.program.network.tensors.items() if tensor.weight]
    assert {name for name in weights if many.program.homes[name] != (-1,)} <= {"embed"}  # its rows are looked up
    assert few.program.homes["mlp.up"] == (1,) and few.weight_bytes < many.weight_bytes / 3


def test_gradients_lie_where_signatures_leave_them():
    """Of a product of rows cut in parts: rows with them, of the matrix terms; of one that sums over a cut dim the
    matrix's part; of terms of a sum the whole."""
    assert {(0, -1, 0), (2, 0, -2), (-2, -1, -2)} < set(SIGNATURES["product"])
    assert dual((0,), (0,)) == (0,) and dual((-1,), (0,)) == (-2,) and dual((0,), (-2,)) == (0,)
    assert dual((-2,), (-2,)) == (-1,) and dual((-1,), (-1,)) == (-1,) and wanted((-2, 1)) == (-1, 1)


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text(
        '[mesh]\ndp = 2\ntp = 3\n[weight]\nx = 1\n[weights]\n"mlp.upp" = ["dp:B"]\n'
        'mlp.up = ["dp:B", "dp:S(0)", "zz:B", "tp:Q", "tp:S(7)"]\n"mlp.down" = ["dp:P"]\n"attention.k" = "dp:B"\n'
        '"attention.v" = ["dp:S(1)", "tp:S(1)"]\n'
    )
    model = transformer(layers=2, hidden=32, heads=4, kv_heads=4, vocab=67, ffn=48, max_seq_len=64, gated=True)
    with pytest.raises(MeshwrightError) as error:
        placements.load(bad, network(model, 4, 16), 8)
    said = [(d.message, d.place.partition(": ")[2]) for d in error.value.diagnostics]
    for part, place in (
        ("unknown table 'weight'", "[weight]"),
        ("= 6 ranks, and the cluster 8", "[mesh]"),
        ("no tensor 'mlp.upp'", "weights.mlp.upp"),
        ("'dp:S(0)' contradicts", "weights.mlp.up"),
        ("'zz:B' is of no axis", "weights.mlp.up"),
        ("'tp:Q' is no placement", "weights.mlp.up"),
        ("'tp:S(7)' cuts a dim", "weights.mlp.up"),
        ("a weight is no sum", "weights.mlp.down"),
        ("'dp:B' is no list", "weights.attention.k"),
        ("'tp:S(1)' cuts 4 places into 6", "weights.attention.v"),
    ):
        assert any(part in message and place == where for message, where in said), part
    assert all(d.code == "A002" and d.help for d in error.value.diagnostics) and len(said) == 10
    question = ["--on", "8xh100", "--train", "batch=8,seq=128", "--placements"]
    assert main(["place", "llama3-8b", *question, str(tmp_path / "none.toml")]) == 2
    assert main(["place", "mixtral-8x7b", *question, str(EXAMPLE)]) == 2
    assert main(["place", "llama3-8b", *question, str(EXAMPLE), "--run", "1"]) == 2
    assert {"A002", "A003"} <= {word[6:10] for word in capsys.readouterr().err.split() if word.startswith("error[")}


def test_the_command_prints_where_everything_lies_and_what_is_exchanged(capsys):
    argv = ["place", "llama3-8b", "--on", "8xh100", "--train", "batch=8,seq=4096", "--placements", str(EXAMPLE)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert '"mlp.down"           = ["dp:B", "tp:S(0)"]' in text and "all_reduce     over tp" in text
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"]["mlp.up"] == ["dp:B", "tp:S(1)"] and found["run"] is None
    assert found["step_s"] == pytest.approx(found["compute_s"] + found["exchange_s"])
