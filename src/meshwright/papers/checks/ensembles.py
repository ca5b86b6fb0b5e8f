"""Decentralised diffusion models between real processes: what experts send each other, and images that an ensemble of
them makes on ranks of their own beside those that one rank makes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from meshwright.papers.learnt import missing
from meshwright.papers.outcome import AT_MOST, Check, Figure, Outcome, at_most, by_processes
from meshwright.papers.trained import TOLERANCE

if TYPE_CHECKING:
    from meshwright.run.job import Job

#: Experts, samples of a step of all of them, and steps: enough that no two of them are alike.
EXPERTS, BATCH, STEPS = 4, 16, 4
#: Images that are made, and in how many steps.
IMAGES, DENOISING = 4, 10
#: An expert of digits; the router is one with classes.
MODEL = {
    "architectures": ["DiTTransformer2DModel"],
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 1,
    "out_channels": 1,
    "patch_size": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 0,
}
ROUTER = MODEL | {"num_layers": 1, "num_labels": EXPERTS}


def _job(folder: Path, name: str, config: dict[str, Any], plan: str, **more: Any) -> Job:
    """A run on digits, called `name`, whose checkpoint goes into a folder of that name."""
    from meshwright.plan import parse
    from meshwright.run import data
    from meshwright.run.data import tokenizer
    from meshwright.run.job import Job
    from meshwright.run.settings import Settings
    from meshwright.spec.model import from_config
    from meshwright.spec.workload import parse as parse_train

    placed = parse(plan)
    return Job(
        model=from_config(config, name=name),
        plan=placed.on(placed.layout.num_ranks),
        train=parse_train(f"batch={BATCH},seq=16,dtype=fp32"),
        settings=Settings(lr=0.01, precision="float64"),
        text="digits",
        corpus=str(data.build("digits", tokenizer.Bytes(), data.cache_folder())),
        steps=STEPS,
        quiet=True,
        out=str(folder / name),
        **more,
    )


def _made(folder: Path, plan: str) -> list[Any]:
    """Images of the ensemble whose weights are in a folder, under a plan, as nested lists."""
    from meshwright.plan import parse
    from meshwright.run import launch
    from meshwright.run.images import ImagesJob, make
    from meshwright.spec.denoise import Denoise
    from meshwright.spec.model import from_config

    placed = parse(plan)
    router = str(folder / "router-0")
    said = {"images": IMAGES, "size": 64, "steps": DENOISING, "guidance": False, "dtype": "fp32"}
    job = ImagesJob(
        model=from_config(MODEL, name="experts"),
        plan=placed.on(placed.layout.num_ranks),
        denoise=Denoise(experts=EXPERTS, router=router, **said),
        weights=",".join(str(folder / f"experts-{number}") for number in range(EXPERTS)),
        dtype="float64",
    )
    return launch.start(make, job, num_ranks=placed.layout.num_ranks, device="cpu")["images"]


def _between_processes() -> Outcome:
    import numpy as np

    from meshwright.run import launch, loop
    from meshwright.run.checkpoint.format import find
    from meshwright.run.companions import Companions
    from meshwright.run.weights import export_weights

    with TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        plan = f"dp{EXPERTS} mb{BATCH // EXPERTS} sync=ddm:features=pixels"
        experts = _job(folder, "experts", MODEL, plan)
        said = launch.start(loop.train, experts, num_ranks=EXPERTS, device="cpu")
        told = {"clusters": str(folder / "experts" / "clusters.npz")}
        router = _job(folder, "router", ROUTER, f"dp1 mb{BATCH}", **told)
        launch.start(loop.train, router, num_ranks=1, device="cpu")
        for job, config, count in ((experts, MODEL, EXPERTS), (router, ROUTER, 1)):
            for number in range(count):
                where = folder / f"{job.model.name}-{number}"
                export_weights(find(job.out), where, companions=Companions(config), replica=number)
        alone, apart = (np.array(_made(folder, plan)) for plan in ("dp1", f"dp{EXPERTS}"))
    sent = sum(size for *_, size in said["exchanged"])
    furthest = float(np.abs(apart - alone).max() / np.abs(alone).max())
    what = f"images of {EXPERTS} experts on {EXPERTS} processes, furthest from those of one"
    return Outcome(
        figures=(
            at_most(f"bytes that {EXPERTS} experts on {EXPERTS} processes send each other in training", sent, 0.0),
            Figure(what, None, furthest, "", AT_MOST, TOLERANCE),
        )
    )


def ddm() -> Outcome:
    """Experts that never meet, and the images that they make together."""
    found = Outcome(
        baseline="one process that has all experts",
        missing=missing("ddm"),
        assumptions=(f"{STEPS} steps on digits of 8 x 8 pixels, in float64",),
    )
    return by_processes(found, "training on digits", _between_processes)


CHECKS = {"ddm": Check(ddm)}
