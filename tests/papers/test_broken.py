"""A check fails when its recipe is broken: the mechanism is replaced by one that does not do it."""

import msgspec
import numpy as np
import pytest

from meshwright import catalog
from meshwright.cost import load_framework
from meshwright.layers import algebra
from meshwright.papers import checking, evaluate, figures, outcome, ranks
from meshwright.papers.checks import (
    bandwidth,
    checkpoints,
    checks,
    codecs,
    dispatch,
    layouts,
    replayed,
    sequence,
    zero_bubble,
)
from meshwright.papers.outcome import SHOWN
from meshwright.papers.record import paper
from meshwright.papers.state import PARTLY, REPRODUCED, USABLE, of
from meshwright.schedules import build
from meshwright.spec.model import load
from meshwright.sync import ballots


@pytest.fixture(autouse=True)
def asked_anew():
    """Nothing that a broken predictor or schedule answered is kept, nor what a whole one did."""
    evaluate._predicted.cache_clear()
    evaluate._ordered.cache_clear()
    yield
    evaluate._predicted.cache_clear()
    evaluate._ordered.cache_clear()


def outcome_of(name):
    """The outcome of a row's figures and check; its plans are not trained."""
    return checking.run(msgspec.structs.replace(paper(name), runs=()))


def reached(name):
    return of(paper(name), outcome_of(name)).state


def one_f_one_b(name, p, m, vpp=None, **params):
    """Every schedule is plain 1F1B."""
    return build("1f1b", p, m)


def test_zero_bubble_without_its_orders(monkeypatch):
    assert reached("zero-bubble") == USABLE
    monkeypatch.setattr(zero_bubble, "build", one_f_one_b)
    assert reached("zero-bubble") != USABLE


@pytest.mark.parametrize("name", ["gpipe", "hanayo", "bitpipe", "2bp", "zeropp", "zero-bubble"])
def test_a_schedule_that_is_plain_1f1b_fails_the_figures_of_its_order(name, monkeypatch):
    orders = [one.what for one in paper(name).figures if one.order]
    before = [f for f in evaluate.evaluate(paper(name)).failures if f.startswith(tuple(orders))]
    evaluate._ordered.cache_clear()
    monkeypatch.setattr(evaluate, "build", one_f_one_b)
    after = [f for f in evaluate.evaluate(paper(name)).failures if f.startswith(tuple(orders))]
    assert len(after) > len(before)


def test_uneven_stages_that_are_even(monkeypatch):
    row = paper("yuan2")
    even = [msgspec.structs.replace(f, against=f.ask) for f in row.figures]
    assert evaluate.evaluate(row).failures == ()
    assert len(evaluate.evaluate(msgspec.structs.replace(row, figures=tuple(even))).failures) == 2


@pytest.mark.parametrize("name", ["usp", "burstattention", "tokenring", "hydragen"])
def test_partial_attentions_added_without_their_maxima(name, monkeypatch):
    monkeypatch.setattr(ranks, "merge", lambda a, b: (a[0] + b[0], np.maximum(a[1], b[1]), a[2] + b[2]))
    assert outcome_of(name).failures


def test_linear_attention_without_the_state_before(monkeypatch):
    def alone(q, k, v, cut, sent):
        out = np.empty_like(q)
        for rank, rows in enumerate(cut):
            sent.add(rank, np.empty((q.shape[0], q.shape[-1], v.shape[-1])))
            out[:, rows] = np.tril(q[:, rows] @ k[:, rows].swapaxes(1, 2)) @ v[:, rows]
        return out

    monkeypatch.setattr(sequence.ranks, "passed_states", alone)
    assert reached("lasp") not in REPRODUCED


@pytest.mark.parametrize("name", ["oneflow", "gspmd"])
def test_a_reduction_that_forgets_a_rank(name, monkeypatch):
    real = algebra.carry_out

    def forgetful(mesh, one, held):
        if one.op in ("all_reduce", "reduce_scatter"):
            axis = [n for n, _ in mesh.axes].index(one.axis)
            held = {at: part * (at[axis] > 0) for at, part in held.items()}
        return real(mesh, one, held)

    monkeypatch.setattr(algebra, "carry_out", forgetful)
    assert outcome_of(name).failures


