"""A codec and a rule in one file each, as the page on extending shows them: priced and trained by their words."""

import re
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.spec.workload import Train
from meshwright.sync import codecs, policy, rules
from tests.run import local
from tests.run.processes import launch
from tests.run.small import differences, llama

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
TRAIN = Train(global_batch=8, seq_len=16, dtype="fp32")


def forget():
    for known in (codecs.codecs, rules.rules):
        known.cache_clear()
    policy.read.cache_clear()


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Adds the first block under a heading of the page as a file of its own."""

    def add(heading, registry):
        text = re.search(rf"## {heading}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]
        assert len(text.splitlines()) <= 40
        name = f"extending_{registry.__name__.rpartition('.')[2]}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(registry, "MODULES", [*registry.MODULES, name])
        monkeypatch.delitem(sys.modules, name, raising=False)
        forget()

    yield add
    monkeypatch.undo()
    forget()


def averaged_bytes(words, model, where, train):
    run = simulate(parse(words), model, mw.load_cluster(where), train, standard())
    tasks = [run.lowered.programs[key] for key in run.lowered.graph.cost_key.tolist()]
    return sum(move.num_bytes for program in tasks if program.every > 1 for move in program.moves)


def test_a_codec_in_one_file_is_a_word_that_is_priced_and_trained(added):
    added("A codec", codecs)
    words, model = "dp2 mb1 sync=local:h=2,codec=cut16", llama(vocab=64)
    got = launch(2, local.trained, model, words, TRAIN, 2, local.FP32)
    sent = sum(size for _, size in got[0][3])  # two bytes a value, of two replicas
    assert sent == averaged_bytes(words, model, "2xh100", TRAIN) == 2 * 2 * model.num_params
    one, other = (local.whole([held], "param") for _, _, held, *_ in got)
    assert max(differences(one, other).values()) == 0


def test_a_rule_in_one_file_is_a_word_that_is_priced_and_trained(added):
    added("A rule of synchronisation", rules)
    words, model = "dp2 mb1 sync=own-experts:h=2", llama(vocab=64, experts=4, top_k=2, moe_ffn=24)
    experts = 4 * 4 * 3 * 32 * 24  # layers, experts, matrices, hidden, width
    assert averaged_bytes(words, model, "2xh100", TRAIN) == 4 * (model.num_params - experts)
    one, other = (local.whole([held], "param") for _, _, held, *_ in launch(2, local.trained, model, words, TRAIN, 2))
    apart = {name for name, difference in differences(one, other).items() if difference}
    assert apart and all("experts" in name for name in apart)
