"""The switch of a row works: its command runs, and its words are in it."""

import json
import shlex
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.papers.record import papers
from meshwright.papers.shipped import shipped
from meshwright.papers.state import USABLE
from meshwright.plan import parse
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.feed import parse as parse_feed
from meshwright.spec.graphs import is_graph_model
from meshwright.spec.model import load
from meshwright.spec.recommender import is_recommender
from meshwright.spec.rollout import parse as parse_rollout
from meshwright.spec.serve import parse as parse_serve
from meshwright.spec.workload import parse as parse_train
from meshwright.world.trace import read

EXAMPLES = Path(__file__).parents[2] / "examples"
SWITCHED = [p for p in papers().values() if p.switch]
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 257,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def own(tmp_path):
    """The files that MODEL, FOLDER, TRACE, PLACEMENTS, COMPUTATION and RECIPE in a command stand for."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with as_file(files("meshwright.papers").joinpath("data", "dpro_zb-h1.json.gz")) as trace:
        yield {
            "MODEL": str(tmp_path / "config.json"),
            "FOLDER": str(tmp_path / "out"),
            "TRACE": str(trace),
            "PLACEMENTS": str(EXAMPLES / "placements.toml"),
            "COMPUTATION": str(EXAMPLES / "factorisation.toml"),
            "RECIPE": str(EXAMPLES / "recipe.toml"),
        }


def test_every_usable_row_has_a_switch():
    usable = {name for name, s in shipped().states.items() if s.state == USABLE}
    assert usable and usable <= {p.id for p in SWITCHED}


@pytest.mark.parametrize("row", SWITCHED, ids=lambda p: p.id)
def test_a_switch_is_a_command_that_runs_with_its_words_in_it(row, own, capsys):
    commands = [shlex.split(text) for text in (row.switch.first, row.switch.command) if text]
    if any(argv[0] == "run" for argv in commands):
        pytest.importorskip("torch")
    said = {word for arg in commands[-1] for word in (arg, *arg.split(), *arg.replace(" ", ",").split(","))}
    assert set(shlex.split(row.switch.words)) <= said
    for argv in commands:
        assert main([own.get(word, word) for word in argv]) in (0, 1), capsys.readouterr().err


@pytest.mark.parametrize("row", [p for p in SWITCHED if p.switch.command.startswith("predict")], ids=lambda p: p.id)
def test_the_words_of_a_switch_change_the_model_the_plan_or_the_work(row):
    argv, words = shlex.split(row.switch.command), row.switch.words.split()
    plan = argv[argv.index("--plan") + 1]
    changed = parse(plan) != parse(" ".join(word for word in plan.split() if word not in words))
    if "," in argv[1]:
        model = argv[1].split(",")
        changed |= load(argv[1]) != load(",".join(word for word in model if word not in words))
    on = argv[argv.index("--on") + 1]
    if set(words) & set(on.replace(" ", ",").split(",")):
        islands = (",".join(w for w in part.split(",") if w not in words) for part in on.split(" + "))
        with_words, without = load_cluster(on), load_cluster(" + ".join(islands))
        changed |= (with_words.islands, with_words.interconnect) != (without.islands, without.interconnect)
    if "--serve" in argv:
        serve = argv[argv.index("--serve") + 1]
        changed |= parse_serve(serve) != parse_serve(",".join(word for word in serve.split(",") if word not in words))
    others = is_recommender(argv[1]) or is_graph_model(argv[1])  # whose workloads are samples, in words of their own
    if "--train" in argv and not others:
        rolled = "batch=1," if "--rollout" in argv else ""  # whose trajectories are a step's batch
        train = rolled + argv[argv.index("--train") + 1]
        changed |= parse_train(train) != parse_train(",".join(word for word in train.split(",") if word not in words))
    if "--rollout" in argv:
        said = argv[argv.index("--rollout") + 1]
        kept = ",".join(word for word in said.split(",") if word not in words)
        changed |= parse_rollout(said).control != parse_rollout(kept).control
    if "--feed" in argv:
        feed = argv[argv.index("--feed") + 1]
        kept = ",".join(w for w in feed.split(",") if w not in words and not w.startswith("threshold"))
        changed |= parse_feed(feed) != parse_feed(kept)
    if "--world" in argv:
        world = argv[argv.index("--world") + 1]
        changed |= read(world) != read(",".join(word for word in world.split(",") if word not in words))
    assert changed
