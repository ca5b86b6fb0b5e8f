"""Files of requests: every published form, every column, and every row that is wrong, by its number, at once."""

import gzip
import importlib.util
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.spec.request_catalog import entry, hashed, known_blocks, packed, unpacked
from meshwright.spec.request_files import read
from meshwright.spec.serve import parse
from meshwright.spec.serve_values import Population

ROOT = Path(__file__).parents[2]
HEAD = "arrival_s,prompt_tokens,output_tokens"


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def refused(path, **words):
    with pytest.raises(MeshwrightError) as caught:
        read(path, **words)
    assert all(d.code == "W011" and d.place and d.help for d in caught.value.diagnostics)
    return [d.message for d in caught.value.diagnostics]


def wrong_lines(path, **words):
    return {message.rpartition(": ")[0][:24]: message.rpartition(": ")[2] for message in refused(path, **words)}


def test_the_columns_of_a_table_say_whose_a_request_is_and_what_it_waits_for(tmp_path):
    rows = "0,8,4,chat,1,sql,s1,\n1,8,4,code,-2,,,-1\n5,16,4,chat,1,sql,s1,0\n"
    text = f"{HEAD},tenant,priority,adapter,program,after\n{rows}"
    found = read(written(tmp_path, "t.csv", text))
    assert (found.tenant.tolist(), found.priority.tolist()) == ([0, 1, 0], [1, -2, 1])
    assert (found.adapter.tolist(), found.program.tolist()) == ([0, -1, 0], [0, -1, 0])
    assert (found.after.tolist(), found.arrival_s.tolist()) == ([-1, -1, 0], [0.0, 1.0, 5.0])


def test_numbers_of_tenants_and_adapters_are_their_own(tmp_path):
    path = written(tmp_path, "t.csv", f"{HEAD},tenant,adapter\n0,8,4,7,3\n1,8,4,2,-1\n")
    assert read(path).tenant.tolist() == [7, 2] and read(path).adapter.tolist() == [3, -1]


def test_unknown_adapters_and_tenants_are_named_by_their_lines(tmp_path):
    rows = "0,8,4,chat,0\n1,8,4,code,5\n2,8,4,mail,x\n3,8,4,,none\n"
    path = written(tmp_path, "t.csv", f"{HEAD},tenant,adapter\n{rows}")
    known = {"tenant": Population(2, ("chat", "code"), (1.0, 1.0)), "adapter": Population(5)}
    assert wrong_lines(path, known=known) == {
        "its tenant is not one of": "lines 4-5",
        "its adapter is not one o": "lines 3-4",
    }
    with pytest.raises(MeshwrightError, match="its adapter is not one of 5: lines 3-4"):
        parse("trace=t.csv,adapters=5", base=tmp_path).drawn()


def test_a_row_comes_after_one_that_is_above_it(tmp_path):
    rows = "0,8,4,\n1,8,4,1\n1,8,4,7\n1,8,4,x\n1,8,4,-2\n0.5,8,4,0\n"
    assert wrong_lines(written(tmp_path, "t.csv", f"{HEAD},after\n{rows}")) == {"the row that it comes af": "lines 3-6"}


def test_times_of_thinking_need_no_order(tmp_path):
    found = read(written(tmp_path, "t.csv", f"{HEAD},after\n5,8,4,\n9,8,4,\n0.5,8,4,0\n12,8,4,\n"))
    assert found.arrival_s.tolist() == [0, 4, 0.5, 7]


def test_priorities_are_whole_numbers(tmp_path):
    path = written(tmp_path, "t.csv", f"{HEAD},priority\n0,8,4,1\n1,8,4,1.5\n2,8,4,\n3,8,4,{10**30}\n")
    assert wrong_lines(path) == {"its priority is no whole": "lines 3-5"}


def test_sessions_of_burstgpt_are_programs(tmp_path):
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    log = "Conversation log\n"
    rows = f"5,a,1.5,ChatGPT,472,18,490,{log}45,,2.5,GPT-4,10,20,30,API log\n46,a,1,ChatGPT,500,9,509,{log}"
    found = read(written(tmp_path, "b.csv", f"{head}\n{rows}"))
    assert (found.program.tolist(), found.arrival_s.tolist()) == ([0, -1, 0], [0.0, 40.0, 41.0])


