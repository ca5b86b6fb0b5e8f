"""Trace files: what viewers read of them equals the timeline, and they come back as it."""

from __future__ import annotations

import gzip
import json

import msgspec
import numpy as np
import pytest

from meshwright import catalog, trace
from meshwright.errors import MeshwrightError
from meshwright.graph import KINDS, QUEUES, GraphBuilder, RankClass
from meshwright.simulate import engine
from meshwright.timeline import Counter, Identity, Instants, MemoryTrace, StepBounds, Timeline, from_times


@pytest.fixture
def timeline() -> Timeline:
    """Two stages, two microbatches, sends between them, host work, a gradient exchange over both ranks."""
    build = GraphBuilder([RankClass(stage=0, multiplicity=8), RankClass(label="stage <1>")])
    last = []
    for mb in range(2):
        f = build.add("F", "forward", build.stream(0, "compute"), stage=0, microbatch=mb)
        send = build.add("send", "activations", build.stream(0, "pp_forward"), after=[f], stage=0, microbatch=mb)
        g = build.add("F", "forward", build.stream(1, "compute"), after=[send], stage=1, microbatch=mb)
        last = [build.add("BW", "backward", build.stream(1, "compute"), after=[g], stage=1, microbatch=mb)]
    both = [build.stream(rank, "dp") for rank in (0, 1)]
    exchange = build.add("all_reduce", "gradients", both, after=last)
    build.add("host", "log", build.stream(0, "host"), after=[exchange])
    build.add("op", "norm", build.stream(0, "compute"), after=[exchange], layer=3)
    graph = build.build()
    seconds = {"forward": 0.1, "activations": 0.0123, "backward": 0.2, "gradients": 1 / 3, "log": 1e-5, "norm": 3e-5}
    durations = np.array([seconds[key] for key in graph.keys])
    start, end = engine.times(graph, durations)
    curve = MemoryTrace(
        time_s=np.array([0.0, 0.1, 0.25]),
        categories=("parameters", "activations"),
        num_bytes=np.array([[1e9, 1e9, 1e9], [0.0, 5e8, 2.5e8]]),
    )
    parts = {"gemm": durations * 0.75, "tp": durations * 0.25}
    return from_times(graph, start, end, parts=parts, memory=(curve, curve), identity=Identity(code="0.1.0"))


def events(path) -> tuple[dict, list[dict]]:
    data = path.read_bytes()
    whole = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return whole, whole["traceEvents"]


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_trace_comes_back_as_the_timeline_it_was(tmp_path, timeline, name):
    trace.write(timeline, tmp_path / name)
    back = trace.read(tmp_path / name)
    for field in ("ranks", "multiplicity", "keys", "identity"):
        assert getattr(back, field) == getattr(timeline, field)
    for field in ("task", "rank", "queue", "kind", "attributes", "waited_for", "cost_key"):
        ours, read = getattr(timeline, field), getattr(back, field)
        assert np.array_equal(ours, read) and ours.dtype == read.dtype, field
    assert np.allclose(back.start_s, timeline.start_s, rtol=0, atol=1e-15)
    assert np.allclose(back.end_s, timeline.end_s, rtol=0, atol=1e-15)
    assert all(np.array_equal(back.parts[c], timeline.parts[c]) for c in timeline.parts)
    assert back.peak_memory() == timeline.peak_memory() and back.memory[0].categories == timeline.memory[0].categories
    assert np.array_equal(back.critical_path(), timeline.critical_path())


def test_an_empty_timeline_comes_back(tmp_path):
    empty = from_times(GraphBuilder(["alone"]).build(), np.empty(0), np.empty(0))
    trace.write(empty, tmp_path / "t.json")
    assert trace.read(tmp_path / "t.json").num_spans == 0


