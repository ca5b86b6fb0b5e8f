"""The cluster of a machine: what each tool's text says, and that what it does not say is marked as assumed."""

import random
import subprocess
import sys

import pytest

from meshwright import catalog
from meshwright.cli import main
from meshwright.detect import Here, accelerators, detect, host
from meshwright.detect.build import known_device
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import from_toml, load_device, source_of, template
from tests.detect.samples import (
    A100_PCIE,
    DGX_H100,
    LSPCI,
    MI300X,
    QUERY_COMMAND,
    ROCM,
    TWO_4090,
    Machine,
    all_pairs,
    ibstat,
    matrix,
)


def levels(found):
    return [(v.name, v.arity, v.gb_s, v.topology) for v in found.cluster.islands[0].levels]


def refusal(texts, **said):
    with pytest.raises(MeshwrightError) as caught:
        detect(Machine(texts), **said)
    assert caught.value.exit_code == 2
    (found,) = caught.value.diagnostics
    return found


def test_a_dgx_h100_is_eight_devices_behind_switches_and_the_eight_cards_beside_them():
    found = detect(Machine(DGX_H100), nodes=4)
    # NVLink 4: 18 links of 25 GB/s are all of an H100's; 8 ports of 400 Gbit/s are 400 GB/s
    assert levels(found) == [("nvlink", 8, 450, "switch"), ("ib400", 4, 400, "fat_tree")]
    node = found.cluster.islands[0].node
    assert (node.devices, node.nics, node.nic_gbit_s, node.cpus, node.pcie_gb_s) == (8, 8, 400, 112, 63)
    assert node.host_memory_bytes == 2048 * 2**30
    assert node.nvme_bytes == 2 * 7501476528 * 512
    assert source_of(node, "nics").startswith("ibstat: 8 x 400 Gbit/s infiniband (mlx5_0")
    assert "mlx5_8" not in source_of(node, "nics")
    assert source_of(found.cluster.islands[0].levels[0], "gb_s").startswith(
        "nvidia-smi topo -m: NV18 between pairs of 8"
    )


def test_four_a100_on_pcie_are_a_host_bridge_and_one_port_of_25_gigabit():
    found = detect(Machine(A100_PCIE), nodes=2)
    assert levels(found) == [("pcie", 4, 31.5, "pcie"), ("25gbe", 2, 3.125, "fat_tree")]
    assert found.cluster.islands[0].device == load_device("a100_40gb_pcie")
    node = found.cluster.islands[0].node
    assert (node.nics, node.cpus, node.nvme_bytes) == (1, 32, 0)
    assert source_of(found.cluster.islands[0].levels[0], "gb_s").startswith("nvidia-smi topo -m: PHB, SYS")
    assert source_of(node, "nics") == "/sys/class/net: 1 x 25 Gbit/s ethernet (eno1)"


def test_cards_on_eight_lanes_have_half_a_slot():
    found = detect(Machine(TWO_4090))
    assert levels(found) == [("pcie", 2, 15.75, "pcie")]
    node = found.cluster.islands[0].node
    assert source_of(node, "nics").startswith("assumed, not detected")
    assert source_of(node, "pcie_gb_s").startswith("nvidia-smi --query-gpu: PCIe generation 4, 8 lanes")


def test_eight_mi300x_are_a_mesh_of_xgmi_with_roce_between_nodes():
    found = detect(Machine(MI300X), nodes=2)
    assert levels(found) == [("xgmi", 8, 448, "mesh"), ("roce400", 2, 400, "fat_tree")]
    assert found.cluster.islands[0].device.name == "mi300x"


