"""The pace of an engine's kernels over those of the tables, by hand."""

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.replica import paced
from meshwright.calibrate.engine import as_toml
from meshwright.cost.engine import EngineProfile, engine_profile, load
from meshwright.cost.fitted import products_library
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.simulate.iterations import priced
from meshwright.spec.cluster import load_device

PROFILE = EngineProfile(name="made", kernels=1.1, prompts=0.9, prompts_over={"trtllm": 1.25}, graph_tokens=128)


@pytest.mark.parametrize(("device", "prompts"), [("b200_sxm", 0.9 * 1.25), ("h100_sxm", 0.9)])
def test_prompts_take_longer_where_the_products_of_the_tables_are_another_library_s(device, prompts):
    cluster = mw.load_cluster(f"1x{device}")
    plan, where = mw.parse_plan("tp1").on(1), cluster.islands[0].device
    forward = Forward(mw.load_model("llama3-8b"), plan, Mesh(plan, cluster))
    table = priced(forward, where, serving_costs(), tokens=512, batch=8, context=1024)
    found = paced(table, PROFILE, where)
    assert found.linear_s[128] == pytest.approx(1.1 * table.linear_s[128], rel=1e-12)
    assert found.linear_s[129] == pytest.approx(1.1 * prompts * table.linear_s[129], rel=1e-12)
    assert np.allclose(found.prefill_s, 1.1 * prompts * table.prefill_s, rtol=1e-12, atol=0)
    assert np.allclose(found.decode_s, 1.1 * table.decode_s, rtol=1e-12, atol=0)


def test_a_device_without_products_of_its_own_has_no_library():
    names = ("b200_sxm", "rtx_pro_6000_server", "h200_sxm", "rtx4090", "mi300x")
    assert [products_library(load_device(name)) for name in names] == ["trtllm", "trtllm", "sglang", "", ""]


def test_a_profile_keeps_its_paces_in_a_file(tmp_path):
    for profile in (PROFILE, engine_profile("vllm"), engine_profile("sglang")):
        (tmp_path / "made.toml").write_text(as_toml(profile), encoding="utf-8")
        assert load(tmp_path / "made.toml") == profile
    wrong = msgspec.structs.replace(PROFILE, prompts_over={"trtllm": -1.0})
    (tmp_path / "wrong.toml").write_text(as_toml(wrong), encoding="utf-8")
    with pytest.raises(MeshwrightError, match="negative or not finite"):
        load(tmp_path / "wrong.toml")
