"""Short names: what each composes to, and what the refusals say."""

import pytest

from meshwright.errors import MeshwrightError
from meshwright.spec import cluster as cluster_module
from meshwright.spec.cluster import forget_here, load


def tree(text):
    return [[(level.name, level.arity) for level in island.levels] for island in load(text).islands]


def refusal(text):
    with pytest.raises(MeshwrightError) as caught:
        load(text)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_count_fills_the_devices_standard_nodes():
    built = load("64xh100")
    assert tree("64xh100") == [[("nvlink", 8), ("rail", 8)]]
    assert (built.num_devices, built.islands[0].num_nodes, built.islands[0].devices_per_node) == (64, 8, 8)
    # DGX H100: 8 NICs of 400 Gbit/s = 400 GB/s per node and direction; NVLink 4: 450 GB/s per device and direction
    assert [level.gb_s for level in built.islands[0].levels] == [450, 400]


def test_nodes_by_devices_sets_the_node_size():
    built = load("16x4xa100")
    assert tree("16x4xa100") == [[("nvlink", 4), ("rail", 16)]]
    # half a DGX A100: 4 of its 8 NICs of 200 Gbit/s
    assert (built.islands[0].node.nics, built.islands[0].levels[1].gb_s) == (4, 100)
    assert built.islands[0].node.sources["*"].startswith("4/8 of the standard node")


def test_node_sizes_are_data_of_the_device():
    assert tree("8xv100_pcie_16gb") == [[("pcie", 4), ("fabric", 2)]]
    assert tree("12xmax1550") == [[("xelink", 6), ("fabric", 2)]]
    assert tree("4xgh200") == [[("nvlink", 1), ("fabric", 4)]]


def test_a_count_below_a_node_is_part_of_one_node():
    built = load("3xh100")
    assert tree("3xh100") == [[("nvlink", 3)]]
    assert built.islands[0].num_nodes == 1
    assert tree("h100") == [[("nvlink", 1)]]


def test_large_clusters_get_leaf_and_spine_when_they_divide_and_one_flat_level_when_not():
    assert tree("1024xh100") == [[("nvlink", 8), ("rail", 32), ("spine", 4)]]
    # 33 nodes do not fill rails of 32: one level over all nodes, each with its own 400 GB/s
    assert tree("264xh100") == [[("nvlink", 8), ("fabric", 33)]]
    assert load("264xh100").islands[0].levels[1].gb_s == 400
    # a rail's port into the spine is the sum of its 32 nodes' ports
    assert load("1024xh100").islands[0].levels[2].gb_s == 32 * 400


def test_an_nvl72_rack_is_one_scale_up_domain_of_18_four_device_nodes():
    rack = load("72xgb200").islands[0]
    assert tree("72xgb200") == [[("nvlink", 72)]]
    assert (rack.domain_size, rack.devices_per_node, rack.num_nodes) == (72, 4, 18)
    # one 400 Gbit/s NIC per GPU: 72 x 50 GB/s leave a rack
    assert load("576xgb200").islands[0].levels[1].gb_s == 3600


def test_domains_that_are_not_full_racks_are_equal_and_as_few_as_possible():
    # 128 nodes of 4 in racks of at most 18 nodes: 8 racks of 16 nodes, not 7 full ones and a remainder
    assert tree("128x4xgb200") == [[("nvlink", 64), ("rail", 8)]]
    assert tree("512xgb200") == tree("128x4xgb200")
    assert tree("2x36xgb200") == [[("nvlink", 36), ("rail", 2)]]


def test_a_pair_bridge_that_does_not_divide_the_count_is_left_out():
    assert tree("4xh100_nvl") == [[("nvlink_bridge", 2), ("pcie", 2)]]
    assert tree("3xh100_nvl") == [[("pcie", 3)]]
    # a pair has two slots of 63 GB/s on the host bridge, a single card one
    assert load("4xh100_nvl").islands[0].levels[1].gb_s == 126
    assert load("3xh100_nvl").islands[0].levels[0].gb_s == 63


def test_a_torus_is_as_near_to_a_cube_as_the_count_allows():
    assert load("64xtpu_v4").islands[0].levels[0].shape == (4, 4, 4)
    assert load("32xtpu_v4").islands[0].levels[0].shape == (2, 4, 4)
    assert load("128xtpu_v5e").islands[0].levels[0].shape == (8, 16)


