"""Scans and their convolutions: rows of ops_ssm as work, and what the shipped curves say of rows of that table."""

import pytest

from meshwright.calibrate.rows import measured
from meshwright.calibrate.tables import TableRow
from meshwright.cost import standard_on
from meshwright.spec import cluster
from meshwright.work import Convolution, Scan

TEXT = {"source": "aiconfigurator", "hardware": "h100_sxm", "backend": "sglang", "backend_version": "0.5.14"}
QWEN = {"d_conv": 4, "num_k_heads": 16, "head_k_dim": 128, "num_v_heads": 32, "head_v_dim": 128}


def row(kernel, *, op="gdn", phase="prefill", **numbers):
    words = {"op": op, "kernel": kernel, "phase": phase, "dtype": "bf16"}
    sizes = {"d_state": 0, "n_groups": 0, **QWEN, "batch": 2, "seq_len": 4096, "latency_us": 100.0, **numbers}
    return TableRow(2, TEXT | words, sizes)


def test_a_row_is_the_scan_that_a_layer_lowers_to():
    found = measured("ops_ssm", row("chunk_gated_delta_rule"))
    (scan,) = found.kernels
    assert scan == Scan(rule="delta", batch=2, seq_len=4096, heads=32, groups=16, k_dim=128, v_dim=128, chunk=64)
    assert (found.op, found.seconds) == ("scan", pytest.approx(1e-4))


def test_the_convolution_runs_over_queries_keys_and_values_or_over_inputs_and_maps():
    (delta,) = measured("ops_ssm", row("causal_conv1d_fn")).kernels
    assert delta == Convolution(batch=2, seq_len=4096, channels=2 * 16 * 128 + 32 * 128, kernel=4)
    (mamba,) = measured("ops_ssm", row("causal_conv1d_fn", op="mamba2", d_state=64, n_groups=8)).kernels
    assert mamba.channels == 32 * 128 + 2 * 8 * 64


@pytest.mark.parametrize(
    ("kernel", "phase"),
    [
        ("chunk_gated_delta_rule_flashinfer", "prefill"),
        ("chunk_kda", "prefill"),
        ("fused_recurrent_gated_delta_rule", "decode"),
    ],
)
def test_kernels_that_training_does_not_run_are_left_out(kernel, phase):
    assert measured("ops_ssm", row(kernel, phase=phase)) is None


def test_a_single_token_is_no_scan_by_chunks():
    # 485 prefill rows of one token are in the table; a calibration of all tables once failed at them
    assert measured("ops_ssm", row("chunk_gated_delta_rule", seq_len=1)) is None


# Rows of ops_ssm.csv.gz, SGLang 0.5.14 on the H100 and TensorRT-LLM 1.3 on the H200: (batch, tokens, heads, key heads).
MEASURED = [
    ("h100_sxm", (4, 1024, 32, 16), 465.0),
    ("h100_sxm", (4, 8192, 32, 16), 3687.5),
    ("h100_sxm", (16, 4096, 32, 16), 7212.4),
    ("h200_sxm", (4, 1024, 32, 16), 256.0),
    ("h200_sxm", (4, 8192, 32, 16), 1867.7),
    ("h200_sxm", (16, 4096, 32, 16), 3698.6),
]


@pytest.mark.parametrize(("device", "shape", "us"), MEASURED)
def test_shipped_curves_say_what_was_measured(device, shape, us):
    batch, tokens, heads, groups = shape
    where = cluster.load(f"8x{device}")
    work = Scan(rule="delta", batch=batch, seq_len=tokens, heads=heads, groups=groups, k_dim=128, v_dim=128, chunk=64)
    price = standard_on(where).price(work, where.islands[0].device)
    assert price.source.startswith("fitted: ")
    assert price.seconds == pytest.approx(us * 1e-6, rel=0.2)


def test_a_backward_is_priced_by_its_work_and_is_less_sure():
    where = cluster.load("8xh100")
    costs, device = standard_on(where), where.islands[0].device
    sizes = {"batch": 4, "seq_len": 4096, "heads": 32, "groups": 16, "k_dim": 128, "v_dim": 128, "chunk": 64}
    forward = costs.price(Scan(rule="delta", **sizes), device)
    backward = costs.price(Scan(rule="delta", backward=True, **sizes), device)
    assert 1.5 * forward.seconds < backward.seconds < 2.6 * forward.seconds
    assert backward.sigma >= 0.35 > forward.sigma and backward.source.endswith("backward by its work")
