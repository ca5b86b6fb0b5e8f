"""Cluster files: what is written is read back equal, and everything wrong is said at once."""

import re
import tomllib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import Cluster, clusters, from_toml, load, load_device, template, to_toml
from meshwright.spec.cluster_file import EXAMPLES
from meshwright.spec.toml_text import dumps

MINE = """
format_version = 1
name = "mine"
[[islands]]
name = "a"
device = "h100"
[[islands.levels]]
name = "nvlink"
arity = 8
gb_s = 450
latency_us = 0.6
topology = "switch"
[[islands.levels]]
name = "fabric"
arity = 4
gb_s = 400
latency_us = 3
topology = "fat_tree"
scale_out = true
"""


def refusal(text):
    with pytest.raises(MeshwrightError) as caught:
        from_toml(text, place="mine.toml")
    return str(caught.value)


def codes(text):
    with pytest.raises(MeshwrightError) as caught:
        from_toml(text)
    return [found.code for found in caught.value.diagnostics]


@pytest.mark.parametrize(
    "name", ["64xh100", "3xh100", "8xa100 + 8xh100", "512xgb200", "128xtpu_v5p", "16x4xp5", "100000xh100"]
)
def test_a_composed_cluster_survives_its_toml_text(name):
    built = load(name)
    assert from_toml(to_toml(built)) == built


def test_every_catalog_cluster_survives_its_toml_text():
    for cluster in clusters():
        assert from_toml(to_toml(cluster)) == cluster


def test_a_device_of_ones_own_is_written_out_and_survives():
    h100 = load("64xh100")
    device = msgspec.structs.replace(load_device("h100"), memory_gb_s=3000, title="shop's own")
    island = msgspec.structs.replace(h100.islands[0], device=device)
    own = msgspec.structs.replace(h100, islands=(island,))
    assert "[islands.device]" in to_toml(own)
    assert from_toml(to_toml(own)) == own


def test_a_catalog_device_is_written_by_name_with_the_format_version():
    table = tomllib.loads(to_toml(load("64xh100")))
    assert table["format_version"] == 1
    assert table["islands"][0]["device"] == "h100_sxm"
    assert "node" not in table["islands"][0]


def test_measured_bus_bandwidths_are_kept_and_written_out():
    text = MINE.replace("scale_out = true", "scale_out = true\nbusbw_gb_s = {all_reduce = 170.5, all_gather = 44}")
    built = from_toml(text)
    assert built.islands[0].levels[-1].busbw_gb_s == {"all_reduce": 170.5, "all_gather": 44.0}
    assert from_toml(to_toml(built)) == built


def test_an_islands_node_is_its_devices_standard_node_unless_said():
    assert from_toml(MINE).islands[0].node == load_device("h100").node


def test_a_file_is_loaded_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert load(str(path)).num_devices == 32


def test_a_machine_file_is_one_machine(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text('format_version = 1\nname = "box"\ndevice = "a100"\n')
    assert load(str(path)).num_devices == 8


values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def has_table_in_list(value):
    """A list that mixes tables with other values has no line form: outside what records hold."""
    if isinstance(value, dict):
        return any(has_table_in_list(v) for v in value.values())
    if isinstance(value, list):
        if value and all(isinstance(v, dict) for v in value):
            return any(has_table_in_list(v) for v in value)
        return any(isinstance(v, dict | list) for v in value)
    return False


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4).filter(lambda table: not has_table_in_list(table)))
def test_toml_text_is_read_back_equal_by_the_standard_reader(table):
    assert tomllib.loads(dumps(table)) == table


def test_all_violations_are_reported_at_once():
    broken = MINE.replace("gb_s = 450", "gbs = 450").replace('"switch"', '"start"').replace("arity = 4", 'arity = "4"')
    text = refusal(broken)
    assert text.count("error[") == 4
    assert "error[C005]: unknown key 'gbs'" in text and "did you mean gb_s" in text
    assert "error[C006]: level needs 'gb_s'" in text
    assert text.count("error[C007]") == 2
    assert "islands[0].levels[1].arity = '4'   <- mine.toml" in text
    assert "one of: switch, ring, mesh, torus, pcie, fat_tree, dragonfly" in text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("gb_s = 400", "gb_s = 3200", "looks like Gbit/s"),  # 8 x 400 Gbit/s written as such
        ("gb_s = 400", "gb_s = 400e9", "looks like bytes/s"),
        ("gb_s = 450", "gb_s = 7200", "looks like Gbit/s or MB/s"),
        ("latency_us = 3", "latency_us = 3e-6", "looks like seconds"),
        ("latency_us = 3", "latency_us = 3_000_000", "looks like nanoseconds"),
        ("scale_out = true", "scale_out = true\noversubscription = 0.5", "never below 1"),
        ('name = "mine"', 'name = "mine"\npue = 0.9', "never below 1"),
        ("arity = 8", "arity = -8", "cannot be negative"),
        ("gb_s = 450", "gb_s = nan", "out of range"),
        ("scale_out = true", "scale_out = true\nbusbw_gb_s = {all_gather = 3200}", "carries 400 GB/s"),
        ("scale_out = true", "scale_out = true\nbusbw_gb_s = {all_gather = nan}", "carries 400 GB/s"),
        ("scale_out = true", "scale_out = true\nbusbw_gb_s = {allgather = 40}", "did you mean all_gather?"),
        ("gb_s = 450", "gb_s = 450\nbusbw_gb_s = {all_reduce = 40}", "over a scale-out level"),
        ("gb_s = 400", "gb_s = 400\nbusbw_gb_s = {all_gather = 0}", "carries 400 GB/s"),
    ],
)
def test_a_number_in_another_unit_is_refused_with_the_reason(old, new, why):
    text = refusal(MINE.replace(old, new))
    assert "error[C008]" in text and why in text


