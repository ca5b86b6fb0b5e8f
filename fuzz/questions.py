"""The campaign of predictions: legal questions of all models, devices and facets, and what must hold of any answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

from tests.lower.test_step_bounds import with_links
from tests.random_plans import MODELS

from fuzz.readers import Defect
from meshwright import catalog, plan, schedules
from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.cost import standard_on
from meshwright.errors import MeshwrightError
from meshwright.plan.facets.memory import ATTENTION_KERNELS, GATHERED, LOSS_KERNELS, RECOMPUTE_MODES
from meshwright.plan.facets.sequence import CP_ALGORITHMS
from meshwright.spec import cluster, model, workload
from meshwright.spec.workload import DTYPE_BYTES

SMALL = {small.name + " (small)": small for small in MODELS}
TRIES = 2_000
#: Words of a plan besides its axes: one of each line may be said.
WORDS = (
    ("zero1", "zero2", "fsdp", "hsdp2", "zero1 shard2"),
    ("sp", "nosp"),
    RECOMPUTE_MODES,
    ("recompute_layers=1",),
    CP_ALGORITHMS,
    ("ulysses2",),
    ATTENTION_KERNELS,
    ("bf16", "fp16", "fp32", "fp8", "fp8_block", "mxfp8"),
    ("grads=bf16", "grads=fp32"),
    ("master=none", "master=fp32", "master=bf16"),
    ("moments=bf16", "moments=fp8"),
    ("params=fp8",),
    tuple(f"loss={kernel}" for kernel in LOSS_KERNELS),
    tuple(f"gathered={what}" for what in GATHERED),
    ("imbalance=1.3",),
    ("overlap=none", "overlap=dp", "overlap=dp,tp,pp", "overlap=tp", "overlap=pp", "overlap=dp,pp,ep"),
    ("order=tp-cp-pp-dp", "order=tp-pp-dp-cp"),
    ("hpz2", "scopes=2,4", "shard2", "hold=2,1", "dtypes=fp32,bf16"),
    (
        "offload=optimizer",
        "offload=optimizer@0.5+activations",
        "offload=activations@0.3",
        "offload=params+grads+optimizer",
    ),
    ("prefetch=1", "prefetch=7", "tiles=4", "update=delayed"),
    (
        "sync=local:h=4",
        "sync=diloco:h=4",
        "sync=int8",
        "sync=powersgd:rank=2",
        "sync=gossip",
        "sync=qsdp:near=2",
        "sync=mhd:public=0.2,heads=2",
        "sync=admm",
        "sync=dadao",
        "sync=fedavg:h=2",
        "sync=demo",
        "sync=streaming-diloco:h=8",
    ),
    ("gather=after", "gather=ahead", "recompute_portions=2", "loss_portions=64"),
    ("capacity=1.25", "hot=2", "ep_inner=2", "dispatch=gathered", "duplicates=dropped"),
    ("overlap=tp:domino", "overlap=tp:ladder", "overlap=tp:triggered", "yield_mb=4"),
    ("fill_layers=1", "stages=balanced", "passes=swarm", "compile=yes", "brought=kept"),
    ("groups=flexsp", "groups=bytescale", "groups=zeppelin", "scans=handed"),
)
WORKLOAD = (
    ("tokens=1t", "tokens=300b"),
    ("dropout=yes",),
    ("causal=no",),
    ("optimizer=adamw", "optimizer=sgd", "optimizer=adafactor", "optimizer=lion", "optimizer=muon"),
    ("phase=lora,rank=8", "phase=lora,rank=16,targets=all"),
    ("lengths=64:0.5;128:0.5", "lengths=100:1;17:3"),
    ("dtype=fp32", "dtype=fp16", "dtype=fp8"),
)
#: Refusals that need the sizes of what is lowered: a window of moved layers that has no room.
SIZED = {"P054"}
#: The numbers of an answer that may be negative.
SIGNED = {"headroom_bytes", "change"}


class Questions:
    """Legal questions; an example is what the command line is told, and how much better links are."""

    target, chunk = 20_000, 2_000

    def example(self, rng: Random) -> dict[str, Any]:
        for _ in range(TRIES):
            asked = _drawn(rng)
            try:
                parts = read(asked)
            except MeshwrightError:
                continue
            if not plan.check(*parts):
                return asked | {"faster": rng.choice((0, 0, 0, 1.5, 4.0, 30.0)), "detail": rng.random() < 0.3}
        raise Defect(f"no legal question in {TRIES}")

    def look(self, example: dict[str, Any]) -> str:
        parts = read(example)
        where, net, train = parts[2], parts[1], parts[3]
        try:
            answer = predict(net, where, train, parts[0], costs=standard_on(where, ""), detail=example["detail"])
        except MeshwrightError as error:
            if {d.code for d in error.diagnostics} <= SIZED:
                return "refused"
            raise
        judge(answer)
        # where messages are overlapped, later ones slow kernels that earlier ones would not
        steady = not where.shares_ports and answer.plan.overlap.how != "ladder"
        if example["faster"] and steady and not any(i.device.cores for i in where.islands):
            linked = with_links(where, bandwidth=example["faster"])
            faster = predict(net, linked, train, parts[0], costs=standard_on(linked, ""), detail=False)
            if faster.step_time_s > answer.step_time_s * (1 + 1e-9):
                raise Defect(f"better links, slower step: {answer.step_time_s} to {faster.step_time_s}")
        return "fits" if answer.fits else "does not fit"

    def smaller(self, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        words = example["plan"].split()
        for i in range(len(words)):
            yield from _legal(example | {"plan": " ".join(words[:i] + words[i + 1 :])})
        said = example["train"].split(",")
        for i in range(2, len(said)):
            yield from _legal(example | {"train": ",".join(said[:i] + said[i + 1 :])})
        if example["faster"]:
            yield example | {"faster": 0}
        if example["detail"]:
            yield example | {"detail": False}


def read(asked: dict[str, Any]) -> tuple:
    """Plan, model, cluster and workload of an example, as `check` takes them.

    Raises:
        MeshwrightError: what is wrong with them.
    """
    where = _cluster(asked["on"])
    chosen = plan.parse(asked["plan"]).on(where.num_devices)
    return chosen, _model(asked["model"]), where, workload.parse(asked["train"])


def judge(answer: Prediction) -> None:
    """Check that a prediction keeps what must hold of any, such as causes that add up to the step.

    Raises:
        Defect: it does not.
    """
    figures(answer.to_json(), "")
    low, high = answer.step_time_interval_s
    held = {
        "the step time is in its interval": 0 < low <= answer.step_time_s <= high,
        "a step takes at least the roofline's time": 0 < answer.bound_s <= answer.step_time_s,
        # against the peak at 16 bits, which products at 8 and at 4 bits may exceed
        "utilisation is a share": 0 < answer.mfu <= answer.hfu * (1 + 1e-9) and (answer.hfu <= 1 or _narrow(answer)),
        "the bubble is a share": 0 <= answer.bubble < 1,
        "the causes add up to the step": math.isclose(
            sum(answer.attribution.values()), answer.step_time_s, rel_tol=1e-6
        ),
        "every rank class has memory": all(rank.peak_bytes > 0 for rank in answer.memory) and answer.memory,
        "tokens are counted": math.isclose(
            answer.tokens_per_s_per_gpu * answer.num_devices * answer.step_time_s,
            answer.train.tokens_per_step,
            rel_tol=1e-9,
        ),
        "every layer is in a stage": sum(map(sum, answer.stage_layers)) >= answer.model.num_layers,
        "tasks end after they start": (answer.timeline.end_s >= answer.timeline.start_s).all(),
    }
    broken = [claim for claim, holds in held.items() if not holds]
    if broken:
        raise Defect("; ".join(broken))


def _narrow(answer: Prediction) -> bool:
    return DTYPE_BYTES[answer.plan.precision.compute or answer.train.dtype] < 2


def figures(value: Any, place: str) -> None:
    """No number is NaN, infinite or, where that means nothing, negative."""
    if isinstance(value, dict):
        for key, inner in value.items():
            figures(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            figures(inner, place)
    elif isinstance(value, float | int):
        if not math.isfinite(value):
            raise Defect(f"{place} is {value}")
        if value < 0 and not SIGNED & set(place.split(".")):
            raise Defect(f"{place} is negative: {value}")


@cache
def _model(name: str) -> model.Model:
    return SMALL[name] if name in SMALL else model.load(name)


@cache
def _cluster(name: str) -> cluster.Cluster:
    return cluster.load(name)


def _legal(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        if not plan.check(*read(asked)):
            yield asked
    except MeshwrightError:
        return


def _drawn(rng: Random) -> dict[str, Any]:
    """Any question, mostly legal."""
    tp, pp, cp = (rng.choice(sizes) for sizes in ((1, 1, 2, 4, 8), (1, 1, 2, 3, 4, 8), (1, 1, 1, 2, 4)))
    dp, mb = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 1, 2, 4))
    words = [f"tp{tp}", f"pp{pp}", f"dp{dp}", f"mb{mb}"] + ([f"cp{cp}"] if cp > 1 else [])
    name = rng.choice((*SMALL, *SMALL, *SMALL, *SMALL, *catalog.names("models")))
    name = rng.choice(tuple(SMALL)) if rng.random() < 0.3 else name
    if _model(name).mixtures:
        words += [f"ep{rng.choice((1, 2, 4, 8))}"] if rng.random() < 0.7 else []
        words += ["etp1"] if rng.random() < 0.7 else []
    if pp > 1 and rng.random() < 0.7:
        family = schedules.get(rng.choice((*schedules.families(), "2bp:1f1b")))
        vpp = rng.choice(family.vpps or (1, 2, 3))
        words += [family.name] + ([f"vpp{vpp}"] if vpp > 1 else [])
    words += [rng.choice(line) for line in WORDS if rng.random() < 0.12]
    seq = rng.choice((128, 128, 512, 2048, 4096))
    train = [f"batch={dp * mb * pp * rng.choice((1, 2, 4))},seq={seq}"]
    train += [rng.choice(line) for line in WORKLOAD if rng.random() < 0.1]
    return {"model": name, "on": _where(rng, tp * pp * cp * dp), "train": ",".join(train), "plan": " ".join(words)}


def _where(rng: Random, count: int) -> str:
    device, other = rng.choice(catalog.names("devices")), rng.choice(catalog.names("devices"))
    match rng.randrange(6):
        case 0 if count % 2 == 0:
            return f"{count // 2}x{device} + {count // 2}x{other}"
        case 1 if count % 4 == 0:
            return f"{count // 4}x4x{device}"
        case 2:
            return f"{count}x1x{device}"
        case _:
            return f"{count}x{device}"
