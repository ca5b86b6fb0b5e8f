"""Vectors of nodes on real processes: equal to one process, bytes as predicted, files of edges."""

import json

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.cli.run_network import print_losses
from meshwright.errors import MeshwrightError
from meshwright.lower.bucket_training import rounds_of
from meshwright.plan import parse as parse_plan
from meshwright.run import launch
from meshwright.run.nodes import apart
from meshwright.run.nodes.edges import Walks, by_bucket
from meshwright.run.nodes.train import NodeTrainer
from meshwright.spec.edge_files import Edges, read_edges
from meshwright.spec.edge_samples import parse_edge_samples

EDGES = np.random.default_rng(0).integers(40, size=(300, 2))


def test_processes_train_what_one_process_trains():
    """Lock server and grid, one table and two, negatives shared and not, walks, three optimizers: 1e-9 in float64."""
    assert max(apart.apart(2).values()) < 1e-9


def test_a_run_moves_the_bytes_that_are_predicted_and_its_loss_falls(tmp_path, capsys):
    model, edges, out = tmp_path / "mine.json", tmp_path / "edges.tsv", tmp_path / "out"
    model.write_text(json.dumps({"architectures": ["NodeEmbedding"], "nodes": 40, "edges": 300, "dim": 8}))
    np.savetxt(edges, EDGES, fmt="%d", delimiter="\t")
    words = ["--train", "batch=50,negatives=2,epochs=4", "--plan", "dp2 partitions=4", "--lr", "0.05"]
    assert main(["run", str(model), *words, "--data", str(edges), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["moved_bytes"] == found["predicted_moved_bytes"] > 0
    assert len(found["losses"]) == 4 and found["losses"][-1] < found["losses"][0]
    assert found["samples"] == 4 * 300
    assert np.load(out / "vectors.npz")["vectors"].shape == (40, 8)
    assert main(["run", str(model), *words, "--data", str(edges), "--steps", "3"]) == 2
    assert "[X004]" in capsys.readouterr().err


@pytest.mark.parametrize("drives", [False, True])
def test_a_training_that_is_asked_to_stop_ends_behind_its_pass_with_the_vectors_of_it(drives, tmp_path, monkeypatch):
    """Two of many passes are two passes: the same losses and vectors, to the last bit, and all partitions are back."""
    model, edges = apart.graph(False, 0)
    work = parse_edge_samples("batch=50,negatives=2,optimizer=rowwise-adagrad")
    rounds = rounds_of(model, parse_plan("partitions=4").on(1))

    def trained(passes, asked):
        monkeypatch.setattr(launch, "stop", launch.StopSignal())
        folder = str(tmp_path / f"{passes}") if drives else ""
        trainer = NodeTrainer(model, work, apart.HYPER, rounds, 4, edges, passes, 0, folder)
        losses = []

        def ended(number, loss, samples):
            losses.append(loss)
            if number + 2 == asked:
                launch.stop()

        trainer.train(ended)
        assert not trainer.mine
        return losses, trainer.gathered()

    short, long = trained(2, 0), trained(9, 2)
    assert short[0] == long[0] and len(long[0]) == 2
    assert all((a == b).all() for a, b in zip(short[1], long[1]))


def test_partitions_on_drives_are_those_in_memory_and_bytes_are_predicted(tmp_path, capsys):
    model, edges = tmp_path / "mine.json", tmp_path / "edges.npz"
    model.write_text(json.dumps({"architectures": ["NodeEmbedding"], "nodes": 40, "edges": 300, "dim": 8}))
    np.savez(edges, edges=EDGES)
    words = [
        "run",
        str(model),
        "--train",
        "batch=50,epochs=2,optimizer=rowwise-adagrad",
        "--data",
        str(edges),
        "--json",
    ]
    tables = []
    for plan in ("partitions=4", "partitions=4 idle=nvme", "partitions=4 idle=nvme swap=beside"):
        assert main([*words, "--plan", plan, "--out", str(tmp_path / "out")]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["swapped_bytes"] == found["predicted_swapped_bytes"] and found["moved_bytes"] == 0
        tables.append(np.load(tmp_path / "out" / "vectors.npz")["vectors"])
    # six pairs a pass, each of which loads one partition and the first of all two, as much is stored: ten rows of nine
    assert found["swapped_bytes"] == 2 * (2 * 6 + 1) * 10 * 9 * 4
    assert (tables[0] == tables[1]).all() and (tables[0] == tables[2]).all()
    assert main([*words, "--plan", "partitions=4", "--drives", str(tmp_path)]) == 2


def test_files_of_edges_say_the_same(tmp_path):
    np.savez(tmp_path / "a.npz", edges=EDGES)
    np.savez(tmp_path / "b.npz", heads=EDGES[:, 0], tails=EDGES[:, 1])
    np.savetxt(tmp_path / "c.csv", EDGES, fmt="%d", delimiter=",")
    found = [read_edges(str(tmp_path / name), 40) for name in ("a.npz", "b.npz", "c.csv")]
    assert all((one.heads == EDGES[:, 0]).all() and (one.tails == EDGES[:, 1]).all() for one in found)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"from": EDGES[:, 0], "to": EDGES[:, 1]})
    parquet.write_table(table, tmp_path / "d.parquet")
    assert (read_edges(str(tmp_path / "d.parquet"), 40).tails == EDGES[:, 1]).all()


@pytest.mark.parametrize(("text", "said"), [("0 1\n2 40\n", "node 40"), ("a b\n", "cannot be read"), ("", "is empty")])
def test_a_file_that_has_no_edges_says_why(text, said, tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text(text)
    with pytest.raises(MeshwrightError) as error:
        read_edges(str(path), 40)
    assert error.value.diagnostics[0].code == "D010" and said in error.value.diagnostics[0].message


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut short"])
def test_a_file_that_holds_no_arrays_says_so(content, tmp_path):
    path = tmp_path / "edges.npz"
    path.write_bytes(content)
    with pytest.raises(MeshwrightError) as error:
        read_edges(str(path), 40)
    assert error.value.diagnostics[0].code == "D010" and "pickle" not in error.value.diagnostics[0].message


def test_a_run_looks_at_its_folder_and_rate_before_it_trains(tmp_path, capsys):
    model, edges = tmp_path / "mine.json", tmp_path / "edges.tsv"
    model.write_text(json.dumps({"architectures": ["NodeEmbedding"], "nodes": 40, "edges": 300, "dim": 8}))
    np.savetxt(edges, EDGES, fmt="%d", delimiter="\t")
    words = ["run", str(model), "--data", str(edges), "--train", "batch=50", "--plan", "dp2 partitions=4"]
    assert main([*words, "--out", str(edges)]) == 2 and "[X104]" in capsys.readouterr().err
    assert main([*words, "--lr", "-1"]) == 2 and "[L005]" in capsys.readouterr().err
    many = [*words[:-1], "partitions=256"]  # as many as a prediction refuses, without a cluster too
    assert main(many) == 2 and "65,536 buckets" in capsys.readouterr().err
    assert edges.read_text().count("\n") == 300


def test_a_loss_that_is_no_number_is_said(capsys):
    assert print_losses([0.5, None], "epoch") is False and print_losses([0.5], "pass", " a sample") is True
    found = capsys.readouterr()
    assert "epoch 2: loss is no number" in found.out and "pass 1: loss 0.5 a sample" in found.out
    assert "--lr" in found.err


def test_buckets_have_their_edges_in_order():
    found = by_bucket(Edges(EDGES[:, 0], EDGES[:, 1]), 3)
    for head in range(3):
        for tail in range(3):
            mine = EDGES[(EDGES[:, 0] % 3 == head) & (EDGES[:, 1] % 3 == tail)]
            bucket = found.of(head, tail, 3)
            assert (bucket.heads == mine[:, 0] // 3).all() and (bucket.tails == mine[:, 1] // 3).all()
    few = by_bucket(Edges(EDGES[:, 0], EDGES[:, 1]), 3, most=5)
    assert np.diff(few.first).max() == 5


def test_walks_go_along_edges_and_pair_nodes_that_are_near():
    """On a ring every step is to one of two neighbours, so that pairs are at most two apart."""
    ring = np.arange(20)
    walks = Walks(Edges(ring, (ring + 1) % 20), 20, walk=5, augment=2)
    pairs = walks.pairs(900, np.random.default_rng(1))
    far = np.minimum((pairs.heads - pairs.tails) % 20, (pairs.tails - pairs.heads) % 20)
    assert len(far) == 900 and set(far.tolist()) == {0, 1, 2}
    # of nine pairs of a walk of six nodes five are one step apart
    assert (far == 1).mean() == pytest.approx(5 / 9)


def test_edges_have_relations_where_the_model_does(tmp_path):
    kinds = np.arange(300) % 3
    np.savez(tmp_path / "a.npz", edges=np.column_stack([EDGES, kinds]))
    np.savez(tmp_path / "b.npz", heads=EDGES[:, 0], tails=EDGES[:, 1], relations=kinds)
    np.savez(tmp_path / "c.npz", edges=EDGES)
    assert all((read_edges(str(tmp_path / name), 40, 3).relations == kinds).all() for name in ("a.npz", "b.npz"))
    for name, count, said in (("c.npz", 3, "no relations"), ("a.npz", 2, "from 0 to 2 of 2")):
        with pytest.raises(MeshwrightError, match=said):
            read_edges(str(tmp_path / name), 40, count)
    bucket = by_bucket(read_edges(str(tmp_path / "a.npz"), 40, 3), 2).of(1, 0, 2)
    assert (bucket.relations == kinds[(EDGES[:, 0] % 2 == 1) & (EDGES[:, 1] % 2 == 0)]).all()
