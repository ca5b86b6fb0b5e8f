"""Every model, device and cluster of the catalog gives an answer that holds together."""

import msgspec
import pytest

from meshwright import catalog, predict
from meshwright.plan import check, parse
from meshwright.spec import cluster, model
from meshwright.spec.vectors import FeatureVectors
from meshwright.spec.workload import Lora, Train

WORDS = ("tp8 pp2 zero1 mb1", "tp2 pp4 interleaved vpp2 ep2 etp1 mb1", "fsdp mb1", "tp2 cp2 ep4 etp1 fsdp full mb1")
LLAMA, H100S = model.load("llama3-8b"), cluster.load("64xh100")


def holds_together(found):
    step = found.step_time_s
    assert sum(found.attribution.values()) == pytest.approx(step)
    assert min(found.attribution.values()) >= 0
    assert found.bound_s <= step
    low, high = found.step_time_interval_s
    assert low <= step <= high
    assert all(rank.peak_bytes > 0 for rank in found.memory)
    # MFU is counted against 16 bits, which only lower precisions pass
    assert 0 < found.mfu < 1 and found.mfu <= found.hfu


def predicted(gpt, where, train, words):
    plan = parse(words).on(where.num_devices)
    return None if check(plan, gpt, where, train) else predict(gpt, where, train, plan, detail=False)


@pytest.mark.parametrize("name", catalog.names("models"))
def test_every_model_is_predicted(name):
    gpt = model.load(name)
    adapters = {"phase": "lora", "lora": Lora()}
    flow = gpt.flows[gpt.head.stream]
    length = flow.tokens or min(1024, (gpt.learned_positions and gpt.max_seq_len) or 1024)
    frames = getattr(gpt.embedding, "frames", 0)
    image = 256 if any(one.scale for one in gpt.flows) else 0
    features = gpt.embedding.channels if isinstance(gpt.embedding, FeatureVectors) else 0
    work = Train(global_batch=512, seq_len=image**2 or length, frames=frames, image=image, features=features)
    trains = [work, msgspec.structs.replace(work, **adapters)]
    answers = [predicted(gpt, H100S, train, words) for train in trains for words in WORDS]
    answers = [found for found in answers if found is not None]
    assert answers
    for found in answers:
        holds_together(found)


@pytest.mark.parametrize("device", cluster.devices(), ids=lambda d: d.name)
def test_every_device_is_predicted(device):
    where = cluster.load(f"2x{device.node.devices}x{device.name}")
    train = Train(global_batch=where.num_devices * 2, seq_len=1024)
    for words in ("fsdp mb1", "pp2 zero1 mb1"):
        holds_together(predicted(LLAMA, where, train, words))


@pytest.mark.parametrize("where", cluster.clusters(), ids=lambda c: c.name)
def test_every_cluster_is_predicted(where):
    train = Train(global_batch=where.num_devices * 2, seq_len=1024)
    holds_together(predicted(LLAMA, where, train, "fsdp mb1"))
