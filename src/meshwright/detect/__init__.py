"""The cluster of the machine this runs on: a description in which every number says where it comes from.

``nvidia-smi``, ``rocm-smi``, ``ibstat``, ``lspci``, ``/sys`` and ``/proc`` are asked (:mod:`meshwright.detect.ask`),
pure functions make records of what they say, and :func:`meshwright.detect.build.detect` makes a cluster of the
records.
"""

from meshwright.detect.ask import Here, MachineAnswer
from meshwright.detect.build import Detected, detect

__all__ = ["MachineAnswer", "Detected", "Here", "detect"]
