"""Decentralised diffusion models: experts, their router and one model of all the data learn to draw digits with as much
compute, and are judged by the noise that they find in digits that none of them has seen."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.papers.learnt import by_seed, missing
from meshwright.papers.outcome import AT_LEAST, SHOWN, Check, Figure, Outcome, at_most, by_processes

if TYPE_CHECKING:
    from meshwright.run.job import Job

EXPERTS, BATCH, STEPS, SEEDS = 4, 64, 300, 3
#: The share of the digits that none trains on, and steps of the noise that errors are the mean of.
HELD_OUT, NOISE = 0.2, 10
#: Learning rates, each the best among powers of two on seed 10.
RATES = {"one": 2**-8, "experts": 2**-7, "router": 2**-8}
#: Experts and the one model that they are against; the router, whose step computes a twentieth of theirs.
MODEL = {
    "architectures": ["DiTTransformer2DModel"],
    "num_layers": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 1,
    "out_channels": 1,
    "patch_size": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 0,
}
ROUTER = MODEL | {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 4, "num_labels": EXPERTS}
BASELINE = "one diffusion transformer of the same size, trained on all the data with as many samples in all"
ASSUMPTIONS = (
    "1,437 digits of 8 x 8 pixels, four experts on clusters of their pixels and diffusion transformers of three layers "
    "of width 32, where the paper has ImageNet, eight experts, features of DINOv2 and DiT-XL",
    "the error of the noise that is found, where the paper has FID",
)


class _Learnt:
    """The runs of one seed, and the weights that they leave in a folder."""

    def __init__(self, folder: Path, seed: int, rates: dict[str, float]):
        self.folder, self.seed, self.rates = folder, seed, rates

    def job(self, name: str, config: dict[str, Any], plan: str, **more: Any) -> Job:
        """The run called `name`, of a model under a plan."""
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
            settings=Settings(
                seed=self.seed, lr=self.rates[name], weight_decay=0.0, warmup=STEPS // 20, precision="float64"
            ),
            text="digits",
            corpus=str(data.build("digits", tokenizer.Bytes(), data.cache_folder())),
            steps=STEPS,
            quiet=True,
            judged_every=STEPS,
            held_out=HELD_OUT,
            out=str(self.folder / name),
            **more,
        )

    def train(self, name: str, config: dict[str, Any], plan: str, **more: Any) -> dict[str, Any]:
        """Train it between real processes, and write the weights of each replica's model; what came of it."""
        from meshwright.run import launch, loop
        from meshwright.run.checkpoint.format import find
        from meshwright.run.companions import Companions
        from meshwright.run.weights import export_weights

        job = self.job(name, config, plan, **more)
        said = launch.start(loop.train, job, num_ranks=job.plan.num_ranks, device="cpu")
        for replica in range(EXPERTS if name == "experts" else 1):
            where = self.folder / f"{name}-{replica}"
            export_weights(find(job.out), where, companions=Companions(config), replica=replica)
        return said

    def errors(self, actives: tuple[int, ...]) -> list[float]:
        """The errors of the one model, and of the ensemble with so many experts a sample, of its weights."""
        from meshwright.plan import parse
        from meshwright.run import data, launch
        from meshwright.run.ensemble_error import errors
        from meshwright.run.images import ImagesJob
        from meshwright.spec.denoise import Denoise

        job = self.job("one", MODEL, "dp1 mb64")
        corpus = data.load(Path(job.corpus), job.train, vocab=0, model=job.model)
        held = corpus.held_out(HELD_OUT)[1]
        said = Denoise(images=held.num_sequences - held.padding, size=64, guidance=False, dtype="fp32")
        told = {"experts": EXPERTS, "router": str(self.folder / "router-0")}
        plain = {"model": job.model, "plan": parse("dp1").on(1), "dtype": "float64"}
        folders = ",".join(str(self.folder / f"experts-{number}") for number in range(EXPERTS))
        one = ImagesJob(denoise=said, weights=str(self.folder / "one-0"), **plain)
        every = ImagesJob(denoise=msgspec.structs.replace(said, **told), weights=folders, **plain)
        jobs = [one, *(every for _ in actives)]
        return launch.start(errors, jobs, [0, *actives], held, NOISE, num_ranks=1, device="cpu")


def learnt(seed: int, rates: dict[str, float] = RATES) -> dict[str, float]:
    """What a seed came to: errors of one model, of all experts weighed by the router and of the one that weighs most,
    how often the router is right, and the bytes that experts sent each other."""
    with TemporaryDirectory(prefix="meshwright-") as folder:
        runs = _Learnt(Path(folder), seed, rates)
        runs.train("one", MODEL, f"dp1 mb{BATCH}")
        experts = runs.train("experts", MODEL, f"dp{EXPERTS} mb{BATCH // EXPERTS} sync=ddm:features=pixels")
        router = runs.train("router", ROUTER, f"dp1 mb{BATCH}", clusters=str(Path(folder) / "experts" / "clusters.npz"))
        one, every, top = runs.errors((EXPERTS, 1))
        sent = float(sum(size for *_, size in experts["exchanged"]))
        (right,) = router["accuracy"].values()
        return {"one": one, "every": every, "top": top, "right": right, "sent": sent}


def ddm() -> Outcome:
    """Four experts that never meet, against one model."""

    def carry_out() -> Outcome:
        found = [learnt(seed) for seed in range(SEEDS)]
        gains = {name: [one["one"] / one[name] for one in found] for name in ("top", "every")}
        what = {"top": "the expert that the router weighs most", "every": "all experts, weighed by the router"}
        return Outcome(
            figures=(
                at_most("bytes that experts send each other in training", max(one["sent"] for one in found), 0.0),
                *(
                    Figure(
                        f"error of one model over that of {what[name]}, with as many samples trained",
                        None,
                        fmean(some),
                        "x",
                        AT_LEAST,
                        1 + 2 * stdev(some) / sqrt(SEEDS),
                        by_seed(some, "x"),
                        headline=name == "top",
                    )
                    for name, some in gains.items()
                ),
                Figure(
                    "clusters that the router tells rightly from noisy digits",
                    None,
                    fmean(100 * one["right"] for one in found),
                    "%",
                    SHOWN,
                ),
            )
        )

    found = Outcome(baseline=BASELINE, missing=missing("ddm"), assumptions=ASSUMPTIONS)
    return by_processes(found, "training on digits", carry_out)


CHECKS = {"ddm": Check(ddm)}
