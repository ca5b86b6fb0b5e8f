"""A technique of serving is chosen by records of other questions, and it alone is simulated."""

import json

import numpy as np
import pytest

import meshwright as mw
from meshwright.cli import main
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.search.serving.evaluate import ServingEvaluator
from meshwright.search.serving.learned import (
    SHIPPED,
    AskedWords,
    GainTrees,
    RecordedGains,
    TechniqueRecord,
    read,
    write,
)
from meshwright.search.serving.techniques import Technique, measure_of, what_helps
from meshwright.spec.serve import parse

COUNTED = measure_of(False)
SHARED = "batch=64,prompt=1024,prefix=896:groups=4,output=64"
ALONE = "batch=64,prompt=1024,output=64"


def whatif(*more, serve=ALONE, on="1xh100", plan="tp1"):
    return main(["whatif", "llama3-8b", "--on", on, "--plan", plan, "--serve", serve, *more])


def test_trees_find_the_feature_and_the_threshold_that_tell_gains_apart():
    draw = np.random.default_rng(1)
    x = draw.uniform(size=(60, 5))
    gains = np.where(x[:, 2] > 0.5, 0.4, -0.1)
    trees = GainTrees(x, gains)
    asked = np.full(5, 0.5)
    for value, expected in ((0.9, 0.4), (0.1, -0.1)):
        asked[2] = value
        assert trees(asked) == pytest.approx(expected, abs=0.02)
    assert trees(asked) == GainTrees(x, gains)(asked)  # the same records, the same trees


def test_what_was_tried_is_kept_and_chooses_for_another_question(tmp_path, capsys):
    file = tmp_path / "tried.jsonl"
    for number in (600, 800, 1000, 1200):
        # prefixes of most of a prompt, and none: caching them pays for the first alone
        for prefix in (f",prefix={number - 100}:groups=4", ""):
            serve = f"batch=48,prompt={number}{prefix},output=48"
            assert whatif("--try", "prefix_cache=yes", "--records", str(file), serve=serve) == 0
    kept = read(file)
    assert len(kept) == 16 and [one.technique for one in kept[:2]] == ["", "prefix_cache=yes"]
    capsys.readouterr()
    whatif("--try", "learned", "--records", str(file), "--json", serve=SHARED, on="1xa100-80")
    found = json.loads(capsys.readouterr().out)
    assert [one["technique"] for one in found["attempts"]] == ["prefix_cache=yes"]  # and nothing else is simulated
    (said,) = found["learned"]["expected"]
    assert said[1] > 1.2 and found["attempts"][0]["gain"] > 1.2 and found["learned"]["questions"] == 8
    whatif("--try", "learned", "--records", str(file))
    said = capsys.readouterr().out
    assert "nothing that this plan takes gains here" in said and "none of" not in said


def test_the_records_of_the_catalog_choose_where_none_are_named(capsys):
    assert whatif("--try", "learned", serve=SHARED) == 0
    said = capsys.readouterr().out
    assert said.startswith("chosen by") and "prefix_cache=yes" in said.splitlines()[0]


def test_a_plan_of_several_pools_is_refused(capsys):
    pools = "prefill=[tp1 on=0:1] + decode=[tp1 on=1:2] prefill->decode:kv"
    for tried in ("learned", "kv=fp8"):
        assert whatif("--try", tried, serve="rate=4,prompt=99,output=9", on="2xh100", plan=pools) == 2
        assert "over a plan of one pool" in capsys.readouterr().err


def test_what_computes_something_else_is_not_chosen(tmp_path, capsys):
    asked = AskedWords("llama3-8b", "1xh100", "tp1", ALONE)
    values = {"": 100.0, "kv=fp8": 200.0, "policy=sarathi": 120.0}
    write(
        tmp_path / "own.jsonl",
        (TechniqueRecord(**asked._asdict(), technique=t, measure=COUNTED, value=v) for t, v in values.items()),
    )
    whatif("--try", "learned", "--records", str(tmp_path / "own.jsonl"), "--json")
    found = json.loads(capsys.readouterr().out)
    assert [one[0] for one in found["learned"]["expected"]] == ["policy=sarathi"]
    assert found["learned"]["expected"][0][1] == pytest.approx(1.2)


def test_records_of_another_measure_teach_nothing(tmp_path, capsys):
    file = tmp_path / "tried.jsonl"
    whatif("--try", "policy=sarathi", "--records", str(file))
    capsys.readouterr()
    assert (
        whatif("--slo", "ttft=1s", "--try", "learned", "--records", str(file), serve="rate=4,prompt=99,output=9") == 2
    )
    assert "X006" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("\n{}\n", "line 2: Object missing required field"), ('{"model": 1}', "line 1")],
)
def test_files_that_hold_no_records_are_refused(text, said, tmp_path):
    file = tmp_path / "own.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(MeshwrightError) as error:
        read(file)
    (one,) = error.value.diagnostics
    assert one.code == "X006" and said in one.message and "--records FILE" in one.help


def test_shipped_records_are_near_what_is_predicted_today():
    kept = [one for one in read(SHIPPED) if one.asked == read(SHIPPED)[0].asked]
    asked, values = kept[0].asked, {one.technique: one.value for one in kept}
    model, cluster, serve = mw.load_model(asked.model), mw.load_cluster(asked.on), parse(asked.serve)
    evaluator = ServingEvaluator(model, cluster, serve, serve.drawn(), serving_costs(), engine_profile())
    words = "policy=sarathi"
    found = what_helps(evaluator, mw.parse_plan(asked.plan).on(cluster.num_devices), [Technique(words, True)])
    # made by tools/try_techniques.py, which is run again where this moves
    assert found.gain(found.attempts[0]) == pytest.approx(values[words] / values[""], rel=0.1)


def test_questions_left_out_teach_nothing():
    known = RecordedGains(read(SHIPPED), COUNTED)
    every = known.expects(known.x[0])
    without = known.expects(known.x[0], but=range(1, len(known.questions)))
    assert every.questions == len(known.questions) and without.questions == 1 and without.records < every.records
