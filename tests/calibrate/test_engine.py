"""Engine profiles: constants that made the data are found again, and groups left out are predicted without them."""

import tomllib

import msgspec
import numpy as np
import pytest

from meshwright.calibrate import engine
from meshwright.calibrate.engine import EngineSample, figures, fit, fit_all, report, weights, write
from meshwright.cost.engine import EngineProfile, engines
from meshwright.cost.standard import serving_costs
from meshwright.validate.serving import asked, dated, family
from tests.validate.test_serving_runs import ROW

TRUE = EngineProfile(
    name="true", kernels=1.2, prompts=1.0, step_us=900.0, request_us=12.0, layer_us=0.0, front_us=30000.0
)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Let 12 rows be enough."""
    monkeypatch.setattr(engine, "FEWEST", 12)


@pytest.fixture(scope="module")
def servers():
    """15 small servers under an engine that adds nothing: three names of models, closed loops of 1 to 8 requests."""
    costs, found = serving_costs(), []
    for number in range(15):
        cells = {"concurrency": str(1 + number % 8), "isl": str(128 << number % 3), "osl": "16", "source_ref": ""}
        question = asked(ROW | cells)
        plan = question.plan.on(1)
        made = engine.built(
            question.model, question.cluster, question.serve, plan, question.requests, costs, engine.NOTHING
        )
        where = (f"m{number % 3}", "h100_sxm", "s")
        said = (question.model, question.serve, question.requests, 1)
        found.append(EngineSample("e", *where, made.replica, *said, (np.nan, np.nan, np.nan)))
    return found


def told(servers, profile, noise=0.0):
    """The servers with what an engine of that profile would take, off by at most `noise`."""
    rng = np.random.default_rng(0)
    measured = [sample.predicted(profile) * (1 + noise * rng.uniform(-1, 1, 3)) for sample in servers]
    return [sample._replace(measured=tuple(one)) for sample, one in zip(servers, measured)]


def test_constants_behind_the_data_predict_servers_that_the_fit_never_saw(servers):
    mine = told(servers, TRUE)
    found = fit("e", mine[:12], ()).profile
    assert found.left_out["in_sample"]["median"] < 0.01
    assert found.latent_us == 0.0  # none of them has latent attention
    for unseen in mine[12:]:
        assert unseen.predicted(found) == pytest.approx(unseen.measured, rel=0.03)
    # and an engine that adds nothing is far off: a millisecond of host beside five of kernels, and 30 ms in front
    assert mine[0].predicted(engine.NOTHING)[1] < 0.5 * mine[0].measured[1]


def test_errors_of_models_left_out_are_those_of_noise_and_spreads_cover_80_percent_of_them(servers):
    found = fit("e", told(servers, TRUE, noise=0.1), ("model",)).profile
    # uniform noise of 10% has a median of 5%, and 80% of it lies within 8% = 1.28 spreads
    assert 0.03 < found.left_out["model"]["median"] < 0.08 and found.sigma == pytest.approx(0.08 / 1.2816, rel=0.35)


def test_a_model_of_another_kind_shows_in_the_errors_of_models_left_out(servers):
    mine = told(servers, TRUE)
    odd = [s._replace(measured=tuple(2 * t for t in s.measured)) if s.model == "m0" else s for s in mine]
    found = fit("e", odd, ("model",)).profile.left_out
    assert found["in_sample"]["median"] < 0.1 and found["model"]["p90"] > 0.4


def test_engines_of_few_rows_are_left_out_and_the_default_is_that_of_all(servers, monkeypatch):
    mine = told(servers, TRUE)
    other = [sample._replace(profile="o") for sample in mine[:12]]
    monkeypatch.setattr(engine, "STEPS", 3)
    assert [f.profile.name for f in fit_all([*mine[:12], *other[:10]])] == ["e"]
    found = fit_all([*mine[:12], *other])[-1].profile
    assert found.name == "default" and found.flagged and found.left_out["profile"]["median"] < 0.05


def test_tokens_a_second_count_where_no_time_per_token_is_known():
    measured = np.log(np.array([[0.01, 0.1, 50.0], [np.nan, np.nan, 50.0], [np.nan, 0.1, np.nan]]))
    assert weights(measured).tolist() == [[1.0, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]
    # errors +10% of a time per token, -20% of tokens a second; +50% of two times to the first token
    error = np.log(np.array([[1.1, 1.5, 9.0], [9.0, 9.0, 0.8], [9.0, 1.5, 9.0]]))
    said = {"median": 0.15, "p90": 0.19, "ttft_median": 0.5, "ttft_p90": 0.5}
    assert figures(error, weights(measured)) == pytest.approx(said)


def test_a_profile_is_written_as_the_catalog_holds_it(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "STEPS", 3)
    found = fit("e-2024-12", told(servers, TRUE, noise=0.1), ("model", "hardware"))
    (path,) = write([found.profile], tmp_path / "engines")
    table = tomllib.loads(path.read_text())
    assert table.pop("format_version") == 1 and msgspec.convert(table, EngineProfile) == found.profile
    assert (table["until"], path.name, table["flagged"]) == ("2024-12", "e_2024_12.toml", False)
    assert "models left out" in table["source"] and "models left out" in report([found])[-1]


def test_the_profiles_of_the_catalog_say_where_they_are_from():
    for name, one in engines().items():
        assert one.name == name and one.source
        if not one.iterations:
            assert "fitted to" in one.source and one.left_out and one.flagged == (name == "default"), name


def test_an_engine_is_named_whoever_ships_it_and_a_profile_is_that_of_its_time():
    said = {"vllm": "vllm", "nim (tensorrt-llm)": "trtllm", "vLLM 0.10.0, RHEL": "vllm", "TensorRT 10.8": "trtllm"}
    assert {name: family(name) for name in said} == said
    assert [dated("vllm", date) for date in ("2023-10", "2024-10", "2026-03", "")] == [
        "vllm-2023-12", "vllm-2024-12", "vllm", "vllm"
    ]  # fmt: skip
    assert dated("nobody", "") == "default"


def test_graphs_are_captured_from_the_year_on_in_which_engines_do():
    assert engines()["vllm-2023-12"].graph_tokens == 0 < engines()["vllm"].graph_tokens
