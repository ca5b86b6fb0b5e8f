"""Plans that engines run, memory left over, families, the plan to recommend: held to brute force over whole spaces."""

import json

import numpy as np
import pytest

from meshwright.answer.risk import room_bytes
from meshwright.cli import main
from meshwright.cli.search import ENGINES as RUNNABLE
from meshwright.errors import Infeasible
from meshwright.export.engines import ENGINES, refusals
from meshwright.export.request import ExportRequest
from meshwright.export.runnable import able, engine
from meshwright.plan import parse as plan
from meshwright.report import search_text
from meshwright.search.draws import SharedDraws
from meshwright.search.engines import Demands, Runnable, extended
from meshwright.search.evaluate import Evaluator
from meshwright.search.families import family_of
from meshwright.search.find import find
from meshwright.search.recommend import NEAR, REACH, ROOM
from meshwright.search.restrict import restricted
from meshwright.search.settle import settled
from meshwright.search.space import default, states
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse
from tests.random_plans import MIXTURE
from tests.search.small import everything

DENSE = model("llama3-8b"), cluster("16xa100-80"), parse("batch=32,seq=2048")
EXPERTS = MIXTURE, cluster("8xh100"), parse("batch=16,seq=1024")
FEW = ["order=tp-cp-dp-pp,dp-tp-cp-pp", "schedule=1f1b,interleaved,zb-h1", "vpp=1,2", "mb=1", "recompute=none"]
TIGHT = ["tp=1,2", "cp=1,2", "pp=1,2", "algorithm=ring,allgather", "shard=0"]


def question(asked, names=ENGINES, fix=(*FEW, *TIGHT)):
    """(engines, space) of a small question."""
    engines = [engine(name, *asked) for name in names]
    return engines, restricted(extended(default(*asked), engines), fix=fix)


def brute(asked, space):
    """Every plan of a space with its seconds and bytes left."""
    evaluator = Evaluator(*asked)
    points = everything(space, *asked)
    plans = {settled(*point, evaluator): point for point in points}
    return {p: (*evaluator(p), point) for p, point in plans.items()}


@pytest.fixture(scope="module")
def dense():
    _, space = question(DENSE)
    return space, brute(DENSE, space)


