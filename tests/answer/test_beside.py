"""Predictions of jobs beside requests on the same devices."""

import pytest

import meshwright as mw
from meshwright.answer.beside import JOBS_APART, JobOnDevice
from meshwright.answer.serving import predict_serving
from meshwright.cost.part import DevicePart, part_of
from meshwright.errors import MeshwrightError
from meshwright.spec.beside import BatchJob
from meshwright.spec.serve import parse

JOB = "beside=bert-large:batch=8:seq=512"
WORDS = f"rate=2,prompt=512,output=32,requests=40,{JOB}"


def asked(words, plan="tp1", on="1xh100"):
    question = mw.load_model("llama3-8b"), mw.load_cluster(on), parse(words), mw.parse_plan(plan)
    return predict_serving(*question, detail=False)


@pytest.fixture(scope="module")
def shared():
    return asked(WORDS + ",sharing=fixed-share:0.5")


def test_requests_are_slower_beside_a_job_and_the_answer_says_what_they_have_without(shared):
    (job,) = shared.beside
    alone = asked(WORDS.replace(f",{JOB}", ""))
    assert shared.without.tpot_s.mean == pytest.approx(alone.metrics.tpot_s.mean, rel=1e-6)
    assert job.slowdown > 1.3 and shared.metrics.tpot_s.mean > 1.3 * alone.metrics.tpot_s.mean
    assert JOBS_APART in shared.warnings and JOBS_APART not in alone.warnings
    assert job.busy == 1.0 and job.share == pytest.approx(0.5)
    low, high = job.samples_interval
    assert low < job.samples_per_s < high
    # what the job holds is no cache: its memory in blocks of 16 tokens of 128 KiB
    step = JobOnDevice(BatchJob("bert-large", 8, 512), shared.cluster).step
    assert alone.kv_blocks - shared.kv_blocks == pytest.approx(step.peak_memory_bytes / (16 * 131_072), abs=1)


def test_the_dynamic_share_keeps_iterations_near_the_limit(shared):
    (job,) = asked(WORDS).beside
    assert 1.0 < job.slowdown < 1.25 < shared.beside[0].slowdown and 0 < job.speed < shared.beside[0].speed


def test_a_job_that_waits_for_operations_has_no_more_than_its_multiprocessors():
    cluster = mw.load_cluster("1xh100")
    device = cluster.islands[0].device
    half = part_of(device, DevicePart(sms=0.5))
    assert half.num_sms == 66 and half.peak_flops["bf16"] == device.peak_flops["bf16"] / 2
    assert half.memory_gb_s == device.memory_gb_s  # half of the ports to the L2 carry more than the memory gives
    # 13 SMs of 64 bytes a clock at 1.83 GHz
    assert part_of(device, DevicePart(sms=0.1)).memory_gb_s == pytest.approx(13 * 64 * 1.83)
    job = JobOnDevice(BatchJob("bert-large", 8, 512), cluster)
    at_once = JobOnDevice(BatchJob("bert-large", 8, 512, mb=8), cluster)  # an eighth as many kernels to start
    assert at_once.step.step_time_s < job.step.step_time_s / 4
    assert at_once.step.peak_memory_bytes > job.step.peak_memory_bytes
    assert job.speed(0.5, 0.0) > job.speed(0.5, 1.0) > 0.5 * job.speed(1.0, 1.0)


def test_each_replica_has_the_job_of_the_heaviest_matching():
    few = WORDS.replace("requests=40", "requests=10") + ",sharing=fixed-share:0.3"
    (first, second) = asked(few.replace(JOB, JOB + "+gpt2:batch=1:seq=128"), "dp2", "2xh100").beside
    assert {first.job, second.job} == {"bert-large:batch=8:seq=512", "gpt2:batch=1:seq=128"}
    lone, none = sorted(asked(few, "dp2", "2xh100").beside, key=lambda one: not one.job)
    assert lone.job and not none.job and none.slowdown == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        (",borrow=yes,sharing=fixed-share:1.5", ["W014", "W014"]),
        ("+nobody:batch=1:seq=8", ["M006"]),
        ("+gpt2:batch=4:seq=8:mb=3", ["P014"]),
        (",power=polca", ["W014"]),
    ],
)
def test_what_cannot_be_shared_is_said_at_once(more, codes):
    with pytest.raises(MeshwrightError) as raised:
        asked(WORDS + more, "dp2", "2xh100")
    assert [one.code for one in raised.value.diagnostics] == codes


def test_words_of_a_job_read_back():
    words = "rate=1.0,prompt=512,output=64,beside=gpt2:batch=4:seq=128:dtype=fp16:mb=2+bert-large:batch=8:seq=512"
    assert parse(parse(words).text()) == parse(words)
    options = ("batch=0:seq=1", "batch=1:seq=1:mode=x", "batch=1:seq=1:mb=0", "batch=1:seq=1:dtype=int8")
    for wrong in ("beside=gpt2", "sharing=muxflow", *(f"beside=gpt2:{said}" for said in options)):
        with pytest.raises(MeshwrightError):
            parse(f"rate=1,prompt=512,output=64,{wrong}")


def test_several_pools_do_not_share():
    with pytest.raises(MeshwrightError, match="several pools"):
        asked(WORDS, "prefill=[tp1 on=0:1] + decode=[tp1 on=1:2] prefill->decode:kv", "2xh100")
