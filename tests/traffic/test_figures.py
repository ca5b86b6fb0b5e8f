"""Figures that servers say of themselves while they are measured."""

from meshwright.traffic import record
from meshwright.traffic.figures import ServerFigures, read
from meshwright.traffic.record import RequestRecord, Traffic, TrafficHead, TrafficJournal
from meshwright.traffic.timeline import timeline

VLLM = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a"} 7
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 9
"""


def test_figures_are_read_under_the_names_of_each_server():
    assert read(VLLM, 1.5) == ServerFigures(at_s=1.5, running=5.0, waiting=7.0, cache=0.5)
    assert read("sglang:num_running_reqs 4\nsglang:token_usage 0.1\n", 0.0) == ServerFigures(
        at_s=0, running=4, cache=0.1
    )
    assert read("llamacpp:requests_deferred 2\n", 0.0) == ServerFigures(at_s=0.0, waiting=2.0)
    assert read("python_info 1\nvllm:num_requests_running nonsense\n", 0.0) is None and read("", 0.0) is None


def test_they_are_lines_of_the_file_and_counters_of_the_timeline(tmp_path):
    head = TrafficHead(url="http://a", model="m", serve="rate=1", digest="", requests=2)
    path = str(tmp_path / "a.jsonl")
    journal = TrafficJournal(path, head, goes_on=False)
    journal.add(ServerFigures(at_s=0.5, running=1.0))
    journal.add(
        RequestRecord(number=0, due_s=0.0, sent_s=0.0, first_s=0.3, end_s=0.9, prompt=4, output=2, gaps_us=(6,))
    )
    journal.add(ServerFigures(at_s=1.5, running=0.0, cache=0.25))
    journal.close()
    found = record.read(path)
    assert isinstance(found, Traffic) and len(found.figures) == 2 and list(found.records) == [0]
    counters = {one.name: (one.time_s.tolist(), one.value.tolist()) for one in timeline(found).counters}
    assert counters["running, as the server says"] == ([0.5, 1.5], [1.0, 0.0])
    assert counters["cache in use, as the server says"] == ([1.5], [0.25])
    assert "waiting, as the server says" not in counters
