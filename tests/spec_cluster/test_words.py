"""Clusters in words: what each word makes of a cluster, where its numbers are from, and what the refusals say."""

import pytest

from meshwright import catalog
from meshwright.cli.explain import look_up
from meshwright.cost.network import Network
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import from_toml, load, load_device, source_of, to_toml
from meshwright.spec.cluster_names import ASSUMED
from meshwright.spec.links import by_word, links, networks
from meshwright.work import Collective, Group, Hop


def levels(text):
    return [(level.name, level.arity, level.gb_s) for island in load(text).islands for level in island.levels]


def refusal(text):
    with pytest.raises(MeshwrightError) as caught:
        load(text)
    assert caught.value.exit_code == 2
    return caught.value.diagnostics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 25 Gbit/s are 3.125 GB/s; nodes of 4 A100 keep NVLink 3, 300 GB/s each way
        ("4x4xa100,25gbe", [("nvlink", 4, 300), ("25gbe", 4, 3.125)]),
        ("4x4xa100,25gbe,nics=2", [("nvlink", 4, 300), ("25gbe", 4, 6.25)]),
        ("4x4xa100,nic=25gbe,nics=2", [("nvlink", 4, 300), ("25gbe", 4, 6.25)]),
        # PCIe 4.0 x16: 31.5 GB/s; 600 GB/s of the A100 datasheet are both directions together
        ("2x4090,pcie4", [("pcie", 2, 31.5)]),
        ("nodes=4,gpus=4,device=a100,nvlink=600,nic=25gbe", [("nvlink", 4, 300), ("25gbe", 4, 3.125)]),
        ("4x8xa100,nvlink=400,hdr", [("nvlink", 8, 200), ("ib200", 4, 200)]),
        ("4x8xa100,nonvlink,roce100", [("pcie", 8, 31.5), ("roce100", 4, 100)]),
        ("8x8xh100,8xib400", [("nvlink", 8, 450), ("ib400", 8, 400)]),
        ("16x4xa100,slingshot", [("nvlink", 4, 300), ("slingshot", 16, 100)]),
        # p5.48xlarge: 3,200 Gbit/s a node; p4d: 400
        ("4x8xh100,efa", [("nvlink", 8, 450), ("efa", 4, 400)]),
        ("4x8xa100-40,efa", [("nvlink", 8, 300), ("efa", 4, 50)]),
        ("64xh100,gpus=4,ndr", [("nvlink", 4, 450), ("ib400", 16, 200)]),
        ("2x8xv100,nvswitch,edr", [("nvlink", 8, 150), ("ib100", 2, 50)]),
        ("8xp5,gpus=4", [("nvlink", 4, 450), ("efa", 8, 200)]),
        ("h100,nodes=2,gpus=4,400gbe", [("nvlink", 4, 450), ("400gbe", 2, 50)]),
    ],
)
def test_words_say_what_joins_devices_and_nodes(text, expected):
    assert levels(text) == expected


def test_each_island_has_words_of_its_own_and_the_slowest_network_joins_them():
    built = load("2x8xh100,ib400 + 2x8xa100,25gbe")
    assert [island.levels[1].name for island in built.islands] == ["ib400", "25gbe"]
    # two nodes with one port of 25 Gbit/s each: 6.25 GB/s, with TCP's latency
    (meeting,) = built.interconnect
    assert (meeting.name, meeting.gb_s, meeting.latency_us) == ("25gbe", 6.25, 17.8)
    assert load("8xh100+8xa100,25gbe").interconnect[0].gb_s == 3.125


def test_a_pcie_word_is_the_hosts_link_too():
    assert load("2x4xa100,pcie3,25gbe").islands[0].node.pcie_gb_s == 15.75
    assert load("2x4xa100,nonvlink,25gbe").islands[0].node.pcie_gb_s == 31.5


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("8×h100", "8xh100"),
        ("8 h100", "8xh100"),
        ("8h100", "8xh100"),
        ("8 H100", "8xh100"),
        ("h100x8", "8xh100"),
        ("8*h100", "8xh100"),
        ("64 x H100", "64xh100"),
        ("4x8 h100", "4x8xh100"),
        ("rtx4090x2", "2xrtx4090"),
        ("mi300x8", "8xmi300x"),
        ("2 4090", "2x4090"),
        ("8xa100+8xh100", "8xa100 + 8xh100"),
        ("4 x 4 x A100 , 25GbE", "4x4xa100,25gbe"),
        ("nodes=4,gpus=4,device=A100,nvlink=600,net=25gbe", "4x4xa100,nvlink=600,25gbe"),
        ("4x4xa100,nonvlink,pcie4", "4x4xa100,pcie4"),
        ("4x8xa100,4xib200", "4x8xa100,ib200,nics=4"),
    ],
)
def test_spellings_of_newcomers_are_one_name(said, name):
    assert load(said).name == name
    assert load(name) == load(said)


def test_a_name_with_an_x_and_digits_in_it_is_not_taken_apart():
    assert load("rtx4090").num_devices == 1
    assert load("4090").islands[0].device.name == "rtx4090"
    assert "unknown cluster 'gtx1080'" in str(refusal("gtx1080")[0])


