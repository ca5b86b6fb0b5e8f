"""Op tables that cannot be measurements are refused with file, line and reason, all faults at once."""

import gzip

import pytest

from meshwright.calibrate.samples import samples
from meshwright.errors import MeshwrightError

HEADER = "source,hardware,backend,backend_version,dtype,pass,batch,m,n,k,latency_us"
#: 2 * 4096^3 FLOP in 200 us: 687 TFLOP/s, as an H100 (989 at most) may do.
GOOD = "mine,h100_sxm,cublas,12,bf16,fwd,1,4096,4096,4096,200"


def refused(tmp_path, *lines, header=HEADER, name="ops_gemm.csv"):
    text = "\n".join([header, *lines]) + "\n"
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    with pytest.raises(MeshwrightError) as caught:
        samples(tmp_path, ("gemm",))
    return caught.value.diagnostics


def test_a_folder_without_the_table_says_which_file_is_missing(tmp_path):
    with pytest.raises(MeshwrightError, match=r"ops_gemm\.csv or ops_gemm\.csv\.gz"):
        samples(tmp_path, ("gemm",))


def test_every_missing_column_is_named_with_the_nearest_that_is_there(tmp_path):
    found = refused(tmp_path, GOOD, header=HEADER.replace("latency_us", "latency_ms").replace("batch", "bs"))
    assert [d.code for d in found] == ["K002", "K002"]
    assert {"latency_us" in d.message for d in found} == {True, False}
    assert any("latency_ms" in d.help for d in found)


def test_nan_zero_and_text_are_refused_each_with_its_line(tmp_path):
    found = refused(tmp_path, GOOD, GOOD[:-3] + "nan", GOOD, GOOD[:-3] + "0", GOOD[:-3] + "fast")
    assert [d.code for d in found] == ["K003"] * 3
    assert [d.place.rpartition(":")[2] for d in found] == ["3", "5", "6"]


def test_a_plain_and_a_gzipped_table_are_refused_alike(tmp_path):
    (plain,) = refused(tmp_path, GOOD[:-3] + "nan")
    (tmp_path / "ops_gemm.csv").unlink()
    (packed,) = refused(tmp_path, GOOD[:-3] + "nan", name="ops_gemm.csv.gz")
    assert plain.message == packed.message


@pytest.mark.parametrize("factor", [1000, 1 / 1000])
def test_a_column_in_other_units_is_refused_as_such(tmp_path, factor):
    # 600 us in place of 200, so that neither the true nor the scaled rate is a borderline case
    lines = [f"mine,h100_sxm,cublas,12,bf16,fwd,1,{m},4096,4096,{m / 4096 * 600 * factor}" for m in (1024, 2048, 4096)]
    found = refused(tmp_path, *lines)
    assert {d.code for d in found} == {"K004"}
    assert "units" in found[0].message and "microseconds" in found[0].help


def test_a_rate_above_the_peak_is_refused_with_the_rate(tmp_path):
    # 2 * 4096^3 / 100 us = 1374 TFLOP/s on a device of 989.4
    found = refused(tmp_path, GOOD, GOOD, GOOD[:-3] + "100")
    assert [(d.code, d.place.rpartition(":")[2]) for d in found] == [("K005", "4")]
    assert "1374 TFLOP/s of 989.4" in found[0].message


def test_faults_beyond_the_first_twenty_are_counted(tmp_path):
    found = refused(tmp_path, *[GOOD[:-3] + "nan"] * 30)
    assert len(found) == 20 and "and 10 more" in found[-1].message


def test_an_unknown_device_is_refused(tmp_path):
    with pytest.raises(MeshwrightError, match="h100_sxn"):
        (tmp_path / "ops_gemm.csv").write_text("\n".join([HEADER, GOOD.replace("h100_sxm", "h100_sxn")]))
        samples(tmp_path, ("gemm",))


def test_precisions_the_package_does_not_compute_in_are_left_out_and_counted(tmp_path):
    (tmp_path / "ops_gemm.csv").write_text("\n".join([HEADER, GOOD, GOOD.replace("bf16", "int3_wo")]))
    found, left = samples(tmp_path, ("gemm",))
    assert [(s.op, s.dtype, len(s.seconds)) for s in found] == [("gemm", "bf16", 1)]
    assert [(row.table, row.rows) for row in left] == [("ops_gemm", 1)]
