"""Networks at scale from what jobs measured on themselves before they trained."""

import pytest

from meshwright.calibrate import network
from meshwright.calibrate.network import jobs as network_jobs
from meshwright.cost.fabric import read_profile, shipped
from meshwright.work import REACHED_BYTES
from tests.validate.samples import step, table

EFA = "EFA 3200 Gb/s (400 GB/s) per node, NVLink4 in node"
STEP_S, PORT = 20e-6, 400e9


def busbw(ranks, rounds, share):
    """Bus bandwidth of a ring whose steps take 20 us and their bytes at a share of the port."""
    seconds = rounds * (ranks - 1) * (STEP_S + REACHED_BYTES / ranks / (PORT * share))
    return rounds * (ranks - 1) / ranks * REACHED_BYTES / seconds / 1e9


def job(index, ranks):
    gather = busbw(ranks, 1, 0.6)
    notes = f"busbw GB/s in job: AR={busbw(ranks, 2, 0.8378):.2f} AG={gather:.2f} RS={gather:.2f} AR_intra=424"
    return step(id=f"j:{index}", num_gpus=ranks, dp=ranks // 2, network=EFA, notes=notes)


@pytest.fixture
def folder(tmp_path):
    sizes = [ranks for ranks in (16, 64, 256, 512) for _ in range(network_jobs.MIN_JOBS)]
    table(tmp_path, "training_steps", [job(i, ranks) for i, ranks in enumerate(sizes)])
    return tmp_path


def test_a_fabric_learns_its_steps_from_jobs_of_many_sizes(folder):
    series = network_jobs.read_job_series(folder)
    assert {(s.op, s.group.size) for s in series} == {
        (op, n) for op in ("all_gather", "all_reduce", "reduce_scatter") for n in (16, 64, 256, 512)
    }
    told = {p.name: p for p in network_jobs.with_steps_at_scale(tuple(shipped().profiles.values()), series)}
    constants = told["efa"].constants
    assert constants.gather_us == pytest.approx(20, rel=0.15)
    assert constants.reduce_us == pytest.approx(20, rel=0.15)
    # rings so much slower than trees would be: no trees beyond two nodes
    assert constants.tree_nodes == 2
    # nobody timed gathers over EFA but these jobs, the fastest of them over two nodes
    assert constants.all_gather == pytest.approx(busbw(16, 1, 0.6) / 400, rel=0.02)
    assert "steps at scale" in told["efa"].source
    untouched = [p for p in told.values() if p.name != "efa"]
    assert all(p == shipped().profiles[p.name] for p in untouched)


def test_few_jobs_and_faulty_ones_say_nothing(tmp_path):
    rows = [job(i, 64) for i in range(network_jobs.MIN_JOBS)]
    rows[0]["flags"] = "degraded_intranode_bw"
    table(tmp_path, "training_steps", rows)
    assert network_jobs.read_job_series(tmp_path) == []


def test_the_command_writes_what_the_jobs_tell(folder, tmp_path, monkeypatch):
    """A calibration's files are the fabrics with their steps, as the catalog has them."""
    known = tuple(shipped().profiles.values())
    monkeypatch.setattr(network, "read_series", lambda _: [])
    monkeypatch.setattr(network, "fit_series", lambda *_, **__: known)
    monkeypatch.setattr(network, "predict", lambda *_: [])
    monkeypatch.setattr(network.network_exchange, "fit", lambda _: ())
    network.run(folder, out=tmp_path / "out")
    written = read_profile((tmp_path / "out" / "efa.json").read_bytes(), "efa.json")
    assert written.constants.gather_us == pytest.approx(20, rel=0.15)
