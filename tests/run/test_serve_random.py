"""The serving engine under random events, as ``python -m fuzz engine`` does it: no block is lost or given out twice,
what lies on the host is wanted there, and no answer changes."""

from fuzz.campaign import rng_of
from fuzz.engine import Interleavings


def test_no_block_is_lost_and_no_answer_changes_in_random_interleavings():
    campaign = Interleavings()
    outcomes = [campaign.look(campaign.example(rng_of(7, number))) for number in range(150)]
    assert outcomes.count("preempted") > 10  # evicted requests were among them
