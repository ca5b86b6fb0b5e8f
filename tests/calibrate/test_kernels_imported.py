"""AIConfigurator's Parquet layout is read as rows of our own tables, with the same refusals."""

import sys

import pytest

from meshwright.calibrate import imported
from meshwright.calibrate.samples import samples
from meshwright.errors import MeshwrightError

GEMM = {"framework": "SGLang", "version": "0.5", "gemm_dtype": "bfloat16", "m": 4096, "n": 4096, "k": 4096}
DECODE = {
    "framework": "TRTLLM", "version": "1.3", "attn_dtype": "bfloat16", "kv_cache_dtype": "fp8", "batch_size": 2,
    "step": 1023, "num_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "window_size": 0, "latency": 0.02,
}  # fmt: skip


def write(path, *rows):
    table = pytest.importorskip("pyarrow").Table.from_pylist(list(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


def test_milliseconds_and_torch_names_become_microseconds_and_ours(tmp_path):
    write(tmp_path / "sglang/gemm_perf.parquet", {**GEMM, "latency": 0.2})
    (row,) = imported.read(tmp_path / "sglang/gemm_perf.parquet", "h100_sxm")
    assert (row.text["dtype"], row.text["backend"], row.text["hardware"]) == ("bf16", "sglang", "h100_sxm")
    assert row.number == {"batch": 1, "m": 4096, "n": 4096, "k": 4096, "latency_us": pytest.approx(200.0)}


def test_a_generated_token_attends_to_the_cache_and_itself(tmp_path):
    write(tmp_path / "generation_attention_perf.parquet", DECODE)
    (sample,), _ = samples(tmp_path, ("attention",), "h100_sxm")
    assert (sample.op, sample.dtype) == ("decode", "fp8")
    assert sample.points[0][0][:6].tolist() == [2, 1024, 8, 2, 128, 1024]


def test_two_versions_below_one_folder_are_refused_with_both_named(tmp_path):
    for version in ("1.0", "2.0"):
        write(tmp_path / version / "gemm_perf.parquet", {**GEMM, "latency": 0.2})
    with pytest.raises(MeshwrightError, match=r"1\.0, 2\.0") as caught:
        samples(tmp_path, ("gemm",), "h100_sxm")
    assert caught.value.diagnostics[0].code == "K011"


def test_missing_columns_and_impossible_values_are_refused(tmp_path):
    write(tmp_path / "gemm_perf.parquet", {**GEMM, "latency": float("nan")}, {**GEMM, "latency": 0.0})
    with pytest.raises(MeshwrightError) as caught:
        imported.read(tmp_path / "gemm_perf.parquet", "h100_sxm")
    assert [d.code for d in caught.value.diagnostics] == ["K003", "K003"]
    write(tmp_path / "gemm_perf.parquet", GEMM)
    with pytest.raises(MeshwrightError, match="no column latency"):
        imported.read(tmp_path / "gemm_perf.parquet", "h100_sxm")


def test_without_a_device_the_layout_is_refused_with_what_to_add(tmp_path):
    (tmp_path / "gemm_perf.parquet").write_bytes(b"")
    with pytest.raises(MeshwrightError, match="add --device NAME"):
        samples(tmp_path, ("gemm",))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "gemm_perf.parquet").write_bytes(b"")
    with pytest.raises(MeshwrightError, match=r"meshwright\[import\]"):
        samples(tmp_path, ("gemm",), "h100_sxm")
