"""The paged cache, shared prefixes, the host's memory and swapping: by hand, and by invariants over random requests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import serving
from meshwright.errors import MeshwrightError
from meshwright.serving.batching import Admit, Arrived, Batching, Computed, Evict, Iterate, Withdrawn
from meshwright.serving.cache import CacheRules, EngineLimits, KvCache
from meshwright.serving.engine_request import EngineRequest, NewRequest
from meshwright.serving.prefix_cache import PrefixCache
from meshwright.world.decider import LogEntry, replayed


def limits(blocks, *, block=4, max_batch=8, budget=40):
    return EngineLimits(max_batch=max_batch, budget=budget, block=block, blocks=blocks)


def cache(blocks, **rules):
    return PrefixCache(limits(blocks), CacheRules(prefix=True, unit=4, **rules))


def came(number, prompt, *hashes):
    return EngineRequest(NewRequest(number, prompt, 4, hashes=hashes), number)


def computed(where, one):
    """Let a request be admitted and computed whole."""
    where.look(one)
    where.hold(one, one.target)
    one.running, one.computed = True, one.target
    where.grown(one)


def test_a_prefix_is_found_by_the_request_behind_it_but_for_its_last_token():
    where = cache(20)
    computed(where, came(0, 10, 1, 2))  # 3 blocks, of which two have a name
    other = came(1, 8, 1, 2)
    where.look(other)
    assert where.free == 17 and (other.matched, other.computed) == (1, 4)  # 8 tokens would be all; one is computed
    assert where.needs(other, 8) == 1
    where.hold(other, 8)
    assert where.free == 16 and where.refs == {1: 2, 2: 1}


def test_what_nobody_holds_is_free_and_stays_until_its_room_is_needed_the_end_of_a_chain_first():
    where = cache(6)
    first = came(0, 12, 1, 2, 3)
    computed(where, first)
    where.drop(first)
    assert where.free == 6 and where.bare == 3 and where.has((1, 2, 3)) == 3
    computed(where, came(1, 16))  # four blocks: three bare ones, and the unit at the end of the chain
    assert where.free == 2 and where.has((1, 2, 3)) == 2 and list(where.idle) == [2, 1]


def test_a_unit_that_was_used_again_is_emptied_last():
    where = cache(6)
    for number, name in ((0, 1), (1, 2), (2, 1)):
        one = came(number, 5, name)
        computed(where, one)
        where.drop(one)
    assert list(where.idle) == [2, 1]


def test_units_that_leave_the_device_go_to_the_host_and_come_back():
    where = cache(3, host_blocks=2)
    for number, name in enumerate((1, 2, 3)):
        one = came(number, 4, name)
        computed(where, one)
        where.drop(one)
    big = came(3, 12)
    computed(where, big)  # all three are emptied; the host has room for two, and forgets the one that came first
    assert where.moved() == (0, 3) and list(where.host) == [2, 3] and where.host_free == 0
    where.drop(big)
    back = came(4, 6, 3)
    where.look(back)
    assert back.computed == 4 and where.needs(back, 6) == 2  # a unit in the host's memory takes its room on the device
    where.hold(back, 6)
    assert where.moved() == (1, 0) and where.host_free == 1 and where.refs == {3: 1}


def test_a_swapped_request_keeps_what_was_computed_and_a_host_that_is_full_does_not():
    where = KvCache(limits(4), CacheRules(swap=True, host_blocks=2))
    one, other = came(0, 8), came(1, 4)
    for each in (one, other):
        where.hold(each, each.target)
        each.computed = each.target
        where.evict(each)
    assert (one.swapped, one.computed, other.swapped, other.computed) == (True, 8, False, 0)
    assert where.free == 4 and where.moved() == (0, 2)
    where.back(one)
    where.hold(one, 9)
    assert where.moved() == (2, 0) and where.host_free == 2 and where.free == 1


@pytest.mark.parametrize(
    ("policy", "shares"), [("vllm-v1", [(0, 12), (1, 8), (2, 4)]), ("vllm-v0", [(0, 12), (1, 12), (2, 12)])]
)
def test_under_vllm_v1_equal_prompts_of_one_iteration_are_computed_once(policy, shares):
    # three blocks of 4, of which the second request shares one and the third two with the first
    decider = Batching(policy=serving.get("batching", policy), limits=limits(20), rules=CacheRules(prefix=True, unit=4))
    asked = (
        NewRequest(0, 12, 4, hashes=(1, 2, 3)),
        NewRequest(1, 12, 4, hashes=(1, 8, 9)),
        NewRequest(2, 12, 4, hashes=(1, 2, 3)),
    )
    _, (*_, run) = decider.decide(decider.begin(), Arrived(asked))
    assert [(share.number, share.new) for share in run.shares] == shares


def test_names_of_no_whole_blocks_are_refused():
    with pytest.raises(MeshwrightError) as caught:
        PrefixCache(limits(4, block=16), CacheRules(prefix=True, unit=24))
    assert caught.value.diagnostics[0].code == "W005"


def sound(state, rules, bounds):
    """Every block is somewhere, once; nobody holds less than nothing; the host's memory is what lies in it."""
    kept, cohort = state.cache, state.cohort
    everyone = [*state.running, *state.parked.values()]
    shared = {}
    for one in everyone:
        for name in one.pinned:
            shared[name] = shared.get(name, 0) + 1
    unit = getattr(kept, "unit_blocks", 0)
    held = unit * len(shared)
    for one in everyone:
        blocks = bounds.blocks_for(one.computed + cohort.ahead) if one in cohort and cohort.grows else one.blocks
        assert blocks * bounds.block >= one.computed or one.done
        held += blocks - unit * len(one.pinned)
    idle = len(getattr(kept, "idle", ()))
    assert 0 <= held <= bounds.blocks and kept.bare >= 0
    assert kept.bare + unit * idle + held == bounds.blocks
    if rules.prefix:
        assert {name: count for name, count in kept.refs.items() if count} == shared
        assert {name for name, count in kept.refs.items() if not count} == set(kept.idle)
        assert not kept.refs.keys() & kept.host.keys()
    swapped = sum(bounds.blocks_for(one.computed) for one in state.waiting if one.swapped)
    assert kept.host_free + swapped + unit * len(getattr(kept, "host", ())) == rules.host_blocks
    assert kept.host_free >= 0