NODE = "[islands.node]\ndevices = 8\nnics = 8\nnic_gbit_s = 400\nhost_memory_bytes = 2e12\npcie_gb_s = 63\n"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("nic_gbit_s = 400", "nic_gbit_s = 400e9", "bit/s"),
        ("pcie_gb_s = 63", "pcie_gb_s = 63e9", "bytes/s"),
        ("host_memory_bytes = 2e12", "host_memory_bytes = 2048", "looks like GB"),
        ("devices = 8", "devices = 0", "at least 1"),
    ],
)
def test_a_node_in_other_units_is_refused_with_the_reason(old, new, why):
    node = NODE.replace("2e12", "2_000_000_000_000").replace(old.replace("2e12", "2_000_000_000_000"), new)
    text = refusal(MINE + node)
    assert "error[C008]" in text and why in text


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("memory_bytes", 80, "looks like GB"),
        ("memory_gb_s", 3.35, "looks like TB/s"),
        ("peak_flops", {"bf16": 989.4}, "looks like TFLOP/s"),
        ("clock_mhz", 1.83, "looks like GHz"),
        ("num_sms", 0, "at least one core"),
    ],
)
def test_a_device_in_other_units_is_refused_with_the_reason(field, value, why):
    device = msgspec.structs.replace(load_device("h100"), **{field: value})
    island = msgspec.structs.replace(load("8xh100").islands[0], device=device)
    assert why in refusal(to_toml(msgspec.structs.replace(load("8xh100"), islands=(island,))))


def test_an_unknown_data_type_and_a_bare_efficiency_are_refused():
    device = load_device("h100")
    bad = msgspec.structs.replace(
        device,
        peak_flops={"bfloat16": 989e12},
        efficiency=msgspec.structs.replace(device.efficiency, gemm=80, source=""),
    )
    island = msgspec.structs.replace(load("8xh100").islands[0], device=bad)
    text = refusal(to_toml(msgspec.structs.replace(load("8xh100"), islands=(island,))))
    assert "gemm is a fraction of the peak" in text and "needs its source" in text
    typed = msgspec.structs.replace(bad, efficiency=None)
    island = msgspec.structs.replace(island, device=typed)
    text = refusal(to_toml(msgspec.structs.replace(load("8xh100"), islands=(island,))))
    assert "unknown data type" in text and "did you mean" in text


def test_parts_that_do_not_fit_together_are_refused():
    assert codes(MINE.replace("arity = 4", "arity = 0")) == ["C009"]
    assert codes(MINE.replace("scale_out = true", "scale_out = true\nshape = [2, 3]")) == ["C009"]
    # two islands and nothing that joins them
    second = MINE[MINE.index("[[islands]]") :].replace('name = "a"', 'name = "b"')
    assert codes(MINE + second) == ["C009"]
    # a domain of 12 devices on nodes of 8
    assert codes(MINE.replace("arity = 8", "arity = 12")) == ["C009"]
    # a scale-up level outside the network
    swapped = MINE.replace("scale_out = true", "").replace("latency_us = 0.6", "latency_us = 0.6\nscale_out = true")
    assert "C009" in codes(swapped.replace("gb_s = 450", "gb_s = 50"))


def test_a_machine_without_an_outer_network_is_refused():
    machine = 'format_version = 1\nname = "box"\ndevice = "a100"\n[[levels]]\nname = "nvlink"\narity = 8\ngb_s = 300\n'
    text = refusal(machine + 'latency_us = 1\ntopology = "switch"\n')
    assert "error[C009]" in text and "scale_out = true and arity = 0" in text


def test_an_unknown_device_in_a_file_is_reported_with_the_rest():
    text = refusal(MINE.replace('device = "h100"', 'device = "h1000"').replace("arity = 4", "arty = 4"))
    assert "error[C001]: unknown device 'h1000'" in text and "error[C005]" in text and "error[C006]" in text


