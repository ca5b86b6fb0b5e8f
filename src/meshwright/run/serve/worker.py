"""The engine's process: ``python -m meshwright.run.serve.worker DESCRIPTOR``, started by the HTTP front.

It builds the engine that the front orders over the socket of that file descriptor, and drives it until the front is
gone. Whatever the engine raises ends the process; the front starts another and goes on.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from meshwright import plan
from meshwright.endpoint.driving import work
from meshwright.endpoint.seam import EngineSpec, ServingEngine
from meshwright.run.environment import keep_memory
from meshwright.run.serve.built import HOST_SHARE, engine
from meshwright.run.serve.refused import one_replica
from meshwright.spec.engine_words import EngineWords
from meshwright.spec.serve import engine_words


def build(spec: EngineSpec) -> ServingEngine:
    """Return the engine that was ordered.

    Raises:
        MeshwrightError: as :func:`meshwright.run.serve.built.engine`, and for a plan or words that cannot be read.
    """
    device = spec.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        keep_memory()  # what attention gathers of long contexts is else 8,000 fresh pages an iteration
    laid_out, words = plan.parse(spec.plan), engine_words(spec.serve)
    if spec.replicas > 1:
        laid_out = one_replica(laid_out)
        if device == "cpu":  # they share the host's memory
            share = HOST_SHARE if words.memory == EngineWords().memory else words.memory
            words = msgspec.structs.replace(words, memory=share / spec.replicas)
    return engine(
        spec.folder,
        laid_out,
        words,
        device=device,
        dtype=spec.dtype,
        adapters=dict(spec.adapters),
    )


if __name__ == "__main__":
    sys.exit(work(int(sys.argv[1]), build))
