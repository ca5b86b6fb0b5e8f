"""The recorder keeps what it is told, of the steps it is asked for."""

import threading
import time

import numpy as np
import pytest
import torch

from meshwright.run.record import Off, Recorder


def said(recording):
    """(step, kind, queue, attributes) of every span."""
    return [(int(s), *recording.labels[i][:6]) for s, i in zip(recording.step, recording.label)]


def test_a_span_has_the_attributes_and_times_it_was_given():
    recorder = Recorder(rank=3)
    recorder.step_begin(7)
    before = time.perf_counter_ns()
    token = recorder.start("F", stage=2, chunk=1, microbatch=5)
    inside = time.perf_counter_ns()
    recorder.stop(token)
    after = time.perf_counter_ns()
    recorder.step_end()
    found = recorder.recording()
    assert said(found) == [(7, "F", "compute", 2, 1, 5, -1)]
    assert before <= found.start_ns[0] <= inside <= found.end_ns[0] <= after
    ((number, begin, end),) = found.steps
    assert number == 7 and begin <= before and end >= after
    assert found.rank == 3


def test_spans_nest_and_say_how_deep():
    recorder = Recorder()
    recorder.step_begin(0)
    with recorder.span("F", microbatch=0):
        with recorder.span("F", microbatch=0, layer=0), recorder.span("op", key="norm"):
            pass
        with recorder.span("all_reduce", "tp"):
            pass
    with recorder.span("B", microbatch=0):
        pass
    recorder.step_end()
    found = recorder.recording()
    assert [s[1] for s in said(found)] == ["F", "F", "op", "all_reduce", "B"]
    assert found.depth.tolist() == [0, 1, 2, 0, 0]


def test_only_the_window_is_kept():
    recorder = Recorder(warmup=2, keep=3)
    for step in range(9):
        recorder.step_begin(step)
        for microbatch in range(step):
            recorder.stop(recorder.start("F", microbatch=microbatch))
        recorder.step_end()
        recorder.stop(recorder.start("host"))
    found = recorder.recording()
    assert [number for number, _, _ in found.steps] == [6, 7, 8]
    assert said(found) == [(s, "F", "compute", -1, -1, m, -1) for s in (6, 7, 8) for m in range(s)]
    assert len(found.memory) == 6


def test_a_warming_recorder_records_nothing():
    recorder = Recorder(warmup=1)
    recorder.step_begin(0)
    with recorder.span("F") as token:
        assert token == -1
    recorder.step_end()
    assert len(recorder.recording().label) == 0


def test_arrays_grow():
    recorder = Recorder()
    recorder.step_begin(0)
    tokens = [recorder.start("F", microbatch=i) for i in range(5000)]
    for token in tokens:
        recorder.stop(token)
    recorder.step_end()
    found = recorder.recording()
    assert [s[5] for s in said(found)] == list(range(5000))
    assert (found.end_ns >= found.start_ns).all()


class Work:
    """A collective that another thread finishes."""

    def __init__(self):
        self.future = torch.futures.Future()

    def get_future(self):
        return self.future

    def finish(self):
        thread = threading.Thread(target=self.future.set_result, args=(None,))
        thread.start()
        thread.join()


def test_a_watched_collective_ends_when_it_does_even_after_its_step():
    recorder, early, late, never = Recorder(keep=2), Work(), Work(), Work()
    recorder.step_begin(0)
    for microbatch, work in enumerate((early, late, never)):
        recorder.watch(work, recorder.start("all_reduce", "dp", microbatch=microbatch))
    early.finish()
    recorder.step_end()
    recorder.step_begin(1)
    between = time.perf_counter_ns()
    late.finish()
    recorder.stop(recorder.start("F"))
    recorder.step_end()
    found = recorder.recording()
    assert found.start_ns[0] < found.end_ns[0] < between < found.end_ns[1]
    assert found.end_ns[2] == -1


def test_a_late_end_never_reaches_a_step_that_uses_the_same_block():
    recorder, late = Recorder(keep=1), Work()
    recorder.step_begin(0)
    recorder.watch(late, recorder.start("all_reduce", "dp"))
    recorder.step_end()
    recorder.step_begin(1)
    recorder.start("F")
    recorder.step_end()
    late.finish()
    assert recorder.recording().end_ns.tolist() == [-1]


def test_a_word_that_is_no_kind_or_queue_is_refused():
    recorder = Recorder()
    recorder.step_begin(0)
    with pytest.raises(ValueError, match="'forward' is none of F, B"):
        recorder.start("forward")
    with pytest.raises(ValueError, match="'nvlink' is none of compute"):
        recorder.start("F", "nvlink")