@pytest.mark.parametrize("name", ["4x4xa100,25gbe", "2x4090,pcie4", "2x8xh100,ib400 + 2x8xa100,25gbe", "8x8xh100,efa"])
def test_a_worded_cluster_survives_its_toml_text(name):
    assert from_toml(to_toml(load(name))) == load(name)


@pytest.mark.parametrize(
    ("text", "codes", "said"),
    [
        ("4x4xa100,nvlink,pcie4", ["C013"], "nvlink and pcie4 contradict each other"),
        ("4x4xa100,25gbe,ib200", ["C013"], "25gbe and ib200 contradict each other: two networks"),
        ("4x8xa100,gpus=4", ["C013"], "gpus=4 contradicts 4x8xa100, which says 8"),
        ("8xp5,nodes=4", ["C013"], "nodes=4 contradicts 8xp5, which says 8"),
        ("64xh100,gpus=3", ["C013"], "such as 8x8xh100 or 16x4xh100"),
        ("8xh100,device=a100", ["C013"], "h100 and device=a100 contradict"),
        ("8x4090,nvlink", ["C013"], "rtx4090 has no NVLink"),
        ("4xh100_nvl,nvswitch", ["C013"], "NVLink bridges between two cards"),
        ("4x8xa100,ib400", ["C013"], "at most ib200 on a100_80gb_sxm's PCIe"),
        ("4x4xa100,pcie5", ["C013"], "say pcie4"),
        ("4x4xa100,nvlink=900", ["C013"], "600 GB/s, both directions"),
        ("4x4xa100,pcie4,nvlink=600", ["C013"], "nvlink=600 and pcie4 contradict"),
        ("4x4xa100,nics=0", ["C013"], "reaches no other"),
        ("64xtpu_v4,ib400", ["C013"], "joined by its own links (ICI)"),
        ("2x36xgb200,nonvlink", ["C013"], "joined by NVLink alone"),
        ("nodes=4,gpus=4", ["C014"], "no device is named"),
        ("4x4xa100,25gb", ["C014"], "did you mean 25gbe"),
        ("4x4xa100,ib", ["C014"], "which of ib56, ib100, ib200, ib400, ib800?"),
        ("4x4xa100,100Mbps", ["C014"], "a rate in bits is written 100mbit"),
        ("4x4xa100,2.5 Gbit/s", ["C014"], "a rate in bits is written 2.5gbit"),
        ("4x4xa100,color=red", ["C014"], "unknown key 'color'"),
        ("4x4xa100,nic=pcie4", ["C014"], "no network 'pcie4'"),
        ("4x4xa100,nics=two", ["C014"], "not a whole number"),
        ("4x4xa100,nvlink=fast", ["C014"], "not a number of GB/s"),
        ("4x4xa100,", ["C014"], "an empty word"),
        ("selene,25gbe", ["C002"], "selene is a whole cluster"),
        ("1000000000xh100", ["C015"], "1000000xh100"),
        ("1000000x8xh100", ["C015"], "8,000,000 devices"),
        ("9" * 5000 + "xh100", ["C015"], "1,000,000"),
        ("1000000xh100 + 8xh100", ["C015"], "1,000,008 devices"),
    ],
)
def test_words_that_cannot_be_are_one_error_with_the_nearest_choice(text, codes, said):
    found = refusal(text)
    assert [one.code for one in found] == codes
    assert said in str(found[0]) and found[0].help


def test_everything_wrong_with_all_islands_is_said_at_once():
    found = refusal("4x8xa100,gpus=4,ib400,25gbe,pcie5 + 8x4090,nvlink + 8xh1000,ib")
    assert [one.code for one in found] == ["C013", "C013", "C014", "C013", "C013", "C013", "C001"]


def test_a_million_devices_are_a_cluster():
    assert load("1000000xh100").num_devices == 1_000_000


def test_a_network_nobody_named_is_marked_and_a_named_one_is_not():
    unsaid, said = load("4x4xa100").islands[0].levels[1], load("4x4xa100,ib200,nics=4").islands[0].levels[1]
    assert source_of(unsaid, "gb_s").startswith(ASSUMED)
    assert source_of(said, "gb_s").startswith("said: nics=4")
    ports = load("4x4xa100,nics=2").islands[0]
    assert source_of(ports.levels[1], "gb_s").startswith(ASSUMED) and ports.levels[1].gb_s == 50
    assert source_of(ports.node, "nics") == "said: nics=2"
    assert not source_of(load("8xp5").islands[0].levels[1], "gb_s").startswith("assumed")


def test_ports_nobody_counted_are_marked_as_assumed():
    assert source_of(load("4x4xa100,25gbe").islands[0].node, "nics").startswith("assumed: one port a node")
    assert source_of(load("4x4xa100,ib200").islands[0].node, "nics").startswith("assumed: as many as")


