"""ColD Fusion: replicas train on text of their own and are fused by the mean of their parameters (Don-Yehiya et al.
2212.01378).

Local steps whose replicas have an equal run of the text each: contributors with data that nobody else has.
"""

from __future__ import annotations

import msgspec

from meshwright.sync.rules.local import LOCAL

COLD_FUSION = msgspec.structs.replace(
    LOCAL,
    name="cold-fusion",
    title="local steps on text of each replica's own",
    paper="Don-Yehiya et al., 2022, arXiv 2212.01378",
    choices=lambda values: LOCAL.choices(values) | {"own_data": True},
)

RULES = (COLD_FUSION,)