@pytest.mark.parametrize("texts", [DGX_H100, A100_PCIE, TWO_4090, MI300X], ids=["h100", "a100", "4090", "mi300x"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_what_is_detected_is_a_file_that_is_read_back_equal_with_a_source_for_every_number(texts, nodes):
    cluster = detect(Machine(texts), nodes=nodes).cluster
    assert from_toml(template(cluster)) == cluster
    (island,) = cluster.islands
    for record in (island.node, *island.levels):
        for field in record.__struct_fields__:
            value = getattr(record, field)
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                assert source_of(record, field), field


def test_four_a100_joined_by_four_links_each_are_a_mesh():
    texts = {
        QUERY_COMMAND: "NVIDIA A100-SXM4-40GB, 40960, 4, 16\n" * 4,
        "nvidia-smi topo -m": matrix(all_pairs(4, "NV4")),
    }
    # 4 links of 25 GB/s to each of 3 others: 300 GB/s, all that an A100 has
    assert levels(detect(Machine(texts))) == [("nvlink", 4, 300, "mesh")]


def test_bridged_pairs_are_a_level_of_their_own():
    rows = [[" X ", "NV12", "SYS", "SYS"], ["NV12", " X ", "SYS", "SYS"], ["SYS", "SYS", " X ", "NV12"],
            ["SYS", "SYS", "NV12", " X "]]  # fmt: skip
    texts = {QUERY_COMMAND: "NVIDIA A100 80GB PCIe, 81920, 4, 16\n" * 4, "nvidia-smi topo -m": matrix(rows)}
    assert levels(detect(Machine(texts))) == [("nvlink_bridge", 2, 300, "mesh"), ("pcie", 2, 63, "pcie")]


def test_links_that_the_catalog_has_no_rate_of_are_named_and_pcie_stands_in():
    texts = {
        QUERY_COMMAND: "NVIDIA GeForce RTX 3090, 24576, 4, 16\n" * 2,
        "nvidia-smi topo -m": matrix(all_pairs(2, "NV4")),
    }
    found = detect(Machine(texts))
    first = found.cluster.islands[0].levels[0]
    assert (first.name, first.gb_s) == ("pcie", 31.5) and "NV4" in source_of(first, "gb_s")


def test_lspci_alone_tells_devices_and_the_rest_is_assumed():
    found = detect(Machine({"lspci": LSPCI}), nodes=2)
    assert found.cluster.num_devices == 8
    assert all(source_of(v, "gb_s").startswith("assumed") for v in found.cluster.islands[0].levels)


def test_a_processors_own_graphics_is_no_device_of_the_node():
    own = "0c:00.0 VGA compatible controller: Advanced Micro Devices, Inc. [AMD/ATI] Raphael (rev c4)\n"
    assert detect(Machine({"lspci": own + LSPCI})).cluster.num_devices == 4
    assert refusal({"lspci": own}).code == "C017"


def test_more_devices_than_the_usual_node_holds_are_all_there():
    found = detect(Machine({QUERY_COMMAND: "Tesla V100-SXM2-32GB, 32768, 3, 16\n" * 16}), nodes=2).cluster
    assert (found.num_devices, found.islands[0].num_nodes) == (32, 2)


def test_a_number_that_no_machine_has_is_not_believed():
    texts = {**A100_PCIE, "/proc/meminfo": "MemTotal: 5 kB\n", "/sys/class/net/eno1/speed": "100\n"}
    node = detect(Machine(texts)).cluster.islands[0].node
    assert source_of(node, "host_memory_bytes").startswith("assumed") and source_of(node, "nics").startswith("assumed")


def test_mangled_texts_of_tools_give_a_cluster_or_a_refusal():
    rng = random.Random(0)
    for i in range(300):
        texts = dict(rng.choice([DGX_H100, A100_PCIE, TWO_4090, MI300X]))
        for key in rng.sample(sorted(texts), 3):
            if isinstance(texts[key], str):
                lines = texts[key].split("\n")
                where = rng.randrange(len(lines))
                lines[where] = lines[where][: rng.randrange(len(lines[where]) + 1)] if i % 2 else rng.choice(lines)
                texts[key] = "\n".join(lines[: rng.choice([len(lines), where + 1])])
        try:
            cluster = detect(Machine(texts), nodes=2).cluster
        except MeshwrightError as error:
            assert error.exit_code == 2
        else:
            assert from_toml(template(cluster)) == cluster


def test_memory_other_than_the_catalogs_is_the_machines_own():
    texts = {**TWO_4090, QUERY_COMMAND: "NVIDIA GeForce RTX 4090, 49140, 4, 16\n" * 2}
    island = detect(Machine(texts)).cluster.islands[0]
    assert island.device.memory_bytes == 49140 * 2**20
    assert island.device.sources["memory_bytes"].startswith("nvidia-smi --query-gpu")
    assert "[islands.device]" in template(detect(Machine(texts)).cluster)


def test_a_machine_without_accelerators_is_one_error_with_everything_that_was_asked():
    found = refusal({})
    assert found.code == "C016"
    for tool in ("nvidia-smi", "rocm-smi", "lspci", "ibstat", "/sys/class/infiniband", "/sys/class/net"):
        assert tool in found.place
    assert "calibrate --here" in found.help and "4x4xa100,25gbe" in found.help


def test_devices_that_are_unlike_or_unknown_are_refused_with_what_to_say():
    two = {QUERY_COMMAND: "NVIDIA L40S, 46068, 4, 16\nNVIDIA L4, 23034, 4, 16\n"}
    assert refusal(two).code == "C017" and "1 x l40s, 1 x l4" in refusal(two).place
    strange = {QUERY_COMMAND: "NVIDIA H900 80GB, 81559, 5, 16\n"}
    assert "'NVIDIA H900 80GB' is not a device of the catalog" in refusal(strange).message
    assert detect(Machine(strange), device="h100").cluster.islands[0].device == load_device("h100")
    assert refusal(DGX_H100, nodes=1_000_000).code == "C015"


def test_names_that_drivers_report_belong_to_devices_of_the_catalog():
    known = catalog.tables("reported")
    assert set(known) <= set(catalog.names("devices"))
    names = [name.lower() for row in known.values() for name in row["names"]]
    assert len(names) == len(set(names))
    assert known_device("NVIDIA H100 80GB HBM3") == "h100_sxm" and known_device("Tesla T4") == "t4"


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "NVIDIA-SMI has failed because it couldn't communicate", "GPU0 X", "{", "[1,2", "\x00", "a,b\n,,,"],
)
def test_texts_of_another_kind_are_no_records(text):
    assert accelerators.nvidia_gpus(text) == accelerators.amd_gpus(text) == accelerators.lspci_gpus(text) == ()
    assert accelerators.nvidia_matrix(text) is None and accelerators.amd_matrix(text) is None
    assert host.ibstat_ports(text) == () and host.cores(text) == host.memory_bytes(text) == host.drive_bytes(text) == 0


