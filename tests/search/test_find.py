"""The verb: answers, ties, near misses, the store, other strategies, and the command line."""

import json
import sqlite3

import pytest

from meshwright.answer.predict import predict
from meshwright.cli import main
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.plan import parse as plan
from meshwright.plan.facets import fields
from meshwright.plan.text import over
from meshwright.quantity import seconds
from meshwright.search.draws import SharedDraws
from meshwright.search.evaluate import Evaluator
from meshwright.search.find import find
from meshwright.search.found import pareto
from meshwright.search.restrict import restricted
from meshwright.search.space import default, plan_of
from meshwright.search.store import Store, identity
from meshwright.search.strategies import exhaustive
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.model import transformer
from meshwright.spec.workload import Train, parse
from tests.random_plans import LLAMA
from tests.search.small import everything

SMALL = LLAMA, cluster("8xh100"), parse("batch=16,seq=1024")
FEW = ["order=tp-cp-dp-pp", "schedule=1f1b,interleaved,zb-h1", "recompute=none,full", "mb=1,2"]


def space():
    return restricted(default(*SMALL), fix=FEW)


def test_the_best_plan_is_proven_and_predict_says_the_same():
    found = find(*SMALL, space=space())
    assert found.proven_optimal
    best = found.best[0]
    assert best.prediction.step_time_s == predict(*SMALL, best.plan).step_time_s
    assert best.prediction.fits
    assert found.covered == sum(found.pruned.values()) + min(len(found.best), found.covered)


@pytest.mark.parametrize("objective", ["step", "cost", "energy"])
def test_what_is_proven_is_what_is_first_and_rows_are_in_order(objective):
    """Plans that tie with the fastest stay behind it: of this question's best eight some were once shown before it."""
    asked = model("llama3-8b"), cluster("8xh100"), parse("batch=32,seq=8192")
    space = restricted(default(*asked), fix=["recompute=none", "order=tp-cp-dp-pp"])
    found = find(*asked, space=space, top=8, objective=objective)
    assert found.proven_optimal and any(r.tie for r in found.best)
    steps = [r.prediction.step_time_s for r in found.best]
    assert steps == sorted(steps)
    money = [r.prediction.money for r in found.best]
    asked_for = {"step": steps, "cost": [m.usd_per_step for m in money], "energy": [m.joules_per_step for m in money]}
    assert asked_for[objective] == sorted(asked_for[objective])
    assert [row["step_time_s"] for row in found.to_json()["best"]] == steps


def test_memory_left_is_no_objective_that_can_be_proven_and_the_error_says_where_it_is():
    with pytest.raises(MeshwrightError) as caught:
        find(*SMALL, space=space(), objective="headroom")
    (wrong,) = caught.value.diagnostics
    assert wrong.code == "R004" and "--pareto step,headroom" in wrong.help


def test_dollars_and_joules_are_not_told_of_devices_without_a_price_or_a_rated_power(capsys):
    """A price for what has none is its device-hours at most, and would be shown with a dollar sign."""
    ask = ["search", "gpt2", "--train", "batch=8,seq=256", "--store", "none", "--fix", "pp=1"]
    unpriced = cluster("8xh800")
    assert unpriced.total_price_usd_hour() is None
    assert main([*ask, "--on", "8xh800", "--objective", "cost", "--pareto", "step,cost"]) == 2
    said = capsys.readouterr().err
    assert said.count("error[R014]") == 2 and "--price h800" in said
    assert main([*ask, "--on", "8xh800", "--objective", "cost", "--price", "2.10"]) == 0
    assert "/Mtok" in capsys.readouterr().out
    assert main([*ask, "--on", "4xtpu_v5e", "--pareto", "step,energy"]) == 2
    assert "no rated power of" in capsys.readouterr().err


def test_the_same_question_has_the_same_answer_bit_for_bit():
    first, again = (find(*SMALL, space=space()).to_json() for _ in range(2))
    first.pop("seconds"), again.pop("seconds")
    assert first == again


@pytest.mark.parametrize("strategy", ["beam", "anneal"])
def test_a_strategy_that_looks_at_less_proves_nothing_and_finds_nothing_better(strategy):
    best = find(*SMALL, space=space()).best[0].prediction.step_time_s
    found = find(*SMALL, space=space(), strategy=strategy)
    assert not found.proven_optimal
    assert found.best[0].prediction.step_time_s >= min(best, found.best[0].prediction.step_time_s)
    assert min(r.prediction.step_time_s for r in found.best) >= best * (1 - 1e-12)


