"""Graph networks: bytes, times and volumes by hand, cuts against brute force, what is refused."""

import json

import numpy as np
import pytest

from meshwright.answer.graph_network import predict_graph_network
from meshwright.assign.cuts import blocks, copies_at_random, copies_of, skew_of
from meshwright.cli import main
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.lower.graph_network import layer_kernels
from meshwright.plan import parse
from meshwright.simulate.price import Pricer
from meshwright.spec.cluster import load as cluster
from meshwright.spec.graph_epochs import parse_graph_epochs
from meshwright.spec.graphs import load_graph_model, read_graph_model
from meshwright.work import Gemm

SMALL = {
    "architectures": ["GraphNetwork"],
    "layer": "gcn",
    "layers": 8,
    "hidden": 64,
    "vertices": 800_000,
    "edges": 16_000_000,
    "features": 100,
    "classes": 10,
}
MODEL = read_graph_model(SMALL, name="small")
COSTS = standard(load_framework("fused"))


def asked(words, model=MODEL, on="4xa100-80", work="epochs=10,copies=2"):
    return predict_graph_network(model, cluster(on), parse_graph_epochs(work), parse(words), costs=COSTS)


def test_kernels_of_a_layer_by_hand():
    gathered, product, activation = (one.work for one in layer_kernels(MODEL, 100, 2000, "F"))
    assert gathered.num_bytes == 2000 * (256 + 8) + 100 * 256  # a row, an index and a weight an edge, a row a vertex
    assert product == Gemm(m=100, n=64, k=64, dtype="fp32", out_bytes=4.0)
    assert activation.num_bytes == 4 * 100 * 256
    sage = read_graph_model({**SMALL, "layer": "sage"})
    assert layer_kernels(sage, 100, 2000, "F")[1].work.k == 128
    assert [one.name for one in layer_kernels(MODEL, 100, 2000, "BW")] == [
        "activation",
        "inputs",
        "weights",
        "aggregation",
    ]
    attended = read_graph_model({**SMALL, "layer": "gat", "heads": 4})
    assert layer_kernels(attended, 100, 2000, "F")[0].work.num_bytes == 4 * 2000 * 4 * 4 + 2 * 100 * 256


def test_parameters_by_hand():
    ends = 101 * 64 + 65 * 10
    assert MODEL.num_params == 8 * (64 * 64 + 64) + ends
    assert read_graph_model({**SMALL, "layer": "gcnii"}).num_params == 8 * 64 * 64 + ends
    assert read_graph_model({**SMALL, "layer": "sage"}).num_params == 8 * (128 * 64 + 64) + ends


def test_volumes_are_those_of_their_definitions():
    """Graph parallelism sends each vertex to its copies in each layer, a pipeline each vertex over each boundary."""
    row = 64 * 4.0
    divided = asked("dp4").times.lowered
    assert divided.boundary_bytes == 2 * 8 * 800_000 * 2 * row and divided.stage_bytes == 0
    piped = asked("pp4 gpipe vertex_chunks=16").times.lowered
    assert piped.stage_bytes == pytest.approx(2 * 3 * 800_000 * row) and piped.boundary_bytes == 0
    both = asked("pp2 dp2 gpipe vertex_chunks=16", work="epochs=1,copies=1").times.lowered
    assert both.stage_bytes == pytest.approx(2 * 800_000 * row)
    assert both.boundary_bytes == pytest.approx(2 * 8 * 800_000 * row)
    twice = asked("pp4 gpipe vertex_chunks=16", read_graph_model({**SMALL, "layer": "gcnii"})).times.lowered
    assert twice.stage_bytes == 2 * piped.stage_bytes  # the first layer's numbers travel beside


def test_an_epoch_of_one_device_is_the_sum_of_its_kernels():
    found = asked("dp1", on="1xa100-80")
    graph, pricer = found.times.lowered.graph, Pricer(COSTS)
    seconds = [pricer(program).seconds for program in found.times.lowered.programs]
    assert found.epoch_s == pytest.approx(sum(seconds[key] for key in graph.cost_key.tolist()))
    assert graph.num_tasks == 2 * (8 + 2) + 1
    assert found.total_s == pytest.approx(10 * found.epoch_s)
    assert sum(found.times.places.values()) == pytest.approx(found.epoch_s)


