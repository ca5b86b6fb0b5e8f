"""``meshwright calibrate`` on kernel tables: report, JSON, files, misuse."""

import json

import pytest

from meshwright.cli import main
from meshwright.cost import curves_gemm
from meshwright.cost.curve import hardware
from meshwright.spec.cluster import load_device

HEADER = "source,hardware,backend,backend_version,dtype,pass,batch,m,n,k,latency_us"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    hw = hardware(load_device("l40s"), "bf16")
    constants = [c.start for c in curves_gemm.GEMM.constants]
    lines = [HEADER]
    for m in (1, 64, 512, 2048, 8192):
        for n in (512, 2048, 8192, 16384):
            for k in (512, 2048, 8192, 16384):
                seconds = curves_gemm.gemm((m, n, k, 1, 2.0, 2.0, 2.0), hw, constants)
                lines.append(f"mine,l40s,cublas,12,bf16,fwd,1,{m},{n},{k},{seconds * 1e6:.6g}")
    folder = tmp_path_factory.mktemp("mine")
    (folder / "ops_gemm.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_users_own_table_gives_a_report_with_constants_sizes_and_errors_held_out(table, capsys):
    assert main(["calibrate", "--data", str(table), "--only", "gemm"]) == 0
    said = capsys.readouterr().out
    for part in ("l40s: gemm bf16, 80 rows of l40s cublas 12 (mine)", "of_bandwidth", "1e12", "held out by (n, k)"):
        assert part in said


def test_json_has_the_same_figures_and_files_only_come_with_out(table, tmp_path, capsys):
    argv = ["calibrate", "--data", str(table), "--only", "gemm", "--device", "l40s", "--json"]
    assert main([*argv, "--out", str(tmp_path / "profiles")]) == 0
    (curve,) = json.loads(capsys.readouterr().out)["curves"]
    assert (curve["device"], curve["op"], curve["rows"]) == ("l40s", "gemm", 80)
    assert curve["errors"]["held_out_median"] < 0.1
    assert [p.name for p in (tmp_path / "profiles/kernels").iterdir()] == ["l40s.json"]


def test_misuse_is_listed_at_once(table, tmp_path, capsys):
    argv = ["calibrate", "--data", str(tmp_path / "nowhere"), "--only", "gem", "--holdout", "2", "--divice", "h100"]
    assert main(argv) == 2
    said = capsys.readouterr().err
    for part in ("K001", "did you mean gemm", "K010", "X003"):
        assert part in said
