"""An epoch of a graph network as a sheet: where its time goes, what is sent, memory."""

from __future__ import annotations

from meshwright.answer.graph_network import NetworkPrediction
from meshwright.quantity import gibibytes
from meshwright.report.sheet import Lines, Sheet, Spent, fullest, headline
from meshwright.simulate.graph_network import PLACES


def sheet(prediction: NetworkPrediction) -> Sheet:
    """Return the answer as a sheet."""
    places, memory, lowered = prediction.times.places, prediction.memory, prediction.times.lowered
    spent = [(place, places[place], words) for place, words in PLACES.items()]
    rate = f"{prediction.model.vertices / prediction.epoch_s:,.0f} vertices/s"
    sent = [
        ("vertices that others need", gibibytes(lowered.boundary_bytes)),
        ("chunks between stages", gibibytes(lowered.stage_bytes)),
        ("other devices that need a vertex", f"{lowered.cut.copies:.4g}"),
        ("edges of the busiest device, over the mean", f"{lowered.cut.skew:.4g}"),
        ("layers of each stage", ", ".join(map(str, lowered.layers))),
    ]
    return Sheet(
        name=f"{prediction.model.name} on {prediction.cluster.name}",
        fits=prediction.fits,
        headline=headline(prediction.epoch, "an epoch", rate, memory),
        question=(
            ("model", prediction.model.name),
            ("cluster", prediction.cluster.name),
            ("workload", prediction.work.text()),
            ("plan", prediction.plan.text()),
        ),
        sections=(
            Spent("Where the time of an epoch goes (mean over stages)", prediction.epoch_s, spent),
            Lines("Sent in an epoch, by all devices", sent),
        ),
        memory=memory,
        held=(fullest(memory, "device"),),
        assumptions=prediction.assumptions,
        cautions=prediction.cautions,
        timeline=prediction.times.timeline,
        timed="an epoch",
    )
