"""Software that nobody measured is the weighted middle of the stacks that were, by the evidence of the question."""

from math import exp, log

import pytest

from meshwright.cost import Framework, frameworks, load_framework, standard_on
from meshwright.cost.unknown import LEAST_APART, MIDDLE, MISMATCH, Evidence, evidence, likened, middle
from meshwright.errors import MeshwrightError
from meshwright.spec import cluster as clusters
from meshwright.validate.cases import families_of
from meshwright.validate.software import date_of, shape_of
from tests.validate.samples import step


def stack(name: str, passes: float, **more) -> Framework:
    return Framework(name=name, elementwise_passes=passes, pinned=("elementwise_passes",), flagged=False, **more)


#: Two families of 16 bits, one of them with two versions, and one of 8 bits.
STACKS = (
    stack("a", 2.0),
    stack("b", 4.0),
    stack("b2", 1.0, family="b"),
    stack("c", 8.0, bits=(8,)),
    Framework(name="guess", elementwise_passes=100.0),
)


def test_the_middle_weighs_families_alike_and_stacks_that_evidence_does_not_fit_a_tenth():
    """By hand: log 2 and the mean of log 4 and log 1 (log 2) weigh 1 each, log 8 a tenth; nobody's guess nothing."""
    found, low = (middle(Evidence(bits=bits), known=STACKS) for bits in (16, 8))
    assert found.elementwise_passes == pytest.approx(exp((2 * log(2) + MISMATCH * log(8)) / (2 + MISMATCH)), rel=0.01)
    mean = (2 * MISMATCH * log(2) + log(8)) / (1 + 2 * MISMATCH)
    assert low.elementwise_passes == pytest.approx(exp(mean), rel=0.01)
    apart = ((log(8) - mean) ** 2 + 2 * MISMATCH * (log(2) - mean) ** 2) / (1 + 2 * MISMATCH)
    assert low.passes_sigma == pytest.approx(apart**0.5, rel=0.01)
    assert found.passes_sigma == LEAST_APART  # 0.29 by hand, and never less than the least


def test_operands_of_8_bits_are_no_eager_stack_s_unless_somebody_says_so():
    """By hand: of stacks of 16 bits the eager one misses the precision and the kernels and weighs a hundredth, the
    others a tenth; a word for the kernels stands instead."""
    known = tuple(
        stack(kind, passes, kernels=kind) for kind, passes in (("eager", 8.0), ("compiled", 2.0), ("fused", 1.0))
    )
    quantised, said, wide = (middle(e, known=known) for e in (Evidence(8), Evidence(8, kernels="eager"), Evidence(16)))
    assert quantised.elementwise_passes == pytest.approx(exp((log(2) / 10 + log(8) / 100) / 0.21), rel=0.01)
    assert said.elementwise_passes == pytest.approx(exp((log(8) / 10 + log(2) / 100) / 0.12), rel=0.01)
    assert wide.elementwise_passes == pytest.approx(exp(log(16) / 3), rel=0.01)


def test_what_is_left_out_has_no_part_in_the_middle():
    assert middle(Evidence(), {"b", "b2", "c"}, STACKS).elementwise_passes == pytest.approx(2.0)
    every = frozenset(frameworks()) - {"nanotron"}
    assert middle(Evidence(), every).elementwise_passes == load_framework("nanotron").elementwise_passes


def test_profiles_that_nobody_measured_have_the_middle_of_their_kind():
    alike = [f for f in frameworks().values() if f.like]
    assert {f.name for f in alike} >= {"default", "unfused", "hf-trainer"}
    assert [f.name for f in alike if likened(f, tuple(frameworks().values())) != f] == []


def test_evidence_is_read_from_precision_device_and_year():
    h100, b200 = (clusters.load_device(name) for name in ("h100_sxm", "b200_sxm"))
    assert evidence(h100, "bf16") == Evidence(bits=16)
    assert evidence(h100, "fp8") == Evidence(bits=8, flash=0)
    assert evidence(b200, "bf16") == Evidence(bits=16, flash=0)
    assert evidence(h100, "fp16").old
    assert not evidence(h100, "fp16", year=2024.0).old
    assert evidence(h100, "bf16", year=2021.5).old


def test_the_middle_answers_for_a_question_without_a_framework_and_words_narrow_it():
    cluster = clusters.load("8xh100")
    plain, eager, old = (standard_on(cluster, name).framework for name in ("", "eager", "default@2021"))
    quantised = standard_on(cluster, dtype="fp8").framework
    constants = [getattr(plain, name) for name in MIDDLE]
    assert constants == [getattr(load_framework("default"), name) for name in MIDDLE]
    assert quantised.elementwise_passes < plain.elementwise_passes < eager.elementwise_passes
    assert (old.defaults.attention, plain.defaults.attention) == ("unfused", "flash")
    assert standard_on(cluster, "nanotron").framework == load_framework("nanotron")


def test_a_bare_name_is_its_newest_version_of_the_year():
    names = {"megatron-lm@2021": "megatron-lm", "megatron-lm@2023": "megatron-lm-v3", "megatron-lm": "megatron-lm-v3"}
    names |= {"nemo@2025.5": "megatron-bridge", "nemo": "megatron-bridge-26.06", "megatron-lm@2016": "megatron-lm"}
    assert {said: load_framework(said).name for said in names} == names
    with pytest.raises(MeshwrightError) as error:
        load_framework("megatron-lm@soon")
    assert "'soon' is no year" in error.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("changed", "year"),
    [
        ({"source_ref": "mlcommons/training_results_v4.1@9a Dell"}, 2024.9),
        ({"notes": "step time from 2104.04473 eq. 3"}, 2021.25),
        ({"source_ref": "benchmarks/llama3_h100_202412_x.md"}, 2024 + 11 / 12),
        ({"framework": "megatron-bridge 25.09"}, 2025 + 8 / 12),
        ({"notes": "busbw 10.5 GB/s"}, None),
    ],
)
def test_the_date_of_a_row_is_read_from_its_reference(changed, year):
    found = date_of(step(**{"source_ref": "", "notes": "", **changed}))
    assert found == (None if year is None else pytest.approx(year))


def test_names_of_one_shape_are_one_model_and_versions_go_with_their_family():
    assert shape_of(step(model="x", vocab="")) == shape_of(step(model="y"))
    assert shape_of(step(layers="23")) != shape_of(step())
    found = families_of([step(framework="nemo"), step(framework="megatron-bridge 25.09"), step(framework="nobody's")])
    every = {"megatron-bridge", "megatron-bridge-2026", "megatron-bridge-26.06"}
    assert found == dict.fromkeys(("nemo", "megatron-bridge"), every)
