"""Time and cost over the number of devices: ranges, answers, ties, what is shared between points, pictures, errors."""

import json
import re
import xml.etree.ElementTree as ET

import msgspec
import numpy as np
import pytest

from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.quantity import big
from meshwright.report.figure import round_values
from meshwright.report.scaling_plot import figure
from meshwright.search import scaling
from meshwright.search.evaluate import Evaluator
from meshwright.search.find import find
from meshwright.search.glance import Glances
from meshwright.search.restrict import restricted
from meshwright.search.scaling import ScalingRange, sweep
from meshwright.search.space import cores, default, inners
from meshwright.search.walk import Walk
from meshwright.search.warm import grown, point_of
from meshwright.spec.cluster import load
from meshwright.spec.cluster_range import is_range, load_all
from meshwright.spec.goal import Goal, priced, read_price
from meshwright.spec.workload import parse
from tests.random_plans import LLAMA, MIXTURE

TRAIN = parse("batch=16,seq=1024,tokens=1b")
FEW = ["order=tp-cp-dp-pp", "schedule=1f1b", "recompute=none", "mb=1", "cp=1", "sp=yes", "tp=1,2"]
QUESTION = ["search", "gpt2", "--train", "batch=8,seq=256", "--store", "none", "--fix", "cp=1", "--fix", "pp=1"]


def searched(cluster, **hints):
    space = restricted(default(LLAMA, cluster, TRAIN), fix=FEW)
    return find(LLAMA, cluster, TRAIN, space=space, top=1, **hints)


def swept(goal, *words, price="2"):
    curves = [ScalingRange(w, tuple((t, priced(c, read_price(price))) for t, c in load_all(w))) for w in words]
    return sweep(curves, goal, searched, lambda *_: None)


@pytest.fixture(scope="module")
def whole():
    """Without a goal, at 2 dollars a device and hour: 2, 4, 8 and 16 H100, and 8 A100."""
    return swept(Goal(), "2..16xh100", "8xa100")


@pytest.mark.parametrize(
    ("word", "counts"),
    [
        ("8..64xh100", [8, 16, 32, 64]),
        ("4..40xh100", [4, 8, 16, 32, 40]),
        ("3..48xh100", [3, 6, 8, 24, 48]),  # 12 fills no nodes of 8, 8 does
        ("64,8,16xh100", [8, 16, 64]),
        ("1..4xp5", [8, 16, 32]),
        ("2..4x4xa100", [8, 16]),
        ("8..16xh100+8xa100", [16, 24]),
        ("8..16xa100,25gbe", [8, 16]),
        ("8xh100", [8]),
    ],
)
def test_a_range_doubles_in_whole_nodes_and_a_list_is_what_it_says(word, counts):
    assert [cluster.num_devices for _, cluster in load_all(word)] == counts
    assert is_range(word) == (len(counts) > 1)
    assert all(load(text) == cluster for text, cluster in load_all(word))


@pytest.mark.parametrize(
    "word", ["8..8xh100", "64..8xh100", "0..8xh100", "8..xh100", "8..16", "0,8xh100", "8...16xh100"]
)
def test_what_is_no_range_is_refused(word):
    with pytest.raises(MeshwrightError, match="B005"):
        load_all(word)


def test_ends_that_fill_no_nodes_are_refused_with_the_nearest_that_do():
    with pytest.raises(MeshwrightError) as error:
        load_all("8..100xh100")
    (wrong,) = error.value.diagnostics
    assert wrong.code == "C003" and "96xh100" in wrong.help


def test_every_point_is_what_a_search_of_its_own_finds(whole):
    for point in whole.points:
        alone = searched(load(point.text))
        assert point.proven and alone.proven_optimal
        assert point.prediction.step_time_s == alone.best[0].prediction.step_time_s
        assert point.prediction.plan == alone.best[0].plan


def test_the_cost_of_a_point_is_devices_times_hours_times_price(whole):
    """By hand: 1e9 tokens in steps of 16 x 1024 are 61,036 steps; 2 dollars for each device and hour."""
    for point in whole.points:
        run = point.run
        steps = next(s for what, s, _ in run.lines if what == "steps")
        assert steps == pytest.approx(61_036 * point.prediction.step_time_s)
        assert run.usd == pytest.approx(point.cluster.num_devices * run.seconds / 3600 * 2)


