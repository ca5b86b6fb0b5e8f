"""A technique of serving is chosen by records of other questions, and it alone is simulated."""

import gzip
import json

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright import catalog
from meshwright.cli import main
from meshwright.cost.engine import engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.native import Native
from meshwright.search.serving.evaluate import ServingEvaluator
from meshwright.search.serving.gain_trees import LEAF, TIE, TREES
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


def by_hand(x, gains, rows, draw):
    """A tree on some questions, written to be read: a function from a question to its log gain."""
    mean, low, high = gains[rows].mean(), x[rows].min(0), x[rows].max(0)
    if len(rows) < 2 * LEAF or np.ptp(gains[rows]) == 0:
        return lambda asked: mean
    thresholds = draw.uniform(low, high)
    best = None
    for feature, threshold in enumerate(thresholds):
        sides = [rows[side] for side in (x[rows, feature] < threshold, x[rows, feature] >= threshold)]
        if min(map(len, sides)) >= LEAF:
            # squares around both means are least where this is most; summed in order, as features tie to rounding
            under, total = (float(np.cumsum(gains[some])[-1]) for some in (sides[0], rows))
            kept = under * under / len(sides[0]) + (total - under) * (total - under) / len(sides[1])
            if best is None or kept > best[0] * (1 + TIE):
                best = kept, feature, threshold, sides
    if best is None:
        return lambda asked: mean
    _, feature, threshold, sides = best
    below, above = (by_hand(x, gains, side, draw) for side in sides)
    return lambda asked: (below if asked[feature] < threshold else above)(asked)


@pytest.mark.parametrize("questions", [1, 3, 4, 40, 150])
def test_trees_are_those_that_are_grown_by_hand(questions):
    draw = np.random.default_rng(questions)
    x = draw.normal(size=(questions, 6))
    x[:, 4] = np.round(x[:, 4])  # a feature that many have alike, and one that all do
    x[:, 5] = 1.0
    gains = np.where(x[:, 0] > 0.3, 0.5, x[:, 1] / 7) + np.where(x[:, 4] > 0, 0.0, 0.2)
    drawn = np.random.default_rng(0)
    forest = [by_hand(x, gains, np.arange(questions), drawn) for _ in range(TREES)]
    trees = GainTrees(x, gains)
    for asked in draw.normal(size=(20, 6)):
        assert trees(asked) == pytest.approx(np.mean([tree(asked) for tree in forest]), abs=1e-12)


def test_trees_that_are_grown_plain_and_compiled_are_the_same(monkeypatch):
    draw = np.random.default_rng(5)
    x, gains = draw.normal(size=(30, 4)), draw.normal(size=30)
    asked = draw.normal(size=(10, 4))
    said = {}
    for way in (Native.plain, Native.compiled):
        monkeypatch.setattr(Native, "__call__", way)
        said[way] = [GainTrees(x, gains)(one) for one in asked]
    assert said[Native.plain] == said[Native.compiled]


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


def test_records_that_cannot_be_written_are_refused_before_anything_is_simulated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.search.serving.techniques.what_helps", None)
    assert whatif("--try", "policy=sarathi", "--records", str(tmp_path / "none" / "tried.jsonl")) == 2
    assert "[X104]" in capsys.readouterr().err


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


def recorded(question, values):
    """Lines of records of a question, of the values of techniques."""
    some = [TechniqueRecord(**question._asdict(), technique=t, measure=COUNTED, value=v) for t, v in values.items()]
    return b"".join(msgspec.json.encode(one) + b"\n" for one in some)


ASKED = AskedWords("llama3-8b", "1xh100", "tp1", ALONE)
LINES = recorded(ASKED, {"": 100.0, "policy=sarathi": 120.0})


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (gzip.compress(LINES)[:-20], "Compressed file ended"),
        (gzip.compress(LINES)[:20] + b"\xff" * 200, "invalid"),
        (b"no gzip", "Not a gzipped file"),
    ],
)
def test_compressed_files_that_are_cut_short_or_none_are_refused(stored, said, tmp_path):
    (tmp_path / "own.jsonl.gz").write_bytes(stored)
    with pytest.raises(MeshwrightError, match=said) as error:
        read(tmp_path / "own.jsonl.gz")
    assert error.value.diagnostics[0].code == "X006"


