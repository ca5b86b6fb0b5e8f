"""Whether ``meshwright run`` can begin on this machine: the files that it reads, and memory for what its plan is
predicted to hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import Diagnostic
from meshwright.quantity import gibibytes, lacking

if TYPE_CHECKING:
    from meshwright.answer.prediction import Prediction, RankMemory


def of_files(words: str, weights: str) -> None:
    """Look whether the tokenizer is there that is named, and the published weights that a run begins with ("": none).

    Raises:
        MeshwrightError: D004 for a tokenizer that cannot be read, H006 for weights; before anything is said of memory.
    """
    from meshwright.run.data import tokenizer
    from meshwright.run.weights import DISTRIBUTED, open_weights

    if weights and not (Path(weights) / DISTRIBUTED).is_file():
        open_weights(Path(weights))
    tokenizer.load(words)


def without_room(prediction: Prediction, device: str) -> list[Diagnostic]:
    """L010 where the tensors of a rank are predicted to need more memory than it has on this machine: on a GPU all of
    it, on a processor a rank's share of what is free. What frameworks and communication hold besides is of the cluster
    that the plan is for, and not counted."""
    from meshwright.run.room import device_bytes, local_ranks, on_gpus

    ranks = sum(one.multiplicity for one in prediction.memory)
    there = device_bytes(device, local_ranks(ranks))
    if there is None:
        return []
    fullest = max(prediction.memory, key=_tensors)
    # ranks on a processor fill one memory together: there their mean counts
    gpus = on_gpus(device)
    counted = [(fullest, 1)] if gpus else [(one, one.multiplicity) for one in prediction.memory]
    kinds: Counter[str] = Counter()
    for one, times in counted:
        kinds.update({name: size * times / (1 if gpus else ranks) for name, size in _kinds(one).items()})
    needed = sum(kinds.values())
    if needed <= there:
        return []
    what = ", ".join(f"{name} {gibibytes(size)}" for name, size in kinds.most_common(3))
    where = "its GPU has" if gpus else f"its share of this machine's free memory, with {ranks} ranks, is"
    mean = "" if gpus else " on the mean"
    message = f"a rank is predicted to hold {gibibytes(needed)} ({what}){mean}, and {where} {gibibytes(there)}"
    help = (
        f"{lacking(needed - there)} less each: meshwright predict says what to shard or recompute (zero1, fsdp, full, "
        "a smaller mb or seq, a lower rank of adapters); --anyway begins all the same"
    )
    return [Diagnostic(code="L010", message=message, place=f"--plan {prediction.plan.text()}", help=help)]


def _kinds(memory: RankMemory) -> dict[str, float]:
    """Bytes of a rank's tensors at its peak by category."""
    from meshwright.answer.rank_memory import OVERHEAD

    return {name: size for name, size in memory.alive.items() if name not in OVERHEAD}


def _tensors(memory: RankMemory) -> float:
    return sum(_kinds(memory).values())