@pytest.mark.parametrize("asked", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_narrowing_a_space_to_an_engine_loses_no_plan_that_it_runs(asked):
    engines, space = question(asked)
    evaluator, ran = Evaluator(*asked), 0
    rng = np.random.default_rng(3)
    points = list(everything(space, *asked))
    for i in rng.permutation(len(points))[:1500].tolist():
        core, inner, piped, state = points[i]
        whole = settled(*points[i], evaluator)
        for one in engines:
            if one.refuses(whole):
                continue
            ran += 1
            (left,) = Runnable([one]).narrowed(space, core)
            values = inner._asdict() | piped._asdict() | state._asdict()
            hidden = {"overlap"}  # overlaps that hide nothing are one
            for facet in ("order", "sp", "algorithm", "recompute", "attention", "loss", "schedule", "zero"):
                beside = facet == "schedule" and core.pp == 1
                assert beside or facet in hidden or values[facet] in left[facet], (one.name, whole.text(), facet)
            assert state in states(left, core, asked[1], asked[2])
    assert ran > 100


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed", "accelerate", "meshwright"])
def test_the_best_for_an_engine_is_the_best_of_all_that_it_runs(name, dense):
    space, answers = dense
    (one,) = engines = [engine(name, *DENSE)]
    fits = {p: seconds for p, (seconds, room, _) in answers.items() if room >= 0}
    runs = {p: seconds for p, seconds in fits.items() if not one.refuses(p)}
    found = find(*DENSE, space=space, top=3, families=True, demands=Demands(engines=tuple(engines)))
    assert found.proven_optimal and found.engines == (one.label,)
    steps = [r.prediction.step_time_s for r in found.best]
    assert steps[0] == min(runs.values())
    assert steps == sorted(steps) and all(not one.refuses(r.plan) for r in found.best)
    best = {}
    for p, seconds in runs.items():
        best[family_of(p)] = min(seconds, best.get(family_of(p), seconds))
    assert steps == sorted(best.values())[: len(steps)]
    if min(fits.values()) < steps[0]:
        assert found.unrunnable.step_time_s == min(fits.values())
        assert found.unrunnable.wins == 1 - min(fits.values()) / steps[0]
        assert found.unrunnable.reasons and one.label in found.unrunnable.reasons[0]
    else:
        assert found.unrunnable is None
    assert found.covered == len(answers) or found.covered >= found.evaluated + sum(found.pruned.values()) - 3


def test_where_nothing_that_an_engine_runs_fits_the_fastest_that_does_is_named():
    """DeepSpeed's file has neither stages nor sequence parallelism; by brute force, all of this space that fits has
    one of them."""
    asked = model("llama3-70b"), cluster("16xh100"), parse("batch=16,seq=1024")
    fix = ["order=tp-cp-dp-pp", "tp=1,8", "cp=1", "pp=1,2", "mb=1", "zero=0,1", "schedule=1f1b", "recompute=full"]
    space = restricted(default(*asked), fix=[*fix, "sp=yes"])
    one = engine("deepspeed", *asked)
    fits = {p: s for p, (s, room, _) in brute(asked, space).items() if room >= 0}
    assert fits and all(one.refuses(p) for p in fits)
    found = find(*asked, space=space, demands=Demands(engines=(one,)))
    assert not found.fits and found.proven_optimal
    assert found.unrunnable.step_time_s == min(fits.values()) and found.unrunnable.wins is None
    assert search_text.verdict(found) == "nothing that DeepSpeed runs fits"
    assert [title for title, _ in search_text.excluded(found)] == ["Fits, but not run by DeepSpeed"]
    roomy = find(*asked, space=space, demands=Demands(engines=(one,), room_bytes=2.0**30))
    assert search_text.verdict(roomy) == "nothing that DeepSpeed runs leaves 1.0 GiB on every device"


def test_for_several_engines_the_best_is_that_of_what_any_of_them_runs(dense):
    space, answers = dense
    engines = [engine(name, *DENSE) for name in ("deepspeed", "accelerate")]
    runs = [s for p, (s, room, _) in answers.items() if room >= 0 and any(not e.refuses(p) for e in engines)]
    found = find(*DENSE, space=space, top=1, demands=Demands(engines=tuple(engines)))
    assert found.best[0].prediction.step_time_s == min(runs)


@pytest.mark.parametrize("strategy", ["beam", "anneal"])
def test_a_strategy_that_proves_nothing_still_shows_nothing_but_what_the_engine_runs(strategy, dense):
    one = engine("megatron", *DENSE)
    found = find(*DENSE, space=dense[0], strategy=strategy, demands=Demands(engines=(one,)))
    assert found.best and all(not one.refuses(r.plan) for r in found.best)


def test_every_plan_leaves_the_room_that_is_asked_for_and_the_best_is_the_best_of_those(dense):
    space, answers = dense
    rooms = sorted(room for _, room, _ in answers.values())
    wanted = rooms[int(0.9 * len(rooms))]
    found = find(*DENSE, space=space, top=3, demands=Demands(room_bytes=wanted))
    assert found.best[0].prediction.step_time_s == min(s for s, room, _ in answers.values() if room >= wanted)
    assert all(r.prediction.tightest.headroom_bytes >= wanted * (1 - 1e-12) for r in found.best)
    none = find(*DENSE, space=space, top=3, demands=Demands(room_bytes=rooms[-1] * 1.01))
    assert not none.fits and none.proven_optimal
    assert none.misses[0].lacks_bytes == pytest.approx(rooms[-1] * 0.01)


def test_the_usual_room_is_left_where_a_plan_leaves_it_and_the_fastest_that_does_not_is_named(dense):
    space, answers = dense
    fits = [(s, room) for s, room, _ in answers.values() if room >= 0]
    usual = max(room for s, room in fits if s == min(fits)[0]) * 1.01  # more than the fastest leaves
    found = find(*DENSE, space=space, recommend=True, demands=Demands(usual_room_bytes=usual))
    least = min(s for s, room in fits if room >= usual)
    assert found.usual and found.best[0].prediction.step_time_s == least
    assert found.risky.step_time_s == min(fits)[0] and found.risky.wins == 1 - min(fits)[0] / least
    (title, _), lines = search_text.excluded(found)[0], found.to_json()["risky"]["reasons"]
    assert title.startswith("Faster by") and "fits with a probability of" in lines[0] and "--risk" in lines[0]
    assert "--risk sets another" in search_text.demanded(found)


def test_where_no_plan_leaves_the_usual_room_the_best_of_all_is_shown_with_how_sure_it_is(dense):
    space, answers = dense
    most = max(room for _, room, _ in answers.values()) * 1.01
    plain = find(*DENSE, space=space, recommend=True)
    found = find(*DENSE, space=space, recommend=True, demands=Demands(usual_room_bytes=most))
    assert not found.usual and found.room_bytes == 0 and found.risky is None and found.proven_optimal
    assert [r.plan for r in found.best] == [r.plan for r in plain.best] and found.covered == plain.covered
    assert any(f"the first does with {found.best[0].prediction.p_fit:.0%}" in remark for remark in found.remarks)


def test_a_family_is_shown_once_with_its_best_and_families_are_in_order(dense):
    """Brute force: the fastest of each family, of all plans that fit."""
    space, answers = dense
    found = find(*DENSE, space=space, top=4, families=True)
    best = {}
    for p, (seconds, room, _) in answers.items():
        if room >= 0:
            best[family_of(p)] = min(seconds, best.get(family_of(p), seconds))
    assert [r.prediction.step_time_s for r in found.best] == sorted(best.values())[:4]
    assert len({r.family for r in found.best}) == 4
    for r in found.best:
        assert family_of(r.plan).text() == r.family
        for v in r.variants:
            assert family_of(v.plan).text() == r.family
            assert v.step_time_s >= r.prediction.step_time_s and answers[v.plan][0] == v.step_time_s


def test_the_recommended_plan_ties_with_the_fastest_has_room_and_is_run_by_an_engine():
    """Mixtral's fastest plan of this space shards gradients under a pipeline; one that a paired interval cannot tell
    from it leaves enough memory too and is Megatron-LM's."""
    asked = model("mixtral-8x7b"), cluster("64xh100"), parse("batch=512,seq=4096")
    fix = ["pp=2", "tp=1", "cp=1", "recompute=none", "order=tp-cp-dp-pp", "schedule=interleaved", "mb=1", "ep=2,4,8"]
    space = restricted(default(*asked), fix=[*fix, "vpp=4,6,8,16"])
    others = tuple(engine(name, *asked) for name in ("megatron", "torchtitan"))
    found = find(*asked, space=space, families=True, recommend=True, demands=Demands(others=others))
    first, pick = found.best[0], found.recommended
    assert pick.plan != first.plan and "Megatron-Core" in pick.engines
    assert not refusals("megatron", ExportRequest(model=asked[0], cluster=asked[1], train=asked[2], plan=pick.plan))
    assert refusals("megatron", ExportRequest(model=asked[0], cluster=asked[1], train=asked[2], plan=first.plan))
    room = pick.prediction.tightest.headroom_bytes
    # 5% of cases under the spread of the default profile's peaks: more than any plan as fast as these leaves
    capacity, sigma = asked[1].islands[0].device.memory_bytes, Evaluator(*asked).costs.framework.memory_sigma
    assert ROOM * capacity <= room < pick.room_bytes == room_bytes(0.05, capacity, sigma)
    assert "less than" in pick.why
    runs = [simulate(p, *asked, Evaluator(*asked).costs) for p in (pick.plan, first.plan)]
    slower = [r for r in found.best if r.tie and r.prediction.step_time_s >= runs[0].step_time_s]
    assert SharedDraws(Evaluator(*asked)).tie(pick.plan, first.plan) is not None or slower
    assert 0 < pick.slower == runs[0].step_time_s / runs[1].step_time_s - 1 < REACH - 1
    assert f"{pick.slower:.1%} slower than the fastest" in pick.why and "Megatron-Core runs it" in pick.why
    eligible = [r for r in found.best if r.tie and not others[0].refuses(r.plan)]
    assert all(r.prediction.step_time_s * NEAR >= runs[0].step_time_s for r in eligible)


def test_the_fastest_itself_is_recommended_where_it_has_room_and_is_run(dense):
    one = engine("meshwright", *DENSE)
    space = dense[0].with_domain("zero", (3,))
    found = find(*DENSE, space=space, families=True, recommend=True, demands=Demands(others=(one,)))
    assert found.recommended.plan == found.best[0].plan
    assert found.recommended.why.startswith("the fastest; leaves")


def test_an_engine_that_a_question_rules_out_is_left_out_and_none_left_is_the_answer_no():
    lora = (DENSE[0], DENSE[1], parse("batch=32,seq=2048,phase=lora"))
    engines = [engine(name, *lora) for name in ("megatron", "meshwright")]
    left, (said,) = able(engines, DENSE[1])
    assert left == engines[1:] and "Megatron-Core cannot run phase=lora, whatever the plan" in said
    with pytest.raises(Infeasible, match="Megatron-Core cannot run phase=lora, whatever the plan"):
        able(engines[:1], DENSE[1])
    rotary = [engine(name, *DENSE) for name in ("megatron", "meshwright")]
    assert able(rotary, DENSE[1]) == (rotary, [])


ASKED = ["search", "llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=8192", "--store", "none"]
NARROW = ["--fix", "tp=1,2", "--fix", "cp=1", "--fix", "pp=1,2", "--fix", "order=tp-cp-dp-pp"]


def test_the_command_finds_what_an_engine_runs_under_its_costs_and_saves_the_recommended(tmp_path, capsys):
    saved = str(tmp_path / "plan.toml")
    asked = [*ASKED, *NARROW, "--for", "megatron", "--headroom", "5%"]
    assert main([*asked, "--json", "--save", saved]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["framework"] == "megatron-core" and answer["engines"] == ["Megatron-Core"]
    assert all(row["headroom_bytes"] >= answer["room_bytes"] > 0 for row in answer["best"])
    assert any("--framework names another" in remark for remark in answer["remarks"])
    assert plan(saved).text() == answer["recommended"]["plan"]
    assert main(["export", saved, "--to", "megatron"]) == 0
    capsys.readouterr()
    assert main(["predict", saved, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == answer["recommended"]["step_time_s"]
    assert main([*asked, "--pick", "fastest", "--save", saved, "--framework", "nanotron"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "run by Megatron-Core" in out and "costs of nanotron" in out
    assert "Best of each family" in out


def test_what_is_wrong_with_the_demands_is_said_at_once_with_the_nearest(capsys):
    assert main([*ASKED, "--for", "megatrn,titan", "--headroom", "5", "--framework", "nanotrn", "--pick", "x"]) == 2
    said = capsys.readouterr().err
    for words in ("R012", "megatron", "R013", "--headroom 5%", "X020", "nanotron", "--pick x"):
        assert words in said
    for words in (["--headroom", "100%"], ["--headroom", "90GiB"], ["--headroom", "-1GiB"], ["--for", ","]):
        assert main([*ASKED, *words]) == 2
        assert "error[R01" in capsys.readouterr().err


def test_plans_of_a_small_risk_fit_so_surely_and_a_risk_that_is_none_is_refused(capsys):
    """5% where the default profile's peaks have an error of 0.2: 1 - exp(-1.645 * 0.2) of the device stays free."""
    assert main([*ASKED, *NARROW, "--risk", "5%", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    free = [row["headroom_bytes"] for row in answer["best"]]
    room = answer["room_bytes"]
    assert min(free) >= room > 0
    assert answer["recommended"]["headroom_bytes"] >= room
    for words in ("0%", "80%", "often"):
        assert main([*ASKED, "--risk", words]) == 2
        assert "R013" in capsys.readouterr().err


def test_runnable_leaves_in_what_some_engine_or_the_executor_runs(capsys):
    asked = ["search", "llama3-8b", "--on", "2xh100", "--train", "batch=8,seq=2048", "--store", "none", "--json"]
    fix = ["--fix", "mb=1", "--fix", "schedule=1f1b,gpipe", "--fix", "cp=1"]
    assert main([*asked, *fix, "--runnable"]) == 0
    found = json.loads(capsys.readouterr().out)
    question = model("llama3-8b"), cluster("2xh100"), parse("batch=8,seq=2048")
    able_to = [engine(name, *question) for name in RUNNABLE]
    assert len(found["engines"]) == len(RUNNABLE)
    assert found["best"]
    for one in found["best"]:
        assert any(not who.refuses(plan(one["plan"])) for who in able_to), one["plan"]
    assert main([*asked, "--runnable", "--for", "megatron"]) == 2
    assert "R003" in capsys.readouterr().out