def test_requests_of_burstgpt_that_failed_are_named(tmp_path):
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = written(tmp_path, "b.csv", f"{head}\n5,ChatGPT,472,18,490,C\n9,ChatGPT,0,0,0,C\n11,GPT-4,7,0,7,C\n")
    assert wrong_lines(path) == {"the prompt is no whole n": "line 3", "the answer is no whole n": "lines 3-4"}


def test_traces_of_vidur_are_read(tmp_path):
    path = written(tmp_path, "v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,100,20\n2.5,50,10\n")
    assert (read(path).arrival_s.tolist(), read(path).prompt.tolist()) == ([0, 1], [100, 50])


def test_conversations_are_lengths_of_their_first_question_and_answer(tmp_path):
    turn = [{"from": "human", "value": "x" * 10}, {"from": "gpt", "value": "y" * 4001}, {"from": "human", "value": "z"}]
    chat = [{"role": "user", "content": "x" * 4}, {"role": "assistant", "content": "y" * 8}]
    short, empty = (
        [{"from": "human", "value": "hello"}],
        [{"from": "human", "value": ""}, {"from": "gpt", "value": "y"}],
    )
    said = [{"id": i, "conversations": c} for i, c in enumerate((turn, short, empty))] + [{"messages": chat}]
    found = read(written(tmp_path, "s.json", json.dumps(said)), timed=False)
    # four characters a token, rounded up; those without a question and an answer are left out
    assert (found.prompt.tolist(), found.output.tolist()) == ([3, 1], [1001, 2])
    assert "4 characters a token" in found.source and not len(found.line)
    path = written(tmp_path, "bad.json", json.dumps([said[0], 5, {"id": 3}, {"conversations": "x"}]))
    assert refused(path, timed=False) == ["no conversation: entries 2-4"]
    assert "no JSON list" in refused(written(tmp_path, "obj.json", "{}"), timed=False)[0]
    assert "no column arrival_s" in refused(tmp_path / "s.json")[0]


def test_block_hashes_are_whole_numbers_and_no_more_than_the_prompt_has_blocks(tmp_path):
    rows = [
        (0, 600, [1, 2]),
        (1, 600, [1, 2, 3]),
        (2, 600, [1.5]),
        (3, 600, ["1"]),
        (4, 600, 7),
        (5, 600, [2**70]),
        (6, 10, []),
    ]
    text = "".join(
        json.dumps({"timestamp": t, "input_length": i, "output_length": 1, "hash_ids": h}) + "\n" for t, i, h in rows
    )
    path = written(tmp_path, "m.jsonl", text)
    assert wrong_lines(path) == {"its block hashes are no ": "lines 3-6", "it has more block hashes": "line 2"}
    assert wrong_lines(path, hash_block=256) == {"its block hashes are no ": "lines 3-6"}


def test_the_size_of_the_blocks_of_hashes_is_said_by_a_word(tmp_path):
    written(tmp_path, "t.csv", f"{HEAD},block_hashes\n0,40,4,1 2 3\n")
    assert parse("trace=t.csv,hash_block=16", base=tmp_path).drawn().hash_block == 16


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", f"{HEAD},prompt_tokens\n0,1,2,3\n", "the columns prompt_tokens are there twice"),
        ("a.csv", f"{HEAD}\n0,1,2,3\n0,1\n", "more cells than the table has columns: line 2"),
        ("a.csv", '"a\n', "no column prompt_tokens"),
        ("a.jsonl", "[1]\n\n{}\nnull\n", "no JSON object: lines 1, 4"),
        ("a.jsonl", "x\n", "no JSON object: line 1"),
        ("a.csv", f"{HEAD}\n", "no requests"),
        ("a.csv", "", "no column prompt_tokens; its columns: none"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,5,5\n,5,5\n2023-13-45 1:2:3,5,5\nx,5,5\n",
            "from 0 on: lines 3-5",
        ),
        ("a.csv", f"{HEAD}\nnan,1,1\n-1,1,1\ninf,1,1\n1e300,1,1\n,1,1\n", "from 0 on: lines 2-6"),
        ("a.csv", f"{HEAD}\n0,0,1\n0,1.5,1\n0,-3,1\n0,1e10,1\n0,,1\n0,nan,1\n", "1,000,000,000: lines 2-7"),
    ],
)
def test_a_wrong_file_says_what_is_wrong_where(tmp_path, name, text, said):
    assert any(said in message for message in refused(written(tmp_path, name, text)))


def test_a_file_that_is_no_text_or_no_gzip_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(HEAD.encode())[:-4])
    for name in ("a.csv", "a.csv.gz", "b.csv.gz", ""):
        assert "cannot read" in refused(tmp_path / name)[0]