def test_each_complete_event_has_its_span_s_time_in_microseconds_rank_and_queue(tmp_path, timeline):
    trace.write(timeline, tmp_path / "t.json")
    _, found = events(tmp_path / "t.json")
    spans = [e for e in found if e["ph"] == "X"]
    assert len(spans) == timeline.num_spans
    for i, event in enumerate(spans):
        assert event["ts"] == timeline.start_s[i] * 1e6
        assert event["dur"] == (timeline.end_s[i] - timeline.start_s[i]) * 1e6
        assert (event["pid"], event["tid"]) == (timeline.rank[i], timeline.queue[i])
        assert event["args"]["kind"] == KINDS[timeline.kind[i]]
        assert sum(event["args"]["parts_us"].values()) == pytest.approx(event["dur"])


def test_processes_and_threads_are_named_and_ordered(tmp_path, timeline):
    trace.write(timeline, tmp_path / "t.json")
    whole, found = events(tmp_path / "t.json")
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in found if e["ph"] == "M"}
    assert named["process_name", 0, 0] == {"name": "rank 0"} and named["process_labels", 0, 0] == {"labels": "8 ranks"}
    assert named["process_labels", 1, 0] == {"labels": "1 rank"}
    used = {(e["pid"], e["tid"]) for e in found if e["ph"] == "X"}
    for rank, queue in used:
        assert named["thread_name", rank, queue] == {"name": QUEUES[queue]}
        assert named["thread_sort_index", rank, queue] == {"sort_index": queue}
    assert whole["schemaVersion"] == 1 and whole["format_version"] == 2
    assert whole["meshwright"]["identity"] == {"code": "0.1.0"}


def test_categories_are_those_of_kineto(tmp_path, timeline):
    trace.write(timeline, tmp_path / "t.json")
    cats = {e["args"]["kind"]: e["cat"] for e in events(tmp_path / "t.json")[1] if e["ph"] == "X"}
    assert cats["host"] == "cpu_op" and {cats[k] for k in ("F", "BW", "send", "all_reduce", "op")} == {"kernel"}


def test_an_arrow_leads_from_the_pass_through_its_send_to_the_pass_it_let_start(tmp_path, timeline):
    trace.write(timeline, tmp_path / "t.json")
    arrows: dict[int, list[dict]] = {}
    for event in events(tmp_path / "t.json")[1]:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    first = arrows[min(arrows)]
    assert [(e["ph"], e["pid"], QUEUES[e["tid"]]) for e in first] == [
        ("s", 0, "compute"),
        ("t", 0, "pp_forward"),
        ("f", 1, "compute"),
    ]
    assert [e["ts"] for e in first] == pytest.approx([0.0, 1e5, 1.123e5])
    assert all(path[0]["ph"] == "s" and path[-1]["ph"] == "f" for path in arrows.values())


def test_memory_is_a_counter_of_each_rank(tmp_path, timeline):
    trace.write(timeline, tmp_path / "t.json")
    counters = [e for e in events(tmp_path / "t.json")[1] if e["ph"] == "C"]
    assert [(e["ts"], e["args"]["activations"]) for e in counters if e["pid"] == 0] == [
        (0.0, 0.0),
        (1e5, 5e8),
        (2.5e5, 2.5e8),
    ]


