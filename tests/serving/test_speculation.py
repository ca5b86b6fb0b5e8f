"""Speculation: rounds against closed forms, and what the simulator makes of them."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.errors import MeshwrightError
from meshwright.serving.batching import Batching
from meshwright.serving.dsi import lookahead
from meshwright.serving.speculative import Drafts, GuessTimes
from meshwright.simulate.guessing import Guesses, chance
from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_pool import served_logged
from meshwright.spec.serve import parse
from meshwright.world.decider import replayed
from tests.serving.costs import linear_costs, replica, requests

NAMES = serving.names("speculation")


def guessing(name="speculative", *, accept=0.8, count=4, draft=0.1, base=1.0, targets=1, **limits):
    """A replica whose iterations take a second and whose draft model takes a tenth."""
    drafting = Guesses(
        policy=serving.get("speculation", name),
        accept=accept,
        draft=linear_costs(base=draft) if draft else None,
        targets=targets,
    )
    one = replica("vllm-v1", linear_costs(base=base), **limits)
    return msgspec.structs.replace(one, drafts=Drafts(count=count, even=drafting.policy.even), guessing=drafting)


def test_chances_are_even():
    drawn = np.array([chance(i, j) for i in range(100) for j in range(100)])
    assert abs(drawn.mean() - 0.5) < 0.01 and abs((drawn < 0.2).mean() - 0.2) < 0.01
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


def test_with_guesses_that_are_all_right_a_round_makes_all_of_them_and_one_more():
    # the prompt: 1 s, and 0.1 s in the draft model; then 10 tokens in 2 rounds of 5 tokens, 4 * 0.1 + 1 s each
    served = simulate(guessing(accept=1.0), requests((0.0, 8, 11)))
    assert served.end_s[0] == pytest.approx(1.1 + 2 * 1.4) and served.iterations == 3


def test_a_draft_model_that_forgets_reads_its_sequences_again_in_every_round():
    """The rounds of above, whose first guess comes of a pass of the draft model over all that there is: 0.1 s as any
    other, and with a millisecond a token that of 9 and then 14 tokens; its prompt is read in the first round."""
    one = guessing(accept=1.0)
    forgets = msgspec.structs.replace(one.guessing, forgets=True)
    asked = requests((0.0, 8, 11))
    served = simulate(msgspec.structs.replace(one, guessing=forgets), asked)
    assert served.end_s[0] == pytest.approx(1.0 + 2 * 1.4)
    slow = msgspec.structs.replace(forgets, draft=linear_costs(base=0.1, token=0.001))
    served = simulate(msgspec.structs.replace(one, guessing=slow), asked)
    assert served.end_s[0] == pytest.approx(1.0 + 2 * 1.4 + 0.001 * (9 + 14) + 2 * 3 * 0.001)


def test_guesses_that_are_all_wrong_cost_their_time():
    served = simulate(guessing(accept=1e-9), requests((0.0, 8, 4)))
    # 3 more tokens, of which the last leaves no room for a guess, and the one before it for one alone
    assert served.end_s[0] == pytest.approx(1.1 + 1.2 + 1.1 + 1.0)


def test_tokens_of_a_round_are_as_many_as_the_closed_form_says():
    # (1 - a^(k+1)) / (1 - a) of them on average (Leviathan et al., equation 1)
    served = simulate(guessing(accept=0.8), requests((0.0, 8, 8000)))
    assert 8000 / (served.iterations - 1) == pytest.approx((1 - 0.8**5) / 0.2, rel=0.03)


@pytest.mark.parametrize(("name", "rounds"), [("speculative", (1.4, 1.4, 1.2)), ("eqspec", (1.4, 1.1, 1.4, 1.0))])
def test_guesses_of_a_batch_without_pages_are_as_many_as_its_shortest_answer_may_take(name, rounds):
    """Answers of 7 and 14 tokens, all guesses right: 5 come after the first ones, so that the one has 1 left and the
    other 8. By itself that says 5 and 3; in one tensor with the first it guesses 1 and says 2, then 5 and 1."""
    served = simulate(guessing(name, accept=1.0), requests((0.0, 8, 7), (0.0, 8, 14)))
    assert served.end_s[1] == pytest.approx(1.1 + sum(rounds))


def test_distributed_speculation_takes_the_draft_models_time_for_what_is_right_and_the_models_for_what_is_wrong():
    # a t_d + (1 - a) t_t a token where a copy is always free (2405.14105, section 3)
    one = guessing("dsi", accept=0.8, count=60, targets=10, max_batch=1)
    served = simulate(one, requests((0.0, 8, 4001)))
    each = (served.end_s[0] - served.first_s[0]) / 4000
    assert each == pytest.approx(0.8 * 0.1 + 0.2 * 1.0, rel=0.06)


def test_a_block_is_as_long_as_needed_for_a_copy_to_be_free():
    # a second of the model is ten of the draft model's steps: ten copies take a guess each, three take blocks of four
    times = GuessTimes(0.1, 1.0)
    assert [lookahead(msgspec.structs.replace(times, targets=n)) for n in (10, 5, 3, 1)] == [1, 2, 4, 10]


@pytest.mark.parametrize(("accept", "draft"), [(0.5, 0.05), (0.8, 0.1), (0.95, 0.3), (0.3, 0.6)])
def test_distributed_speculation_is_never_slower_than_the_others(accept, draft):
    asked = requests((0.0, 8, 600))
    plain = simulate(replica("vllm-v1", linear_costs(base=1.0), max_batch=1), asked).end_s[0]
    usual, apart = (
        simulate(guessing(name, accept=accept, draft=draft, targets=40, max_batch=1), asked).end_s[0]
        for name in ("speculative", "dsi")
    )
    assert apart <= usual and apart <= plain + draft


def test_moving_the_cache_is_paid_where_sequences_accept_different_numbers():
    times = GuessTimes(0.1, 1.0, realign_s=2.0)
    usual, all_of_it, alone = (serving.get("speculation", n) for n in ("speculative", "eqspec", "exspec"))
    assert usual.round_s(4, [1, 2, 2, 3], times) == pytest.approx(1.4)
    assert all_of_it.round_s(4, [1, 2, 2, 3], times) == pytest.approx(3.4)
    assert alone.round_s(4, [1, 2, 2, 3], times) == pytest.approx(1.4 + 2.0 * 2 / 4)
    assert all_of_it.round_s(4, [2, 2], times) == pytest.approx(1.4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [40, 1000])
def test_every_token_is_answered_once_and_the_log_replays(name, blocks):
    rng = np.random.default_rng(2)
    rows = zip(np.cumsum(rng.exponential(2.0, 30)), rng.integers(1, 200, 30), rng.integers(1, 60, 30))
    asked = requests(*rows)
    one = guessing(name, blocks=blocks, max_batch=1 if name in ("dsi", "pipeinfer") else 16)
    served, log = served_logged(one, asked)
    assert served.gaps.sum() == (asked.output - 1).sum() and (served.end_s >= served.first_s).all()
    assert (served.evictions > 0) == (blocks == 40 and one.limits.max_batch > 1)
    assert replayed(one.decider(), log) == log and isinstance(one.decider(), Batching)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("draft=llama3.2-1b", "W003"),
        ("accept=0.5", "W005"),
        ("draft=ngram,accept=1.5", "W002"),
        ("draft=ngram,accept=0.5,guesses=0", "W002"),
        ("draft_cache=no", "W005"),
    ],
)
def test_words_that_say_no_guesses_are_refused(words, code):
    with pytest.raises(MeshwrightError) as caught:
        parse(f"rate=1,prompt=8,output=8,{words}")
    assert code in [d.code for d in caught.value.diagnostics]