CELL = st.sampled_from(["", "0", "1", "7.5", "-1", "nan", "1e400", "x", "9" * 30, '"', "2023-01-01 00:00:00", "1 2"])


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@example(rows=[["0"] * 8])
@given(rows=st.lists(st.lists(CELL, min_size=1, max_size=9), min_size=1, max_size=5))
def test_any_cells_are_requests_or_diagnostics(tmp_path_factory, rows):
    head = f"{HEAD},block_hashes,tenant,priority,adapter,after"
    path = tmp_path_factory.mktemp("cells") / "t.csv"
    path.write_text("\n".join([head, *(",".join(row) for row in rows)]) + "\n")
    try:
        found = read(path)
    except MeshwrightError as error:
        assert {d.code for d in error.diagnostics} == {"W011"}
    else:
        assert (found.prompt >= 1).all() and (found.output >= 1).all() and (found.after < np.arange(len(found))).all()


def test_traces_of_the_catalog_are_whole_or_say_how_much_they_are():
    conv = parse("trace=azure-conv").drawn()
    # Patel et al., Splitwise, 2311.18677: 19,366 requests of one hour; the median prompt of the service is 1,020 tokens
    # and the median answer 129 (their section III)
    assert (len(conv), np.median(conv.prompt), np.median(conv.output)) == (19366, 1020, 129)
    assert conv.source == "azure-conv" and (np.diff(conv.arrival_s) >= 0).all() and 3400 < conv.arrival_s[-1] < 3600
    code = parse("trace=azure_code").drawn()
    assert (len(code), np.median(code.prompt), np.median(code.output)) == (8819, pytest.approx(1500, rel=0.03), 13)
    some = parse("trace=mooncake").drawn()
    assert len(some) == 3000 and "3,000 requests of 12,031" in some.source and some.hash_block == 512


def test_block_hashes_of_the_catalog_are_the_published_ones_first_rows():
    found = parse("trace=mooncake").drawn()
    pieces = np.split(found.hashes, found.hash_ptr[1:-1])
    # the first rows of conversation_trace.jsonl
    assert pieces[0].tolist() == list(range(14)) and pieces[1].tolist() == [0, *range(14, 28)]
    assert [len(piece) for piece in pieces] == (-(-found.prompt // 512)).tolist()


def test_lengths_of_the_catalog_are_drawn_as_pairs():
    found = parse("rate=1,lengths=sharegpt,requests=4000").drawn()
    assert found.prompt.max() < 8192 and found.prompt.mean() == pytest.approx(2340, rel=0.05)  # of all 30,731 rows


def test_a_day_of_clients_of_the_catalog_has_its_rates():
    found = parse("windows=servegen-deepseek-r1,begin=8h,window=10m").drawn()
    whole = parse("windows=servegen-deepseek-r1,requests=20000").drawn()
    assert set(found.tenant) <= set(range(73)) and len(whole) == 20000 and len(found) > 4000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trace=azure", "did you mean"),
        ("trace=burstgpt", "BurstGPT_without_fails_1.csv"),
        ("trace=sharegpt", "lengths=sharegpt"),
        ("trace=servegen-deepseek-r1", "windows=servegen-deepseek-r1"),
        ("windows=azure-conv,prompt=8,output=8", "trace=azure-conv"),
        ("trace=mooncake,data=nowhere", "conversation_trace.jsonl"),
        ("trace=azure-conv,begin=9h", "no request between"),
        ("trace=mooncake,prefix=512", "drop prefix="),
        ("trace=azure-conv,longest=8", "the shortest has"),
    ],
)
def test_a_trace_that_cannot_be_had_says_what_can(text, said):
    with pytest.raises(MeshwrightError, match=said):
        parse(text).drawn()


def test_the_published_file_is_read_whole_where_its_folder_is_said(tmp_path):
    rows = "".join(
        json.dumps({"timestamp": t, "input_length": 9, "output_length": 1, "hash_ids": [0]}) + "\n" for t in (5, 905)
    )
    written(tmp_path, "conversation_trace.jsonl", rows)
    assert parse("trace=mooncake,data=.", base=tmp_path).drawn().arrival_s.tolist() == pytest.approx([0, 0.9])