def test_more_time_is_never_dearer_and_more_money_never_slower(whole):
    days = [p.run.days for p in whole.points]
    usd = [p.run.usd for p in whole.points]
    before = np.inf
    for limit in np.geomspace(min(days) * 0.9, max(days) * 1.1, 40):
        found = with_goal(whole, Goal(days=float(limit))).cheapest
        spent = np.inf if found is None else found.run.usd
        assert spent <= before
        before = spent
    before = np.inf
    for limit in np.geomspace(min(usd) * 0.9, max(usd) * 1.1, 40):
        found = with_goal(whole, Goal(budget_usd=float(limit))).fastest
        took = np.inf if found is None else found.run.seconds
        assert took <= before
        before = took


def with_goal(whole, goal):
    """The same points under another goal, as `sweep` makes them."""
    points = tuple(
        msgspec.structs.replace(p, prediction=msgspec.structs.replace(p.prediction, goal=goal)) for p in whole.points
    )
    return msgspec.structs.replace(whole, points=points, goal=goal)


def test_answers_are_the_least_of_those_that_meet_the_goal_by_brute_force(whole):
    limit = sorted(p.run.days for p in whole.points)[2]  # three points are in time
    found = with_goal(whole, Goal(days=limit))
    meeting = [p for p in found.points if p.run.days <= limit]
    assert len(meeting) == 3
    assert found.cheapest.run.usd == min(p.run.usd for p in meeting)
    assert found.fastest.run.days == min(p.run.days for p in meeting)
    assert found.nearest is None and found.chosen is found.cheapest


def test_where_none_is_in_time_the_nearest_miss_is_named(whole):
    found = with_goal(whole, Goal(days=min(p.run.days for p in whole.points) / 2))
    assert (found.cheapest, found.fastest) == (None, None)
    assert found.nearest.run.days == min(p.run.days for p in whole.points)
    both = with_goal(whole, Goal(days=found.nearest.run.days * 0.9, budget_usd=1e-3))
    assert both.nearest.run.usd == min(p.run.usd for p in whole.points)  # the budget is missed by far more


def test_what_has_no_price_is_never_the_cheapest_and_without_any_device_hours_are_told_apart(whole):
    none = [msgspec.structs.replace(p.run, usd=None, usd_interval=None) for p in whole.points]
    bare = [msgspec.structs.replace(p.prediction, run=r) for p, r in zip(whole.points, none)]
    points = tuple(msgspec.structs.replace(p, prediction=b) for p, b in zip(whole.points, bare))
    without = msgspec.structs.replace(whole, points=points)
    assert not without.in_dollars
    assert without.cheapest.run.device_hours == min(p.run.device_hours for p in points)
    one = msgspec.structs.replace(whole, points=(*points[:-1], whole.points[-1]))
    assert one.cheapest is one.points[-1]


def test_ties_of_equal_devices_are_paired_and_of_others_independent():
    """By hand: the same draws 2% apart never meet when paired; against each other nine of twenty-five differences of
    -0.2 to 0.2 are of the other sign."""
    draws = np.array([0.9, 0.95, 1.0, 1.05, 1.1])

    def point(device, times):
        run = type("Run", (), {"draws_s": tuple(draws * times)})
        islands = (type("Island", (), {"device": type("Device", (), {"name": device})}),)
        return type("Point", (), {"run": run, "cluster": type("Cluster", (), {"islands": islands})})

    values = lambda p: np.array(p.run.draws_s)  # noqa: E731
    assert not scaling._tied(point("h100", 1.02), point("h100", 1.0), values)
    assert scaling._tied(point("a100", 1.02), point("h100", 1.0), values)
    assert not scaling._tied(point("a100", 2.0), point("h100", 1.0), values)


def test_a_cluster_without_a_plan_says_why_and_the_others_go_on():
    found = swept(Goal(), "2,4,32xh100")  # a batch of 16 over tp 2 and pp 1, 2 or 4 is at most 16 x 2 x 4 devices
    assert [p.prediction is not None for p in found.points] == [True, True, True]
    tight = restricted(default(LLAMA, load("64xh100"), TRAIN), fix=["tp=1", "cp=1", "pp=1"])
    told = sweep(
        [ScalingRange("8,64xh100", load_all("8,64xh100"))],
        Goal(),
        lambda cluster, **hints: find(
            LLAMA,
            cluster,
            TRAIN,
            space=tight.with_domain("devices", (cluster.num_devices,)),
            top=1,
            **hints,
        ),
        lambda *_: None,
    )
    assert [p.text for p in told.fitting] == ["8xh100"]
    assert told.points[1].refused.startswith("no legal plan: 64 devices")