def test_redco_with_every_matrix_cut_the_same_way(monkeypatch):
    real = layouts.redco_rules
    same = lambda block, hidden: {n: (rows, columns, 1) for n, (rows, columns, _) in real(block, hidden).items()}  # noqa: E731
    monkeypatch.setattr(layouts, "redco_rules", same)
    assert checks()["redco"]().failures[0].startswith("one reduction after attention")


@pytest.mark.parametrize("name", ["k", "v", "kv"])
def test_redco_with_keys_or_values_cut_by_rows(name, monkeypatch):
    real = layouts.redco_rules

    def by_rows(block, hidden):
        placed = real(block, hidden)
        return placed | ({name: (*placed[name][:2], 0)} if name in placed else {})

    monkeypatch.setattr(layouts, "redco_rules", by_rows)
    assert checks()["redco"]().failures[0].startswith("one reduction after attention")


def test_redco_says_which_blocks_its_rules_do_not_cut_at_heads(outcomes):
    (whole,) = [f for f in outcomes["redco"].figures if "whole heads" in f.what]
    every = [b for name in catalog.names("models") for b in load(name).blocks]
    blocks = [b.attention for b in every if b.attention is not None and b.mlp is not None]
    # counted by hand: a rank's columns end inside a head where the heads are no multiple of the ranks
    assert (whole.paper, whole.ours) == (len(blocks), sum(a.heads % 4 == a.kv_heads % 4 == 0 for a in blocks))
    assert whole.ours < whole.paper


def test_a_controller_that_always_waits(monkeypatch):
    real = dispatch.finished
    assert checks()["pathways"]().failures == ()
    monkeypatch.setattr(dispatch, "finished", lambda *args: real(*args[:-1], False))
    assert [f.partition(",")[0] for f in checks()["pathways"]().failures] == ["waiting for each computation"]


def test_no_figure_is_judged_that_is_the_check_s_own_formula(outcomes):
    assert not [f for f in outcomes["pathways"].figures if f.judge != SHOWN and f.paper is not None]


def changed(name, *places, **words):
    """A row whose questions from these places of its paper all say these words in place of their own."""
    row = paper(name)
    figures = [
        msgspec.structs.replace(f, ask=f.ask | words, against=None if f.against is None else f.against | words)
        for f in row.figures
        if f.place in places and not f.order
    ]
    return msgspec.structs.replace(row, figures=tuple(figures))


def test_overlap_and_operators_that_change_nothing():
    failed = evaluate.evaluate(
        changed("megascale", "Table 3", plan="+ unfused overlap=none", framework="fused")
    ).failures
    assert any("all lines together" in f for f in failed)


def test_zero_3_that_exchanges_at_the_rate_of_the_links():
    failed = evaluate.evaluate(changed("megatron-ptdp", "Table 2", framework="fused")).failures
    assert len(failed) == 3 and all("PTD-P over ZeRO-3" in f for f in failed)


@pytest.mark.parametrize("name", ["megatron-ptdp", "megascale", "torchtitan"])
def test_a_profile_that_is_fitted_to_a_paper_s_own_rows_judges_nothing(name, outcomes, monkeypatch):
    def slower(called):
        found = load_framework(called)
        fitted = called.startswith(("megatron-lm", "torchtitan"))
        return msgspec.structs.replace(found, host_us_per_pass=1e6) if fitted else found

    monkeypatch.setattr(evaluate, "load_framework", slower)
    judged = [f for f in outcomes[name].figures if f.judge != SHOWN and "from one process" not in f.what]
    again = {f.what: f.ours for f in evaluate.evaluate(paper(name)).figures if f.judge != SHOWN}
    assert len(judged) >= 5 and all(again[f.what] == f.ours for f in judged)


def test_ternary_codes_without_chance(monkeypatch):
    biased = lambda gradients, rng, clip=2.5: np.abs(gradients).max() * np.sign(gradients)  # noqa: E731
    monkeypatch.setattr(codecs, "ternary", biased)
    assert reached("terngrad") not in REPRODUCED