def test_records_are_added_to_compressed_files_and_behind_a_line_without_an_end(tmp_path):
    for name, stored in (("a.jsonl", LINES), ("b.jsonl", LINES.rstrip()), ("c.jsonl.gz", gzip.compress(LINES))):
        (tmp_path / name).write_bytes(stored)
        write(tmp_path / name, read(tmp_path / name))
        assert len(read(tmp_path / name)) == 4
    assert gzip.decompress((tmp_path / "c.jsonl.gz").read_bytes()) == LINES * 2


def test_a_file_that_cannot_take_records_is_refused_before_anything_is_tried(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("meshwright.search.serving.techniques._attempt", None)
    (tmp_path / "notes.txt").write_text("what somebody wrote\n")
    for name, code in (("notes.txt", "X006"), ("nowhere/own.jsonl", "X104"), (".", "X104")):
        assert whatif("--try", "all", "--records", str(tmp_path / name)) == 2
        assert code in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "what somebody wrote\n"


def test_trials_that_somebody_ends_keep_what_was_found(tmp_path, capsys, monkeypatch):
    from meshwright.search.serving import techniques

    attempt, asked = techniques._attempt, []

    def third_is_interrupted(evaluator, plan, one, heard):
        asked.append(one)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return attempt(evaluator, plan, one, heard)

    monkeypatch.setattr(techniques, "_attempt", third_is_interrupted)
    whatif("--try", "all", "--records", str(tmp_path / "tried.jsonl"), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["stopped"] and len(found["attempts"]) == 1
    assert [one.technique for one in read(tmp_path / "tried.jsonl")] == ["", asked[1].words]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "nobody-9b"},
        {"on": "gone.toml"},
        {"plan": "tp3"},
        {"serve": "batch=many"},
        {"plan": "prefill=[tp1 on=0:1] + decode=[tp1 on=1:2] prefill->decode:kv"},
    ],
)
def test_a_record_that_cannot_be_asked_is_named(changed, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_bytes(recorded(ASKED._replace(**changed), {"": 100.0, "policy=sarathi": 120.0}))
    assert whatif("--try", "learned", "--records", str(tmp_path / "own.jsonl")) == 2
    said = capsys.readouterr().err
    assert "X006" in said and "a record's question cannot be asked" in said and next(iter(changed.values())) in said


def test_records_of_which_none_gains_choose_nothing(tmp_path, capsys):
    (tmp_path / "own.jsonl").write_bytes(recorded(ASKED, {"": 100.0, "policy=sarathi": 90.0}))
    whatif("--try", "learned", "--records", str(tmp_path / "own.jsonl"))
    assert "by 1 records of 1 question nothing" in capsys.readouterr().out


def test_what_a_question_has_already_is_not_chosen(tmp_path, capsys):
    (tmp_path / "own.jsonl").write_bytes(recorded(ASKED, {"": 100.0, "policy=sarathi": 130.0, "policy=orca": 120.0}))
    for serve, words in ((ALONE, "policy=sarathi"), (f"{ALONE},policy=sarathi", "policy=orca")):
        whatif("--try", "learned", "--records", str(tmp_path / "own.jsonl"), "--json", serve=serve)
        found = json.loads(capsys.readouterr().out)
        assert [one["technique"] for one in found["attempts"]] == [words]


def test_files_of_a_question_are_recorded_so_that_they_are_found_from_any_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "own.json").write_bytes((catalog.folder("models") / "llama3-8b.json").read_bytes())
    words = f'model = "own.json"\non = "1xh100"\nplan = "tp1"\nserve = "{ALONE}"\n'
    (tmp_path / "asked" / "question.toml").write_text("format_version = 1\n" + words)
    monkeypatch.chdir(tmp_path)
    assert main(["whatif", "asked/question.toml", "--try", "policy=sarathi", "--records", "tried.jsonl"]) in (0, 1)
    assert {one.model for one in read("tried.jsonl")} == {str((tmp_path / "asked" / "own.json").resolve())}


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
