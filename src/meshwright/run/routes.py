"""Sequences routed to paths by their first tokens, and samples to experts by features, before training begins.

The feature of a sequence is the mean of the hidden states behind the last layer over its prefix, in the model that the
run begins with; k-means over the features of a sample gives a centre for each path, and a sequence is of the nearest
(Douillard et al. 2403.10616, sections 2.4.1 and 7.2). Where predictions are mixed, a linear classifier of the clusters
by the same features is the router (McAllister et al. 2501.05450 train one by cross-entropy). Nothing of a prefix is
learnt or judged. Labelled samples, which diffusion models learn, are routed by pixels, by the mean of such hidden
states of a sample without noise, or by a user's own features or clusters, and judged by the expert of their cluster:
there the router, which sees noisy samples, is a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import ceil

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from meshwright.assign.kmeans import centres, classifier, nearest, ranked, shares
from meshwright.errors import MeshwrightError
from meshwright.run import noise
from meshwright.run.data import LabelledSamples
from meshwright.run.data.clustered import ClusterFile
from meshwright.run.data.corpus import Batch, Corpus, judged_sequences, sequences
from meshwright.run.data.mixture import MixedText
from meshwright.run.data.rows import NOTHING
from meshwright.run.fsdp import let_go
from meshwright.run.parts import Pass
from meshwright.run.pieces import JUDGED, ROUTE, Parameter, Part, TensorPiece
from meshwright.run.record import Off, install, recorder
from meshwright.run.rotary import rotaries
from meshwright.run.trainer import Trainer
from meshwright.sync.paths import PIXELS

#: What is routed.
Routed = Corpus | LabelledSamples
#: Sequences for each path that centres are made of, at most.
SAMPLE = 256


class Routes:
    """The paths of ``num_sequences`` sequences, ``overlap`` of each, and of ``num_judged`` held-out ones what each
    of ``count`` paths is weighed with. ``known``: they were found, or loaded."""

    def __init__(self, count: int, num_sequences: int, num_judged: int, overlap: int = 1):
        self.count, self.overlap = count, overlap
        self.of = torch.full((num_sequences * overlap,), -1, dtype=torch.float32)
        self.judged = torch.full((num_judged * count,), -1.0, dtype=torch.float32)

    @property
    def known(self) -> bool:
        """Whether every sequence has a path."""
        return bool((self.of >= 0).all())

    @property
    def sizes(self) -> list[int]:
        """Sequences of each path."""
        return torch.bincount(self.of.long(), minlength=self.count).tolist()

    def members(self, path: int) -> NDArray[np.int64]:
        """Return the sequences of a path."""
        return np.flatnonzero((self.of.view(-1, self.overlap) == path).any(1).numpy())

    def pieces(self, owner: bool) -> Iterable[TensorPiece]:
        """Yield what was found, live, as tensors of their own."""
        for key, values in ((ROUTE, self.of), (JUDGED, self.judged)):
            part = Part(key, (values.numel(),), (0,), (slice(None),))
            about = Parameter(key, (values.numel(),), (part,))
            yield TensorPiece(key, about, 0, values.numel(), values, owner)


def prepared(trainer: Trainer, corpus: Corpus | MixedText | LabelledSamples, held: Routed | None) -> Routes:
    """Return room for the routes of a text, or of samples, and its held-out part, unknown yet.

    Raises:
        MeshwrightError: D009 for a text whose sequences are not its own runs of tokens.
    """
    text = not isinstance(corpus, LabelledSamples)
    if text and (isinstance(corpus, MixedText) or corpus.rows is not None or corpus.learnt is not None):
        help = "name one text that is no conversations, and leave pack= out"
        raise MeshwrightError.one("D009", "whole sequences of one plain text are routed", place="--data", help=help)
    judged = 0 if held is None else len(judged_of(held))
    count = trainer.rounds.policy.paths.count(trainer.rounds.replicas)
    return Routes(count, corpus.num_sequences, judged, trainer.rounds.policy.paths.overlap)


def judged_of(held: Routed) -> NDArray[np.int64]:
    """Return the numbers of the held-out sequences, or samples, that a loss is the mean of."""
    if isinstance(held, LabelledSamples):
        return np.arange(held.num_sequences - held.padding)
    return judged_sequences(held)


def ready(trainer: Trainer, corpus: Routed, held: Routed | None, given: ClusterFile | None = None) -> None:
    """Route a text, or samples by what is `given` of them, unless their routes were loaded, and have rounds count
    replicas by them; collective.

    Raises:
        MeshwrightError: D005 where a path has no sequence; D013 for clusters of which there are no experts.
    """
    routes = trainer.routes
    if not routes.known:
        if given is not None and given.clusters is not None:
            take(routes, corpus, held, given.clusters)
        else:
            find(trainer, corpus, held, None if given is None else given.features)
    if min(routes.sizes) == 0:
        samples, total = isinstance(corpus, LabelledSamples), f"{corpus.num_sequences:,}"
        each, place, help = "experts" if samples else "paths", "--data", "more text, or fewer paths"
        what = f"the text is too short: of its {total} sequences"
        if given is not None and given.clusters is not None:
            what, place = f"the file has fewer clusters: of {total} samples", "--clusters"
            help = "as many replicas as the file has clusters, which are numbered from 0"
        elif samples:
            what, help = f"there are too few samples: of {total}", "more samples, other features, or fewer replicas"
        message = f"{what} none goes to {routes.sizes.count(0)} of {routes.count} {each}"
        raise MeshwrightError.one("D005", message, place=place, help=help)
    trainer.rounds.weigh(routes.sizes)


def take(routes: Routes, corpus: LabelledSamples, held: LabelledSamples | None, clusters: NDArray[np.int64]) -> None:
    """Route samples as a file says, which has the cluster [N] of each.

    Raises:
        MeshwrightError: D013 where it says others than there are experts, or none.
    """
    own, judged = corpus.chosen, clusters[:0] if held is None else clusters[held.chosen[judged_of(held)]]
    every = np.concatenate((clusters[own], judged))
    if int(every.max()) >= routes.count or int(every.min()) < 0:
        worst = int(every.min()) if int(every.min()) < 0 else int(every.max())
        message = f"there is a cluster {worst}, and {routes.count} experts have the clusters 0 to {routes.count - 1}"
        help = "as many replicas as the file has clusters, which are numbered from 0"
        raise MeshwrightError.one("D013", message, place="--clusters", help=help)
    routes.of.copy_(torch.from_numpy(clusters[own]).float())
    routes.judged.copy_(torch.from_numpy(np.eye(routes.count)[judged]).float().view(-1))


def find(trainer: Trainer, corpus: Routed, held: Routed | None, given: NDArray[np.float64] | None = None) -> None:
    """Route all sequences of a text, and the held-out ones that are judged, by their first tokens; or samples by
    features [N, width], where these are `given`; collective."""
    routes, paths, seed = trainer.routes, trainer.rounds.policy.paths, trainer.settings.seed
    count, total = routes.count, corpus.num_sequences
    trainer.settle()
    sample = sequences(np.arange(min(total, SAMPLE * count)), total, seed)
    points = _over(trainer, corpus, sample, lambda some: some, given)
    middle, router = np.zeros((count, points.shape[1])), np.zeros((points.shape[1] + 1, count))
    mixed = paths.mixed and not isinstance(corpus, LabelledSamples)
    if trainer.mesh.first and len(points) >= count:
        middle = centres(points, count, seed)
        router = classifier(points, nearest(points, middle), count) if mixed else router
    middle, router = (_told(trainer, one) for one in (middle, router))

    def route(some: NDArray[np.float64]) -> NDArray[np.float64]:
        return ranked(some, middle, paths.overlap).astype(np.float64)

    found = _over(trainer, corpus, np.arange(total), route, given)
    routes.of.copy_(torch.from_numpy(found).float().reshape(-1))
    if held is not None and min(routes.sizes):
        weigh = (lambda some: shares(some, router)) if mixed else (lambda some: np.eye(count)[nearest(some, middle)])
        weights = _over(trainer, held, judged_of(held), weigh, given)
        routes.judged.copy_(torch.from_numpy(weights).float().view(-1))


def written(trainer: Trainer, corpus: LabelledSamples, held: LabelledSamples | None) -> NDArray[np.int64]:
    """Return the cluster [N] of all samples of the data, -1 of those that were not routed; `held` are of the same."""
    routes = trainer.routes
    out = np.full(len(corpus.labels), -1, np.int64)
    out[corpus.chosen] = routes.of.numpy()
    if held is not None:
        out[held.chosen[judged_of(held)]] = routes.judged.view(-1, routes.count).argmax(1).numpy()
    return out


def _told(trainer: Trainer, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values as the first rank has them."""
    if trainer.mesh["world"].alone:
        return values
    sent = torch.from_numpy(values).to(trainer.mesh.device)
    dist.broadcast(sent, 0)
    return sent.cpu().numpy()


