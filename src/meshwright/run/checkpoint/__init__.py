"""Checkpoints that any plan and number of processes can resume (Lian et al., 2406.18820), saved while training goes on
(Maurya et al., 2406.10707).

    saver = AsyncSaver(folder, mesh["world"], device=mesh.device, keep=2)   # every rank
    trainer.before_update.append(saver.before_update)
    saver.begin(trainer.pieces(), Meta(...))                                # returns at once
    saver.poll()                                                            # once a step
    saver.wait()                                                            # before leaving

    meta = load(folder, trainer.pieces(), mesh["world"], model_hash=identity(model), device=mesh.device)
"""

from meshwright.run.checkpoint.format import Meta, find, identity, latest, read_index
from meshwright.run.checkpoint.loading import load
from meshwright.run.checkpoint.saving import AsyncSaver, save

__all__ = ["AsyncSaver", "Meta", "find", "identity", "latest", "load", "read_index", "save"]
