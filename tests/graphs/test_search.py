"""Searches of plans for models of graphs: no slower than any plan of their space, saved and asked again."""

import json

import pytest

from meshwright.answer.node_embedding import predict_node_embedding
from meshwright.cli import main
from meshwright.plan import parse
from meshwright.search.graphs import find_graph
from meshwright.spec.cluster import load as cluster
from meshwright.spec.edge_samples import parse_edge_samples
from meshwright.spec.graph_epochs import parse_graph_epochs
from meshwright.spec.graphs import load_graph_model, read_graph_model

MODEL = read_graph_model(
    {"architectures": ["NodeEmbedding"], "nodes": 80_000_000, "edges": 640_000_000, "dim": 64}, name="one"
)


def test_a_search_finds_what_fits_and_is_no_slower_than_other_plans():
    where, work = cluster("4xp100"), parse_edge_samples("batch=100000,negatives=3")
    found = find_graph(MODEL, where, work, top=100, fix=["partitions=8,16"])
    assert found.fits and found.best[0].plan.buckets.partitions > 1
    times = [one.total_s for one in found.best if one.fits]
    assert times == sorted(times)
    for words in ("partitions=8", "partitions=8 swap=beside", "partitions=16 buckets=tournament"):
        assert times[0] <= predict_node_embedding(MODEL, where, work, parse(words)).total_s
    only = find_graph(MODEL, where, work, fix=["partitions=8", "swap=wait"])
    assert {(one.plan.buckets.partitions, one.plan.buckets.swap) for one in only.best} == {(8, "wait")}


def test_old_neighbours_are_tried_where_they_are_allowed():
    reddit, where, work = load_graph_model("reddit"), cluster("2x4xa100-80,25gbe"), parse_graph_epochs("copies=2")
    exact = find_graph(reddit, where, work)
    assert {one.plan.vertices.vertex_chunks for one in exact.best} == {1}
    assert not any("approximate" in caution for one in exact.best for caution in one.cautions)
    more = find_graph(reddit, where, work, allow=["vertex_chunks=32"])
    assert more.best[0].plan.vertices.vertex_chunks == 32 and more.best[0].epoch_s < exact.best[0].epoch_s


def test_a_search_saves_a_question_that_predict_answers_alike(capsys, tmp_path):
    path = str(tmp_path / "plan.toml")
    words = ["youtube-line", "--on", "4xp100", "--train", "batch=100k", "--fix", "partitions=4,8", "--top", "2"]
    assert main(["search", *words, "--save", path, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert len(best) == 2 and best[0]["total_s"] <= best[1]["total_s"]
    assert main(["predict", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_s"] == best[0]["total_s"]
    assert main(["search", *words]) == 0 and "plans, the best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code"),
    [(["--fix", "tp=2"], "R001"), (["--objective", "cost"], "X004"), (["--fix", "partitions=3"], "P084")],
)
def test_what_does_not_apply_is_misuse(more, code, capsys):
    assert main(["search", "youtube-line", "--on", "4xp100", "--train", "batch=100k", *more]) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_stages_that_do_not_divide_the_devices_leave_no_plan(capsys):
    words = ["reddit-gcnii", "--on", "8xa100-80", "--train", "copies=2", "--fix", "pp=3"]
    assert main(["search", *words]) == 2 and "[R005]" in capsys.readouterr().err
    words[2] = "4..8xa100-80"
    assert main(["search", *words]) == 2 and "models of graphs are trained on one" in capsys.readouterr().err
