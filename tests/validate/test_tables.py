"""Tables that cannot be measurements are refused, with file, line and reason; all of it at once."""

import gzip

import pytest

from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.validate.run import LEFT_OUT, UNKNOWN, validate
from meshwright.validate.tables import numbered
from tests.validate.samples import collective, gemm, step, table


def refused(folder):
    with pytest.raises(MeshwrightError) as error:
        validate(folder, standard)
    return error.value.diagnostics


def test_a_folder_without_tables_is_refused(tmp_path):
    assert [d.code for d in refused(tmp_path)] == ["V003"]


def test_every_missing_column_is_named(tmp_path):
    rows = [{k: v for k, v in step().items() if k not in ("seq_len", "dtype")}]
    path = table(tmp_path, "training_steps", rows)
    (fault,) = refused(tmp_path)
    assert fault.code == "V002"
    assert "seq_len, dtype" in fault.message
    assert fault.place == f"{path}:1"


@pytest.mark.parametrize("name", ["training_steps", "ops_gemm", "ops_attention", "ops_moe", "collectives"])
@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"a,b\n1,2\n" * 5000)[:-40]], ids=["not packed", "cut short"]
)
def test_a_packed_table_that_cannot_be_unpacked_is_refused(tmp_path, name, content):
    (tmp_path / f"{name}.csv.gz").write_bytes(content)
    (fault,) = refused(tmp_path)
    assert (fault.code, fault.place) == ("V001", str(tmp_path / f"{name}.csv.gz"))


@pytest.mark.parametrize("byte", [20, 40, 60])
def test_a_packed_table_with_a_changed_byte_is_refused_or_lacks_its_columns(tmp_path, byte):
    packed = bytearray(gzip.compress(",".join(step()).encode()))
    packed[byte] ^= 0xFF
    (tmp_path / "training_steps.csv.gz").write_bytes(bytes(packed))
    assert refused(tmp_path)[0].code in ("V001", "V002")


@pytest.mark.parametrize(
    ("column", "value"),
    [("hidden", "nan"), ("seq_len", "long"), ("num_gpus", "inf"), ("tp", "-2"), ("step_time_s", "nan"), ("mfu", "-1")],
)
def test_a_cell_that_is_no_number_is_refused_with_its_line(tmp_path, column, value):
    path = table(tmp_path, "training_steps", [step(), step(id="a:1", **{column: value})])
    (fault,) = refused(tmp_path)
    assert (fault.code, fault.place) == ("V004", f"{path}:3")
    assert f"{column} = {value!r}" in fault.message


def test_all_wrong_cells_are_listed(tmp_path):
    table(tmp_path, "training_steps", [step(hidden="x", heads="y"), step(layers="z")])
    assert len(refused(tmp_path)) == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        # 64 x 2048 tokens in 0.5 s on 8 devices are 32768 a second each
        ({"step_time_s": 500, "tokens_per_s_per_gpu": 32768}, "contradicts"),
        ({"step_time_s": 0.0005}, "TFLOP/s per device"),
        ({"step_time_s": 500, "model_tflops_per_gpu": 400}, "the row says 400"),
        ({"peak_memory_gb": 30_000}, "on a device of"),
    ],
)
def test_units_that_are_off_by_a_thousand_are_refused(tmp_path, changed, said):
    path = table(tmp_path, "training_steps", [step(**changed)])
    found = refused(tmp_path)
    assert {(d.code, d.place) for d in found} == {("V005", f"{path}:2")}
    assert any(said in d.message for d in found)


def test_a_kernel_faster_than_the_peak_is_refused(tmp_path):
    # 2 x 4096^3 operations in 100 us are 1374 TFLOP/s of the H100's 989
    path = table(tmp_path, "ops_gemm", [gemm(), gemm(latency_us=100)])
    (fault,) = refused(tmp_path)
    assert (fault.code, fault.place) == ("V005", f"{path}:3")
    assert "1374 TFLOP/s" in fault.message


@pytest.mark.parametrize("name, row", [("ops_gemm", gemm), ("collectives", collective)])
def test_latencies_in_nanoseconds_are_refused(tmp_path, name, row):
    usual = row()["latency_us"]
    table(tmp_path, name, [row(latency_us=float(usual) * 1000)] * 20)
    assert {d.code for d in refused(tmp_path)} == {"V005"}


@pytest.mark.parametrize("packed", [True, False])
def test_tables_are_read_packed_or_plain(tmp_path, packed):
    path = table(tmp_path, "training_steps", [step()], packed=packed)
    assert numbered(path, "training_steps") == [(2, step())]


def test_devices_and_precisions_that_are_unknown_are_listed_not_refused(tmp_path):
    table(tmp_path, "training_steps", [step(), step(id="a:1", hardware="abacus")])
    table(tmp_path, "ops_gemm", [gemm(), gemm(dtype="int3"), gemm(hardware="abacus")])
    table(tmp_path, "collectives", [collective(), collective(hardware="abacus")])
    for made in validate(tmp_path, standard):
        assert made.metrics["all"]["rows"] == 1
        if made.name.endswith((UNKNOWN, LEFT_OUT)):
            continue
        assert made.metrics["hand/abacus"]["unsupported"] == 1
        assert sum(count for _, count in made.reasons()) == made.metrics["all"]["unsupported"] == len(made.unsupported)