def test_ctrl_c_leaves_the_clusters_that_are_done():
    calls = []

    def interrupted(cluster, **hints):
        calls.append(cluster)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return searched(cluster, **hints)

    curves = [ScalingRange("2..16xh100", load_all("2..16xh100"))]
    found = sweep(curves, Goal(), interrupted, lambda *_: None)
    assert ([p.text for p in found.points], found.stopped, found.asked) == (["2xh100", "4xh100"], True, 4)


@pytest.mark.parametrize("asked", [LLAMA, MIXTURE])
def test_kernels_of_layers_are_the_same_on_any_number_of_the_same_devices(asked):
    known, compared = {}, 0
    for count in (8, 16, 64):
        where = load(f"{count}xh100")
        evaluator = Evaluator(asked, where, TRAIN)
        glances, space = Glances(evaluator), default(asked, where, TRAIN)
        for core in list(cores(space, asked, where, TRAIN))[::5]:
            glances.ideal_seconds(core, inners(space, core, asked, where, TRAIN))
        for key, alone in evaluator.kernels.items():
            if key in known:
                compared += 1
                assert np.array_equal(alone.kernels, known[key].kernels)
                assert np.array_equal(alone.core, known[key].core)
                assert alone.waited == known[key].waited
            known[key] = alone
    assert compared > 5


def test_a_warm_start_takes_plans_of_the_space_only_and_finds_them_again():
    where = load("8xh100")
    best = searched(where).best[0].plan
    space = restricted(default(LLAMA, where, TRAIN), fix=FEW)
    walk = Walk(space, Evaluator(LLAMA, where, TRAIN), keep=1)
    core, inner, piped, state = point_of(best, walk)
    assert walk.evaluate(core, inner, piped, state).step_time_s == searched(where).best[0].prediction.step_time_s
    odd = msgspec.structs.replace(best, layout=msgspec.structs.replace(best.layout, tp=4, dp=best.layout.dp))
    assert point_of(odd, walk) is None
    assert all(p.layout.num_ranks == 16 for p in grown(best, 16)) and grown(best, 16)
    three = msgspec.structs.replace(best, layout=msgspec.structs.replace(best.layout, tp=3))
    assert grown(three, 16) == ()


def said(capsys, *argv):
    code = main([*QUESTION, *argv])
    return code, *capsys.readouterr()


def test_the_command_answers_with_a_table_and_both_curves(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "140")
    report, plot, plan = (str(tmp_path / name) for name in ("r.html", "c.svg", "best.toml"))
    argv = ["--on", "1..4xh100", "--on", "2xb200", "--tokens", "10b", "--days", "100"]
    code, out, err = said(capsys, *argv, "--report", report, "--plot", plot, "--save", plan)
    assert code == 0
    assert re.search(r"^cheapest within 100 days: \dx\w+, [\d.]+ days, \$[\d,.]+, P\(<= 100 days\) = ", out)
    for name in ("1xh100", "2xh100", "4xh100", "2xb200"):
        assert len(re.findall(rf"^ +{name} ", out, re.MULTILINE)) == 3  # in the table, and in both drawings
    assert "the same run on every cluster, 8 sequences a step" in out
    lines = [line.split()[:2] for line in err.splitlines()]
    assert lines == [["wrote", plan], ["next:", "meshwright"], ["wrote", report], ["wrote", plot]]
    ET.parse(plot)  # well-formed
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 and "http://www.w3.org" in page and "src=" not in page
    assert main(["predict", plan]) == 0  # what was saved is a question, with its goal


def test_json_says_the_same_and_the_exit_code_is_the_goals(capsys):
    code, out, _ = said(capsys, "--on", "1,2xh100", "--tokens", "10b", "--days", "0.001", "--budget", "1", "--json")
    answer = json.loads(out)
    assert (code, answer["met"], answer["cheapest"], answer["fastest"]) == (1, False, None, None)
    assert answer["nearest"] in ("1xh100", "2xh100")
    assert [row["num_devices"] for row in answer["points"]] == [1, 2]
    for row in answer["points"]:
        low, high = row["days_interval"]
        assert low < row["days"] < high
        assert [g["what"] for g in row["goal"]] == ["deadline", "budget"]
        assert row["usd"] == pytest.approx(row["device_hours"] * 6.88)  # the catalog's price of an H100


def test_one_cluster_has_the_run_below_its_plans_and_is_held_to_the_goal(capsys):
    code, out, _ = said(capsys, "--on", "2xh100", "--tokens", "10b", "--days", "0.001", "--price", "2.10")
    assert code == 1
    assert re.search(r"^ +deadline +not met +P\(<= 0.001 days\) = under 1%$", out, re.MULTILINE)
    assert "$2.10" in out and "Best of each family" in out


