"""One run as every rank is told it, and what came of it."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.assign.groups import GroupCosts
from meshwright.lower.filling import FrozenOrder
from meshwright.plan import Plan
from meshwright.plan.slices import Portions
from meshwright.run import data
from meshwright.run.settings import Settings
from meshwright.spec.architecture import Model
from meshwright.spec.workload import Lengths, Train
from meshwright.timeline import UNKNOWN, Identity, Timeline, pack
from meshwright.world.faulty import FaultyWorkers

#: Checkpoints kept in a run's folder.
KEEP = 2
#: What a run leaves of its adapters: a folder of PEFT's, or the base with them added; by the words of ``--export``.
ADAPTER, MERGED = "adapter", "merged"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as every rank is told it.

    ``corpus`` is a tokenised corpus's folder; "": every machine builds its own of ``text``. ``steps`` are done in all,
    those of a resumed checkpoint among them. ``out`` "" keeps nothing. ``save_every`` 0 saves at the end alone.
    ``ideal_s``: what a step would take at the devices' peak, for MFU; 0 says none. ``schedule_params`` are the
    prediction's, so that a schedule made for given times has one order in both; so are ``group_costs``, by which groups
    of ranks are formed, and what frozen layers run in waits (``frozen_order``). ``quiet`` prints no progress.
    ``routing`` is a file that the choices of the model's routers are written to, ``variances`` one that those of
    operators in fewer bits are, measured on the first batch. ``judged_every`` so many steps (0: never) the loss is
    measured on the last ``held_out`` of the text, which is then not trained on, or on ``judged_text``, whose folder is
    ``judged_corpus``; of sequences so many first tokens are not judged (``judged_from``). Images that are trained on
    are changed as ``augment`` says. ``keep`` so many checkpoints.
    ``faulty``: replicas that bring something else than their gradients.
    ``portions``: what replicas that differ have of a step. ``config``: the file that the model was read from, "" of one
    of the catalog. ``adapter``: a folder of adapters to begin with.
    ``clusters``: a file of the samples' clusters or features (:mod:`.data.clustered`).
    ``export``: what adapters are written as at the end (:mod:`.lora.peft`), "" for nothing. ``tensorboard``: a folder,
    ``wandb`` a project, ``callback`` a function ``module:name`` that is told of every step (:mod:`.reports`).
    """

    model: Model
    plan: Plan
    train: Train
    settings: Settings = Settings()
    text: str = data.documents.SAMPLE
    tokenizer: str = "bytes"
    corpus: str = ""
    steps: int = 20
    out: str = ""
    resume: bool = False
    save_every: int = 0
    weights: str = ""
    ideal_s: float = 0.0
    quiet: bool = False
    judged_every: int = 0
    held_out: float = 0.0
    judged_from: int = 0
    judged_text: str = ""
    judged_corpus: str = ""
    augment: data.Augment = data.Augment()
    clusters: str = ""
    keep: int = KEEP
    data_workers: int = 0
    prefetch: int = 0
    config: str = ""
    adapter: str = ""
    export: str = ADAPTER
    tensorboard: str = ""
    wandb: str = ""
    callback: str = ""
    routing: str = ""
    variances: str = ""
    identity: Identity = UNKNOWN
    schedule_params: dict[str, Any] = {}
    faulty: FaultyWorkers | None = None
    portions: Portions = Portions()
    group_costs: GroupCosts | None = None
    frozen_order: FrozenOrder | None = None


class RunSummary(msgspec.Struct, kw_only=True):
    """The outcome of a run: its ``timeline`` (:func:`meshwright.timeline.pack`), and what is read off it: seconds and
    loss of every step that this start of it did, and the most memory that each rank held. ``stopped``: it was asked to
    end before its last step. ``lengths``: documents as they were packed. ``exchanged`` are the bytes of the first
    rank's exchanges in these steps, as (kind, ranks of the group, bytes), ``judged`` its held-out losses by step,
    ``accuracy`` the share of held-out samples that were classified rightly then,
    ``batches`` the sequences of every step where that may grow, ``data_s`` seconds that each waited for its batch."""

    timeline: bytes
    first_step: int
    last_step: int
    step_s: list[float]
    losses: list[float]
    peak_bytes: list[int]
    device: str
    stopped: bool = False
    saved: str = ""
    exported: str = ""
    lengths: Lengths | None = None
    exchanged: list[tuple[str, int, int]] = []
    judged: dict[int, float] = {}
    accuracy: dict[int, float] = {}
    batches: list[int] = []
    data_s: list[float] = []

    @classmethod
    def of(cls, timeline: Timeline, last_step: int, **said: Any) -> RunSummary:
        """Build the summary of a measured timeline, after whose steps `last_step` were done in all."""
        steps, ranks = timeline.records["step"], timeline.records["rank"]
        return cls(
            timeline=pack(timeline),
            first_step=last_step - len(steps["step"]) + 1,
            last_step=last_step,
            step_s=steps["seconds"].tolist(),
            losses=steps["loss"].tolist(),
            peak_bytes=ranks["peak_bytes"].tolist(),
            **said,
        )