def test_the_cheapest_plan_is_the_fastest_as_every_plan_uses_every_device():
    wide = restricted(default(*SMALL), fix=[*FEW, "devices=1,2,4,8"])
    cheap, fast = (find(*SMALL, space=wide, objective=o, top=1).best[0] for o in ("cost", "step"))
    assert cheap.prediction.money.usd_per_step == fast.prediction.money.usd_per_step
    assert cheap.plan.layout.num_ranks == fast.plan.layout.num_ranks == 8


def test_nothing_fits_says_what_comes_closest_and_what_would_make_it_fit():
    found = find(model("llama3-70b"), cluster("8xh100"), parse("batch=8,seq=8192"), top=1)
    assert not found.fits and found.proven_optimal
    assert found.misses and all(m.lacks_bytes > 0 for m in found.misses)
    assert "GiB" in found.misses[0].remedy
    # state that lies in the hosts' memory makes room: what is told is what predict says
    named, told = found.misses[0].remedy.split("; or ")[1].split(": fits, ")
    moved = predict(
        model("llama3-70b"), cluster("8xh100"), parse("batch=8,seq=8192"), over(found.misses[0].plan, named)
    )
    assert moved.fits and told == f"{seconds(moved.step_time_s)} a step"


def test_the_best_plan_with_state_off_the_devices_is_the_best_of_all_of_them():
    where, few = cluster("8xa100,host=64gb"), ["order=tp-cp-dp-pp", "schedule=1f1b", "recompute=full", "mb=1"]
    asked = LLAMA, where, parse("batch=16,seq=128")
    space = restricted(default(*asked), fix=[*few, "offload=optimizer+activations", "cp=1"])
    found = find(*asked, space=space)
    assert found.proven_optimal
    steps = []
    for words in (f"tp{t} pp{p} dp{8 // t // p} zero{z}{sp}" for t in (1, 2, 4) for p in (1, 2) for z in range(4)
                  for sp in ("", " nosp")):  # fmt: skip
        one = plan(f"{words} mb1 full offload=optimizer+activations")
        if not check(one, *asked):
            steps.append(predict(*asked, one, detail=False).step_time_s)
    assert len(steps) > 20 and found.best[0].prediction.step_time_s <= min(steps)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"strategy": "foo"}, "--strategy foo"),
        ({"objective": "foo"}, "--objective foo"),
        ({"objectives": ("step", "foo")}, "--pareto foo"),
    ],
)
def test_an_unknown_objective_or_strategy_is_reported_where_it_was_said(wrong, place):
    with pytest.raises(MeshwrightError) as caught:
        find(*SMALL, space=space(), **wrong)
    assert [(d.code, d.place) for d in caught.value.diagnostics] == [("R004", place)]


def test_no_legal_plan_is_misuse():
    with pytest.raises(MeshwrightError) as caught:
        find(*SMALL, space=restricted(default(*SMALL), fix=["tp=3"]))
    assert caught.value.diagnostics[0].code == "R005"


def test_a_sequence_beyond_learned_positions_is_the_reason_that_no_plan_is_legal():
    table = transformer(layers=2, hidden=64, heads=4, vocab=128, positions="learned", max_seq_len=128)
    with pytest.raises(MeshwrightError) as caught:
        find(table, cluster("2xh100"), parse("batch=4,seq=256"))
    assert [d.code for d in caught.value.diagnostics] == ["W006"]


def test_a_plan_ties_with_itself_and_not_with_one_that_recomputes_everything():
    draws = SharedDraws(Evaluator(*SMALL, standard()))
    same, full = plan("tp2 zero1").on(8), plan("tp2 zero1 full").on(8)
    assert draws.tie(same, same)[:2] == (0.0, 0.0)
    assert draws.tie(full, same) is None


def test_the_front_keeps_what_nothing_beats_twice():
    """By hand: (1, 5) and (3, 2) are on it, (2, 5) loses to the first, (4, 2) to the second."""
    points = [
        (plan("tp2"), (2.0, 5.0)),
        (plan("tp4"), (1.0, 5.0)),
        (plan("tp8"), (4.0, 2.0)),
        (plan("pp2"), (3.0, 2.0)),
    ]
    assert [v for _, v in pareto(points)] == [(1.0, 5.0), (3.0, 2.0)]


