"""The denoising steps of a diffusion transformer on real ranks: images from noise, by a plan that waits for its
exchanges or by one that does not, and how far the images of the latter are from those of the former.

A step passes all rows (every image once, and with guidance once more without its class) and moves the images towards
what the noise is found to be: DDIM without noise of its own (Song et al., 2010.02502), over as many of the 1,000 steps
of the noise as there are, evenly. Ranks of ``cp`` share patches of an image (:mod:`.patch_core`), those of ``dp`` the
rows. Stages of a pipeline hand hidden states on within a step; under ``stale=stages`` each goes on from what the one
before it has left in the step before, with what that was told of its step and class (AsyncDiff, Chen et al.,
2406.06911). Of an ensemble the ranks of ``dp`` have experts in place of rows (:mod:`.ensemble`).
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright.lower.partition import stage_layers
from meshwright.plan import Plan
from meshwright.plan.facets.denoising import NONE, PATCHES, STAGES, Denoising
from meshwright.run import mesh, noise
from meshwright.run.attention import local_positions
from meshwright.run.collect import all_gather
from meshwright.run.dims import switched
from meshwright.run.ensemble import RankExperts
from meshwright.run.model import Stage
from meshwright.run.parameters import Maker
from meshwright.run.parts import Pass, Shared
from meshwright.run.patch_core import PatchCore
from meshwright.run.pieces import alike
from meshwright.run.settings import DTYPES
from meshwright.run.weights import load_weights
from meshwright.run.world import World
from meshwright.spec import naming
from meshwright.spec.denoise import Denoise
from meshwright.spec.diffusion import NOISE_STEPS
from meshwright.spec.items import SPACE, TIME
from meshwright.spec.model import Model

#: How much further than without its class an image goes towards it: that of DiT's samples (2212.09748, figure 1).
GUIDANCE = 4.0


class ImagesJob(msgspec.Struct, frozen=True, kw_only=True):
    """Images to be made: by a ``plan`` with its replicas said, from ``weights``, of an ensemble those of each expert
    behind a comma; ``dtype`` is computed in."""

    model: Model
    plan: Plan
    denoise: Denoise
    weights: str
    dtype: str
    seed: int = 0


class Made(NamedTuple):
    """Images that were made: this rank's ``patches`` [images, s, channels, side, side] behind every step, or behind the
    last where none are compared, [] where the rank has none; seconds of all steps together, and the most bytes that a
    rank sent to others' attention, or brought into the sum over experts, in a step."""

    patches: list[torch.Tensor]
    seconds: float
    sent_bytes: float


def make(world: World, job: ImagesJob, keep: bool = True) -> dict[str, Any]:
    """Make the images on the rank that `world` is, and where the plan is approximate those of its exact form besides.

    Returns:
        As plain values: ``images`` (whole samples in fp32, nested lists) where they are to be kept, ``seconds`` of the
        steps, ``sent_bytes`` of a step, and where the plan is approximate ``exact_seconds`` and by step ``apart``: the
        length of the difference from what the exact form has made, over the length of that.

    Raises:
        MeshwrightError: H006 and H007 for the weights, on every rank alike.
    """
    place = mesh.build(job.plan, device=world.device)
    rank = ImageRank(job, place)
    with torch.no_grad():
        rank.steps(Denoising(), 1)  # what is made first is loaded first
        said = job.plan.denoising
        exact = rank.steps(Denoising(), job.denoise.steps) if rank.compares else None
        if rank.experts is not None:
            rank.experts.active = job.denoise.active or job.denoise.experts
        found = rank.steps(said, job.denoise.steps)
    out: dict[str, Any] = {"seconds": found.seconds, "sent_bytes": found.sent_bytes}
    if exact is not None:
        out |= {"exact_seconds": exact.seconds, "exact_sent_bytes": exact.sent_bytes}
        out["apart"] = rank.apart(found.patches, exact.patches)
    if keep:
        out["images"] = rank.whole(found.patches)
    return out


