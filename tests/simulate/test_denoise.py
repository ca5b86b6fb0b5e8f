"""Denoising steps with stale exchanges: the graph's edges and times by hand, and what goes with nothing refused."""

import json

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.denoising import predict_denoising
from meshwright.cli import main
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.lower.denoising import denoising_step
from meshwright.simulate.denoise import graph_of
from meshwright.simulate.engine import steady_state
from meshwright.simulate.price import Pricer
from meshwright.spec.denoise import Denoise, parse
from meshwright.spec.model import config, from_config

MODEL = from_config(config("dit-xl-2") | {"num_layers": 4}, name="small")
COSTS = standard(load_framework("fused"))


def asked(plan, *, on="4xa100-80", words="images=1,size=1024,steps=20", model=MODEL):
    return predict_denoising(model, mw.load_cluster(on), parse(words), mw.parse_plan(plan), costs=COSTS)


def step_of(plan, on="4xa100-80"):
    cluster = mw.load_cluster(on)
    return denoising_step(mw.parse_plan(plan).on(cluster.num_devices), MODEL, cluster, parse("size=1024").train(MODEL))


def test_a_stale_gather_is_waited_for_by_the_next_step_and_by_nothing_of_its_own():
    step = step_of("cp4 allgather")
    waiting, stale = (graph_of(step, COSTS, Pricer(COSTS), how)[0] for how in ("", "patches"))
    assert not waiting.has_lag and stale.dep_lag.sum() == MODEL.num_layers  # one gather a layer
    late = stale.dep[stale.dep_lag == 1]
    assert {stale.streams.queue[stale.member[stale.member_ptr[t]]] for t in late.tolist()} == {
        waiting.streams.queue[waiting.member[waiting.member_ptr[t]]]
        for t in range(waiting.num_tasks)
        if waiting.streams.queue[waiting.member[waiting.member_ptr[t]]]
    }


def test_a_step_beside_its_gathers_takes_what_is_computed_or_what_travels():
    found = asked("cp4 allgather stale=patches")
    # NVLink gathers less than is computed: the step is its kernels, and what they lose to the gathers
    assert found.times.computed_s <= found.times.step_s < 1.1 * found.times.computed_s
    slow = asked("cp4 allgather stale=patches", on="4x1xa100-80,10gbe")
    graph, seconds = graph_of(step_of("cp4 allgather", "4x1xa100-80,10gbe"), COSTS, Pricer(COSTS), "patches")
    travels = np.array(seconds)[graph.cost_key][graph.streams.queue[graph.member[graph.member_ptr[:-1]]] != 0].sum()
    assert slow.times.step_s == pytest.approx(travels, rel=1e-6)  # a link a hundred times slower is never idle
    waits = asked("cp4 allgather", on="4x1xa100-80,10gbe")
    assert waits.times.step_s == pytest.approx(travels + waits.times.computed_s, rel=0.05)


def test_stages_that_read_a_step_late_take_the_longest_stage_and_messages_beside_it():
    step = step_of("pp4")
    graph, seconds = graph_of(step, COSTS, Pricer(COSTS), "stages")
    ends = steady_state(graph, np.array(seconds), 12)
    stages = [Pricer(COSTS)(program).seconds for program in step.passes]
    back = Pricer(COSTS)(step.back).seconds
    # a stage at work all the time, or what goes round all four of them in as many steps
    round_s = sum(stages) + sum(Pricer(COSTS)(message).seconds for message in step.onward) + back
    assert (ends[-1] - ends[-5]) / 4 == pytest.approx(max(max(stages), round_s / 4), rel=1e-6)
    chain, waits = graph_of(step, COSTS, Pricer(COSTS), "")
    ends = steady_state(chain, np.array(waits), 5)
    onward = sum(Pricer(COSTS)(message).seconds for message in step.onward)
    assert ends[-1] - ends[-2] == pytest.approx(sum(stages) + onward + back, rel=1e-9)


def test_all_steps_are_the_warm_up_and_those_that_do_not_wait():
    def took(**said):
        return asked("pp4 stale=stages", words=Denoise(size=1024, **said).text()).latency.value

    waiting, each = asked("pp4").times.step_s, asked("pp4 stale=stages").times.step_s
    assert took(steps=20, warmup=20) == pytest.approx(20 * waiting, rel=0.02)
    assert took(steps=28, warmup=8) - took(steps=24, warmup=8) == pytest.approx(4 * each, rel=1e-6)


def test_a_neighbour_s_part_is_sent_and_attended_to_in_proportion():
    # 4 ranks: a gather brings 3 patches, two neighbours' halves 1; attention over 1 + 1 of 4 patches
    whole, near = asked("cp4 allgather"), asked("cp4 allgather halo=0.5")
    assert near.times.sent_bytes == pytest.approx(whole.times.sent_bytes / 3)
    assert near.times.computed_s < whole.times.computed_s
    both = asked("cp4 allgather stale=patches halo=0.5")
    kept = [found.memory[0].alive["stale keys and values"] for found in (asked("cp4 allgather stale=patches"), both)]
    # keys and values of 4,096 tokens, twice with guidance, in 4 layers of width 1,152 in 16 bits
    assert kept == pytest.approx([2 * 4 * 2 * 4096 * 1152 * 2, 4 * 2 * 4096 * 1152 * 2])