def test_a_stopped_search_answers_with_what_it_found_and_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.search.shown.LOOK_S", -1.0)
    file = tmp_path / "store.sqlite"

    def interrupt(walk):
        if len(walk.tried) == 5 and not walk.ended:
            raise KeyboardInterrupt

    stopped = find(*SMALL, space=space(), store=file, report=interrupt)
    assert stopped.best and not stopped.proven_optimal
    assert sqlite3.connect(file).execute("SELECT count(*) FROM plans").fetchone() == (5,)
    resumed, whole = find(*SMALL, space=space(), store=file).to_json(), find(*SMALL, space=space()).to_json()
    resumed.pop("seconds"), whole.pop("seconds")
    assert resumed == whole
    assert resumed["proven_optimal"]


def test_a_search_that_was_proven_is_not_walked_again_and_says_the_same(tmp_path, monkeypatch):
    file = tmp_path / "store.sqlite"
    asked = {"space": space(), "store": file, "recommend": True}
    first = find(*SMALL, **asked).to_json()

    def never(walk):
        raise AssertionError("it was walked again")

    monkeypatch.setattr(exhaustive, "run", never)
    again = find(*SMALL, **asked).to_json()
    assert again.pop("recalled") and not first.pop("recalled")
    first.pop("seconds"), again.pop("seconds")
    assert again == first and again["proven_optimal"]
    for other in ({"top": 2}, {"families": True}, {"space": space().with_domain("tp", (1,))}):
        with pytest.raises(AssertionError, match="walked again"):
            find(*SMALL, **(asked | other))


