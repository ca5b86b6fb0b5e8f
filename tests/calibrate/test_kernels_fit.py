"""Fits recover what a table was made of, say how good they are, and are deterministic."""

import itertools

import numpy as np
import pytest

from meshwright.calibrate.fitting import Grid, fit_table
from meshwright.calibrate.kernels import fit
from meshwright.calibrate.run import calibrate, write
from meshwright.calibrate.samples import samples
from meshwright.cost.curve import hardware
from meshwright.cost.curves_gemm import GEMM, gemm
from meshwright.cost.fitted import link
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.work import Gemm

HEADER = "source,hardware,backend,backend_version,dtype,pass,batch,m,n,k,latency_us"
#: Constants of a made-up library, in the order of the formula.
TRUE = {"start_us": 5.0, "of_peak": 0.7, "of_bandwidth": 0.6, "sharpness": 4.0, "derate": 0.03}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Products of a library that follows the formula with known constants, on an A100."""
    constants = [TRUE.get(c.name, c.start) for c in GEMM.constants]
    hw = hardware(load_device("a100_80gb_sxm"), "bf16")
    lines = [HEADER]
    sizes = itertools.product((1, 16, 128, 512, 2048, 8192, 32768), (256, 1024, 4096, 16384), (256, 1024, 4096, 16384))
    for m, n, k in sizes:
        seconds = gemm((m, n, k, 1, 2.0, 2.0, 2.0), hw, constants)
        lines.append(f"made up,a100_80gb_sxm,none,0,bf16,fwd,1,{m},{n},{k},{seconds * 1e6:.6g}")
    folder = tmp_path_factory.mktemp("table")
    (folder / "ops_gemm.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def fitted(table):
    (sample,), _ = samples(table, ("gemm",))
    return fit(sample)


def test_a_refit_of_a_table_made_by_the_formula_recovers_its_constants(fitted):
    for name in ("start_us", "of_peak", "of_bandwidth"):
        assert fitted.fit.constants[name] == pytest.approx(TRUE[name], rel=0.1), name


def test_groups_held_out_of_such_a_table_are_predicted_closely(fitted):
    assert 0.05 < fitted.held_out.mean() < 0.5
    assert fitted.fit.errors["held_out_median"] < 0.03
    assert max(fitted.fit.sigma) < 0.1


def test_whole_groups_are_held_out_never_single_rows(fitted):
    pairs = {}
    for x, held in zip(fitted.sample.points[0], fitted.held_out):
        pairs.setdefault((x[1], x[2]), set()).add(bool(held))
    assert all(len(kinds) == 1 for kinds in pairs.values())


def test_equal_tables_give_byte_equal_profiles_that_the_link_reads(table, tmp_path):
    for name in ("one", "two"):
        done = calibrate(table, classes=("gemm",), device="a100_80gb_sxm")
        write(done, ("gemm",), tmp_path / name)
    assert (tmp_path / "one/a100_80gb_sxm.json").read_bytes() == (tmp_path / "two/a100_80gb_sxm.json").read_bytes()
    told = link(folder=tmp_path / "one")(Gemm(m=2048, n=4096, k=4096), load_device("a100_80gb_sxm"))
    hw = hardware(load_device("a100_80gb_sxm"), "bf16")
    true = gemm((2048, 4096, 4096, 1, 2.0, 2.0, 2.0), hw, [TRUE.get(c.name, c.start) for c in GEMM.constants])
    assert told.seconds == pytest.approx(true, rel=0.05)


def test_a_refit_of_one_class_keeps_the_curves_of_others(table, tmp_path):
    done = calibrate(table, classes=("gemm",), device="a100_80gb_sxm")
    (path,) = write(done, ("gemm",), tmp_path)
    path.write_text(path.read_text().replace('"op":"gemm"', '"op":"decode"'))
    write(done, ("gemm",), tmp_path)
    assert path.read_text().count('"op":"decode"') == 1
    assert path.read_text().count('"op":"gemm"') == 1


def test_too_few_rows_for_the_constants_are_refused(table, tmp_path):
    lines = (table / "ops_gemm.csv").read_text().splitlines()[:20]
    (tmp_path / "ops_gemm.csv").write_text("\n".join(lines))
    (sample,), _ = samples(tmp_path, ("gemm",))
    with pytest.raises(MeshwrightError, match="9 constants of gemm bf16") as caught:
        fit(sample)
    assert caught.value.diagnostics[0].code == "K007"


def test_a_residual_table_reproduces_a_plane_through_two_kernels_a_row():
    # oracle: log residual 0.1 x - 0.2 y, linear, so interpolation between nodes is exact; each row is the sum of
    # two kernels at different places and something around them
    rng = np.random.default_rng(7)
    nodes = ((0.0, 1.0, 2.0, 3.0), (0.0, 1.0, 2.0))
    places = [rng.random((400, 2)) * [3, 2] for _ in range(2)]
    parts = [rng.random(400) + 0.5 for _ in range(2)]
    around = rng.random(400) * 0.2
    total = around + sum(p * np.exp(xy @ [0.1, -0.2]) for p, xy in zip(parts, places))
    found = fit_table([Grid(nodes, xy) for xy in places], parts, around, np.log(total)).reshape(4, 3)
    expected = np.add.outer(0.1 * np.arange(4), -0.2 * np.arange(3))
    assert np.abs(found - expected).max() < 0.02
