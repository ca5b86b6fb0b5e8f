"""The figures that the book gives of one H100 are those of what was measured there and of today's predictions."""

import re
from pathlib import Path

import pytest
from bench import on_gpu

from meshwright.catalog import measured_here
from meshwright.spec.dimensions import transformer

PAGE = (Path(__file__).parents[2] / "docs" / "proved.md").read_text(encoding="utf-8")
#: Points by which a figure of the page may be off before it must be written anew (``python -m bench.on_gpu``).
CLOSE = 0.02


def told():
    """The page's medians by name: of the absolute errors, and of the errors."""
    found = re.findall(r"^\| ([a-z0-9 .-]+?) \| ([0-9.]+)% \| ([+-][0-9.]+)% \|$", PAGE, re.M)
    return {name: (float(absolute) / 100, float(bias) / 100) for name, absolute, bias in found}


def test_the_page_s_errors_are_those_of_today_s_predictions():
    found, page = on_gpu.summary(), told()
    assert set(page) == set(found)
    for name, (absolute, bias) in found.items():
        assert page[name] == pytest.approx((absolute, bias), abs=CLOSE), name


def test_what_was_said_to_be_proved_of_training_holds():
    """Every plan of the profile measured there, and of the catalog."""
    assert all(abs(e["step"]) < 0.05 for e in on_gpu.training_errors("1xhere"))
    assert all(abs(e["step"]) < 0.10 for e in on_gpu.training_errors("1xh100"))
    curves = on_gpu.figures().curves
    assert curves["cuda float64"].most_relative_difference < 1e-12 < curves["cuda bf16"].most_relative_difference


def test_the_profile_of_a_machine_is_asked_only_where_it_is_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    with on_gpu.profiled(on_gpu.PROFILE):
        assert measured_here() == on_gpu.PROFILE
    assert measured_here() == tmp_path


@pytest.mark.slow
def test_a_trained_plan_is_measured_by_kind_of_task(monkeypatch):
    """On a processor with a tiny model: the kinds are within the step."""
    tiny = transformer(layers=2, hidden=32, heads=4, kv_heads=2, vocab=257, ffn=48, gated=True, max_seq_len=32)
    monkeypatch.setattr(on_gpu, "llama", lambda layers: tiny)
    torch = pytest.importorskip("torch")
    from meshwright.run.world import World

    row = on_gpu._trained(World(0, 1, 0, 1, "here", torch.device("cpu")), 2, "batch=4,seq=32", "mb2")
    assert 0 < row["forward_s"] + row["backward_s"] + row["optimizer_s"] < 3 * row["step_s"]
    assert row["peak_bytes"] > 0