def test_values_that_a_driver_does_not_have_are_left_to_the_catalog():
    (gpu,) = accelerators.nvidia_gpus("Tesla V100-SXM2-16GB, [N/A], [Not Supported], 16\n")
    assert (gpu.memory_bytes, gpu.pcie_generation, gpu.pcie_lanes) == (None, None, 16)


def test_older_matrices_name_cards_in_their_heading():
    text = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV12\tPIX\t0-47\n"
    text += "GPU1\tNV12\t X \tSYS\t0-47\nmlx5_0\tPIX\tSYS\t X \n"
    found = accelerators.nvidia_matrix(text)
    assert (found.links, found.near) == ((("X", "NV12"), ("NV12", "X")), ("mlx5_0",))


def test_ports_that_are_down_do_not_count():
    text = ibstat([("mlx5_0", "Active", 200, "Ethernet"), ("mlx5_1", "Down", 200, "InfiniBand")])
    assert [(p.name, p.kind, p.gbit_s) for p in host.ibstat_ports(text)] == [("mlx5_0", "roce", 200)]


def test_a_command_is_run_without_a_shell_and_for_a_limited_time(monkeypatch):
    said = Here().run(sys.executable, "-c", "import sys; print(sys.argv[1])", "$(echo no) ; *")
    assert said.text.strip() == "$(echo no) ; *"
    assert Here().run("no-such-tool-anywhere").missing == "not installed"
    assert Here().run(sys.executable, "-c", "import sys; print('broken'); sys.exit(9)").missing == (
        "failed with exit code 9: broken"
    )

    def slow(*args, **kwargs):
        raise subprocess.TimeoutExpired(args[0], kwargs["timeout"])

    monkeypatch.setattr(subprocess, "run", slow)
    assert Here().run("nvidia-smi").missing == "no answer in 20 s"


def test_the_command_writes_the_file_and_says_what_was_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("meshwright.detect.Here", lambda: Machine(DGX_H100))
    path = tmp_path / "mine.toml"
    assert main(["cluster", "--detect", "--nodes", "4", "--out", str(path)]) == 0
    text = path.read_text()
    assert from_toml(text) == detect(Machine(DGX_H100), nodes=4).cluster
    assert "# asked nvidia-smi topo -m: told" in text
    assert capsys.readouterr().out == ""
    assert main(["cluster", "--detect"]) == 0
    assert from_toml(capsys.readouterr().out) == detect(Machine(DGX_H100)).cluster


@pytest.mark.parametrize("words", [[], ["--nodes", "4"], ["--detect", "--nodes", "0"], ["--detect", "--nodes", "many"]])
def test_a_command_that_asks_for_nothing_or_a_strange_count_is_refused(words, capsys):
    assert main(["cluster", *words]) == 2
    assert "error[X004]" in capsys.readouterr().err


def test_other_systems_tools_are_not_needed():
    assert detect(Machine({ROCM: MI300X[ROCM]})).cluster.num_devices == 8
