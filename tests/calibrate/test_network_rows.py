"""Rows of collectives as groups of ranks: which levels, which share of a port."""

import pytest

from meshwright.calibrate.network import group_of
from meshwright.calibrate.network.rows import library_of, read_series
from meshwright.errors import MeshwrightError

ROW = {
    "source": "x",
    "hardware": "h100_sxm",
    "nodes": "1",
    "gpus": "8",
    "gpus_per_node": "8",
    "network": "NVLink4 900 GB/s",
    "op": "all_reduce",
    "library": "nccl 2.29.2",
    "variant": "nccl-tests",
    "bytes": "1024",
    "dtype": "fp16",
    "latency_us": "16",
    "busbw_gbps": "",
    "flag": "",
}


def levels(**changes) -> list[tuple[str, int, float, int]]:
    group, _ = group_of({**ROW, **changes})
    return [(h.name, h.members, round(h.gb_s, 3), h.below) for h in group.hops]


def test_ranks_of_one_node_lie_on_its_inner_level():
    assert levels(gpus="4", gpus_per_node="4") == [("nvlink", 4, 450.0, 1)]


def test_a_network_in_words_is_a_cluster_of_the_catalog():
    wide = {"nodes": "2", "gpus": "16"}
    assert levels(**wide, network="EFA 3200 Gb/s per node (2x p5.48xlarge)")[1] == ("efa", 2, 400.0, 8)
    hdr = {"hardware": "a100_40gb_sxm", "network": "NVLink3 600 GB/s; HDR IB 8x200 Gb/s per node"}
    assert levels(**wide, **hdr)[1] == ("fabric", 2, 200.0, 8)


def test_ranks_use_the_nics_next_to_them():
    one = {"nodes": "2", "gpus": "2", "gpus_per_node": "1", "network": "EFA 3200 Gb/s per node (2x p5.48xlarge)"}
    assert levels(**one) == [("efa", 2, 50.0, 1)]  # one of eight devices: an eighth of 400 GB/s


def test_devices_that_share_a_nic_each_reach_all_of_it():
    alone = {"hardware": "v100_pcie_16gb", "nodes": "2", "gpus": "2", "gpus_per_node": "1", "network": "PCIe3"}
    assert levels(**alone) == [("fabric", 2, 7.0, 1)]


def test_a_pair_of_a_full_mesh_has_only_its_own_links():
    pair = {"source": "estimate_train_time_perlmutter", "hardware": "a100_80gb_sxm", "network": "NVLink3 in node"}
    assert levels(**pair, gpus="2", gpus_per_node="2") == [("nvlink", 2, 100.0, 1)]  # 4 of 12 links
    assert levels(**pair, gpus="4", gpus_per_node="4") == [("nvlink", 4, 300.0, 1)]


def test_an_nvlink_domain_of_many_nodes_is_one_level():
    rack = {"hardware": "gb200", "nodes": "4", "gpus": "16", "gpus_per_node": "4", "network": "NVLink5"}
    assert levels(**rack) == [("nvlink", 16, 900.0, 1)]


def test_bridged_pairs_meet_over_pcie():
    pairs = {"hardware": "h100_pcie", "gpus": "4", "gpus_per_node": "4", "network": "NVLink bridge pairs"}
    assert [name for name, *_ in levels(**pairs)] == ["nvlink_bridge", "pcie"]


def test_the_library_and_whether_it_ran_in_a_graph():
    assert library_of(ROW) == ("nccl", False)
    engine = {**ROW, "library": "vllm-custom-allreduce 0.24.0"}
    assert library_of({**engine, "variant": "vllm_eager"}) == ("vllm", True)
    assert library_of({**engine, "variant": "vllm_graph"}) == ("vllm", False)


def write(folder, rows, columns=tuple(ROW)):
    lines = [",".join(columns), *(",".join(row[c] for c in columns) for row in rows)]
    (folder / "collectives.csv").write_text("\n".join(lines) + "\n")


def test_rows_of_one_group_make_one_series(tmp_path):
    write(tmp_path, [ROW, {**ROW, "bytes": "2048"}, {**ROW, "gpus": "4", "gpus_per_node": "4"}])
    assert [(s.group.size, s.num_bytes) for s in read_series(tmp_path)] == [(8, [1024.0, 2048.0]), (4, [1024.0])]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"latency_us": "nan"}, "us"),
        ({"latency_us": "-1"}, "us"),
        ({"bytes": "many"}, "could not convert"),
        ({"nodes": "1", "gpus": "16"}, "16 ranks on 1 nodes of 8"),
        ({"bytes": "1e9", "latency_us": "0.01"}, "GB/s"),
    ],
)
def test_rows_that_cannot_be_are_refused_with_their_line(tmp_path, change, why):
    write(tmp_path, [ROW, {**ROW, **change}])
    with pytest.raises(MeshwrightError, match=why) as caught:
        read_series(tmp_path)
    assert caught.value.diagnostics[0].code == "N003"
    assert caught.value.diagnostics[0].place.endswith("collectives.csv:3")


def test_a_missing_column_and_a_missing_table_are_named(tmp_path):
    with pytest.raises(MeshwrightError, match="N002"):
        read_series(tmp_path)
    write(tmp_path, [ROW], columns=tuple(c for c in ROW if c != "bytes"))
    with pytest.raises(MeshwrightError, match="bytes"):
        read_series(tmp_path)