CHAINS = {0: (), 1: (1, 2, 3, 4), 2: (1, 2, 30, 40), 3: (7, 8, 9, 10)}
ASKED = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)
RULES = st.builds(
    CacheRules,
    prefix=st.booleans(),
    unit=st.sampled_from([4, 8]),
    swap=st.booleans(),
    host_blocks=st.sampled_from([0, 3, 12]),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    asked=ASKED,
    rules=RULES,
    blocks=st.integers(11, 30),
    policy=st.sampled_from(serving.names("batching")),
    order=st.sampled_from(serving.names("order")),
    repeats=st.booleans(),
    withdrawn=st.sets(st.integers(0, 11), max_size=3),
)
def test_blocks_are_conserved_and_every_request_is_answered(asked, rules, blocks, policy, order, repeats, withdrawn):
    bounds = limits(blocks)
    decider = Batching(
        policy=serving.get("batching", policy), order=serving.get("order", order), limits=bounds, rules=rules
    )
    state, log, made, answered = decider.begin(), [], {}, []
    unsaid = [
        (after, NewRequest(i, prompt, output, tenant=who, priority=who, hashes=CHAINS[chain]))
        for i, (after, prompt, output, chain, who) in enumerate(asked)
    ]
    gone, step, run = set(), 0, None
    while len(answered) + len(gone) < len(asked):
        step += 1
        assert step < 2000
        events = []
        if unsaid and (run is None or unsaid[0][0] <= step % 4):
            events.append(Arrived((unsaid.pop(0)[1],)))
        elif run is not None:
            limit = {number: asked[number][2] for number in range(len(asked))}
            active = [*run.decoding, *(s.number for s in run.shares if s.samples)]
            rest = min((limit[n] - made.get(n, 0) for n in active if made.get(n, 0) < limit[n]), default=1)
            times = min(run.repeat, rest) if repeats else 1
            finished = []
            for number in active:
                if number not in gone and made.get(number, 0) < limit[number]:
                    made[number] = made.get(number, 0) + times
                    finished += [number] if made[number] == limit[number] else []
            answered += finished
            events.append(Computed(tuple(finished), times))
            run = None
        if withdrawn and step == 9:
            leave = {
                n for n in withdrawn if n < len(asked) and n not in answered and all(n != u.number for _, u in unsaid)
            }
            gone |= leave
            events.append(Withdrawn(tuple(sorted(leave))))
        for event in events:
            state, decisions = decider.decide(state, event)
            log.append(LogEntry(event, decisions))
            run = next((d for d in decisions if isinstance(d, Iterate)), run)
            assert all(isinstance(d, Iterate | Admit | Evict) for d in decisions)
            sound(state, rules, bounds)
    assert sorted(answered) == sorted(set(range(len(asked))) - gone)
    assert replayed(decider, log) == log
