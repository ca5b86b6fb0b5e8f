"""The shipped network profiles: complete, small, physical, and read back as written."""

import pytest

from meshwright.cost.fabric import Fabrics, profile_text, read_profile, shipped
from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import load_device
from meshwright.work import Hop

PROFILES = sorted(shipped().profiles.values(), key=lambda p: p.name)
FRACTIONS = ("all_gather", "reduce_scatter", "all_reduce", "in_network", "all_to_all", "send", "ll", "ll128", "tree")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_no_fraction_of_a_port_exceeds_it(profile):
    assert all(0 < getattr(profile.constants, name) <= 1 for name in FRACTIONS)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_a_profile_says_what_it_was_fitted_to_and_how_sure_it_is(profile):
    assert profile.source
    assert all(0 < sigma < 2 for sigma in profile.sigma.values())
    assert "*" in profile.sigma


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_a_profile_reads_back_as_written(profile):
    assert read_profile(profile_text(profile), "here") == profile


def test_the_profiles_are_smaller_than_sixty_kilobytes():
    assert sum(len(profile_text(p)) for p in PROFILES) < 60_000


def test_a_profile_of_another_format_or_with_a_field_missing_is_refused():
    good = profile_text(PROFILES[0])
    for bad in (good.replace(b'"format_version": 2', b'"format_version": 9'), good.replace(b'"kind"', b'"kin"'), b"{"):
        with pytest.raises(MeshwrightError, match="N001"):
            read_profile(bad, "here")


def test_a_level_gets_the_most_particular_profile_that_answers():
    def named(device: str, level: str, topology: str = "switch", scale_out: bool = False) -> str:
        hop = Hop(name=level, members=2, gb_s=1.0, latency_us=1.0, below=1, topology=topology, scale_out=scale_out)
        return shipped().find(hop, device, load_device(device).scale_up)[0].name

    assert named("h100_sxm", "nvlink") == "nvlink4"
    assert named("a100_80gb_sxm", "nvlink") == "nvlink3"
    assert named("a100_80gb_sxm", "nvlink", "mesh") == "nvlink3_mesh"
    assert named("h100_sxm", "efa", "fat_tree", True) == "efa"
    assert named("h100_sxm", "rail", "fat_tree", True) == "network"
    assert named("rtx4090", "pcie", "pcie") == "pcie"


def test_a_kind_stands_in_where_no_profile_answers():
    kinds = Fabrics(tuple(p for p in PROFILES if p.name in ("nvlink", "pcie", "network")))
    hop = Hop(name="nvlink", members=8, gb_s=450.0, latency_us=0.6, below=1, topology="switch")
    assert kinds.find(hop, "h100_sxm", "nvlink4") == (kinds.profiles["nvlink"], True)