def test_signs_of_two_bits(monkeypatch):
    monkeypatch.setattr(ballots, "part", lambda n, copies: 16 * -(-n // (8 * copies)))
    assert reached("dist-lion") not in REPRODUCED


@pytest.mark.parametrize(["said", "instead"], [(",delay=1", ",delay=0"), (",start=backward", ""), ("fp4", "int8")])
def test_exchanges_that_hide_less_or_send_more_need_faster_links(said, instead, monkeypatch):
    """Without the delay, sent at a step's end, or with a code of twice the bits: fewer cells are near, and the row in
    question needs more."""
    table = figures.load("diloco")["streaming_diloco_T4_gbit_s"]["10B"]
    row = bandwidth.WAYS["Streaming_overlap_FP4"]
    other = row.replace("h=100", "h=100,codec=int8") if said == "fp4" else row.replace(said, instead)
    asked = bandwidth.LinkedReplicas(10e9, table["layers"], table["step_s"])
    found = [[asked.printed(words, wanted) for wanted in bandwidth.WANTED] for words in (row, other)]
    assert all(a <= b for a, b in zip(*found)) and found[1][-1] > found[0][-1]
    assert abs(found[0][-1] - bandwidth.nearest(table["Streaming_overlap_FP4"][-1], found[0][-1])) <= 1


def test_every_cell_of_the_bandwidths_is_one_that_is_tried():
    """0.1 is printed of three of the fifty, 3.0 of 2.947, which two digits make 2.95; no cell is of any other."""
    tables = (figures.load("diloco")[name] for name in ("streaming_diloco_T4_gbit_s", "eager_updates_T5_gbit_s"))
    printed = {bandwidth.figure(one) for one in bandwidth.TRIED}
    rows = [row for table in tables for size in ("1B", "10B", "100B") for row in table[size].values()]
    cells = {cell for row in rows if isinstance(row, list) for cell in row}
    assert len(cells) > 30 and cells <= printed
    assert [bandwidth.nearest(0.1, ours) for ours in (0, 1, 9)] == [0, 1, 2]
    assert bandwidth.TRIED[bandwidth.nearest(3.0, 0)] == pytest.approx(2.947, abs=5e-4)


def test_the_tables_print_bandwidths_that_fall_short():
    """By the hours of Table 1, four bits at 1 Gbit/s compute 76% of the time; for 80% Table 4 prints less than that."""
    papers = figures.load("diloco")
    alone, slow = papers["streaming_diloco_T1_hours"]["Streaming_overlap_FP4"]
    cell = papers["streaming_diloco_T4_gbit_s"]["1B"]["Streaming_overlap_FP4"][bandwidth.WANTED.index(0.8)]
    assert (alone + 0.005) / (slow - 0.005) < 0.8 and cell < 1


def test_lazy_checkpoints_that_wait(monkeypatch):
    real = checkpoints._run_s
    monkeypatch.setattr(checkpoints, "_run_s", lambda every, saving: real(every, "blocking"))
    monkeypatch.setattr(outcome, "can_run", lambda: False)
    assert "not so: seldom enough, it costs no step anything" in checks()["datastates-llm"]().failures


def test_a_gain_that_any_bandwidth_gives_is_not_judged(monkeypatch):
    monkeypatch.setattr(outcome, "can_run", lambda: False)
    (gain,) = checks()["datastates-llm"]().figures
    assert gain.judge == SHOWN and reached("datastates-llm") == PARTLY


def test_a_what_if_that_keeps_the_schedule(monkeypatch):
    real = replayed.replay
    monkeypatch.setattr(replayed, "replay", lambda trace, asked: real(trace, replayed.Asked()))
    monkeypatch.setattr(outcome, "can_run", lambda: False)
    assert outcome_of("dpro").failures


def test_a_replay_that_forgets_the_time_between_tasks(monkeypatch):
    from meshwright.replay import rebuild

    monkeypatch.setattr(rebuild, "_waits", lambda tasks: np.full(len(tasks), 0.01))
    monkeypatch.setattr(outcome, "can_run", lambda: False)
    assert outcome_of("dpro").failures
