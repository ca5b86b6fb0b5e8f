"""Engine profiles: constants that made the data are found again, and models left out are predicted without them."""

import tomllib

import numpy as np
import pytest

from meshwright.calibrate import engine
from meshwright.calibrate.engine import EngineSample, fit, fit_all, profile, report, write
from meshwright.cost.engine import engines


def made(kernels, step_us, request_us, *, engine="e", models=3, noise=0.0):
    """60 servers whose times are those of the constants, off by at most `noise`."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(60):
        device, batch = float(rng.uniform(4e-3, 40e-3)), int(rng.integers(1, 128))
        seconds = (kernels * device + (step_us + request_us * batch) * 1e-6) * (1 + noise * rng.uniform(-1, 1))
        found.append(EngineSample(engine, f"m{i % models}", batch, device, seconds))
    return found


def test_the_constants_behind_the_data_are_found():
    # all three are nodes of the grid, so that nothing is left
    found = fit("e", made(0.9, 500.0, 8.0))
    assert (found.kernels, found.step_us, found.request_us) == (pytest.approx(0.9), 500.0, 8.0)
    assert found.median < 1e-9 and found.left_p90 < 1e-9 and (found.rows, found.models) == (60, 3)


def test_errors_of_models_left_out_are_those_of_noise():
    found = fit("e", made(1.0, 300.0, 4.0, noise=0.1))
    assert 0.02 < found.left_median < 0.1 and found.left_p90 < 0.2  # uniform noise of 10% has a median of 5%


def test_a_model_of_another_kind_shows_in_the_errors_of_models_left_out():
    odd = [s._replace(model="odd", measured_s=2 * s.measured_s) for s in made(1.0, 300.0, 4.0)[:20]]
    found = fit("e", made(1.0, 300.0, 4.0) + odd)
    assert found.median < 0.05 and found.left_p90 > 0.4


def test_engines_of_few_rows_are_left_out():
    assert [f.engine for f in fit_all(made(1.0, 100, 1, engine="b") + made(1.0, 100, 1, engine="a")[:10])] == ["b"]


def test_a_profile_is_written_as_the_catalog_holds_it(tmp_path):
    found = fit("e", made(0.9, 500.0, 8.0, noise=0.1))
    (path,) = write([found], tmp_path / "engines")
    table = tomllib.loads(path.read_text())
    assert table["format_version"] == 1 and table["name"] == "e" and table["flagged"] is False
    assert table["step_us"] == found.step_us and "models left out" in table["source"]
    assert profile(found).sigma == pytest.approx(np.log1p(found.left_p90) / 1.645, abs=1e-3)
    assert "models left out" in report([found])[1]


def test_the_profiles_of_the_catalog_say_where_they_are_from():
    for name, one in engines().items():
        assert one.source and one.name == name and (one.flagged or "models" in one.source), name


def test_an_engine_is_named_by_its_first_word():
    assert [engine.family(e) for e in ("vllm", "nim (tensorrt-llm)", "vLLM 0.10.0, RHEL")] == ["vllm", "nim", "vllm"]
