"""Replicas that meet by a graph, simulated: messages on the links that they cross, turns, and steps beside them."""

import msgspec
import pytest

import meshwright as mw
from meshwright.cost import standard
from meshwright.lower.meeting import meeting
from meshwright.lower.place import Mesh
from meshwright.plan import check, parse
from meshwright.simulate.step import simulate
from meshwright.sync.groups import graph, messages
from meshwright.work import Collective

BYTES = 1e9
MODEL, TRAIN = mw.load_model("llama3.2-1b"), mw.parse_train("batch=32,seq=2048")


def priced(where: str, plan: str, text: str, turn: int = 0):
    """Seconds of the messages of a turn of BYTES each, its levels, and what one message between nodes takes alone."""
    cluster = mw.load_cluster(where)
    mesh, costs = Mesh(parse(plan).on(cluster.num_devices), cluster), standard()
    group, device = mesh.among("dp"), cluster.islands[0].device
    met = meeting(mesh, group, 0, list(messages(graph(text, group.size).turns[turn])))
    one = costs.price(Collective(op="neighbours", num_bytes=BYTES, group=met), device).seconds

    def alone(size: float) -> float:
        pair = mesh.pair(0, cluster.num_devices - 1)
        return costs.price(Collective(op="send", num_bytes=size, group=pair), device).seconds

    return one, {hop.name: hop.messages for hop in met.hops}, alone


def test_a_message_to_a_node_that_hears_one_is_a_send_and_of_two_takes_twice_as_long():
    one, _, alone = priced("2x1xh100,10gbe", "dp2", "exponential")
    assert one == pytest.approx(alone(BYTES), rel=1e-9)
    one, two, three = (priced("8x1xh100,10gbe", "dp8", text)[0] for text in ("exponential", "ring", "torus"))
    assert two == pytest.approx(2 * one, rel=1e-3) and three == pytest.approx(3 * one, rel=1e-3)


def test_ranks_of_a_node_share_its_port_and_no_more_than_their_own_of_several():
    """Four tensor-parallel ranks send at once: through one port four messages, through four ports one each; a send of a
    pipeline is of one of four that are at once, too."""
    one, levels, alone = priced("2x4xh100,nics=1,10gbe", "tp4 dp2", "exponential")
    assert levels == {"10gbe": 4} and one == pytest.approx(alone(BYTES), rel=1e-9)
    own, levels, alone = priced("2x4xh100,nics=4,10gbe", "tp4 dp2", "exponential")
    assert levels == {"10gbe": 4} and own == pytest.approx(one / 4, rel=1e-3)


def test_messages_inside_a_node_leave_the_network_to_those_that_leave_it():
    """Sixteen replicas on two nodes of one port: one place further, one message leaves each node; eight further, all
    of its eight."""
    near, far = (priced("2x8xh100,nics=1,25gbe", "dp16", "exponential", turn)[1]["25gbe"] for turn in (0, 3))
    assert (near, far) == (1, 8)
    assert priced("2x8xh100,nics=1,25gbe", "dp16", "ring")[1] == {"nvlink": 2, "25gbe": 2}


def test_steps_are_the_mean_over_the_turns_of_a_graph():
    """Of sixteen on two nodes the turns of one-peer exponential take 1, 2, 4 and 8 messages through a node's port."""
    plan, where = parse("dp16 mb1 sync=gossip:graph=exponential"), mw.load_cluster("2x8xh100,nics=1,25gbe")
    round = simulate(plan.on(16), MODEL, where, TRAIN, standard()).round
    sends = [part.sends_s - round.inner_s for part in round.parts]
    assert round.mean_s == pytest.approx(round.inner_s + sum(sends) / 4, rel=1e-12)
    assert sends[3] - sends[2] == pytest.approx(4 * (sends[1] - sends[0]), rel=0.02)


def test_messages_beside_a_step_take_what_is_longer():
    """On a fast network the step hides them, on a slow one it waits for them and takes as long as they do."""
    fast, slow = mw.load_cluster("8xh100"), mw.load_cluster("8x1xh100,10gbe")
    for where, hidden in ((fast, True), (slow, False)):
        late, once = (
            simulate(parse(f"dp8 mb1 sync=gossip{words}").on(8), MODEL, where, TRAIN, standard())
            for words in (":overlap=yes", "")
        )
        assert late.step_time_s < once.step_time_s
        assert (late.round.waits_s == 0) == hidden
        exchange = max(late.round.parts[0].busy_s)
        assert (exchange < late.round.inner_s) == hidden
        if not hidden:
            assert late.step_time_s == pytest.approx(exchange, rel=0.02)


def test_neighbours_beat_everyone_where_the_network_is_slow_and_hardly_where_it_is_fast():
    """One message a step in place of 2 (n - 1) / n in the ring of an all-reduce (Wang et al. 2410.11998)."""

    def gain(where: str) -> float:
        plans = ("mb1", "mb1 sync=gossip:graph=exponential,overlap=yes")
        every, some = (
            mw.predict(MODEL, mw.load_cluster(where), TRAIN, parse(p), detail=False).step_time_s for p in plans
        )
        return every / some

    assert gain("8x1xh100,1gbe") == pytest.approx(2 * 7 / 8, rel=0.05)
    assert gain("32x1xh100,1gbe") == pytest.approx(2 * 31 / 32, rel=0.05)
    assert 0.9 < gain("8xh100") < 1.1


@pytest.mark.parametrize("words", ["graph=exponential,overlap=yes", "graph=ring", "graph=matching,h=2,overlap=yes"])
def test_exchanges_alone_on_their_ports_take_as_long_where_ports_are_shared(words):
    """A message of the step before is there when a step begins: no step waits for what a later one sends."""
    apart = mw.load_cluster("8x1xh100,10gbe")
    (island,) = apart.islands
    levels = tuple(msgspec.structs.replace(level, shared_ports=True) for level in island.levels)
    shared = msgspec.structs.replace(apart, islands=(msgspec.structs.replace(island, levels=levels),))
    one, other = (
        simulate(parse(f"dp8 mb1 sync=gossip:{words}").on(8), MODEL, where, TRAIN, standard()).step_time_s
        for where in (apart, shared)
    )
    assert other == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize(
    ["words", "reason", "legal"],
    [
        ("graph=random,degree=1", "not connected: 4 parts, of 2 and 2 and 2 and 2 replicas", "degree=2"),
        ("graph=torus,rows=3", "no torus of 3 rows", "rows=2"),
        ("graph=exponential,codec=int8", "are others in every exchange", "graph=static-exponential"),
        ("codec=powersgd", "adds factors", "codec=topk"),
        ("codec=int8,variance=kept", "the spread of a matrix", "drop zero, tp and codec"),
    ],
)
def test_what_replicas_cannot_meet_by_is_refused_with_the_nearest_that_they_can(words, reason, legal):
    found = check(parse(f"dp8 sync=gossip:{words}"), MODEL, mw.load_cluster("8xh100"), TRAIN)
    assert [d.code for d in found] == ["Y003"]
    assert reason in found[0].message and legal in found[0].help