def test_approximate_words_say_so_and_plain_ones_do_not():
    plans = {"cp4 allgather": 0, "dp2 cp2 allgather halo=0.5": 1, "pp4 stale=stages": 1}
    assert {plan: len(asked(plan).cautions) for plan in plans} == plans


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("dp2 pp2 stale=patches", "cp=1"),
        ("cp4 allgather stale=stages", "pp=1"),
        ("cp4 ulysses stale=patches", "say allgather"),
        ("cp4 stale=patches", "passes them round in a ring"),
        ("dp2 pp2 halo=0.5", "cp=1 has none"),
        ("dp4", "do not share the 2 rows"),
        ("dp2 cp2 mb2", "mb2: the 1 rows of a replica"),
        ("dp2 cp2 zero1", "are of training"),
    ],
)
def test_words_with_nothing_to_act_on_are_refused(plan, said):
    with pytest.raises(MeshwrightError) as caught:
        asked(plan)
    assert "P076" in str(caught.value) and said in str(caught.value)


def test_stale_exchanges_are_none_of_a_training_step():
    found = mw.check_plan(
        mw.parse_plan("dp4 stale=patches"), MODEL, mw.load_cluster("4xa100-80"), mw.parse_train("batch=4,seq=256")
    )
    assert [d.code for d in found] == ["P076"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("size=1000", "W019"),
        ("images=0,size=64", "W002"),
        ("steps=5", "W003"),
        ("size=64,steps=2,warmup=3", "W005"),
        ("size=64,colour=blue", "W001"),
    ],
)
def test_what_images_cannot_be_is_said(words, said):
    with pytest.raises(MeshwrightError, match=said):
        asked("dp2 cp2 allgather", words=words)


def test_a_text_of_images_is_read_back():
    one = Denoise(images=3, size=512, steps=20, warmup=1, guidance=False, dtype="fp16")
    assert parse(one.text()) == one
    with pytest.raises(MeshwrightError, match="denoises no images"):
        asked("tp1", on="1xa100-80", model=mw.load_model("llama3-8b"))


@pytest.mark.parametrize("plan", ["cp4 allgather stale=patches", "pp4 stale=stages", "pp2 dp2"])
def test_a_timeline_has_the_steps_as_they_are_timed(plan, tmp_path, capsys):
    found = asked(plan)
    ends = steady_state(found.times.graph, found.times.seconds, 3)
    timeline = found.times.timeline
    last = [float(timeline.end_s[timeline.attribute("step") == step].max()) for step in range(3)]
    assert last == pytest.approx(ends.tolist(), rel=1e-12)
    path = tmp_path / "trace.json"
    words = ["dit-xl-2-256", "--on", "4xa100-80", "--denoise", "size=1024", "--plan", plan, "--trace", str(path)]
    assert main(["predict", *words]) == 0 and "wrote" in capsys.readouterr().err
    assert json.loads(path.read_text())["traceEvents"]


def test_a_search_finds_the_plan_that_makes_images_soonest_and_saves_a_question(tmp_path, capsys):
    path, words = str(tmp_path / "plan.toml"), ["dit-xl-2-256", "--on", "4xa100-80", "--denoise", "images=2,size=256"]
    assert main(["search", *words, "--save", path, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    times = [one["latency_s"] for one in best]
    assert times == sorted(times)
    for plan in ("dp4", "cp4 allgather", "dp2 tp2", "pp4"):
        assert main(["predict", *words, "--plan", plan, "--json"]) == 0
        assert times[0] <= json.loads(capsys.readouterr().out)["latency_s"]
    assert main(["predict", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["latency_s"] == times[0]
    assert main(["search", *words, "--allow", "stale=patches", "--top", "1"]) == 0
    assert "plans, the best" in capsys.readouterr().out
    assert not any("stale" in one["plan"] for one in best)  # other images are searched where they are allowed alone
    assert main(["search", *words, "--slo", "ttft=1s", "--train", "batch=4"]) == 2
    assert capsys.readouterr().err.count("error[X004]") == 2
    assert main(["lower", path]) == 2
    assert "the question says denoise= in place of train=" in capsys.readouterr().err


@pytest.mark.parametrize("limits", [["--fix", "tp=4", "--fix", "cp=4"], ["--fix", "tp=3"]])
def test_a_search_whose_limits_leave_no_plan_says_so(limits, capsys):
    assert main(["search", "dit-xl-2-256", "--on", "8xh100", "--denoise", "size=256", *limits]) == 2
    found = capsys.readouterr().err
    assert "[R005]" in found and "a divisor of the number of devices" in found


@pytest.mark.parametrize(
    ("option", "said"), [("--rollout", "devices=best tries every split"), ("--feed", "predict plan.toml --feed")]
)
def test_what_no_search_is_asked_says_what_to_do_instead(option, said, capsys):
    words = ["llama3-8b", "--on", "8xh100", "--train", "batch=8,seq=4096"]
    assert main(["search", *words, option, "workers=2"]) == 2
    found = capsys.readouterr().err
    assert "[X003]" in found and said in found
