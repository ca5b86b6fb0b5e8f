"""A device's curve from a few measured products: which are chosen, what is learned, and what a prediction then uses."""

from __future__ import annotations

import csv
import json

import msgspec
import numpy as np
import pytest

from meshwright.calibrate import few
from meshwright.cli import main
from meshwright.cost.fitted import link, profiles
from meshwright.spec.cluster import load_device
from meshwright.work import Gemm

KNOWN, SPREADS = profiles(serving=True)
DEVICE = load_device("l40")
UNSEEN = [(8, 1024, 4096), (16, 4096, 4096), (1024, 2048, 2048), (4096, 4096, 4096), (2048, 8192, 1024)]


def seconds_there(m, n, k, dtype):
    """A device of the test's own: a fifth slower than what others say of it, and twice so in small products."""
    said = few.relatives(DEVICE, dtype, KNOWN, SPREADS).seconds([(Gemm(m=m, n=n, k=k, dtype=dtype),)])
    return float(said[0]) * (1.2 if m > 64 else 2.4)


def test_the_rows_chosen_are_the_middles_of_clusters_and_always_the_same():
    cross = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]])
    features = np.vstack([np.array([x, y]) + cross for x in (0, 40) for y in (0, 40)]).astype(float)
    assert few.chosen(features, 4).tolist() == [4, 9, 14, 19]  # the last of each five is its middle
    assert few.chosen(features[:3], 4).tolist() == [0, 1, 2]


def test_a_process_is_the_posterior_of_normal_variables():
    """By hand: one measurement of 0.5, octaves away; covariance v (1 + exp(-d^2 / 32)), v half of a variance."""
    process = few._Process(np.zeros((1, 4)), np.array([0.5]), 0.4, 0.1)
    at, v = np.array([[4.0, 0, 0, 0]]), 0.08
    alike = v * (1 + np.exp(-0.5))
    assert process.mean(at) == pytest.approx([0.5 * alike / (2 * v + 0.01)])
    assert process.sigma(at) ** 2 == pytest.approx(2 * v - alike**2 / (2 * v + 0.01) + 0.01)
    two = few._Process(np.array([[0.0] * 4, [4.0, 0, 0, 0]]), np.array([0.5, 0.5]), 0.4, 0.1)
    assert two.left_out() == pytest.approx((0.5 - 0.5 * alike / (2 * v + 0.01)) / 1.2816)  # each from the other


def test_products_to_measure_are_written_measured_learned_and_predicted_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path / "home"))
    table = tmp_path / "own" / "ops_gemm.csv"
    assert main(["calibrate", "--device", "l40", "--few", "12", "--out", str(table.parent)]) == 0
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row["dtype"] == "bf16"]
    assert len({(row["m"], row["n"], row["k"]) for row in rows}) == 12
    for row in rows:
        row["latency_us"] = seconds_there(int(row["m"]), int(row["n"]), int(row["k"]), "bf16") * 1e6
    with table.open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    capsys.readouterr()
    assert main(["calibrate", "--device", "l40", "--few", "12", "--data", str(table.parent), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["measured"], found["rows"]) == (12, 0)
    price, off = link(), []
    for m, n, k in UNSEEN:
        got = price(Gemm(m=m, n=n, k=k, dtype="bf16"), DEVICE)
        off.append(abs(np.log(got.seconds / seconds_there(m, n, k, "bf16"))))
        assert "the rest by the ratio to" in got.source
    assert max(off) < 0.44  # half of the 0.88 that small ones are off by when the curve is carried as it is
    assert np.mean(off) < 0.2


def test_a_profile_of_ones_own_replaces_the_same_kernels_and_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    fits = KNOWN["h100_sxm"].curves
    one = next(f for f in fits if f.op == "gemm" and f.dtype == "bf16")
    own = msgspec.structs.replace(KNOWN["h100_sxm"], curves=(msgspec.structs.replace(one, source="own"),))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "h100_sxm.json").write_bytes(msgspec.json.encode(own))
    asked = link(serving=True)
    assert len(asked.profiles["h100_sxm"].curves) == len(fits)
    assert "from own" in asked(Gemm(m=4096, n=4096, k=4096, dtype="bf16"), load_device("h100_sxm")).source


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--few", "1", "--device", "l40"], "'1' is no number of products"),
        (["--few", "8", "--out", "x"], "--few is of one device"),
        (["--few", "8", "--device", "l40"], "nothing says where to write"),
        (["--few", "8", "--device", "mi300x", "--out", "x"], "no AMD device has a curve"),
        (["--few", "8", "--device", "l40", "--only", "moe", "--out", "x"], "--only says moe"),
    ],
)
def test_what_cannot_be_learned_is_refused_and_nothing_is_written(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
