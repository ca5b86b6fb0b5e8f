"""The catalog: datasheet numbers agree with the hardware they describe, and every number says where it is from."""

import re

import msgspec
import pytest

from meshwright import catalog
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import clusters, devices, load_device, source_of

MEASURED = [
    "h100_sxm",
    "h100_pcie",
    "h100_nvl",
    "a100_sxm",
    "a100_80gb_sxm",
    "a100_40gb_sxm",
    "a100_80gb_pcie",
    "a100_40gb_pcie",
    "v100_pcie_16gb",
    "v100_pcie_32gb",
    "v100_16gb",
    "v100_32gb",
    "h200_sxm",
    "h200_nvl",
    "gh200",
    "b200",
    "b200_sxm",
    "b300",
    "b300_sxm",
    "gb200",
    "gb300",
    "mi250",
    "mi300x",
    "mi325x",
    "l40s",
    "l4",
    "t4",
    "p4",
    "p100_pcie_16gb",
    "a40",
    "rtx_pro_6000_server",
    "rtx4090",
    "rtxpro6000",
    "gaudi2",
    "max1550",
    "sn40l",
    "h100_sxm_2.4tbs_96gb",
]

# Dense FLOP per clock and multiprocessor (NVIDIA whitepapers: tensor cores x FMA x 2; CDNA whitepapers: per compute
# unit; Intel: per Xe core; TPU: 4 matrix units of 128 x 128 per TensorCore). Peak = cores x clock x this.
PER_CLOCK = {
    "p100_pcie_16gb": ("fp16", 256),
    "v100_16gb": ("fp16", 1024),
    "v100_pcie_16gb": ("fp16", 1024),
    "t4": ("fp16", 1024),
    "p4": ("fp32", 256),
    "a100_80gb_sxm": ("bf16", 2048),
    "a100_40gb_pcie": ("bf16", 2048),
    "a800_sxm": ("bf16", 2048),
    "a40": ("bf16", 1024),
    "h100_sxm": ("bf16", 4096),
    "h100_pcie": ("bf16", 4096),
    "h100_nvl": ("bf16", 4096),
    "h200_sxm": ("bf16", 4096),
    "gh200": ("bf16", 4096),
    "b200_sxm": ("bf16", 8192),
    "b300_sxm": ("bf16", 8192),
    "gb200": ("bf16", 8192),
    "l4": ("bf16", 1024),
    "l40s": ("bf16", 1024),
    "rtx4090": ("bf16", 512),
    "rtx_pro_6000_server": ("bf16", 1024),
    "a30": ("bf16", 2048),
    "a10g": ("bf16", 512),
    "rtx_a6000": ("bf16", 1024),
    "rtx_6000_ada": ("bf16", 1024),
    "rtx3090": ("bf16", 512),
    "rtx5090": ("bf16", 512),
    "l40": ("bf16", 512),
    "mi210": ("bf16", 1024),
    "mi250": ("bf16", 1024),
    "mi250x": ("bf16", 1024),
    "mi300x": ("bf16", 2048),
    "mi350x": ("bf16", 4096),
    "mi355x": ("bf16", 4096),
    "max1550": ("bf16", 4096),
    "tpu_v3": ("bf16", 2 * 2 * 128 * 128),
    "tpu_v4": ("bf16", 4 * 2 * 128 * 128),
    "tpu_v5e": ("bf16", 4 * 2 * 128 * 128),
    "tpu_v5p": ("bf16", 4 * 2 * 128 * 128),
}


@pytest.mark.parametrize("name", PER_CLOCK)
def test_peak_is_cores_times_clock_times_flops_per_clock_within_2_percent(name):
    device, (dtype, per_clock) = load_device(name), PER_CLOCK[name]
    computed = device.num_sms * device.clock_mhz * 1e6 * per_clock
    assert device.peak_flops[dtype] == pytest.approx(computed, rel=0.02)


@pytest.mark.parametrize(
    ("name", "bf16_tflops", "memory_gb_s"),
    [
        ("a100", 312, 2039),  # NVIDIA A100 datasheet
        ("h100", 989.4, 3352),  # NVIDIA H100 whitepaper v1.04, table 2
        ("h100_pcie", 756, 2039),
        ("h200", 989.4, 4800),  # NVIDIA H200 datasheet
        ("b200", 2250, 8000),  # NVIDIA DGX B200 datasheet: 72 PFLOP/s fp8 with sparsity for 8
        ("mi300x", 1307.4, 5325),  # AMD MI300X datasheet
        ("mi250x", 383 / 2, 3276.8 / 2),  # AMD MI250X datasheet, half a module
        ("l40s", 362.05, 864),
        ("tpu_v5p", 459, 2765),
    ],
)
def test_peaks_are_dense_datasheet_figures(name, bf16_tflops, memory_gb_s):
    device = load_device(name)
    assert device.peak_flops["bf16"] == pytest.approx(bf16_tflops * 1e12)
    assert device.memory_gb_s == pytest.approx(memory_gb_s)


