"""Sequences routed to paths by their first tokens, before training begins.

The feature of a sequence is the mean of the hidden states behind the last layer over its prefix, in the model that the
run begins with; k-means over the features of a sample gives a centre for each path, and a sequence is of the nearest
(Douillard et al. 2403.10616, sections 2.4.1 and 7.2). Where predictions are mixed, a linear classifier of the clusters
by the same features is the router (McAllister et al. 2501.05450 train one by cross-entropy). Nothing of a prefix is
learnt or judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from meshwright.assign.kmeans import centres, classifier, nearest, ranked, shares
from meshwright.errors import MeshwrightError
from meshwright.run.data.corpus import Batch, Corpus, judged_sequences, sequences
from meshwright.run.data.mixture import MixedText
from meshwright.run.data.rows import NOTHING
from meshwright.run.fsdp import let_go
from meshwright.run.parts import Pass
from meshwright.run.pieces import JUDGED, ROUTE, Parameter, Part, TensorPiece
from meshwright.run.record import Off, install, recorder
from meshwright.run.rotary import rotaries
from meshwright.run.trainer import Trainer

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


def prepared(trainer: Trainer, corpus: Corpus | MixedText, held: Corpus | None) -> Routes:
    """Return room for the routes of a text and its held-out part, unknown yet.

    Raises:
        MeshwrightError: D009 for a text whose sequences are not its own runs of tokens.
    """
    if isinstance(corpus, MixedText) or corpus.rows is not None or corpus.learnt is not None:
        help = "name one text that is no conversations, and leave pack= out"
        raise MeshwrightError.one("D009", "whole sequences of one plain text are routed", place="--data", help=help)
    judged = 0 if held is None else len(judged_sequences(held))
    count = trainer.rounds.policy.paths.count(trainer.rounds.replicas)
    return Routes(count, corpus.num_sequences, judged, trainer.rounds.policy.paths.overlap)


def ready(trainer: Trainer, corpus: Corpus, held: Corpus | None) -> None:
    """Route a text unless its routes were loaded, and have rounds count replicas by them; collective."""
    if not trainer.routes.known:
        find(trainer, corpus, held)
    trainer.rounds.weigh(trainer.routes.sizes)


def find(trainer: Trainer, corpus: Corpus, held: Corpus | None) -> None:
    """Route all sequences of a text, and the held-out ones that are judged; collective.

    Raises:
        MeshwrightError: D005 where a path has no sequence.
    """
    routes, paths, seed = trainer.routes, trainer.rounds.policy.paths, trainer.settings.seed
    count, total = routes.count, corpus.num_sequences
    trainer.settle()
    sample = sequences(np.arange(min(total, SAMPLE * count)), total, seed)
    points = _over(trainer, corpus, sample, lambda some: some)
    middle, router = np.zeros((count, points.shape[1])), np.zeros((points.shape[1] + 1, count))
    if trainer.mesh.first and len(points) >= count:
        middle = centres(points, count, seed)
        router = classifier(points, nearest(points, middle), count)
    middle, router = (_told(trainer, one) for one in (middle, router))
    found = _over(
        trainer, corpus, np.arange(total), lambda some: ranked(some, middle, paths.overlap).astype(np.float64)
    )
    routes.of.copy_(torch.from_numpy(found).float().reshape(-1))
    if min(routes.sizes) == 0:
        raise MeshwrightError.one(
            "D005",
            f"the text is too short: of its {total:,} sequences none goes to {routes.sizes.count(0)} of {count} paths",
            place="--data",
            help="more text, or fewer paths",
        )
    if held is not None:
        weigh = (
            (lambda some: shares(some, router)) if paths.mixed else (lambda some: np.eye(count)[nearest(some, middle)])
        )
        weights = _over(trainer, held, judged_sequences(held), weigh)
        routes.judged.copy_(torch.from_numpy(weights).float().view(-1))


def _told(trainer: Trainer, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values as the first rank has them."""
    if trainer.mesh["world"].alone:
        return values
    sent = torch.from_numpy(values).to(trainer.mesh.device)
    dist.broadcast(sent, 0)
    return sent.cpu().numpy()


def _over(
    trainer: Trainer,
    corpus: Corpus,
    chosen: NDArray[np.int64],
    finish: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Return what comes of the features of some sequences, [n, width] on every rank: each does as many."""
    dp, rows = trainer.mesh["dp"], rows_of(trainer)
    block = ceil(len(chosen) / dp.size / rows) * rows
    mine = (
        np.resize(chosen[dp.index * block : (dp.index + 1) * block], block) if len(chosen) > dp.index * block else None
    )
    mine = np.resize(chosen, block) if mine is None else mine
    out = [finish(_features(trainer, corpus.sequences_at(mine[i : i + rows]))) for i in range(0, block, rows)]
    local = torch.from_numpy(np.concatenate(out)).to(trainer.mesh.device)
    every = [torch.empty_like(local) for _ in range(dp.size)]
    dist.all_gather(every, local, group=dp.handle)
    return torch.cat(every)[: len(chosen)].cpu().numpy()


def _features(trainer: Trainer, batch: Batch) -> NDArray[np.float64]:
    """The mean hidden states [rows, hidden] behind the last layer over the prefixes of a batch."""
    length, size = trainer.rounds.policy.paths.prefix, trainer.shape.together
    at, device = torch.arange(length, device=trainer.mesh.device), trainer.mesh.device
    tokens, seen, passes = batch.tokens.to(device), [], []
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
    ((_, stage),) = trainer.stages.items()
    hook = stage.head.register_forward_pre_hook(lambda _, given: seen.append(given[0].double().mean(0)))
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


def routed_of(trainer: Trainer, corpus: Corpus, step: int) -> Batch:
    """Return what a rank takes in a step of the sequences of its path; replicas of one path take others."""
    lot, of, path = place_of(trainer)
    members, rows = trainer.routes.members(path), rows_of(trainer)
    every = sequences(np.arange(step * of * rows, (step + 1) * of * rows), len(members), corpus.seed)
    batch = corpus.sequences_at(members[every[lot * rows : (lot + 1) * rows]])
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
