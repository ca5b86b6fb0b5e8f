"""Draws of requests against their distributions: conversations, samples, populations, prefixes, clients' windows."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.spec import request_belongings
from meshwright.spec.request_gaps import gaps
from meshwright.spec.requests import COLUMNS
from meshwright.spec.serve import parse


def drawn(text, base=None):
    return (parse(text, base=base) if base else parse(text)).drawn()


def test_words_on_whose_requests_are_leave_arrivals_as_they_were():
    plain = drawn("rate=100,prompt=64,output=8,requests=20000")
    more = drawn("rate=100,prompt=64,output=8,requests=20000,tenants=3,priority=1+0,adapters=4,prefix=32:groups=2")
    assert np.array_equal(plain.arrival_s, more.arrival_s)


def test_a_turn_holds_the_conversation_and_waits_for_the_answer_before_it():
    found = drawn("rate=4,prompt=100,output=30,turns=3,think=5s,requests=900")
    first = found.after < 0
    assert len(found) == 900 and first.sum() == 300
    turn = np.zeros(900, int)
    for i in np.flatnonzero(~first):  # those before it come before it
        turn[i] = turn[found.after[i]] + 1
        assert found.after[i] < i and found.program[found.after[i]] == found.program[i]
    # the first asks 100; then 100 + 30 were said before, then 260
    assert [set(found.prompt[turn == k]) for k in range(3)] == [{100}, {230}, {360}]
    assert np.bincount(found.program).tolist() == [3] * 300
    # 300 conversations at 4 / 3 a second; thinking is exponential with a mean of 5 s
    assert found.arrival_s[first].max() == pytest.approx(300 / (4 / 3), rel=4 / math.sqrt(300))
    assert found.arrival_s[~first].mean() == pytest.approx(5.0, rel=4 / math.sqrt(600))
    assert found.arrival_s[~first].std() == pytest.approx(5.0, rel=0.2)


def test_turns_share_the_whole_blocks_of_what_was_said():
    found = drawn("rate=4,prompt=100,output=30,turns=3,think=5s,requests=90,hash_block=16")
    pieces = np.split(found.hashes, found.hash_ptr[1:-1])
    assert [len(piece) for piece in pieces] == (found.prompt // 16).tolist() and found.hash_block == 16
    later = np.flatnonzero(found.after >= 0)
    assert all(np.array_equal(pieces[found.after[i]], pieces[i][: len(pieces[found.after[i]])]) for i in later)
    owners = {}
    for program, piece in zip(found.program.tolist(), pieces):
        assert all(owners.setdefault(name, program) == program for name in piece.tolist())


def test_turns_at_random_have_the_mean_that_was_said():
    found = drawn("rate=4,prompt=8,output=8,turns=3.5:geometric,requests=40000")
    each = np.bincount(found.program)[:-1]  # the last one is cut where there are requests enough
    # geometric from 1 on: the variance is (1 - p) / p^2 with p = 1 / 3.5
    assert each.min() == 1 and each.mean() == pytest.approx(3.5, abs=4 * math.sqrt(8.75 / len(each)))


def test_users_of_a_closed_loop_have_one_request_open_each():
    found = drawn("concurrency=4,prompt=8,output=2,turns=2,think=3s:cv=0,ramp=8s,requests=24")
    alone = found.after < 0
    assert found.concurrency == 0 and found.arrival_s[alone].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert set(found.arrival_s[~alone]) == {3.0}
    waited_for = found.after[~alone]
    assert len(set(waited_for.tolist())) == len(waited_for) == 20  # nobody is waited for twice
    # two turns each: 8, then 8 + 2 + 8; the next conversation begins anew
    assert sorted(set(found.prompt)) == [8, 18] and len(set(found.program)) == 12


def test_a_pause_without_turns_is_between_requests_of_a_user():
    found = drawn("concurrency=2,prompt=8,output=8,think=1s:cv=0,requests=6")
    assert found.after.tolist() == [-1, -1, 0, 1, 2, 3] and set(found.prompt) == {8}


def test_samples_of_a_query_ask_the_same_at_once():
    found = drawn("rate=8,prompt=64:0.5;160:0.5,output=100,samples=4,requests=403")
    assert len(found) == 403 and found.program.tolist() == [i // 4 for i in range(403)]
    for name in ("arrival_s", "prompt"):
        column = getattr(found, name)[:400].reshape(100, 4)
        assert (column == column[:, :1]).all()
    assert np.unique(found.arrival_s[:400]).size == 100
    pieces = np.split(found.hashes, found.hash_ptr[1:-1])
    assert all(np.array_equal(pieces[i], pieces[4 * (i // 4)]) for i in range(403))
    assert [len(piece) for piece in pieces] == (found.prompt // 16).tolist()
    # 100 queries at 8 / 4 a second
    assert found.arrival_s[399] == pytest.approx(50.0, rel=4 / math.sqrt(100))


def test_prompts_of_a_group_begin_with_the_same_whole_blocks():
    found = drawn("rate=8,prompt=100:0.5;300:0.5,output=8,prefix=200:groups=3:zipf=1,requests=6000,block=32")
    pieces = np.split(found.hashes, found.hash_ptr[1:-1])
    assert found.hash_block == 32 and {len(piece) for piece in pieces} == {3, 6}  # 100 // 32 and 200 // 32
    group = found.hashes[found.hash_ptr[:-1]] // 6
    assert all(piece.tolist() == list(range(6 * g, 6 * g + len(piece))) for piece, g in zip(pieces, group))
    # Zipf's law over three: 6/11, 3/11, 2/11, within four standard deviations of a count
    share = np.array([6, 3, 2]) / 11
    assert (np.abs(np.bincount(group) - 6000 * share) < 4 * np.sqrt(6000 * share * (1 - share))).all()


def test_a_conversation_begins_with_its_group_s_prefix_and_goes_on_by_itself():
    found = drawn("rate=8,prompt=96,output=32,turns=2,prefix=64:groups=2,requests=40")
    pieces = np.split(found.hashes, found.hash_ptr[1:-1])
    assert {tuple(piece[:4]) for piece in pieces} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    for i in np.flatnonzero(found.after >= 0):
        assert np.array_equal(pieces[found.after[i]], pieces[i][:6]) and len(pieces[i]) == 14  # (96 + 32 + 96) / 16
    assert len({piece[4] for piece in pieces}) == 20  # one of its own for every conversation


def test_requests_are_shared_out_by_weight_and_a_program_is_of_one_of_them():
    text = "rate=8,prompt=8,output=8,tenants=a:3+b,priority=5:0.2+-1:0.8,adapters=2:share=0.6,requests=20000"
    found = drawn(text)
    near = 4 * math.sqrt(0.25 / 20000)
    assert (found.tenant == 0).mean() == pytest.approx(0.75, abs=near)
    assert set(found.priority) == {5, -1} and (found.priority == 5).mean() == pytest.approx(0.2, abs=near)
    assert (found.adapter == -1).mean() == pytest.approx(0.4, abs=near)
    assert (found.adapter == 0).mean() == pytest.approx(0.3, abs=near)
    turns = drawn(text + ",turns=4")
    for name in ("tenant", "priority", "adapter"):
        of_first = {}
        for program, value in zip(turns.program.tolist(), getattr(turns, name).tolist()):
            assert of_first.setdefault(program, value) == value


def test_lengths_follow_the_shares_that_were_said():
    found = drawn("rate=8,prompt=512:0.25;2048:0.75,output=lognormal:median=100;sigma=1,requests=20000")
    assert set(found.prompt) == {512, 2048} and (found.prompt == 512).mean() == pytest.approx(0.25, abs=0.0125)
    assert np.median(found.output) == pytest.approx(100, rel=0.06)
    assert np.log(found.output).std() == pytest.approx(1.0, rel=0.03)


def test_more_hashes_than_fit_are_refused_with_a_block_that_is_large_enough(monkeypatch):
    monkeypatch.setattr(request_belongings, "MOST_HASHES", 1000)
    text = "rate=8,prompt=4096,output=8,turns=4,requests=8"
    with pytest.raises(MeshwrightError) as caught:
        drawn(text)
    (found,) = caught.value.diagnostics
    assert found.code == "W016" and "hash_block=" in found.help
    word = found.help.split()[1]
    assert drawn(f"{text},{word}").hash_block == int(word.partition("=")[2])


@pytest.mark.parametrize(("family", "cv"), [("gamma", 3.0), ("weibull", 2.0), ("gamma", 1.0), ("gamma", 0.5)])
def test_the_first_gap_is_what_is_left_of_one_at_any_moment(family, cv):
    found = gaps(np.random.default_rng(5), 2.0, cv, family, 200_000, first=True)
    # the mean of what is left of a gap is E[x^2] / (2 E[x]) = mean (1 + cv^2) / 2
    assert found.mean() == pytest.approx(1.0 + cv**2, rel=0.05)


WINDOWS = """client,window_start_s,window_length_s,rate_req_s,cv,family,p1,p2
4,0,600,2,1,Gamma,,
9,0,600,1,5,Gamma,,
4,600,600,8,0.5,Weibull,,
"""
QUANTILES = """client,block_start_s,field,mean,p5,p25,p50,p75,p90,p95,p99,max
4,0,input_tokens,,10,20,30,40,50,60,70,80
4,0,output_tokens,,5,5,5,5,5,5,5,5
4,600,input_tokens,,1000,1000,1000,1000,1000,1000,1000,1000
4,600,output_tokens,,5,5,5,5,5,5,5,5
9,0,input_tokens,300,100,100,100,100,100,100,100,100000
9,0,output_tokens,,7,7,7,7,7,7,7,7
9,0,reason_ratio,0.5,0,0,0,0,0,0,0,0
"""


@pytest.fixture
def tables(tmp_path):
    (tmp_path / "w.csv").write_text(WINDOWS)
    (tmp_path / "q.csv").write_text(QUANTILES)
    return tmp_path


def test_clients_ask_at_the_rates_of_their_windows(tables):
    text = "windows=w.csv,prompt=8,output=8,scale=20"
    found = drawn(text, tables)
    counts = [((found.tenant == 0) & (found.arrival_s < 600)).sum(), (found.tenant == 1).sum()]
    counts.append(((found.tenant == 0) & (found.arrival_s >= 600)).sum())
    # 600 s x 20 x the rate; a renewal process from any moment on has its rate, and cv^2 of a count's variance
    for count, rate, cv in zip(counts, (2, 1, 8), (1, 5, 0.5)):
        assert abs(count - 12_000 * rate) < 4 * cv * math.sqrt(12_000 * rate) + 4 * cv**2
    assert (np.diff(found.arrival_s) >= 0).all() and found.arrival_s[0] == 0


def test_short_windows_of_bursts_have_their_rate_too(tables):
    # a renewal process that began with an arrival would have (cv^2 - 1) / 2 = 12 more in every window of 10
    rows = "".join(f"0,{10 * i},10,1,5,Gamma\n" for i in range(2000))
    (tables / "short.csv").write_text("client,window_start_s,window_length_s,rate_req_s,cv,family\n" + rows)
    found = drawn("windows=short.csv,prompt=8,output=8", tables)
    assert len(found) == pytest.approx(20_000, rel=0.1)


def test_lengths_of_clients_follow_their_quantiles(tables):
    found = drawn("windows=w.csv,lengths=q.csv,scale=20", tables)
    early = found.prompt[(found.tenant == 0) & (found.arrival_s < 590)]
    late = found.prompt[(found.tenant == 0) & (found.arrival_s > 610)]
    assert set(late) == {1000} and set(found.output[found.tenant == 1]) == {7}
    assert np.quantile(early, [0.05, 0.25, 0.5, 0.75, 0.9]) == pytest.approx([10, 20, 30, 40, 50], abs=1)
    assert early.max() <= 80 and early.min() == 8  # 10 - (20 - 10) x 5 / 20 is 7.5
    # quantiles alone would give 1 to 100,000 on a line above the 99th: 100 + 0.01 x 49,950; the mean says 300
    bursty = found.prompt[found.tenant == 1]
    assert bursty.max() > 100 and bursty.mean() < 100 + 0.01 * 49_950


def test_windows_are_cut_scaled_and_stopped(tables):
    text = "windows=w.csv,prompt=8,output=8"
    later = drawn(f"{text},begin=600s", tables)
    assert set(later.tenant) == {0} and len(later) == pytest.approx(4800, rel=0.05)
    assert len(drawn(f"{text},requests=500", tables)) == 500
    faster = drawn(f"{text},rate=55", tables)  # (2 + 1 + 8) x 600 in 1200 s are 5.5 a second
    assert len(faster) / 1200 == pytest.approx(55, rel=0.05)
    short = drawn(f"{text},begin=590s,window=20s", tables)
    assert short.arrival_s[-1] < 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("windows=w.csv,lengths=few.csv", "the clients 9"),
        ("windows=w.csv,prompt=8,output=8,begin=2h", "no client asks"),
        ("windows=q.csv,prompt=8,output=8", "no column window_start_s"),
        ("windows=w.csv,lengths=bad.csv", "in order: line 3"),
        ("rate=1,lengths=q.csv", "no column prompt_tokens"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(tables, words, said):
    (tables / "few.csv").write_text("".join(line for line in QUANTILES.splitlines(True) if not line.startswith("9")))
    (tables / "bad.csv").write_text(QUANTILES.replace("4,0,output_tokens,,5,5,5", "4,0,output_tokens,,5,9,5"))
    with pytest.raises(MeshwrightError, match=said):
        drawn(words, tables)


def test_every_wrong_window_is_named_by_its_line(tmp_path):
    rows = ["1,0,600,2,1,Gamma", "-1,0,600,2,1,Gamma", "1,x,600,2,1,Gamma", "1,0,0,0,1,Gamma", "1,0,600,2,0,Pareto"]
    rows += ["1,0,600,2,1,Gamma,9", "1,0"]
    (tmp_path / "w.csv").write_text("client,window_start_s,window_length_s,rate_req_s,cv,family\n" + "\n".join(rows))
    with pytest.raises(MeshwrightError) as caught:
        drawn("windows=w.csv,prompt=8,output=8", tmp_path)
    said = sorted(d.message.rpartition(": ")[2] for d in caught.value.diagnostics)
    assert said == ["line 3", "line 4", "line 7", "lines 5, 8", "lines 5, 8", "lines 6, 8", "lines 6, 8"]


def test_a_million_requests_are_drawn_in_less_than_a_second():
    for words in ("", ",cv=3,prompt=lognormal:mean=1024;sigma=1,tenants=8:zipf=1,adapters=100:zipf=1"):
        serve = parse("rate=100,output=256,requests=1000000" + (words or ",prompt=1024"))
        begin = time.process_time()
        assert len(serve.drawn()) == 1_000_000
        assert time.process_time() - begin < 1.0


def test_a_trace_whose_requests_come_at_once_has_no_rate(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "3,8,4\n" * 5)
    assert len(drawn("trace=t.csv", tmp_path)) == 5
    with pytest.raises(MeshwrightError, match="come at once"):
        drawn("trace=t.csv,rate=8", tmp_path)


ARRIVALS = st.sampled_from(
    ["rate=50", "rate=50,cv=3", "rate=50,burst=weibull,cv=2", "concurrency=3", "concurrency=3,ramp=2s"]
)
TOGETHER = st.sampled_from(["", "turns=3", "turns=2.5:geometric,think=1s", "samples=4"])
WHOSE = st.sampled_from(["", "tenants=3", "priority=2+0,ttft.2=1s,ttft=2s", "adapters=5:zipf=1:share=0.5"])
COMMON = st.sampled_from(["", "prefix=40", "prefix=20:groups=3:zipf=2"])
SIZES = st.sampled_from(
    ["prompt=40,output=3", "prompt=40:0.5;90:0.5,output=1", "prompt=lognormal:mean=99;sigma=1,output=7"]
)
COUNTS = st.sampled_from(["requests=1", "requests=37", "requests=37,longest=120", "requests=60,seed=9"])


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(st.tuples(ARRIVALS, TOGETHER, WHOSE, COMMON, SIZES, COUNTS))
def test_whatever_is_said_the_columns_fit_together(words):
    try:
        serve = parse(",".join(filter(None, words)))
        found = serve.drawn()
    except MeshwrightError as error:  # a prefix longer than a prompt, or every request longer than allowed
        assert {d.code for d in error.diagnostics} <= {"W005", "W011"}
        return
    n = len(found)
    assert 1 <= n <= serve.requests and (found.prompt > 0).all() and (found.output > 0).all()
    for name in COLUMNS:
        assert len(getattr(found, name)) in ((n,) if name in ("arrival_s", "prompt", "output") else (0, n))
    earliest = found.earliest_s()
    assert (np.diff(earliest) >= 0).all() and earliest[0] == 0.0
    assert not (found.concurrency and len(found.after))
    assert (found.after < np.arange(n)).all() if len(found.after) else True
    pieces = np.diff(found.hash_ptr)
    assert len(pieces) in (0, n) and found.hash_ptr[-1] == len(found.hashes)
    assert (pieces <= -(-found.prompt // found.hash_block)).all() if len(pieces) else True
    assert max(found.slo, default=0) < len(serve.objective_classes)
    half = found.first(n // 2 + 1)
    assert np.array_equal(half.earliest_s(), earliest[: n // 2 + 1])