def test_every_link_has_a_source_for_each_number_and_is_explained():
    for link in links().values():
        assert link.source("latency_us") and link.source("gbit_s" if link.gbit_s else "gb_s"), link.name
        assert look_up(link.name)["text"]
    worded = [link for link in links().values() if link.kind != "nvlink"]
    assert len(by_word()) == sum(1 + len(link.aliases) for link in worded), "a word means two links"
    assert catalog.tables("links").keys() == links().keys()


@pytest.mark.parametrize(
    ("word", "low", "high"),
    [
        ("10gbe", 0.7, 0.965),  # one stream of iperf: 9.64 of 10 Gbit/s
        ("25gbe", 0.37, 0.94),  # NVIDIA/nccl issue 209 and microsoft/apex_plus on 24 Gbit/s
        ("100gbe", 0.32, 0.48),  # NVIDIA/nccl issue 450: 4 to 6 GB/s of 12.5
        ("200gbe", 0.05, 0.24),  # no more than over 100 Gbit/s; 1.2 GB/s a port of DebarghaG/estimate-train-time
        ("400gbe", 0.025, 0.12),  # likewise
    ],
)
def test_collectives_over_tcp_reach_what_was_reported_of_it(word, low, high):
    link = by_word()[word]
    hop = Hop(name=word, members=2, gb_s=link.port_gb_s, latency_us=17.8, below=1, topology="fat_tree", scale_out=True)
    work = Collective(op="all_gather", num_bytes=2.0**28, group=Group(size=2, hops=(hop,)))
    price = Network()(work, load_device("v100_pcie_16gb"))
    busbw = 2.0**28 / price.seconds / 2 / 1e9
    assert low < busbw / link.port_gb_s < high
    assert price.sigma >= 0.5 and "assumed" in price.source


def test_rdma_is_quicker_than_tcp_on_the_same_port():
    tcp, rdma = (load(f"4x4xa100,{word},nics=1").islands[0].levels[1] for word in ("100gbe", "roce100"))
    assert tcp.gb_s == rdma.gb_s and tcp.latency_us > 5 * rdma.latency_us


def test_all_networks_build_on_a_device_that_takes_them():
    for link in networks():
        built = load(f"2x8xb200,{link.name}" if link.port_gb_s <= 63 else f"144xgb300,{link.name}")
        assert built.islands[0].levels[-1].scale_out


def test_a_folder_where_a_cluster_is_meant_is_said_to_be_one(tmp_path, monkeypatch):
    (tmp_path / "adir").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "'adir' is a folder" in refusal("adir")[0].message


def test_islands_meet_on_the_network_that_is_said_or_are_refused():
    cluster = load("2x8xa100,ib200,meet=25gbe + 2x8xa100,roce200")
    (meeting,) = cluster.interconnect
    assert (meeting.name, meeting.gb_s) == ("25gbe", 2 * 25 / 8)  # two nodes of an island, one port each
    assert load(cluster.name) == cluster
    for words, said in (("8xa100,meet=25gbe", "no other island"), ("8xa100,meet=1gbe + 8xa100,meet=25gbe", "one net")):
        with pytest.raises(MeshwrightError, match=f"C013.*{said}"):
            load(words)


def test_a_rate_is_sockets_over_a_link_of_it():
    """100 Mbit/s are 0.0125 GB/s, with the latency of sockets; collectives are priced as over 1 gigabit Ethernet."""
    level = load("4x1xv100,100mbit").islands[0].levels[-1]
    assert (level.name, level.gb_s, level.latency_us) == ("100mbit", 0.0125, by_word()["1gbe"].latency_us)
    assert load("2x8xh100,4x1.5gbit").islands[0].levels[-1].gb_s == 4 * 1.5 / 8
    assert load("4x1xv100,100mbit").name == "4x1xv100,100mbit"

    def gathered(name):
        gb_s, about = 0.125, {"latency_us": 17.8, "below": 1, "topology": "fat_tree", "scale_out": True}
        group = Group(size=2, hops=(Hop(name=name, members=2, gb_s=gb_s, **about),))
        return Network()(Collective(op="all_gather", num_bytes=2.0**20, group=group), load_device("v100_pcie_16gb"))

    assert gathered("1gbit") == gathered("1gbe")


def test_a_delay_is_on_top_of_a_networks_latency_between_nodes_and_islands():
    built = load("2x8xh100,100mbit,delay=20ms + 8xa100,1gbe")
    assert built.islands[0].levels[-1].latency_us == pytest.approx(20_017.8)
    assert built.islands[0].levels[0].latency_us == load("8xh100").islands[0].levels[0].latency_us
    assert built.interconnect[0].latency_us == pytest.approx(20_017.8)
    assert load("8xh100 + 8xa100,meet=10mbit,delay=5ms").interconnect[0].latency_us == pytest.approx(5_017.8)
    assert load("4x8xh100,efa,delay=500us").islands[0].levels[-1].latency_us == pytest.approx(
        500 + load("4x8xh100,efa").islands[0].levels[-1].latency_us
    )


@pytest.mark.parametrize("word", ["0.001kbit", "delay=20m", "delay=11s", "delay=", "100 mbits", "meet=4kbit"])
def test_rates_and_delays_that_no_link_has_are_refused(word):
    assert refusal(f"4x8xh100,{word}")[0].code == "C014"