def test_equal_timelines_give_equal_bytes_and_no_other_file(tmp_path, timeline):
    for name in ("a.json.gz", "b.json.gz"):
        trace.write(timeline, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def refused(path) -> str:
    with pytest.raises(MeshwrightError) as caught:
        trace.read(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code in catalog.tables("codes") and diagnostic.help
    return diagnostic.code


@pytest.mark.parametrize("version, way", [(0, "write the trace again"), (3, "update meshwright")])
def test_another_format_is_refused_with_the_way_to_convert(tmp_path, timeline, version, way):
    path = tmp_path / "t.json"
    trace.write(timeline, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": version}))
    with pytest.raises(MeshwrightError, match=way) as caught:
        trace.read(path)
    assert caught.value.diagnostics[0].code == "X103"


def test_unreadable_files_are_one_error(tmp_path, timeline):
    assert refused(tmp_path / "none.json") == "X101"
    assert refused(tmp_path) == "X101"
    whole = tmp_path / "whole.json.gz"
    trace.write(timeline, whole)
    cut = tmp_path / "cut.json.gz"
    for keep in (1, 2, 20, len(whole.read_bytes()) // 2, len(whole.read_bytes()) - 4):
        cut.write_bytes(whole.read_bytes()[:keep])
        assert refused(cut) == "X101"
    cut.write_bytes(b"\x1f\x8b" + b"garbage" * 10)
    assert refused(cut) == "X101"
    cut.write_bytes(b"\xff\xfe{")
    assert refused(cut) == "X101"
    cut.write_bytes(b"[" * 100_000)
    assert refused(cut) == "X101"


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"traceEvents": []}', '{"format_version": "one"}'])
def test_json_of_others_is_not_a_trace_of_ours(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_text(content)
    assert refused(path) == "X102"


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t["meshwright"].pop("keys"),
        lambda t: t["meshwright"]["ranks"].pop(),
        lambda t: t["meshwright"]["parts_s"].update(gemm=[]),
        lambda t: t["meshwright"].update(queues=["what"] * 10),
        lambda t: t["meshwright"]["memory"][0]["time_s"].pop(),
        lambda t: next(e for e in t["traceEvents"] if e["ph"] == "X").pop("args"),
        lambda t: next(e for e in t["traceEvents"] if e["ph"] == "X")["args"].update(kind="dance"),
        lambda t: next(e for e in t["traceEvents"] if e["ph"] == "X")["args"].update(waited_for=10**6),
        lambda t: next(e for e in t["traceEvents"] if e["ph"] == "X")["args"].update(key=-1),
        lambda t: next(e for e in t["traceEvents"] if e["ph"] == "X")["args"].update(correlation=2**40),
        lambda t: t["traceEvents"].remove(next(e for e in t["traceEvents"] if e["ph"] == "X")),
        lambda t: t.update(traceEvents={}),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path, timeline, damage):
    path = tmp_path / "t.json"
    trace.write(timeline, path)
    whole = json.loads(path.read_text())
    damage(whole)
    path.write_bytes(msgspec.json.encode(whole))
    assert refused(path) == "X102"


def test_a_folder_that_is_missing_is_one_error(tmp_path, timeline):
    with pytest.raises(MeshwrightError) as caught:
        trace.write(timeline, tmp_path / "none" / "t.json")
    assert caught.value.diagnostics[0].code == "X104"


def test_a_trace_of_the_format_before_this_one_is_still_read(tmp_path, timeline):
    """Format 1 named ranks by text, counted them apart, and kept the bounds of steps in a text of the identity."""
    trace.write(timeline, tmp_path / "t.json")
    whole = json.loads((tmp_path / "t.json").read_text())
    whole["format_version"] = 1
    for event in whole["traceEvents"]:
        if event["ph"] == "X":
            event["args"]["step"] = 7
    header = {key: whole["meshwright"][key] for key in ("queues", "keys", "parts_s", "memory")}
    header["ranks"] = ["slice 1 rank 0 (h100 (pcie))", "rank 12 dp0 tp1"]
    header["multiplicity"] = [8, 1]
    header["identity"] = {"plan": "dp8", "source": "measured", "step bounds": "0.25:0.75", "made by": "somebody"}
    (tmp_path / "old.json").write_text(json.dumps(whole | {"meshwright": header}))
    old = trace.read(tmp_path / "old.json")
    assert old.ranks == (
        RankClass(slice=1, stage=0, device="h100 (pcie)", multiplicity=8),
        RankClass(stage=12, at=(("dp", 0), ("tp", 1))),
    )
    assert [rank.name for rank in old.ranks] == header["ranks"]
    assert old.identity == Identity(plan="dp8", source="measured")
    assert [c.tolist() for c in (old.steps.number, old.steps.begin_s, old.steps.end_s)] == [[7], [0.25], [0.75]]
    assert np.array_equal(old.kind, timeline.kind)


@pytest.fixture
def happened(timeline) -> Timeline:
    """The timeline with all that may stand beside its spans."""
    return msgspec.structs.replace(
        timeline,
        steps=StepBounds.of([3, 4], [(0.0, 0.5), (0.5, 1.25)]),
        counters=(
            Counter(name="loss", unit="", time_s=np.array([0.5, 1.25]), value=np.array([2.5, 2.25])),
            Counter(name="power", unit="W", time_s=np.array([0.1]), value=np.array([700.0]), rank=1),
        ),
        instants=Instants.of([(0.25, "failure"), (0.5, "repair"), (1.0, "failure")]),
        records={
            "request": {"id": np.array([1, 2]), "ttft_s": np.array([0.5, np.nan]), "why": np.array(["a", "b"], object)}
        },
    )


def test_counters_instants_records_and_steps_come_back(tmp_path, happened):
    trace.write(happened, tmp_path / "t.json")
    back = trace.read(tmp_path / "t.json")
    for ours, read in zip((happened.steps, happened.instants), (back.steps, back.instants)):
        for name, column in msgspec.structs.asdict(ours).items():
            assert np.array_equal(column, getattr(read, name)), name
    assert [(c.name, c.unit, c.rank, c.value.tolist()) for c in back.counters] == [
        ("loss", "", -1, [2.5, 2.25]),
        ("power", "W", 1, [700.0]),
    ]
    table = back.records["request"]
    assert table["id"].tolist() == [1, 2] and table["why"].tolist() == ["a", "b"]
    assert table["ttft_s"][0] == 0.5 and np.isnan(table["ttft_s"][1])


def test_viewers_see_counters_as_tracks_and_instants_as_lines(tmp_path, happened):
    trace.write(happened, tmp_path / "t.json")
    _, found = events(tmp_path / "t.json")
    counters = [
        (e["name"], e["pid"], e["ts"], e["args"]) for e in found if e["ph"] == "C" and "memory" not in e["name"]
    ]
    everybody = len(happened.ranks)
    assert counters == [
        ("loss", everybody, 0.5e6, {"loss": 2.5}),
        ("loss", everybody, 1.25e6, {"loss": 2.25}),
        ("power (W)", 1, 0.1e6, {"power": 700.0}),
    ]
    instants = [(e["name"], e["pid"], e["ts"], e["s"]) for e in found if e["ph"] == "i"]
    assert instants == [
        ("failure", everybody, 0.25e6, "g"),
        ("repair", everybody, 0.5e6, "g"),
        ("failure", everybody, 1e6, "g"),
    ]
    assert {"name": "all ranks"} in [e["args"] for e in found if e["ph"] == "M" and e["pid"] == everybody]


@pytest.mark.parametrize(
    "change",
    [
        {"steps": {"number": [1], "begin_s": [], "end_s": [1.0]}},
        {"instants": {"names": ["a"], "time_s": [0.0], "what": [1], "rank": [-1]}},
        {"instants": {"names": ["a"], "time_s": [0.0], "what": [0], "rank": [9]}},
        {"counters": [{"name": "c", "unit": "", "time_s": [0.0], "value": [], "rank": -1}]},
        {"records": {"event": {"a": [1], "b": []}}},
        {"records": {"event": {"a": [[1]]}}},
    ],
)
def test_columns_that_do_not_fit_each_other_are_a_damaged_trace(tmp_path, timeline, change):
    trace.write(timeline, tmp_path / "t.json")
    whole = json.loads((tmp_path / "t.json").read_text())
    whole["meshwright"] |= change
    (tmp_path / "bad.json").write_text(json.dumps(whole))
    with pytest.raises(MeshwrightError) as caught:
        trace.read(tmp_path / "bad.json")
    assert [d.code for d in caught.value.diagnostics] == ["X102"]
