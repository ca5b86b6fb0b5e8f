"""Host times of published engines, found again from runs of requests that they explain."""

import tomllib

import msgspec
import numpy as np
import pytest

from meshwright.answer.replica import host_times
from meshwright.calibrate.engine import write
from meshwright.calibrate.engine_runs import fit, report
from meshwright.cost.engine import EngineProfile, engine_profile, engines
from meshwright.cost.standard import serving_costs
from meshwright.plan import parse
from meshwright.spec import cluster, model
from meshwright.spec.engine_words import EngineWords
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.validate.serving_requests import MeasuredRun

PUBLISHED = "distserve-vllm"
TRUE = msgspec.structs.replace(
    engine_profile(PUBLISHED), name="true", step_us=3000.0, request_us=100.0, front_us=5000.0
)


def run(rate, slower=1.0):
    """40 requests at a rate under the true profile, each time as many times as long."""
    rng = np.random.default_rng(int(rate * 10))
    requests = Requests(
        arrival_s=np.cumsum(rng.exponential(1 / rate, 40)), prompt=rng.integers(50, 1500, 40),
        output=rng.integers(5, 200, 40),
    )  # fmt: skip
    on = cluster.load("1xa100_80gb_sxm")
    words = EngineWords(policy="vllm-v0", kv_blocks=4134, profile=PUBLISHED)
    serve = Serve(rate=1.0, prompt=1, output=1, engine=words)
    found = MeasuredRun(f"r{rate}", model.load("opt-13b"), on, serve, parse("tp1").on(1), requests, {})
    times = found.times(TRUE, serving_costs("vllm"))
    return found._replace(measured={"tpot": times.tpot * slower, "ttft": times.ttft * slower})


def test_host_times_behind_runs_are_found_again_and_the_one_that_differs_shows_when_it_is_left_out():
    found = fit(PUBLISHED, [run(0.4), run(0.8), run(1.2), run(1.6), run(0.6, slower=1.3)])
    profile = found.profile
    assert (profile.step_us, profile.request_us, profile.front_us) == (3000.0, 100.0, 5000.0)
    assert np.abs(found.errors["run"][:4, :4]).max() < 1e-9
    assert np.exp(found.errors["run"][4, :4]) == pytest.approx(1 / 1.3)
    assert profile.left_out["run"]["mean"] == pytest.approx((1 - 1 / 1.3) / 5, abs=1e-4)
    assert "r0.6: TPOT -23.1% (left out -23.1%)" in "\n".join(report([found]))


def test_a_profile_that_stands_on_published_iterations_names_them_and_does_not_repeat_them(tmp_path):
    profile = EngineProfile(name="x-2024-04", until="2024-04", published_as=PUBLISHED, each_stage=True)
    (path,) = write([msgspec.structs.replace(profile, iterations=TRUE.iterations)], tmp_path)
    told = tomllib.loads(path.read_text())
    assert told["published_as"] == PUBLISHED and told["each_stage"] and "iterations" not in told
    served = [one for one in engines().values() if one.published_as]
    assert served and all(one.iterations == engines()[one.published_as].iterations for one in served)


def test_workers_of_every_stage_take_the_hosts_times_where_each_is_called_from_afar():
    opt, serve = model.load("opt-13b"), Serve(rate=1.0, prompt=1, output=1)
    each = msgspec.structs.replace(TRUE, each_stage=True)
    found = [host_times(profile, opt, serve, 2) for profile in (TRUE, each)]
    assert [one.step_s for one in found] == pytest.approx([0.003, 0.006])
    assert [one.request_s for one in found] == pytest.approx([0.0001, 0.0002])