def test_off_takes_the_same_calls():
    off = Off()
    off.step_begin(0)
    with off.span("F", stage=0) as token:
        off.watch(None, token)
    off.stop(off.start("B", "compute", stage=1, group=(0, 1)))
    off.sample_memory()
    off.step_end()
    public = {name for name in dir(Recorder) if not name.startswith("_")}
    assert public - {"recording"} <= set(dir(off))


def test_a_span_costs_less_than_two_microseconds():
    """The least of many tries: what the machine does besides is no cost of the recorder."""
    recorder, least = Recorder(keep=1), float("inf")
    for step in range(30):
        recorder.step_begin(step)
        begin = time.perf_counter_ns()
        for microbatch in range(500):
            recorder.stop(recorder.start("F", stage=1, chunk=0, microbatch=microbatch % 8))
        least = min(least, (time.perf_counter_ns() - begin) / 500)
        recorder.step_end()
    assert least < 2000


class Device:
    """A stand-in for a GPU: work takes its time on a clock of its own, which drifts from the host's."""

    DRIFT, OFFSET_MS = 1.0001, 5000.0

    def __init__(self, monkeypatch):
        self.host_ns = 1_000_000_000
        self.busy_ns = 0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at_ns = max(device.busy_ns, device.host_ns)

            def elapsed_time(self, other):
                return np.float32((other.at_ns - self.at_ns) * 1e-6 * device.DRIFT).item()

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 7)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 9)

    def synchronize(self, *_):
        self.host_ns = max(self.host_ns, self.busy_ns)

    def launch(self, host_ns, takes_ns):
        """The host takes so long to launch something that then runs after all before it."""
        self.host_ns += host_ns
        self.busy_ns = max(self.busy_ns, self.host_ns) + takes_ns


def test_on_a_gpu_spans_are_when_kernels_ran_not_when_they_were_launched(monkeypatch):
    """Kernels of 3 ms launched every 10 us: on the device they follow each other; nothing waits inside a step."""
    device = Device(monkeypatch)
    recorder = Recorder(device=torch.device("cuda"), keep=2, now=lambda: device.host_ns)
    for step in range(4):
        recorder.step_begin(step)
        begin = device.host_ns
        for microbatch in range(5):
            with recorder.span("F", microbatch=microbatch):
                device.launch(10_000, 3_000_000)
        assert device.host_ns == begin + 50_000
        recorder.step_end()
        device.synchronize()
    found = recorder.recording()
    lengths = found.end_ns - found.start_ns
    # the host's launch of the first is part of it; both ends are rounded to the events' float32
    assert np.abs(lengths[1:5] - 3_000_000).max() < 500
    assert np.abs(found.start_ns[1:5] - found.end_ns[:4]).max() < 500
    assert [number for number, _, _ in found.steps] == [2, 3]
    first = found.steps[0][1]
    assert np.abs(found.start_ns[0] - first) < 2_000
    assert {(m.num_bytes, m.peak_bytes) for m in found.memory} == {(7, 9)}


def test_on_a_gpu_a_watched_collective_ends_on_its_stream(monkeypatch):
    device = Device(monkeypatch)
    recorder = Recorder(device=torch.device("cuda"), now=lambda: device.host_ns)
    work = Work()
    recorder.step_begin(0)
    token = recorder.start("all_reduce", "dp")
    recorder.watch(work, token)
    device.launch(1_000, 2_000_000)
    work.finish()  # NCCL calls back at once, under a stream that waits for it
    recorder.step_end()
    found = recorder.recording()
    assert abs(int(found.end_ns[0] - found.start_ns[0]) - 2_001_000) < 500


class Silent:
    """A collective that says nothing of its end."""

    def get_future(self):
        raise RuntimeError("Work::getFuture not implemented.")


@pytest.mark.parametrize("waited", [True, False])
def test_a_collective_that_cannot_say_when_it_ends_ends_where_it_is_waited_for(waited):
    ticks = iter(range(100))
    recorder = Recorder(now=lambda: next(ticks))
    recorder.step_begin(0)
    token = recorder.watch(Silent(), recorder.start("reduce_scatter", "dp"), waited=waited)
    recorder.stop(recorder.start("B"))
    recorder.stop(token)
    recorder.step_end()
    found = recorder.recording()
    assert (found.end_ns[0] > found.end_ns[1]) == waited
