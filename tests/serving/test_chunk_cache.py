"""The chunk cache: texts wherever they stand in a prompt, by hand and in the simulator."""

import msgspec
import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.serving.cache import CacheRules, EngineLimits
from meshwright.serving.chunk_cache import ChunkCache
from meshwright.serving.engine_request import EngineRequest, NewRequest
from meshwright.simulate.serve_plain import prefixes_of
from meshwright.simulate.serve_pool import served_alone, served_logged
from meshwright.spec.serve import parse
from meshwright.world.decider import replayed
from tests.serving.costs import linear_costs, replica

LIMITS = EngineLimits(max_batch=8, budget=1000, block=16, blocks=1000)


def computed(cache, number, hashes, prompt=100):
    """A request whose prompt is computed, so that its texts are kept."""
    one = EngineRequest(NewRequest(number, prompt, 4, hashes=hashes))
    cache.look(one)
    cache.hold(one, prompt)
    one.running, one.computed = True, prompt
    cache.grown(one)
    return one


def test_a_text_is_found_wherever_it_stands_and_a_share_of_it_computed_again():
    # texts of 32 tokens; of two of three a quarter is computed again: 2 * 32 * 3 / 4 tokens are there
    cache = ChunkCache(LIMITS, CacheRules(unit=32, chunks=0.25, host_blocks=100))
    computed(cache, 0, (7, 8))
    other = EngineRequest(NewRequest(1, 100, 4, hashes=(8, 9, 7)))
    cache.look(other)
    assert (other.matched, other.computed) == (2, 48)
    cache.moved()
    cache.hold(other, 100)
    assert cache.moved() == (4, 0) and other.blocks == 7  # copied into blocks of its own


def test_what_was_used_longest_ago_leaves_a_full_store():
    cache = ChunkCache(LIMITS, CacheRules(unit=32, chunks=0.25, host_blocks=4))  # two texts
    computed(cache, 0, (1, 2))
    computed(cache, 1, (1,))
    computed(cache, 2, (3,))
    assert [cache.has((name,)) for name in (1, 2, 3)] == [1, 0, 1]
    assert cache.host_free == 0


def test_names_of_texts_become_names_of_prefixes():
    # a b c, a b d and b a: a prefix is the same where all before it is
    found = prefixes_of([1, 2, 3, 1, 2, 4, 2, 1], [0, 3, 6, 8])
    assert found[:2] == found[3:5] and found[2] != found[5] and len(set(found)) == 6


def test_texts_are_drawn_without_repeats_and_by_their_weights():
    found = parse("rate=1,requests=3000,prompt=600,output=4,chunks=3:tokens=200:of=50:zipf=1").drawn()
    names = found.hashes.reshape(3000, 3)
    assert all(len(set(row)) == 3 for row in names.tolist()) and found.hash_block == 200 and found.chunked
    counts = np.bincount(names.ravel(), minlength=50)
    assert counts[0] > 1.5 * counts[1] > 2 * counts[9] and counts.sum() == 9000
    assert np.array_equal(found.first(10).hashes, found.hashes[:30]) and found.first(10).chunked


def test_more_texts_than_a_prompt_has_room_for_are_refused():
    with pytest.raises(MeshwrightError) as caught:
        parse("rate=1,prompt=100,output=4,chunks=3:tokens=200")
    assert [d.code for d in caught.value.diagnostics] == ["W005"]


def test_runs_over_a_chunk_cache_are_what_their_iterations_are():
    asked = parse("rate=20,requests=60,prompt=300,output=20,chunks=4:tokens=64:of=30:zipf=1").drawn()
    one = replica("vllm-v1", linear_costs(base=5e-3, token=2e-5), blocks=120, budget=400)
    one = msgspec.structs.replace(one, rules=CacheRules(unit=64, chunks=0.3, host_blocks=60), block_s=1e-5)
    served, log = served_logged(one, asked)
    plain = served_alone(one, asked, skips=False)
    assert served.end_s == pytest.approx(plain.end_s, rel=1e-9) and served.runs < plain.runs
    assert served.cached.tolist() == plain.cached.tolist() and served.cached.sum() > 0
    assert replayed(one.decider(), log) == log