class ImageRank:
    """A rank of a plan that makes images: its stage, and which patches of which images are its own."""

    def __init__(self, job: ImagesJob, place: mesh.ProcessMesh):
        self.job, self.mesh, model, plan = job, place, job.model, job.plan
        self.train, self.kind = job.denoise.train(model), DTYPES[job.dtype]
        shared = Shared(
            model=model,
            plan=plan,
            mesh=place,
            make=Maker(place.device, self.kind),
            names=naming.names(model),
            dropout=0.0,
            seed=job.seed,
            causal=False,
            train=self.train,
        )
        self.shared, pp = shared, place["pp"]
        layers = stage_layers(plan, model)
        self.first, self.last = pp.index == 0, pp.index == pp.size - 1
        mine = layers[pp.index]
        if job.denoise.experts == 1:
            self.stage = Stage(shared, pp.index, mine, ("none",) * len(mine), first=self.first, last=self.last)
            load_weights(job.weights, alike([self.stage], place), model, place["world"], device=place.device)
        cp, algorithm = place["cp"], plan.sequence.algorithm
        at = local_positions(self.train.seq_len, cp.size, cp.index, algorithm, False, ulysses=plan.sequence.ulysses)
        self.tokens = at.to(place.device)
        gathers = cp.size > 1 and algorithm == "allgather" and plan.head_swap == 1 and not self.train.frames
        self.core = PatchCore(cp, 0.0) if gathers else None
        #: Whether what is made is compared step by step.
        self.compares = not plan.denoising.exact or not job.denoise.whole
        #: Those of an ensemble that are here, in place of a stage.
        self.experts = RankExperts(self, tuple(job.weights.split(","))) if job.denoise.experts > 1 else None
        self._rows()

    def _rows(self) -> None:
        """Which images this rank's replica moves, and of which rows it finds the noise."""
        said, dp, spec = self.job.denoise, self.mesh["dp"], self.job.model.embedding
        at, of = (dp.index, dp.size) if self.experts is None else (0, 1)  # of an ensemble every replica has all rows
        count, each = said.images, said.rows // of
        rows = torch.arange(at * each, (at + 1) * each)
        #: Replicas with rows of one image tell each other what they have found.
        self.joined = said.guidance and of > 1
        self.images = torch.arange(count) if said.guidance else rows
        none = max(0, spec.classes - 1)
        told = torch.where(rows < count, rows % max(1, none), none) if spec.classes else torch.zeros_like(rows)
        self.told = told.to(self.mesh.device)
        self.which = (rows % count if said.guidance else rows - rows[0]).to(self.mesh.device)

    def _begun(self) -> torch.Tensor:
        """The patches of noise that images begin with: of an image the same under every plan."""
        spec, said = self.job.model.embedding, self.job.denoise
        side = round((self.train.seq_len // max(1, self.train.frames)) ** 0.5) * spec.patch
        shape = (len(self.images), *((said.frames,) if said.frames else ()), spec.channels, side, side)
        found = noise.drawn(shape, self.images, self.job.seed, 0, said.images).noise
        kind = torch.promote_types(self.kind, torch.float32)
        return noise.patches(found.to(self.mesh.device, kind), spec.patch)[:, self.tokens]

    def steps(self, how: Denoising, count: int) -> Made:
        """Take so many of the steps, the first `warmup` of which wait for every exchange whatever `how` says."""
        said, every = self.job.denoise, self.schedule()
        if self.core is not None:
            self.core.halo, self.core.stale, self.core.sent_bytes = how.halo, False, 0
        line = StageLine(self)
        x = self._begun() if self.first else None
        made, most = [], 0
        meet(self.mesh)
        begun = time.perf_counter()
        for number in range(count):
            waits = how.stale == NONE or number < said.warmup or number == 0
            before = self.core.sent_bytes if self.core is not None else 0
            if self.core is not None:
                self.core.stale = how.stale == PATCHES and not waits
            late = how.stale == STAGES and not waits
            if self.experts is not None:
                found, most = self.experts.noise(x, every[number]), max(most, self.experts.sent_bytes)
            else:
                found = line.step(x, every[number], late=late, last=number + 1 == count)
                found = self._joined(found) if self.first else None
            if self.first:
                x = self._moved(x, found, every[number], every[number + 1])
                made = [*made, x] if self.compares else [x]
            most = max(most, (self.core.sent_bytes if self.core is not None else 0) - before)
        if self.core is not None:
            self.core.finish()
        line.finish()
        meet(self.mesh)
        seconds = torch.tensor([time.perf_counter() - begun, float(most)], dtype=torch.float64, device=self.mesh.device)
        if not self.mesh["world"].alone:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.mesh["world"].handle)
        return Made(made, *seconds.tolist())

    def schedule(self) -> list[int]:
        """The steps of the noise that are taken, from the noisiest, and -1 for none left."""
        count = self.job.denoise.steps
        return [*reversed(range(0, NOISE_STEPS // count * count, NOISE_STEPS // count)), -1]

    def entered(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Hidden states of this replica's rows of the images `x`, in a step of the noise."""
        steps = torch.full((len(self.told),), step, device=self.mesh.device)
        return self.stage.embedding.entered(x[self.which], steps, self.told, self.tokens)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states behind this rank's layers; behind the last of all the noise that is found, as patches [rows, s,
        channels, side, side] of this rank's tokens."""
        return self.found(self.stage, x) if self.last else self.hidden(self.stage, x, self.tokens)

    def hidden(self, stage: Stage, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states of these tokens behind a stage's layers."""
        empty = torch.empty(0, device=self.mesh.device)
        p = Pass(empty, empty, tokens, None, None, empty, 1.0, step=-1, core=self.core)
        for layer in stage.layers:
            x = layer(x, p)
        return x

    def found(self, stage: Stage, x: torch.Tensor) -> torch.Tensor:
        """The noise that a stage with a head finds behind hidden states, as patches of this rank's tokens."""
        found = stage.head.found(self.hidden(stage, x, self.tokens))
        if self.shared.sp:
            found = all_gather(found, self.mesh["tp"])
        model = self.job.model
        if self.shared.plan.sequence.switches and model.block(model.num_layers - 1).attention.over == TIME:
            found = switched(found, SPACE, self.shared)
        return noise.from_found(found, model.head, model.embedding.channels).transpose(0, 1)

    def _joined(self, found: torch.Tensor) -> torch.Tensor:
        """The noise of each image that this rank moves."""
        found = found.to(torch.promote_types(self.kind, torch.float32))
        if self.joined:
            found = all_gather(found.contiguous(), self.mesh["dp"], queue="dp")
        return self.guided(found)

    def guided(self, found: torch.Tensor) -> torch.Tensor:
        """The noise of each image, of that of all rows: with guidance that of its class, further than that of none."""
        found = found.to(torch.promote_types(self.kind, torch.float32))
        if not self.job.denoise.guidance:
            return found
        told, untold = found.chunk(2)
        return untold + GUIDANCE * (told - untold)

    @staticmethod
    def _moved(x: torch.Tensor, found: torch.Tensor, step: int, then: int) -> torch.Tensor:
        """The images with the noise of the step `then` in place of that of `step` (equation 12 of 2010.02502)."""
        kept = noise.kept()
        now, behind = kept[step].item(), kept[then].item() if then >= 0 else 1.0
        clean = (x - (1 - now) ** 0.5 * found) / now**0.5
        return behind**0.5 * clean + (1 - behind) ** 0.5 * found

    def apart(self, found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
        """By step, the relative difference of images over all ranks; collective."""
        count, device = self.job.denoise.steps, self.mesh.device
        sums = torch.zeros(2, count, dtype=torch.float64, device=device)
        for number, (a, b) in enumerate(zip(found, exact)):
            sums[0, number], sums[1, number] = (a - b).double().square().sum(), b.double().square().sum()
        if not self.mesh["world"].alone:
            dist.all_reduce(sums, group=self.mesh["world"].handle)
        return (sums[0] / sums[1]).sqrt().tolist()

    def whole(self, made: list[torch.Tensor]) -> list[Any]:
        """All images as they are at the end, as nested lists; collective."""
        said, spec, device = self.job.denoise, self.job.model.embedding, self.mesh.device
        count = said.images
        sums = torch.zeros(count, self.train.seq_len, spec.inner + 1, dtype=torch.float64, device=device)
        if made and self.mesh["tp"].index == 0:
            index = self.images.to(device)[:, None], self.tokens[None]
            sums[*index, :-1] = made[-1].double().flatten(2)
            sums[*index, -1] = 1.0  # how many ranks have it
        if not self.mesh["world"].alone:
            dist.all_reduce(sums, group=self.mesh["world"].handle)
        cut = (sums[..., :-1] / sums[..., -1:]).unflatten(-1, (spec.channels, spec.patch, spec.patch))
        return noise.whole(cut, spec.patch, said.frames).tolist()


class StageLine:
    """The messages of a rank with the stages before and behind its own."""

    def __init__(self, rank: ImageRank):
        self.rank, self.pp = rank, rank.mesh["pp"]
        #: What flows onward and what comes back never queue behind each other.
        self.onward, self.back = rank.mesh["pp_forward_up"].handle, rank.mesh["pp_backward_down"].handle
        #: What the stage before has left in the step before.
        self.held: torch.Tensor | None = None
        self.left: list[tuple[dist.Work, torch.Tensor]] = []
        #: Whether the message of the step before is still to be received.
        self.open = False

    def step(self, x: torch.Tensor | None, step: int, *, late: bool, last: bool) -> torch.Tensor | None:
        """Pass this rank's stage once and return the noise that is found, on the first rank; None on others. `late`:
        what the stage before has left in the step before is gone on with."""
        rank, pp = self.rank, self.pp
        if rank.first:
            h = rank.entered(x, step)
        else:
            h = self._arrived(late, last)
        out = rank.through(h)
        if pp.alone:
            return out
        if not rank.last:
            if not (late and last):  # else nobody reads it
                self._send(out, pp.index + 1, self.onward)
        else:
            self._send(out, 0, self.back)
        return self._found() if rank.first else None

    def _arrived(self, late: bool, last: bool) -> torch.Tensor:
        if not late:
            self.held = self._receive()
            return self.held
        if self.open:
            self.held = self._receive()
        self.open = not last
        return self.held

    def _hidden(self) -> torch.Tensor:
        rank = self.rank
        length = len(rank.tokens) // (rank.mesh["tp"].size if rank.shared.sp else 1)
        sizes = (1 + length, len(rank.told), rank.job.model.hidden)
        return torch.empty(sizes, dtype=rank.kind, device=rank.mesh.device)

    def _receive(self) -> torch.Tensor:
        out = self._hidden()
        dist.recv(out, self.pp.ranks[self.pp.index - 1], group=self.onward)
        return out

    def _found(self) -> torch.Tensor:
        rank, spec = self.rank, self.rank.job.model.embedding
        sizes = (len(rank.told), len(rank.tokens), spec.channels, spec.patch, spec.patch)
        out = torch.empty(sizes, dtype=rank.kind, device=rank.mesh.device)
        dist.recv(out, self.pp.ranks[-1], group=self.back)
        return out

    def _send(self, out: torch.Tensor, to: int, group: dist.ProcessGroup) -> None:
        out = out.contiguous()
        self.left.append((dist.isend(out, self.pp.ranks[to], group=group), out))
        while len(self.left) > 2:
            self.left.pop(0)[0].wait()

    def finish(self) -> None:
        """Wait for what is still on its way."""
        for work, _ in self.left:
            work.wait()
        self.left.clear()


def meet(place: mesh.ProcessMesh) -> None:
    """Wait for all ranks, and for what a device is still to do."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    if not place["world"].alone:
        dist.barrier(group=place["world"].handle)