def test_what_is_not_a_cluster_file_is_refused(tmp_path):
    with pytest.raises(MeshwrightError, match=r"error\[C004\]: cannot read"):
        load(str(tmp_path / "absent.toml"))
    assert "error[C004]: not a TOML file" in refusal("format_version = ")
    assert "error[C012]: format_version is None" in refusal('name = "x"')
    assert "error[C012]: format_version is 7" in refusal("format_version = 7")
    assert codes("format_version = 1") == ["C006"]
    assert codes('format_version = 1\nname = "x"\nislands = []') == ["C006"]
    assert codes('format_version = 1\nname = "x"\nislands = [3]') == ["C007"]


def test_numbers_out_of_range_are_named_beside_keys_that_are_wrong():
    text = refusal(
        'format_version = 1\nname = "x"\npower_limit_w = -4\nbogus = 1\n[[islands]]\nname = "a"\ndevice = "h101"\n'
        "[[islands.levels]]\narity = 8\ngb_s = nan\n"
    )
    assert "power_limit_w is out of range" in text and "unknown key 'bogus'" in text
    assert (
        "unknown device 'h101'" in text
        and "gb_s is out of range" in text
        and "needs 'name', 'latency_us' and 'topology'" in text
    )


SHORT = """64xh100; 4x4xa100,25gbe; 2x4090,pcie4; 8xh100+8xa100; 8x8xh100,efa; 512xgb200; 128xtpu_v5p; 16x4xp5;
nodes=4,gpus=4,device=a100,nvlink=600,nic=25gbe,nics=2; 8xmi300x; 4xh100_nvl; 1xh100; 3xh100"""


@pytest.mark.parametrize("cluster", [*clusters(), *map(load, SHORT.split(";"))], ids=lambda cluster: cluster.name)
def test_a_template_is_read_back_equal_and_says_what_every_key_means(cluster):
    text = template(cluster)
    assert from_toml(text) == cluster
    header = ""
    for line in text.splitlines():
        header = line if line.startswith("[") else header
        if line and line[0] not in "#[" and not header.endswith("sources]") and ".device" not in header:
            assert "  # " in line, line


def test_a_template_of_a_device_of_ones_own_is_read_back_equal():
    island = load("64xh100").islands[0]
    own = msgspec.structs.replace(island, device=msgspec.structs.replace(island.device, memory_gb_s=3000))
    built = msgspec.structs.replace(load("64xh100"), islands=(own,))
    assert from_toml(template(built)) == built


def test_keys_that_a_template_shows_as_comments_are_keys():
    text = template(load("4x4xa100,25gbe"))
    for key in ("shape", "busbw", "wiring"):
        text = text.replace(f"# {key}", f"#{key}")
    lines = [line[2:] if re.match(r"# [a-z_]+ = ", line) else line for line in text.splitlines()]
    built = from_toml("\n".join(lines))
    assert (built.title, built.pue, built.price_usd_hour) == ("our rack", 1.1, 50.0)
    assert built.islands[0].levels[1].oversubscription == 1.0


def test_a_file_with_much_missing_is_refused_once_with_all_of_it_and_an_example():
    text = refusal(
        'name = "mine"\n[[islands]]\nname = "a"\ndevice = "a100"\n[[islands.levels]]\nname = "nvlink"\narity = 4\n'
        '[[islands.levels]]\nname = "eth"\narity = 4\nspeed = 25\nscale_out = true\n'
    )
    assert "error[C012]: format_version is None" in text
    assert text.count("error[C006]: level needs 'gb_s', 'latency_us' and 'topology'") == 2
    assert "error[C005]: unknown key 'speed'" in text
    assert "error[C009]: a scale-up domain of 4 devices is not whole nodes of 8" in text
    assert text.count("scale_out = true        # through the NICs") == 1
    assert "meshwright catalog clusters" in refusal("") and "cluster needs 'name' and 'islands'" in refusal("")


def test_the_example_of_a_refusal_is_a_cluster():
    example = EXAMPLES[Cluster].partition("the least is\n")[2]
    assert from_toml(example).num_devices == 32


def test_a_file_of_more_devices_than_any_cluster_has_is_refused():
    assert codes(MINE.replace("arity = 4", "arity = 1_000_000_000")) == ["C015"]


def test_a_file_that_is_nested_too_deeply_is_refused():
    assert "error[C004]" in refusal("a = " + "[" * 100_000)


@pytest.mark.parametrize("key", ["nics", "host_memory_bytes", "devices"])
def test_a_number_of_more_digits_than_anything_has_is_refused(key):
    text = template(load("4x4xa100,25gbe"))
    assert "C008" in codes(re.sub(rf"^{key} = .*$", f"{key} = {'9' * 400}", text, flags=re.MULTILINE))
