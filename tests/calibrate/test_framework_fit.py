"""Framework constants are found again in step times and peaks that were made with known ones."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.rank_memory import OVERHEAD, RESERVED, rank_memory
from meshwright.calibrate import framework, framework_memory, framework_profiles
from meshwright.cost import Costs, frameworks, standard
from meshwright.cost.chain import roofline_estimate
from meshwright.errors import MeshwrightError
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load as load_cluster
from meshwright.validate.cases import case
from meshwright.validate.steps import room
from meshwright.work import Gemm
from tests.validate.samples import step, table

TRUE = {
    "elementwise_passes": 3.0,
    "host_us_per_kernel": 40.0,
    "host_us_per_collective": 80.0,
    "host_us_per_pass": 1000.0,
    "host_us_per_step": 4000.0,
    "activation_copies": 1.7,
    "allocator_slack": 0.0,
}


def questions(micros=(1, 2, 4)):
    """Small and large models, long and short sequences, with and without tensor parallelism, so that host time,
    passes and collectives weigh differently from row to row."""
    for model, layers, hidden in (("small", 12, 1024), ("middle", 24, 2048), ("large", 32, 4096)):
        for seq, tp in ((512, 1), (4096, 2), (2048, 8)):
            for micro in micros:
                yield step(
                    id=f"{model}:{seq}:{tp}:{micro}",
                    model=model,
                    layers=layers,
                    hidden=hidden,
                    ffn=4 * hidden,
                    heads=hidden // 64,
                    kv_heads=hidden // 64,
                    seq_len=seq,
                    tp=tp,
                    dp=8 // tp,
                    micro_batch_seqs=micro,
                    params_b=round(12 * layers * hidden**2 / 1e9, 3),
                )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder, rows = tmp_path_factory.mktemp("steps"), []
    for row in questions():
        asked = case(row)
        truth = msgspec.structs.replace(asked.framework, **TRUE)
        run = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs := standard(truth))
        tensors = [
            sum(size for kind, size in rank.alive.items() if kind not in OVERHEAD) for rank in rank_memory(run, costs)
        ]
        rows.append(row | {"step_time_s": run.step_time_s, "peak_memory_gb": max(tensors) / 1e9})
    table(folder, "training_steps", rows)
    return folder


@pytest.fixture(scope="module")
def fit(measured):
    (found,) = framework.fit_all(measured, standard)
    return found


def test_links_are_asked_once_for_all_constants_of_a_framework_and_answer_as_they_do_alone():
    asked, work = [], Gemm(m=512, n=512, k=512)
    base = case(next(questions())).framework
    device = load_cluster("8xh100").islands[0].device

    def link(item, where):
        asked.append(item)
        return roofline_estimate(item, where)

    of = framework.sharing(lambda one: Costs(one, (link,)))
    tried = [msgspec.structs.replace(base, host_us_per_kernel=us) for us in (5.0, 50.0)]
    answers = [of(one).price(work, device) for one in tried]
    assert [of(one).framework for one in tried] == tried and asked == [work]
    assert answers == [Costs(one, (link,)).price(work, device) for one in tried] and len(asked) == 3


def test_step_times_made_with_known_constants_are_found_again(fit):
    assert (fit.framework, fit.rows, fit.groups) == ("megatron-core", 27, 3)
    # not to the last digit: constants are held to what other stacks have
    assert fit.in_sample < 0.005
    assert fit.left_out is not None
    assert fit.left_out < 0.04  # what the other two models do not pin is held to other stacks
    assert fit.constants == pytest.approx({name: TRUE[name] for name in fit.constants}, rel=0.1)


def test_peaks_made_with_known_copies_are_found_again(measured):
    (fit,) = framework_memory.fit_all(measured, standard)
    assert (fit.activation_copies, fit.allocator_slack, fit.rows) == (TRUE["activation_copies"], None, 27)
    assert fit.in_sample < 1e-6


@pytest.mark.parametrize(
    "truth",
    [
        {"activation_copies": 1.4, "allocator_slack": 0.12, "ahead_layers": 0.0},
        {"activation_copies": 1.4, "allocator_slack": framework_memory.USUAL_SLACK, "ahead_layers": 8.0},
    ],
)
def test_slack_and_the_hosts_lead_are_told_apart_by_reserved_peaks(truth, tmp_path):
    """Slack grows with everything that is held, a lead with a microbatch's tokens and not with layers beyond it."""
    rows = []
    for row in questions():
        asked = case(row | {"framework": "nanotron", "sequence_parallel": "True"})
        known = msgspec.structs.replace(asked.framework, **truth)
        run = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs := standard(known))
        first = rank_memory(run, costs)[0]
        tensors = sum(size for kind, size in first.alive.items() if kind not in OVERHEAD)
        size = tensors + sum(first.alive.get(kind, 0.0) for kind in RESERVED)
        size = max(tensors, min(size, room(asked)))  # nobody reserves more than there is
        rows.append(
            row
            | {"framework": "nanotron", "sequence_parallel": "True", "memory_kind": "reserved"}
            | {"peak_memory_gb": size / 1e9}
        )
    table(tmp_path, "training_steps", rows)
    (fit,) = framework_memory.fit_all(tmp_path, standard)
    assert {name: getattr(fit, name) for name in truth} == truth
    assert fit.in_sample < 0.002