def test_a_part_of_a_trace_begins_where_it_is_told(tmp_path):
    written(tmp_path, "t.csv", f"{HEAD},after\n" + "".join(f"{i},8,4,\n" for i in range(10)) + "1,8,4,3\n30,8,4,4\n")
    found = parse("trace=t.csv,begin=3s,window=5s", base=tmp_path).drawn()
    # those at 3 to 7, and one that waits for the one at 3; 30 s after the one at 4 is behind the window
    assert found.arrival_s.tolist() == [0, 1, 2, 3, 4, 1] and found.after.tolist() == [-1] * 5 + [0]
    faster = parse("trace=t.csv,scale=2", base=tmp_path).drawn()
    assert faster.arrival_s.tolist() == [i / 2 for i in range(10)] + [1, 30]  # thinking takes as long


def test_requests_that_are_too_long_are_left_out(tmp_path):
    written(tmp_path, "t.csv", f"{HEAD}\n0,8,4\n1,80,4\n2,8,8\n")
    assert parse("trace=t.csv,longest=16", base=tmp_path).drawn().arrival_s.tolist() == [0, 2]


ROWS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 2000)), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(rows=ROWS, chance=st.randoms(use_true_random=False))
def test_packed_columns_and_block_hashes_are_read_back(rows, chance):
    gap, prompt = (np.array(column) for column in zip(*rows))
    at, blocks = np.cumsum(gap), -(-prompt // 512)
    # chains as a trace numbers them: each goes on from a prefix of an earlier one, with new numbers
    chains, used = [], 0
    for count in blocks.tolist():
        begin = chance.choice(chains)[:count] if chains and chance.random() < 0.7 else []
        begin = begin[: chance.randint(0, len(begin))]
        fresh = count - len(begin)
        chains.append(begin + list(range(used, used + fresh)))
        used += fresh
    hashes, ptr = np.concatenate(chains).astype(int), np.concatenate([[0], np.cumsum(blocks)])
    known, back = known_blocks(hashes, ptr)
    content = packed({"at+": at, "prompt": prompt, "known": known, "back": back})
    heads = [(head, len(rows)) for head in ("at+", "prompt", "known", "back")]
    found = unpacked(content, heads)
    assert np.array_equal(found["at"], at) and np.array_equal(found["prompt"], prompt)
    again, ends = hashed(found["known"], found["back"], found["prompt"])
    assert np.array_equal(again, hashes) and np.array_equal(ends, ptr)


def test_hashes_that_are_not_numbered_as_they_come_are_not_packed():
    with pytest.raises(ValueError, match="row 1"):
        known_blocks(np.array([0, 1, 5]), np.array([0, 2, 3]))


@pytest.fixture
def pack():
    spec = importlib.util.spec_from_file_location("pack_traces", ROOT / "tools" / "pack_traces.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_packed_as_the_catalog_has_them(pack, tmp_path):
    rows = "".join(f"{i * 0.5 + 0.0001},{600 + i},{i + 1},{' '.join(map(str, range(2)))}\n" for i in range(10))
    path = written(tmp_path, "t.csv", f"{HEAD},block_hashes\n{rows}")
    part = msgspec.structs.replace(entry("mooncake"), rows=4)
    found = pack.requests_of(part, path)
    assert found["arrival_ms+"].tolist() == [0, 500, 1000, 1500] and found["known"].tolist() == [0, 2, 2, 2]
    thinned = msgspec.structs.replace(entry("sharegpt"), rows=4)
    assert pack.requests_of(thinned, path)["output"].tolist() == [1, 4, 7, 10]  # every third of ten


def test_windows_are_packed_as_the_catalog_has_them(pack, tmp_path):
    head = "client,window_start_s,window_length_s,rate_req_s,cv,family"
    path = written(tmp_path, "x_windows.csv", f"{head}\n3,1200,600,0.085,6.69324,Weibull\n")
    head = "client,block_start_s,field,mean,p5,p25,p50,p75,p90,p95,p99,max"
    rows = "3,21600,output_tokens,5.4,1,2,3,4,5,6,7,8\n3,0,reason_ratio,0,0,0,0,0,0,0,0,0\n"
    written(tmp_path, "x_length_quantiles.csv", f"{head}\n{rows}")
    found = {name: column.tolist() for name, column in pack.clients_of(entry("servegen-deepseek-r1"), path).items()}
    assert [found[name] for name in entry("servegen-deepseek-r1").columns] == [[3], [2], [51], [6693], [True]]
    assert [found[f"lengths.{name}"] for name in ("block", "answer", "mean", "p5", "max")] == [
        [1],
        [True],
        [5],
        [1],
        [8],
    ]