def test_a_pipeline_of_chunks_fills_as_its_schedule_says():
    """GPipe of p equal stages and m chunks idles (p - 1) / (m + p - 1) of the time, whatever it sends beside."""
    few, many = asked("pp4 gpipe vertex_chunks=4"), asked("pp4 gpipe vertex_chunks=32")
    for found, chunks in ((few, 4), (many, 32)):
        bubble = found.times.places["bubble"] / found.epoch_s
        assert 3 / (chunks + 3) * 0.9 < bubble < 3 / (chunks + 3) + 0.12  # with messages, and an input of one stage
    assert many.epoch_s < few.epoch_s
    assert "historical vertices" in many.memory[0].alive
    assert any("approximate" in caution for caution in many.cautions)


def test_copies_of_a_random_cut_are_what_random_cuts_have():
    random = np.random.default_rng(0)
    vertices, parts, degree = 2_000, 4, 6
    heads = np.repeat(np.arange(vertices), degree)
    tails = random.integers(vertices, size=len(heads))
    part_of = random.integers(parts, size=vertices)
    needed = {(int(h), int(part_of[t])) for h, t in zip(heads, tails)} | {
        (int(t), int(part_of[h])) for h, t in zip(heads, tails)
    }
    brute = sum(part_of[v] != p for v, p in needed) / vertices
    assert copies_of(heads, tails, part_of) == pytest.approx(brute)
    # every vertex has twelve neighbours in the mean, six of them by chance; fewer neighbours reach fewer parts
    assert brute <= copies_at_random(2 * degree, parts) and brute == pytest.approx(
        copies_at_random(12, parts), rel=0.02
    )


def test_a_cut_is_counted_in_a_file_of_edges(tmp_path):
    """A ring of eight vertices in two halves: four of them have a neighbour in the other half."""
    path = tmp_path / "Ring.txt"  # which keeps its capital
    path.write_text("".join(f"{v} {(v + 1) % 8}\n" for v in range(8)))
    ring = read_graph_model({**SMALL, "vertices": 8, "edges": 16}, name="ring")
    assert blocks(8, 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    found = asked("dp2", ring, "2xa100-80", f"epochs=1,cut={path}")
    assert found.times.lowered.cut == (0.5, 1.0)
    star = np.zeros(7, np.int64), np.arange(1, 8)
    assert skew_of(*star, blocks(8, 2)) == (7 + 3) / 7  # of 14 ends the first half has those of the centre and three


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tp2", "tp2 says nothing of small"),
        ("partitions=4", "partitions=4 says nothing of small"),
        ("pp3", "pp=3 x dp="),
        ("vertex_chunks=4", "there is one"),
        ("pp4 zb-h1 vertex_chunks=8", "whole backwards"),
        ("pp2 dp2 gpipe vertex_chunks=60000", ""),
    ],
)
def test_what_a_graph_network_cannot_have_is_refused(words, said):
    few = read_graph_model({**SMALL, "vertices": 1000}, name="small")
    with pytest.raises(MeshwrightError) as error:
        asked(words, few)
    assert {d.code for d in error.value.diagnostics} <= {"P085", "P001", "P002"}
    assert any(said in d.message for d in error.value.diagnostics)


def test_a_network_of_more_layers_than_are_simulated_is_refused():
    with pytest.raises(MeshwrightError, match="from 1 to 4,096"):
        read_graph_model({**SMALL, "layers": 10**8}, name="small")


@pytest.mark.parametrize(("text", "code"), [("epochs=0", "W002"), ("batch=8", "W001"), ("copies=1,cut=a.npz", "W005")])
def test_a_workload_of_whole_graphs_that_is_none_says_why(text, code):
    with pytest.raises(MeshwrightError) as error:
        parse_graph_epochs(text)
    assert error.value.diagnostics[0].code == code
    assert parse_graph_epochs(parse_graph_epochs("epochs=3,copies=1.5").text()).copies == 1.5