def test_a_job_that_ran_out_of_memory_needed_more_than_there_was():
    """10 GB that no copies multiply were measured; 10 GB and twice 20, by hand, are the least that 50 cannot hold."""
    plain = framework_memory.Peak(((10e9, 0.0, 0.0, 4),), 10e9, False, 80e9, 80e9, "m")
    ended = framework_memory.Peak(((10e9, 20e9, 0.0, 4),), 50e9, True, np.inf, 50e9, "m", least=True)
    assert framework_memory._best([plain]).activation_copies == 1.0
    assert framework_memory._best([plain, ended]).activation_copies == 2.0
    roomy = msgspec.structs.replace(ended, ranks=((60e9, 20e9, 0.0, 4),))  # more than enough is no error
    assert framework_memory._best([plain, roomy]).activation_copies == 1.0


def test_a_fit_says_its_rows_and_errors_in_the_profile_and_its_file(fit, measured, tmp_path):
    found = framework_profiles.profiles([fit], list(framework_memory.fit_all(measured, standard)))
    (path,) = [p for p in framework_profiles.write(found, tmp_path) if p.stem == "megatron_core"]
    text = path.read_text()
    assert "27 of 27 measured steps of 3 shapes of models" in text
    assert "27 measured peaks" in text
    assert found["megatron-core"].step_sigma == round(1.25 * fit.left_out, 3)


def test_rows_of_one_model_say_less_than_as_many_of_others(measured):
    timed = [t for _, t in framework.timed_questions(measured, standard)]
    # nine rows of one model, three of the next, whose errors correlate by a fifth: 9 / 2.6 and 3 / 1.4 independent ones
    weights, evidence = framework._weights(timed[:12]), framework._evidence(timed[:12])
    assert evidence == pytest.approx(9 / 2.6 + 3 / 1.4)
    assert weights[:9].sum() == pytest.approx(9 / 2.6 / evidence)
    alone = [*timed[:9] * 20, timed[9]]  # 180 rows of one model say no more than five of as many models
    assert framework._evidence(alone) == pytest.approx(5 + 1, rel=0.05)


def test_constants_are_not_fitted_to_what_cannot_have_been_measured(tmp_path):
    path = table(tmp_path, "training_steps", [step()] * 9 + [step(step_time_s="0.0005")])
    with pytest.raises(MeshwrightError) as error:
        list(framework.fit_all(tmp_path, standard))
    assert [(d.code, d.place) for d in error.value.diagnostics] == [("V005", f"{path}:11")]


def test_nothing_is_fitted_to_software_that_nobody_knows(tmp_path):
    rows = [
        row | {"framework": "unknown (a script)", "step_time_s": "1.0", "peak_memory_gb": "10"} for row in questions()
    ]
    table(tmp_path, "training_steps", [row | {"memory_kind": "allocated"} for row in rows])
    assert list(framework.fit_all(tmp_path, standard)) == []
    assert list(framework_memory.fit_all(tmp_path, standard)) == []


def test_a_constant_that_no_row_feels_stays_where_other_stacks_have_it(tmp_path):
    # one device without tensor parallelism sends nothing, so nothing says what a collective costs the host
    rows = [r | {"num_gpus": "1", "dp": "1", "zero_stage": "0"} for r in questions() if r["tp"] == "1"]
    for row in rows:
        asked = case(row)
        costs = standard(msgspec.structs.replace(asked.framework, **TRUE))
        row["step_time_s"] = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs).step_time_s
    table(tmp_path, "training_steps", rows)
    (found,) = framework.fit_all(tmp_path, standard)
    before = framework._before("megatron-core", {}, standard, {})
    assert found.constants["host_us_per_collective"] == before.constants()["host_us_per_collective"]
    assert "host_us_per_collective" not in found.pinned and "elementwise_passes" in found.pinned


