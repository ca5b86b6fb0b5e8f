"""Training of a graph's vectors as a sheet: where a pass spends its time, its buckets, memory of devices and hosts."""

from __future__ import annotations

from meshwright.answer.node_embedding import NodePrediction
from meshwright.quantity import gibibytes, seconds
from meshwright.report.sheet import Lines, Sheet, Spent, headline, sizes
from meshwright.simulate.bucket_training import PLACES

#: Rounds that are listed, and buckets of one.
SHOWN, BUCKETS = 6, 8


def sheet(prediction: NodePrediction) -> Sheet:
    """Return the answer as a sheet."""
    times, memory = prediction.times, (prediction.memory,)
    rate = f"{prediction.samples_per_s:,.0f} samples/s"
    epochs = f"for {prediction.work.epochs:,} epochs" if prediction.work.epochs > 1 else "an epoch"
    title = f"Where the time of a pass over all buckets goes ({seconds(times.pass_s)}, mean over devices)"
    elsewhere = ()
    if prediction.host_bytes:
        room = gibibytes(prediction.cluster.islands[0].node.host_memory_bytes)
        elsewhere = (Lines(f"Memory of a host, of {room}", sizes(prediction.host_bytes)),)
    return Sheet(
        name=f"{prediction.model.name} on {prediction.cluster.name}",
        fits=prediction.fits,
        headline=headline(prediction.total, epochs, rate, memory),
        question=(
            ("model", prediction.model.name),
            ("cluster", prediction.cluster.name),
            ("workload", prediction.work.text()),
            ("plan", prediction.plan.text()),
        ),
        sections=(
            Spent(title, times.pass_s, [(place, times.places[place], words) for place, words in PLACES.items()]),
            _buckets(prediction),
        ),
        memory=memory,
        held=(Lines("Memory of a device", sizes(prediction.memory.alive)),),
        elsewhere=elsewhere,
        assumptions=prediction.assumptions,
        cautions=prediction.cautions,
        timeline=times.timeline,
        timed="the first passes over all buckets",
    )


def _buckets(prediction: NodePrediction) -> Lines:
    lowered, said = prediction.times.lowered, prediction.plan.buckets
    lines = [
        ("passes over all buckets", f"{prediction.passes:,.4g}"),
        ("an epoch", seconds(prediction.epoch_s)),
        ("a partition", gibibytes(lowered.item_bytes)),
        ("loaded and stored in a pass", gibibytes(prediction.swapped_bytes)),
    ]
    remarks = []
    for number, one in enumerate(lowered.rounds[:SHOWN]):
        drawn = "  ".join("-" if bucket is None else f"({bucket.head}, {bucket.tail})" for bucket in one[:BUCKETS])
        remarks.append(f"round {number}: {drawn}{' ...' if len(one) > BUCKETS else ''}")
    if len(lowered.rounds) > SHOWN:
        remarks.append(f"{len(lowered.rounds) - SHOWN} more rounds: --json has all")
    title = f"Buckets: {said.partitions**2:,} of {lowered.samples:,.0f} samples, in {len(lowered.rounds):,} rounds"
    return Lines(title, lines, remarks)