def test_commands_answer_for_graph_networks(capsys):
    words = ["reddit-gcnii", "--on", "8xa100-80", "--train", "epochs=100"]
    assert main(["predict", *words, "--plan", "pp8 gpipe vertex_chunks=32"]) == 0
    assert "chunks between stages" in capsys.readouterr().out
    assert main(["predict", *words, "--plan", "dp8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["boundary_bytes"] > 0 and sum(found["attribution_s"].values()) == pytest.approx(found["epoch_s"])
    words = ["run", "reddit-gcnii", "--train", "epochs=1", "--data", "x.npz"]
    assert main([*words, "--plan", "dp2 pp2 vertex_chunks=4"]) == 2 and "[P085]" in capsys.readouterr().err
    assert main([*words, "--plan", "dp2"]) == 2 and "[D010]" in capsys.readouterr().err
    assert (
        main(["predict", "reddit-gcnii", "--on", "8xa100-80"]) == 2 and "--train epochs=100" in capsys.readouterr().err
    )
    words = ["reddit-gcnii", "--on", "8xa100-80", "--train", "copies=2", "--plan", "dp8"]
    assert main(["lower", *words]) == 2
    said = capsys.readouterr().err
    assert "[M011]" in said and "W00" not in said  # words of its workload are no mistake beside it
    assert load_graph_model("reddit").layers == 32


def test_processes_train_what_one_process_trains():
    """Four kinds of layers divided, against dense matrices; chunks by two schedules, against one process: 1e-9."""
    from meshwright.run.networks.apart import apart

    assert max(apart(2).values()) < 1e-9


def test_a_run_that_is_asked_to_stop_ends_behind_its_epoch_and_writes_what_it_has(tmp_path, capsys, monkeypatch):
    from meshwright.run import launch  # as a command does, behind everything that plans

    random = np.random.default_rng(3)
    model, graph = tmp_path / "mine.json", tmp_path / "graph.npz"
    sizes = {"vertices": 30, "edges": 120, "features": 6, "classes": 2, "hidden": 8, "layers": 2}
    model.write_text(json.dumps({"architectures": ["GraphNetwork"], "layer": "gcn", **sizes}))
    features, labels = random.standard_normal((30, 6)), random.integers(2, size=30)
    np.savez(graph, edges=random.integers(30, size=(60, 2)), features=features, labels=labels)
    asked = launch.StopSignal()
    asked()
    monkeypatch.setattr(launch, "stop", asked)  # which its processes, forks of this one, begin with
    words = ["run", str(model), "--data", str(graph), "--train", "epochs=8", "--plan", "dp2", "--json"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert len(found["losses"]) == 1 and found["sent_bytes"] == found["predicted_sent_bytes"] > 0
    assert "stopped behind 1 of 8 epochs" in err and (tmp_path / "out" / "weights-0.npz").exists()


def test_a_run_sends_the_bytes_that_are_predicted_and_its_loss_falls(tmp_path, capsys):
    random = np.random.default_rng(2)
    model, graph = tmp_path / "mine.json", tmp_path / "graph.npz"
    sizes = {"vertices": 30, "edges": 120, "features": 6, "classes": 2, "hidden": 8, "layers": 4}
    model.write_text(json.dumps({"architectures": ["GraphNetwork"], "layer": "gcnii", **sizes}))
    labels = random.integers(2, size=30)
    features = random.standard_normal((30, 6)) + labels[:, None]
    np.savez(graph, edges=random.integers(30, size=(60, 2)), features=features, labels=labels)
    words = ["run", str(model), "--data", str(graph), "--train", "epochs=8", "--lr", "0.02", "--json"]
    for plan in ("dp2", "pp2 1f1b vertex_chunks=3"):
        assert main([*words, "--plan", plan, "--out", str(tmp_path / "out")]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["sent_bytes"] == found["predicted_sent_bytes"] > 0
        assert found["losses"][-1] < found["losses"][0]
    assert (tmp_path / "out" / "weights-1.npz").exists()
    np.savez(graph, edges=random.integers(30, size=(60, 2)), features=features[:9], labels=labels)
    assert main([*words, "--plan", "dp2"]) == 2 and '"D010"' in capsys.readouterr().out