def test_what_is_measured_anew_on_this_machine_is_another_question(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    before = identity(*SMALL, standard())
    assert identity(*SMALL, standard()) == before
    for name in ("here.json", "framework.toml"):
        (tmp_path / name).write_text("{}")
        assert identity(*SMALL, standard()) != before
        before = identity(*SMALL, standard())


def test_a_search_that_was_stopped_is_walked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.search.shown.LOOK_S", -1.0)
    file = tmp_path / "store.sqlite"

    def interrupt(walk):
        if len(walk.tried) == 3 and not walk.ended:
            raise KeyboardInterrupt

    find(*SMALL, space=space(), store=file, report=interrupt)
    assert sqlite3.connect(file).execute("SELECT count(*) FROM walks").fetchone() == (0,)


def test_two_writers_share_one_store(tmp_path):
    file = tmp_path / "store.sqlite"
    with Store(file, *SMALL, standard()) as a, Store(file, *SMALL, standard()) as b:
        for number, store in enumerate((a, b, a, b)):
            store.record(plan(f"tp{2 ** (number // 2)}"), (1.0, 2.0))
            store.flush()
        assert a.known() == b.known()
        assert len(a.known()) == 2


def test_a_store_of_another_format_is_refused(tmp_path):
    file = tmp_path / "store.sqlite"
    sqlite3.connect(file).execute("PRAGMA user_version = 99").connection.close()
    with pytest.raises(MeshwrightError) as caught:
        Store(file, *SMALL, standard())
    assert caught.value.diagnostics[0].code == "R010"


#: What an SVG says it is, which nothing fetches.
NAMESPACE = "http://www.w3.org/2000/svg"
QUESTION = ["search", "llama3-8b", "--on", "8xh100", "--train", "batch=64,seq=8192", "--store", "none"]
NARROW = ["--fix", "tp=1,2", "--fix", "cp=1", "--fix", "pp=1", "--fix", "order=tp-cp-dp-pp"]


def test_the_command_prints_json_with_what_was_asked_for(capsys):
    assert main([*QUESTION, *NARROW, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"best", "evaluated", "pruned", "space", "proven_optimal", "seconds"} <= set(answer)
    assert answer["best"][0]["fits"] and answer["proven_optimal"] is True
    assert answer["space"]["tp"] == [1, 2]


def test_the_winner_and_the_report_are_written(tmp_path, capsys):
    saved, report = tmp_path / "plan.toml", tmp_path / "search.html"
    assert main([*QUESTION, *NARROW, "--save", str(saved), "--report", str(report)]) == 0
    shown = capsys.readouterr().out
    assert plan(str(saved)).text() in shown
    page = report.read_text()
    assert "Pareto front" in page and "http" not in page.replace("http-equiv", "").replace(NAMESPACE, "")


def test_nothing_fits_is_exit_code_1_and_misuse_is_2(capsys):
    big = ["search", "llama3-70b", "--on", "8xh100", "--train", "batch=8,seq=8192", "--store", "none"]
    assert main(big) == 1
    said = capsys.readouterr().out
    assert "Closest" in said and "phase=lora" in said
    assert main([*QUESTION, "--fix", "tpp=3"]) == 2
    assert "R001" in capsys.readouterr().err
    for words in (["--fix", "tp=0"], ["--fix", "mb=0"], ["--bound", "stages<=3"], ["--top", "\N{SUPERSCRIPT TWO}"]):
        assert main([*QUESTION, *words]) == 2
        assert "error[R00" in capsys.readouterr().err


def test_every_winner_that_is_saved_is_a_plan_that_predict_takes(tmp_path, capsys):
    """No facet lets a value through that plans do not have; in other words, `zero=9` is misuse."""
    saved = str(tmp_path / "plan.toml")
    few = ["search", "gpt2", "--on", "4xh100", "--train", "batch=8,seq=256", "--store", "none", "--save", saved]
    assert main([*few, "--fix", "zero=9"]) == 2
    assert not (tmp_path / "plan.toml").exists()
    assert main([*few, "--fix", "zero=3", "--fix", "imbalance=1.5", "--fix", "schedule=1f1b"]) == 0
    assert main(["predict", saved]) == 0
    capsys.readouterr()


def test_the_store_is_shown_and_asked_in_sql(tmp_path, capsys):
    file = str(tmp_path / "store.sqlite")
    assert main([*QUESTION[:-1], file, *NARROW]) == 0
    assert main(["search", "--show", "--store", file]) == 0
    assert "llama3-8b" in capsys.readouterr().out
    assert main(["search", "--sql", "SELECT count(*) FROM plans", "--store", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0][0] > 0
    assert main(["search", "--sql", "DELETE FROM plans", "--store", file]) == 2


def test_one_plan_in_two_spellings_is_listed_once_the_simplest_first():
    """Parameters gathered once and held are ZeRO-1's; both spellings are in this space, as fp8 is allowed."""
    fix = ["order=tp-cp-dp-pp", "schedule=1f1b", "recompute=none", "mb=1", "tp=2", "pp=2", "cp=1", "zero=1,3"]
    for allow in ([], ["dtype=fp8"]):
        found = find(*SMALL, space=restricted(default(*SMALL), fix=fix, allow=allow))
        plans = {r.plan.text(): r.also for r in found.best}
        assert any("zero1" in text and also == ("fsdp",) for text, also in plans.items())
        assert not any("fsdp" in text and "fp8" not in text for text in plans)


def test_experts_spread_over_unequal_islands_are_searched_as_they_are_predicted():
    asked = model("mixtral-8x7b"), cluster("16xa100-80 + 16xh100"), parse("batch=128,seq=4096")
    fix = ["ep=8", "order=tp-cp-dp-pp", "schedule=1f1b", "recompute=none", "cp=1", "mb=1", "zero=1", "pp=4", "tp=1,2"]
    found = find(*asked, space=restricted(default(*asked), fix=fix))
    assert found.fits and found.proven_optimal
    best = found.best[0]
    assert best.plan.experts.ep == 8
    assert best.prediction.step_time_s == predict(*asked, best.plan).step_time_s


def test_chunks_with_fewer_layers_than_are_to_be_recomputed_are_not_in_the_space():
    """By hand: 32 layers on 8 stages are 4 each, so 6 of a chunk cannot be recomputed and 2 can."""
    asked = model("llama3-8b"), cluster("8xh100"), parse("batch=16,seq=8192")
    fix = ["recompute=full", "pp=8", "schedule=1f1b", "order=tp-cp-dp-pp", "mb=1"]
    both, legal = (
        find(*asked, space=restricted(default(*asked), fix=[*fix, f"recompute_layers={layers}"]))
        for layers in ("2,6", "2")
    )
    assert both.covered == legal.covered > 0
    assert {r.plan.memory.layers for r in both.best} == {2}
    for strategy in ("exhaustive", "beam", "anneal"):
        with pytest.raises(MeshwrightError) as caught:
            find(*asked, space=restricted(default(*asked), fix=[*fix, "recompute_layers=6"]), strategy=strategy)
        assert caught.value.diagnostics[0].code == "R005"


@pytest.mark.parametrize("strategy", ["exhaustive", "beam"])
def test_plans_that_are_not_legal_are_not_tried_where_few_are(strategy):
    """DualPipe holds every stage twice, which sharded gradients do not express: of two plans one is left."""
    fix = ["order=tp-cp-dp-pp", "schedule=dualpipe", "recompute=none", "mb=1", "tp=2", "pp=2", "cp=1", "sp=yes"]
    space = restricted(default(*SMALL), fix=[*fix, "zero=1,2", "shard=0"])
    found = find(*SMALL, space=space, strategy=strategy)
    assert found.covered == found.evaluated == 1
    assert [r.plan.layout.zero for r in found.best] == [1]


def test_shares_that_do_not_add_up_or_that_a_schedule_cannot_run_are_not_in_the_space():
    """By hand: of eight slices four of each kind take 4 (3 + 5) or 4 (7 + 9) microbatches, and the batch has 64; and
    interleaved chunks on two ranks take microbatches in pairs."""
    asked = model("llama2-13b"), cluster("8xa100-80 + 8xh100"), parse("batch=64,seq=2048")
    fix = ["recompute=full", "order=tp-cp-pp-dp", "cp=1", "stages=even", "mb=1", "dp=8", "zero=1", "shard=0"]
    with pytest.raises(MeshwrightError) as caught:
        find(*asked, space=restricted(default(*asked), fix=[*fix, "shares=3,5"]))
    assert caught.value.diagnostics[0].code == "R005"
    found = find(*asked, space=restricted(default(*asked), fix=[*fix, "shares=7,9", "schedule=1f1b,interleaved"]))
    assert found.proven_optimal
    assert {r.plan.layout.shares for r in found.best} == {(7, 9)}
    assert "interleaved" not in {r.plan.pipeline.schedule for r in found.best}


def test_plans_are_compared_by_the_mean_of_the_documents_and_the_answer_says_so():
    drawn = parse("batch=16,seq=1024,lengths=128;1024")
    found = find(*SMALL[:2], drawn, space=space())
    assert found.proven_optimal and any("the mean of the documents" in remark for remark in found.remarks)
    assert found.best[0].prediction.batches.num_draws == 32
    assert not find(*SMALL, space=space()).remarks


def test_what_a_schedule_hides_is_decided_the_same_by_a_search_and_by_a_plans_words():
    """DualPipe hides the experts' exchange (DeepSeek-V3, 2412.19437) unless the words of a plan say otherwise; a search
    prices it so, and no other schedule."""
    asked = model("mixtral-8x7b"), cluster("16xh100"), parse("batch=64,seq=1024")
    few = ["pp=4", "mb=1", "tp=1", "cp=1", "zero=1", "recompute=full", "schedule=dualpipe,1f1b", "order=tp-cp-dp-pp"]
    space = restricted(default(*asked), fix=[*few, "ep=1,4"])
    found = {one for one, _ in find(*asked, space=space, top=100).points}
    found |= {plan_of(*point) for point in everything(space, *asked)}
    assert {(p.pipeline.schedule, p.experts.ep, p.overlap.ep) for p in found} == {
        ("dualpipe", 1, False),
        ("dualpipe", 4, True),
        ("1f1b", 1, False),
        ("1f1b", 4, False),
    }
    assert all(plan(one.text()) == one for one in found)
    exposed = restricted(space, fix=["overlap=dp+pp"])
    assert not any(plan_of(*point).overlap.ep for point in everything(exposed, *asked))


def test_short_sequences_fill_a_microbatch_with_as_many_tokens_as_long_ones():
    """32 sequences of 2,048 tokens or more, and 65,536 tokens of shorter ones."""
    sizes = fields()["mb"].domain
    most = {seq: max(sizes(None, None, Train(global_batch=1 << 14, seq_len=seq))) for seq in (64, 512, 2048, 8192)}
    assert most == {64: 1024, 512: 128, 2048: 32, 8192: 32}
