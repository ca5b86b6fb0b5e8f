"""Deciders of clients' servers: what they decide, by hand and on the virtual clock with sizes by hand."""

import pytest

from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.simulate.clients import ClientSizes, simulate_clients
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.sync.clients import Answered, Ask, Begun, Left, Merge, Portion, Wake, Woken
from meshwright.sync.clients import TrainOn as Give
from meshwright.sync.policy import read
from meshwright.world.crowd import Crowd, factors
from meshwright.world.decider import replayed

WORDS = [
    "fedavg:h=4",
    "fedavg:h=4,clients=3,wait=0.6",
    "fedprox:h=4,wait=0.5",
    "fedbuff:h=4,buffer=2",
    "fedfix:h=4,every=5s",
    "favano:h=6,clients=2,every=4s",
    "fedcompass:h=12,least=2",
    "backup:b=2",
    "dbw:noise=4",
]


def decider(words, count):
    policy = read(words)
    return policy.rule.decider(policy.values, count)


def sizes(count, step_s=1.0, message_s=0.0, merge_s=0.0):
    steps = (step_s,) * count if isinstance(step_s, float) else step_s
    each = (message_s,) * count
    return ClientSizes(step_s=steps, down_s=each, up_s=each, down_bytes=100, up_bytes=10, merge_s=merge_s)


def told(one, *events):
    """The last decisions of a decider of these events."""
    state, out = one.begin(), ()
    for event in events:
        state, out = one.decide(state, event)
    return out


def arrived(client, task, version=0, steps=4, began_s=0.0, at_s=1.0):
    return Answered(client, task, version, steps, began_s, at_s)


def test_a_cohort_ends_with_its_last_client_and_takes_the_mean():
    one = decider("fedavg:h=4", 2)
    assert told(one, Begun()) == (Give(0, 0, 4), Give(1, 0, 4))
    assert told(one, Begun(), arrived(1, 0)) == ()
    ended = told(one, Begun(), arrived(1, 0), arrived(0, 0))
    assert ended == (Merge((Portion(0, 0, 0.5), Portion(1, 0, 0.5))), Give(0, 1, 4), Give(1, 1, 4))
    assert told(one, Begun(), Left(0, 0, 1.0), arrived(1, 0))[0] == Merge((Portion(1, 0, 1.0),))
    assert told(one, Begun(), Left(0, 0, 1.0), Left(1, 0, 1.0)) == (Give(0, 1, 4), Give(1, 1, 4))


def test_the_last_of_a_cohort_are_dropped_or_asked_for_what_they_have():
    dropped = told(decider("fedavg:h=4,wait=0.5", 4), Begun(), arrived(2, 0), arrived(0, 0))
    assert dropped[0] == Merge((Portion(0, 0, 0.5), Portion(2, 0, 0.5))) and len(dropped) == 5
    asked = told(decider("fedprox:h=4,wait=0.5", 4), Begun(), arrived(2, 0), arrived(0, 0))
    assert asked == (Ask(1), Ask(3))


def test_a_buffer_weighs_what_is_old_less():
    """Of two answers in a buffer the second began one version before: 1/2 and 1/2 / sqrt(2)."""
    one, state = decider("fedbuff:h=4,buffer=2", 3), None
    state, begun = one.decide(one.begin(), Begun())
    assert begun == (Give(0, 0, 4), Give(1, 1, 4), Give(2, 2, 4))
    state, again = one.decide(state, arrived(0, 0))
    assert again == (Give(0, 3, 4),)
    state, first = one.decide(state, arrived(1, 1))
    assert first[0] == Merge((Portion(0, 0, 0.5), Portion(1, 1, 0.5)))
    state, _ = one.decide(state, arrived(1, 4, version=1))
    _, second = one.decide(state, arrived(2, 2))
    assert second[0] == Merge((Portion(1, 4, 0.5), Portion(2, 2, 0.5 * 2**-0.5)))


def test_versions_at_fixed_times_count_slow_clients_as_often_as_fast_ones():
    """A client whose task takes two intervals weighs twice as much: after two, each of two clients has weighed one."""
    one, state = decider("fedfix:h=4,every=10s", 2), None
    state, begun = one.decide(one.begin(), Begun())
    assert begun == (Give(0, 0, 4), Give(1, 1, 4), Wake(0, 10.0))
    state, _ = one.decide(state, arrived(0, 0))
    state, first = one.decide(state, Woken(0, 10.0))
    assert first == (Merge((Portion(0, 0, 0.5),)), Give(0, 2, 4), Wake(1, 20.0))
    state, _ = one.decide(state, arrived(1, 1))
    state, _ = one.decide(state, arrived(0, 2, version=1))
    _, second = one.decide(state, Woken(1, 20.0))
    assert second[0] == Merge((Portion(1, 1, 1.0), Portion(0, 2, 0.5)))