@pytest.mark.parametrize(
    ("argv", "codes"),
    [
        (["--on", "8..512xh100"], ["B003"]),
        (["--on", "8..512xh100", "--tokens", "1t", "--plot", "curve.pdf"], ["B006"]),
        (["--on", "8..4xh100", "--on", "9xnonesuch", "--days", "x"], ["B005", "C001", "B001"]),
        (["--on", "8xh100", "--on", "8xh800", "--budget", "1M"], ["B003", "B002"]),
        (["--on", "8xh100", "--on", "8xa100", "--tokens", "1t", "--price", "b200=3"], ["B004"]),
        ([], ["X004"]),
    ],
)
def test_wrong_questions_are_refused_with_everything_at_once(argv, codes, capsys):
    code, out, err = said(capsys, *argv)
    assert (code, out, re.findall(r"^error\[(\w+)\]", err, re.MULTILINE)) == (2, "", codes)


def test_a_question_file_is_searched_and_options_go_over_it(capsys, tmp_path):
    file = tmp_path / "q.toml"
    file.write_text('format_version = 1\nmodel = "gpt2"\non = "1..2xh100"\ntrain = "batch=8,seq=256"\ntokens = "1b"\n')
    fixed = ["--store", "none", "--fix", "cp=1", "--fix", "pp=1", "--json"]
    assert main(["search", str(file), *fixed]) == 0
    assert [p["cluster"] for p in json.loads(capsys.readouterr().out)["points"]] == ["1xh100", "2xh100"]
    assert main(["search", str(file), "--on", "2xh100", *fixed]) == 0
    assert json.loads(capsys.readouterr().out)["best"][0]["num_devices"] == 2


def test_pictures_are_the_same_shapes_as_svg_and_png(whole, tmp_path):
    drawn = figure(with_goal(whole, Goal(days=whole.points[0].run.days / 2)))
    (tmp_path / "c.svg").write_text(str(drawn.svg("light")), encoding="utf-8")
    root = ET.parse(tmp_path / "c.svg").getroot()
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    titles = [e.text for c in circles for e in c if e.tag.endswith("title")]
    assert len(titles) == 2 * len(whole.points)
    image = pytest.importorskip("PIL.Image")
    drawn.write(tmp_path / "c.png")
    with image.open(tmp_path / "c.png") as png:
        assert png.size == (drawn.width * 2, drawn.height * 2)
        assert len(png.getcolors(1 << 20)) > 20


def test_names_in_a_picture_are_escaped():
    from meshwright.report.figure import Drawing

    drawn = Drawing(10, 10, 'a "label" & more')
    drawn.text(1, 1, "<script>")
    assert "<script>" not in drawn.svg() and "&lt;script&gt;" in drawn.svg()
    ET.fromstring(str(drawn.svg("dark")))


@pytest.mark.parametrize(("low", "high"), [(1.5, 700), (1.4e5, 3.1e5), (0.02, 0.03), (1, 1e9)])
def test_round_values_of_an_axis_are_few_and_inside(low, high):
    found = round_values(low, high)
    assert 2 <= len(found) <= 7
    assert all(low <= v <= high for v in found) and found == sorted(found)
    assert all(len(big(v)) <= 5 for v in found)


def test_a_search_that_is_stopped_in_its_warm_start_answers_with_that(monkeypatch):
    """The first plan is evaluated and progress looked at, which stops it; the second ends the walk, with nothing else
    looked at and no reason counted."""
    where = load("8xh100")
    best = searched(where).best[0].plan
    space = restricted(default(LLAMA, where, TRAIN), fix=FEW)
    other = msgspec.structs.replace(best, layout=msgspec.structs.replace(best.layout, zero=3 - best.layout.zero))

    def stop(walk):
        walk.stopped = True

    monkeypatch.setattr("meshwright.search.shown.LOOK_S", -1.0)
    found = find(LLAMA, where, TRAIN, space=space, top=1, first=(other, best), report=stop)
    assert (found.stopped, found.evaluated, found.covered) == (True, 2, 0)
    assert found.best[0].plan == best
    assert all(count > 0 for count in found.pruned.values())


def test_stopped_before_any_plan_was_found_is_not_said_to_be_that_nothing_fits(capsys, monkeypatch):
    class Nothing:
        fits, stopped, misses = False, True, ()

    monkeypatch.setattr("meshwright.cli.search._find", lambda *_, **__: Nothing)
    code, out, _ = said(capsys, "--on", "1,2xh100", "--tokens", "1b")
    assert (code, out.splitlines()[0]) == (130, "stopped before anything was found")