def _over(
    trainer: Trainer,
    corpus: Routed,
    chosen: NDArray[np.int64],
    finish: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    given: NDArray[np.float64] | None,
) -> NDArray[np.float64]:
    """Return what comes of the features of some sequences, [n, width] on every rank: each does as many."""
    dp, rows = trainer.mesh["dp"], rows_of(trainer)
    block = ceil(len(chosen) / dp.size / rows) * rows
    mine = (
        np.resize(chosen[dp.index * block : (dp.index + 1) * block], block) if len(chosen) > dp.index * block else None
    )
    mine = np.resize(chosen, block) if mine is None else mine
    of = partial(_of_samples, trainer, given) if isinstance(corpus, LabelledSamples) else partial(_features, trainer)
    out = [finish(of(corpus, mine[i : i + rows])) for i in range(0, block, rows)]
    local = torch.from_numpy(np.concatenate(out)).to(trainer.mesh.device)
    every = [torch.empty_like(local) for _ in range(dp.size)]
    dist.all_gather(every, local, group=dp.handle)
    return torch.cat(every)[: len(chosen)].cpu().numpy()


def _of_samples(
    trainer: Trainer, given: NDArray[np.float64] | None, corpus: LabelledSamples, numbers: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The features [n, width] of some samples: those `given` of all, their pixels, or mean hidden states."""
    if given is not None:
        return given[corpus.chosen[numbers]]
    batch = corpus.sequences_at(numbers)
    if trainer.rounds.policy.paths.features == PIXELS:
        return batch.tokens.flatten(1).double().numpy()
    # no class is told, and what stands for one is not read
    batch = batch._replace(targets=torch.zeros(len(numbers), dtype=torch.int64))
    return _hidden(trainer, [one._replace(step=noise.CLEAN) for one in trainer.passes(batch)], 1)


def _features(trainer: Trainer, corpus: Corpus, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean hidden states [n, hidden] behind the last layer over the prefixes of some sequences."""
    batch = corpus.sequences_at(numbers)
    length, size = trainer.rounds.policy.paths.prefix, trainer.shape.together
    at, device = torch.arange(length, device=trainer.mesh.device), trainer.mesh.device
    tokens, passes = batch.tokens.to(device), []
    for first in range(0, len(tokens), size):
        some = slice(first, first + size)
        passes.append(
            Pass(
                tokens=tokens[some, :length],
                targets=tokens[some, 1 : length + 1],
                positions=at,
                documents=None if batch.documents is None else batch.documents[some, :length].to(device),
                **rotaries(at, trainer.model, trainer.types.compute),
                rows=at.unsqueeze(1) + torch.arange(size, device=device).unsqueeze(0) * length,
                scale=1.0,
                step=-1,
            )
        )
    return _hidden(trainer, passes)


def _hidden(trainer: Trainer, passes: list[Pass], first: int = 0) -> NDArray[np.float64]:
    """The mean hidden states [rows, hidden] of passes behind the last layer, from the `first` of a sequence on."""
    ((_, stage),) = trainer.stages.items()
    seen: list[torch.Tensor] = []
    hook = stage.head.register_forward_pre_hook(lambda _, given: seen.append(given[0][first:].double().mean(0)))
    record = recorder()
    install(Off())
    try:
        with torch.no_grad():
            trainer.forwards().run(passes)
    finally:
        install(record)
        hook.remove()
        let_go(trainer.stages)
    found = torch.cat(seen)
    if trainer.plan.layout.sp and not trainer.mesh["tp"].alone:  # every rank has as many of the positions
        dist.all_reduce(found, group=trainer.mesh["tp"].handle)
        found /= trainer.mesh["tp"].size
    return found.cpu().numpy()


def learnt_from(batch: Batch, prefix: int, num_targets: int) -> Batch:
    """Return a batch of which nothing is learnt of the first tokens."""
    targets = batch.tokens[:, 1:].clone()
    targets[:, : prefix - 1] = NOTHING
    return batch._replace(targets=targets, num_targets=num_targets)


def routed_of(trainer: Trainer, corpus: Routed, step: int) -> Batch:
    """Return what a rank takes in a step of the sequences, or samples, of its path; those of one path take others."""
    lot, of, path = place_of(trainer)
    members, rows = trainer.routes.members(path), rows_of(trainer)
    places = np.arange((step * of + lot) * rows, (step * of + lot + 1) * rows)
    mine = members[sequences(places, len(members), corpus.seed)]
    if isinstance(corpus, LabelledSamples):
        return corpus.sequences_at(mine, places)
    batch = corpus.sequences_at(mine)
    prefix = trainer.rounds.policy.paths.prefix
    return learnt_from(batch, prefix, corpus.global_batch * (corpus.seq_len - prefix + 1))


def rows_of(trainer: Trainer) -> int:
    """Return the rows of a global batch that a data-parallel rank takes."""
    return trainer.plan.num_microbatches(trainer.train.global_batch) * trainer.shape.together


def place_of(trainer: Trainer) -> tuple[int, int, int]:
    """Return which of the data-parallel ranks of a path this one is, how many there are, and the path."""
    rounds, dp, paths = trainer.rounds, trainer.mesh["dp"], trainer.rounds.policy.paths
    each = dp.size // rounds.replicas
    path = paths.path_of(rounds.replica, rounds.replicas)
    copies = rounds.replicas // paths.count(rounds.replicas)
    return (rounds.replica % copies) * each + dp.index % each, copies * each, path