def test_machines_are_counted_whole():
    built = load("8xp5")
    assert tree("8xp5") == [[("nvlink", 8), ("efa", 8)]]
    # p5.48xlarge: 3200 Gbit/s of EFA
    assert built.islands[0].node.nic_gb_s == 400
    assert load("8xp4d").islands[0].levels[1].gb_s == 50
    assert tree("4x4xp5") == [[("nvlink", 4), ("efa", 4)]]


def test_unequal_islands_join_at_the_width_of_the_narrowest():
    built = load("16xa100-40 + 32xh100")
    assert [island.device.name for island in built.islands] == ["a100_40gb_sxm", "h100_sxm"]
    assert (built.num_devices, built.is_homogeneous) == (48, False)
    assert (built.device_of(15).name, built.device_of(16).name) == ("a100_40gb_sxm", "h100_sxm")
    assert built.location(17) == (1, 0, 1)
    # two A100 nodes of 8 x 200 Gbit/s: 400 GB/s; four H100 nodes could send 1600
    assert built.interconnect[0].gb_s == 400
    assert load("8xa100+8xa100").is_homogeneous


def test_names_ignore_case_dashes_and_spaces():
    assert load("64 x H100").islands[0].device.name == "h100_sxm"
    assert load("8xa100-40gb").islands[0].device.name == "a100_40gb_sxm"
    assert load("8x4090").islands[0].device.name == "rtx4090"
    assert load("SELENE").num_devices == 560 * 8


def test_a_count_that_does_not_fill_nodes_names_the_valid_ones():
    text = refusal("12xh100")
    assert "error[C003]: 12 devices do not fill h100_sxm nodes of 8" in text
    for suggestion in ("8xh100, 16xh100", "2x6xh100", "8xh100 + 4xh100"):
        assert suggestion in text
    for suggestion in ("8xh100", "16xh100", "2x6xh100", "8xh100 + 4xh100"):
        assert load(suggestion).num_devices in (8, 12, 16)


def test_nodes_that_cannot_share_equal_domains_name_the_valid_counts():
    text = refusal("76xgb200")
    assert "error[C003]" in text and "72xgb200, 144xgb200" in text and "72xgb200 + 4xgb200" in text


def test_a_node_size_beyond_the_domain_is_refused():
    assert "no node or scale-up domain of 16 devices" in refusal("5x16xh100")
    assert "no node or scale-up domain of 6 devices" in refusal("2x6xgb200")


def test_what_is_not_a_short_name_is_refused_with_the_forms():
    for text in ("0xh100", "8x0xh100", "3.5xh100", "8x", "+", "1080ti"):
        assert "error[C002]" in refusal(text)


def test_unknown_names_suggest_the_nearest_and_all_are_listed():
    text = refusal("8xh1000 + 8xa10o")
    assert text.count("error[C001]") == 2
    assert "did you mean" in text and "h100" in text and "a100" in text
    assert "did you mean selene" in refusal("selen")


def test_a_whole_cluster_cannot_be_counted():
    text = refusal("2xselene")
    assert "error[C002]: selene is a whole cluster" in text and "write selene alone" in text


def test_a_device_is_found_by_each_of_its_names_and_no_two_share_one():
    names = [(alias, file) for file in cluster_module._device_files() for alias in cluster_module._called(file)]
    assert len({alias for alias, file in names}) == len(set(names))
    for alias, file in names:
        assert cluster_module._device_file(alias) == file
    assert cluster_module._device_file("no_such_device") is None


@pytest.mark.parametrize(("text", "said"), [("4x8h100", "write 8xh100"), ("4x8xh1000", "did you mean h100")])
def test_a_count_that_no_x_follows_is_written_anew(text, said):
    with pytest.raises(MeshwrightError, match="C001") as error:
        load(text)
    assert said in error.value.diagnostics[0].help


@pytest.mark.parametrize("text", ["2xcpu", "CPU", "localhost", "1xlaptop"])
def test_the_machine_at_hand_is_told_its_name(text):
    with pytest.raises(MeshwrightError, match="C001") as error:
        load(text)
    assert "this machine is here" in error.value.diagnostics[0].help


@pytest.mark.parametrize("text", ["2xhere", "here"])
def test_a_machine_that_is_not_measured_says_how_to(text, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    forget_here()
    with pytest.raises(MeshwrightError, match="C001") as error:
        load(text)
    forget_here()
    assert "meshwright calibrate --here --quick" in error.value.diagnostics[0].help
