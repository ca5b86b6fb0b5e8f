"""Contradictions of a training workload: what its keys may not say together, whatever the model and the plan."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import Diagnostic
from meshwright.spec import lengths as of_documents
from meshwright.spec.lengths import LOGNORMAL


def contradictions(values: dict[str, object], place: str) -> list[Diagnostic]:
    """Return W002 for each pair of what a workload's keys say that does not go together."""
    rules = (_growing, _clustered, _opposed, _filmed, _pictured)
    return [diagnostic for rule in rules for diagnostic in rule(values, place)]


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


def _pictured(values: dict[str, object], place: str) -> list[Diagnostic]:
    """W002 for what is about tokens beside images that are read by their pixels, or vectors of features."""
    key = "image" if "image" in values else "features" if "features" in values else ""
    if not key:
        return []
    said, side = f"{place} {key}={values[key]}", values[key]
    what = f"an image of {side} x {side} pixels" if key == "image" else f"a vector of {side} features"
    about = {"features": "vectors"}
    words = {"seq_len": "seq", "lengths": "lengths", "pack": "pack", "frames": "frames", "routing": "routing"}
    words |= {"adversarial": "adversarial", "align": "align"} | ({"features": "features"} if key == "image" else {})
    return [
        Diagnostic(
            code="W002",
            message=f"each sequence is {what}, and {word}= is about {about.get(word, 'tokens')}",
            place=said,
            help=f"drop {word}=, or {key}= where the model reads {about.get(word, 'tokens')}",
        )
        for field, word in words.items()
        if field in values
    ]


def fitted_lengths(values: dict[str, object], place: str, base: Path) -> list[Diagnostic]:
    """Cut drawn lengths of a distribution to the sequence; W007 for said ones that do not fit, unless they are cut."""
    lengths, seq = values.get("lengths"), values.get("seq_len")
    if lengths is None or seq is None:
        return []
    if lengths.said.startswith(f"{LOGNORMAL}:"):
        values["lengths"] = of_documents.clipped(lengths, seq)
        return []
    over = of_documents.beyond(lengths, seq, base) if values.get("pack") != "concat" else ""
    if not over:
        return []
    help = f"say seq={lengths.tokens[-1]} or more, or pack=concat, which cuts documents where a sequence ends"
    message = f"documents are longer than a sequence of seq={seq} tokens: {over}"
    return [Diagnostic(code="W007", message=message, place=f"{place} lengths={lengths.text()[:80]}", help=help)]
