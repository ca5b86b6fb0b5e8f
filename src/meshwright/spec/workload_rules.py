"""Contradictions of a training workload: what its keys may not say together, whatever the model and the plan."""

from __future__ import annotations

from meshwright.errors import Diagnostic


def contradictions(values: dict[str, object], place: str) -> list[Diagnostic]:
    """Return W002 for each pair of what a workload's keys say that does not go together."""
    return [*_growing(values, place), *_clustered(values, place), *_opposed(values, place), *_filmed(values, place)]


def _growing(values: dict[str, object], place: str) -> list[Diagnostic]:
    """W002 for a batch that grows without an end, or to less than it is."""
    grow, most, batch = values.get("grow"), values.get("most"), values.get("global_batch")
    if (grow is None) == (most is None) and (most is None or batch is None or most >= batch):
        return []
    if (grow is None) != (most is None):
        message, help = "grow and most belong together: a bound of the norm test, and the largest batch", "say both"
    else:
        message, help = f"most={most} is less than batch={batch}", f"say most={batch} or more"
    return [Diagnostic(code="W002", message=message, place=f"{place} grow={grow},most={most}", help=help)]


def _clustered(values: dict[str, object], place: str) -> list[Diagnostic]:
    """W002 for clusters whose momenta the optimizer does not keep, or whose data something else lays out."""
    if "clusters" not in values:
        return []
    said, found = f"{place} clusters={values['clusters']}", []
    if values.get("optimizer") != "momentum":
        found.append(("clusters have a momentum each, and the optimizer is another", "say optimizer=momentum"))
    for key in ("grow", "pack"):
        if key in values:
            found.append((f"steps take turns on clusters, and {key}= lays out the data by itself", f"drop {key}="))
    return [Diagnostic(code="W002", message=message, place=said, help=help) for message, help in found]


def _opposed(values: dict[str, object], place: str) -> list[Diagnostic]:
    """W002 for adversarial steps, whose next batch is known a step before, of data that is laid out otherwise."""
    if "adversarial" not in values:
        return []
    said, found = f"{place} adversarial={values['adversarial']:g}", []
    for key in ("grow", "align", "clusters", "routing", "frames", "lora", "lora.rank"):
        if key in values:
            word = key.partition(".")[0]
            found.append((f"gradients of moved text are half of a step, and {word}= goes by those of a text", word))
    if values.get("phase") == "lora" and not found:
        found.append(("adapters leave the embeddings as they are", "phase"))
    if values.get("pack") in ("balanced", "reordered"):
        found.append(
            (f"pack={values['pack']} lays out every batch by what it costs, and moved text costs more", "pack")
        )
    return [
        Diagnostic(code="W002", message=message, place=said, help=f"drop {word}=, or adversarial=")
        for message, word in found
    ]


def _filmed(values: dict[str, object], place: str) -> list[Diagnostic]:
    """W002 for frames that a sequence does not divide into, and beside documents of other lengths."""
    frames, seq = values.get("frames"), values.get("seq_len")
    if frames is None or seq is None:
        return []
    found = []
    if seq % frames:
        help = f"say seq={max(1, round(seq / frames)) * frames}, as many tokens for every frame"
        found.append((f"a sequence of {seq} tokens does not divide into {frames} frames", help))
    for key in ("lengths", "pack"):
        if key in values:
            found.append((f"sequences are videos of {frames} frames, and {key}= lays out documents", f"drop {key}="))
    said = f"{place} frames={frames}"
    return [Diagnostic(code="W002", message=message, place=said, help=help) for message, help in found]