def test_favano_takes_the_mean_of_the_servers_model_and_of_those_asked_by_their_usual_steps():
    one = decider("favano:h=8,every=10s", 2)
    state, begun = one.decide(one.begin(), Begun())
    assert begun == (Give(0, 0, 8, True), Give(1, 1, 8, True), Wake(0, 10.0))
    state, asked = one.decide(state, Woken(0, 10.0))
    assert asked == (Ask(0), Ask(1), Wake(1, 20.0))
    state, _ = one.decide(state, arrived(0, 0, steps=5))
    _, merged = one.decide(state, arrived(1, 1, steps=2))
    share = pytest.approx(1 / 3)
    assert [(p.start, p.change) for p in merged[0].parts] == [
        (share, pytest.approx(1 / 15)),
        (share, pytest.approx(1 / 6)),
    ]
    assert merged[1:] == (Give(0, 2, 8, True), Give(1, 3, 8, True))


def test_fedcompass_gives_fast_clients_more_steps_so_that_they_answer_together():
    """Seconds a step of 1, 2 and 4: the groups after the first answers end together, within one step of each."""
    rounds = simulate_clients(sizes(3, (1.0, 2.0, 4.0)), decider("fedcompass:h=40,least=4", 3), Crowd(), 400)
    together = [v for v in rounds.versions if v.answers == 3]
    assert len(together) >= len(rounds.versions) / 2
    given = dict.fromkeys(range(3), 0)
    for entry in rounds.log[len(rounds.log) // 2 :]:
        for said in entry.decisions:
            if isinstance(said, Give):
                given[said.client] = said.steps
    assert given[0] == pytest.approx(4 * given[2], abs=4) and given[1] == pytest.approx(2 * given[2], abs=2)
    waiting = simulate_clients(sizes(3, (1.0, 2.0, 4.0)), decider("fedavg:h=10", 3), Crowd(), 400)
    assert rounds.busy > 0.9 > 0.6 > waiting.busy


def test_rounds_that_end_with_a_version_are_the_first_of_those_that_go_on():
    world, said = Crowd(jitter=factors("slow:0.5x3"), drop=0.1, seed=4), "fedavg:h=4,clients=3,wait=0.5"
    whole = simulate_clients(sizes(6, 1.0, 0.2), decider(said, 6), world, 400)
    some = simulate_clients(sizes(6, 1.0, 0.2), decider(said, 6), world, 400, 5)
    assert len(some.versions) == 5 < len(whole.versions)
    assert some.versions == whole.versions[:5] and some.log == whole.log[: len(some.log)]


def test_a_round_of_all_takes_as_long_as_by_hand():
    """10 clients, 8 steps of a second, messages of half a second through one port each way: the last one gets the model
    after 5 s, is done after 13, and its answer is there at 13.5; the server takes 10 x 0.01 s to merge."""
    rounds = simulate_clients(sizes(10, 1.0, 0.5, 0.01), decider("fedavg:h=8", 10), Crowd(), 160)
    assert [v.at_s for v in rounds.versions] == pytest.approx([13.6, 27.2])
    assert (rounds.steps, rounds.wasted, rounds.down_bytes, rounds.up_bytes) == ((16,) * 10, 0, 2000, 200)
    assert rounds.busy == pytest.approx(16 / 27.2)


def test_aggregators_send_one_sum_through_the_servers_port_for_each_group():
    """4 clients in two groups, one step of a second, half a second for a message to an aggregator and a quarter for one
    to the server, which gives the model to one after the other: the last client has it at 1 s, is done at 2, its answer
    is at the aggregator at 2.5 and the sum at the server at 2.75; the first group had its turn before."""
    told = sizes(4, 1.0, 0.25)
    near = ClientSizes(
        step_s=told.step_s,
        down_s=told.down_s,
        up_s=told.up_s,
        down_bytes=100,
        up_bytes=10,
        tree=2,
        near_s=(0, 0.5, 0, 0.5),
    )
    rounds = simulate_clients(near, decider("fedavg:h=1,tree=2", 4), Crowd(), 4)
    assert rounds.versions[0].at_s == pytest.approx(2.75) and rounds.versions[0].answers == 4
    assert (rounds.up_bytes, rounds.down_bytes) == (2 * 100, 4 * 100)
    some = simulate_clients(near, decider("fedavg:h=1,tree=2,clients=3", 4), Crowd(drop=0.3), 60)
    assert some.left > 0 and some.merged >= 60 and {v.answers for v in some.versions} <= {1, 2, 3}


def test_backup_workers_cut_the_tail_of_stragglers():
    """4 workers, one of which takes 5 s where others take one: a step of all takes 5 s, one of the first three 1 s; the
    slow one takes its next step when it has ended the one before, which is not used."""
    world = Crowd(speeds=factors("1/1/1/5"))
    all_, first = (simulate_clients(sizes(4), decider(f"backup:b={b}", 4), world, 60) for b in (0, 1))
    assert all_.seconds == pytest.approx(15 * 5) and first.seconds == pytest.approx(20 * 1)
    assert first.wasted == first.steps[3] == 4 and first.merged == 60


def test_dynamic_backup_workers_wait_for_all_where_none_is_slow_and_cut_the_tail_where_some_are():
    """16 workers with a tenth of the steps six times as long: within a quarter of the progress a second of the best
    number of backup workers, which nobody said, and more than twice that of waiting for all."""
    alike = simulate_clients(sizes(16), decider("dbw:noise=16", 16), Crowd(), 400)
    assert {v.answers for v in alike.versions} == {16}
    world = Crowd(jitter=factors("slow:0.1x6"))
    words = [*(f"backup:b={b}" for b in range(0, 15, 2)), "dbw:noise=16"]
    found = [simulate_clients(sizes(16), decider(one, 16), world, 1200) for one in words]
    progress = [sum(v.answers / (v.answers + 16) for v in one.versions) / one.seconds for one in found]
    assert progress[-1] > 0.75 * max(progress[:-1]) and progress[-1] > 2 * progress[0]


@pytest.mark.parametrize("words", WORDS)
def test_every_decider_replays_its_log_and_loses_no_step(words):
    world = Crowd(speeds=factors("exp:1"), jitter=factors("slow:0.2x4"), links=factors("uniform:1-3"), drop=0.1)
    one = decider(words, 6)
    rounds = simulate_clients(sizes(6, 1.0, 0.2, 0.01), one, world, 200)
    assert replayed(one, rounds.log) == list(rounds.log)
    assert rounds.merged >= 200 and rounds.merged + rounds.wasted == sum(rounds.steps) and rounds.left > 0
    assert 0 < rounds.busy <= 1 and all(a.at_s <= b.at_s for a, b in zip(rounds.versions, rounds.versions[1:]))
    again = simulate_clients(sizes(6, 1.0, 0.2, 0.01), one, world, 200)
    assert again == rounds


@pytest.mark.parametrize("words", WORDS)
def test_words_of_clients_read_back(words):
    assert read(read(words).text) == read(words) and not read(words).exact


@pytest.mark.parametrize(
    ["text", "said"],
    [
        ("dp4 tp2 mb1 sync=fedavg:h=4", "a client is one device with the whole model, and tp2 divides it"),
        ("dp4 zero1 mb1 sync=fedavg:h=4", "and zero divides it"),
        ("dp1 mb1 sync=fedavg:h=4", "the plan has one client"),
        ("dp4 mb1 sync=fedavg:h=4,clients=5", "clients=5 of 4 clients"),
        ("dp4 mb1 sync=backup:b=4", "b=4 of 4 clients"),
        ("dp4 mb1 sync=fedavg:h=4,tree=3", "tree=3 does not divide 4 clients"),
        ("dp4 mb1 sync=fedavg:h=4,tree=2,wait=0.5", "aggregators of tree=2 wait for all of their clients"),
        ("dp4 mb1 sync=fedcompass:h=4,least=5", "least=5 steps are more than h=4"),
        ("dp4 mb1 sync=fedavg:h=4,codec=powersgd", "powersgd is made for gradients"),
    ],
)
def test_plans_without_clients_are_refused(text, said):
    plan, model = parse(text), transformer(layers=2, hidden=32, heads=4, vocab=64, ffn=48, max_seq_len=64)
    found = check(plan, model, load(f"{plan.num_ranks}xh100"), Train(global_batch=8, seq_len=16))
    assert [said in d.message for d in found] == [True], found


def test_durations_are_seconds_in_words():
    assert [read(f"fedfix:h=1,every={text}")["every"] for text in ("500ms", "30s", "1.5m")] == [0.5, 30.0, 90.0]
    for text in ("0s", "30", "s", "-1s"):
        with pytest.raises(MeshwrightError, match="is not a duration"):
            read(f"fedfix:h=1,every={text}")