def test_fp8_runs_at_twice_and_fp4_at_four_times_bf16_or_more():
    for device in devices():
        peak = device.peak_flops
        if "fp8" in peak:
            times = 1 if device.name == "gaudi3" else 2  # Gaudi 3's matrix engines multiply fp8 no faster than bf16
            assert peak["fp8"] == pytest.approx(times * peak["bf16"], rel=0.02), device.name
        if "fp4" in peak:
            assert peak["fp4"] >= 3.99 * peak["bf16"], device.name


@pytest.mark.parametrize("name", MEASURED)
def test_every_hardware_name_of_the_measurement_tables_resolves(name):
    assert load_device(name).peak_flops


def test_no_two_devices_share_a_name_or_alias():
    said = [name.lower().replace("-", "_") for device in devices() for name in (device.name, *device.aliases)]
    # an alias may repeat its own device's name with other dashes, never another device's
    assert all(load_device(name).name == device.name for device in devices() for name in (device.name, *device.aliases))
    assert set(catalog.names("devices")) <= set(said)


def numbers(record):
    """Names of a record's fields that hold a number somebody measured or published."""
    for field in record.__struct_fields__:
        value = getattr(record, field)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (is_number or field == "peak_flops") and value != 0:
            yield field


def test_every_number_of_a_device_its_node_and_its_levels_has_a_source():
    for device in devices():
        for record in (device, device.node, *device.levels):
            for field in numbers(record):
                assert source_of(record, field), f"{device.name}: {record!r}.{field}"
        if device.efficiency is not None:
            assert device.efficiency.source


def test_every_device_has_a_public_price_with_its_source_or_says_that_there_is_none():
    for device in devices():
        source = device.sources.get("price_usd_hour", "")
        if device.price_usd_hour is None:
            assert source.startswith("no public price"), device.name
        else:
            assert re.search(r"price.*20\d\d", source) and 0.1 < device.price_usd_hour < 20, device.name


def test_every_number_of_a_cluster_has_a_source():
    for cluster in clusters():
        for island in cluster.islands:
            for record in (island.node, *island.levels):
                for field in numbers(record):
                    assert source_of(record, field), f"{cluster.name}: {record!r}.{field}"


def test_clusters_have_their_published_sizes():
    sizes = {cluster.name: cluster.num_devices for cluster in clusters()}
    assert sizes["selene"] == 4480  # 560 DGX A100
    assert sizes["eos"] == 4608  # 576 DGX H100
    assert sizes["jean-zay"] == 416  # 52 nodes of 8 A100
    assert sizes["frontier"] == 9856 * 8  # OLCF user guide: 9,856 nodes of 8 GCDs
    assert sizes["perlmutter"] == 6144  # 1,536 nodes of 4 A100
    assert sizes["llama3-24k"] == 24_576  # arXiv 2407.21783: 24K GPUs, 8 pods of 3,072
    assert sizes["tpu-v5p-pod"] == 8960


def test_the_llama3_pods_are_tapered_one_to_seven():
    outer = next(cluster for cluster in clusters() if cluster.name == "llama3-24k").islands[0].levels[-1]
    # a pod of 3,072 GPUs has 400 Gbit/s each: 153,600 GB/s, of which 1/7 when all pods send
    assert (outer.gb_s, outer.busy_gb_s) == (153_600, pytest.approx(153_600 / 7))


def test_price_adds_up_over_devices_and_failures_do_too():
    built = {cluster.name: cluster for cluster in clusters()}
    assert built["eos"].total_price_usd_hour() == pytest.approx(4608 * 6.88)
    assert built["frontier"].total_price_usd_hour() is None
    # arXiv 2407.21783: 419 interruptions in 54 days on 16,384 GPUs = one every 3.1 h; 24,576 GPUs: 2.06 h
    assert built["llama3-24k"].interruption_hours() == pytest.approx(54 * 24 / 419 * 16_384 / 24_576, rel=1e-3)
    assert built["tpu-v4-pod"].interruption_hours() is None
    own = msgspec.structs.replace(built["eos"], price_usd_hour=1000, mtbf_hours=5)
    assert (own.total_price_usd_hour(), own.interruption_hours()) == (1000, 5)


def test_an_unknown_device_suggests_the_nearest():
    with pytest.raises(MeshwrightError, match="did you mean h100_sxm"):
        load_device("h100_sxn")