def test_too_few_rows_are_said_and_not_fitted(tmp_path):
    said = []
    table(tmp_path, "training_steps", [step()] * 7)
    assert list(framework.fit_all(tmp_path, standard, progress=said.append)) == []
    assert "7 timed rows are too few" in said[0]


def test_a_fit_says_its_own_source_anew_and_keeps_what_else_a_profile_says():
    old = {f.name: f for f in frameworks().values()}["deepspeed"]
    assert "the exchange share is that" in old.source
    fit = framework.FrameworkFit(
        framework="deepspeed",
        constants={"host_us_per_pass": 7.0, "elementwise_passes": 4.0},
        rows=9,
        groups=2,
        in_sample=0.1,
        left_out=None,
    )
    peaks = framework_memory.MemoryFit(
        framework="deepspeed", activation_copies=1.5, allocator_slack=None, rows=21, in_sample=0.2, left_out=0.3
    )
    new = framework_profiles.profiles([fit], [peaks])["deepspeed"]
    parts = new.source.split("; ")
    assert parts[0].startswith("host times and passes fitted to 9 of 9 measured steps of 2 shapes of models")
    assert parts[1].startswith("the exchange share is that")
    assert parts[2:] == ["memory fitted to 21 measured peaks: 20.0% mean error in sample, 30.0% with models left out"]


def test_the_error_of_steps_that_were_launches_alone_is_of_the_host():
    """Passes were not among what was fitted: a step that computes is as sure as software of such kernels is."""
    constants = {"host_us_per_kernel": 90.0}
    alone = framework.FrameworkFit(
        framework="megatron-core", constants=constants, rows=40, groups=4, in_sample=0.3, left_out=0.4
    )
    new = framework_profiles.profiles([alone], [])["megatron-core"]
    again = framework_profiles.profiles([alone], [])["megatron-core"]
    of_kind = framework_profiles.middle(framework_profiles.Evidence(kernels="fused"), without=("megatron-core",))
    assert (new.host_sigma, new.step_sigma, new.passes_sigma) == (0.5, of_kind.step_sigma, of_kind.passes_sigma)
    assert new.pinned == () and again.source.count("launches alone") == 1
    both = msgspec.structs.replace(alone, constants={**constants, "elementwise_passes": 1.5})
    assert framework_profiles.profiles([both], [])["megatron-core"].step_sigma == 0.5


def test_versions_that_share_constants_are_fitted_as_one_each_by_its_own_defaults(tmp_path):
    """Steps of both made with the same constants: only with each version's way of adding up gradients are they found
    again, and both profiles get them."""
    rows = []
    for i, row in enumerate(questions((1, 4))):
        row |= {"framework": "megatron-lm", "zero_stage": "0", "recompute": "full", "attention_kernel": "unfused"}
        row["source_ref"] = "arXiv 2104.04473"  # of before version 3
        row["sequence_parallel"] = str(i % 2 == 1)
        asked = case(row)
        assert asked.framework.name == ("megatron-lm-v3" if i % 2 else "megatron-lm")
        costs = standard(msgspec.structs.replace(asked.framework, **TRUE))
        row["step_time_s"] = simulate(asked.plan, asked.model, asked.cluster, asked.train, costs).step_time_s
        rows.append(row)
    table(tmp_path, "training_steps", rows)
    (found,) = framework.fit_all(tmp_path, standard)
    assert (found.framework, found.rows) == ("megatron-lm", 18)
    assert found.in_sample < 0.005
    new = framework_profiles.profiles([found], [])
    for name in ("megatron-lm", "megatron-lm-v3"):
        assert {c: getattr(new[name], c) for c in found.constants} == found.constants
        assert "18 of 18 measured steps of 3 shapes of models" in new[name].source
    assert new["megatron-lm"].defaults.accumulation != new["megatron-lm-v3"].defaults.accumulation


def test_versions_that_share_constants_have_the_same():
    known = frameworks()
    sharing = [f for f in known.values() if f.constants_of]
    assert sharing
    for one in sharing:
        owner = known[one.constants_of]
        fitted = [name for name in framework.CONSTANTS if getattr(one, name) != getattr(owner, name)]
        assert not fitted, one.name
        assert one.step_sigma == owner.step_sigma
