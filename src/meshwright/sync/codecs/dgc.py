"""Deep gradient compression (Lin et al. 1712.01887): the largest of what has gathered travel, and gather with momentum.

Momentum is taken before a value is sent, so that what waits moves as it would have (momentum correction), and is
forgotten where a value was sent (momentum factor masking). The optimizer then has none of its own: ``sgd``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.sync.codecs import Codec, topk
from meshwright.sync.options import RuleOption

SHARE = msgspec.structs.replace(topk.SHARE, default=0.001)
MOMENTUM = RuleOption(
    name="momentum", what="the momentum of what waits to be sent", default=0.9, share=True, most=0.999999
)


def made(values: dict[str, Any]) -> Codec:
    """Return the codec that sends a share of what gathers with a momentum."""
    return msgspec.structs.replace(
        topk.made(values),
        name="dgc",
        title="the largest values that have gathered, with momentum",
        paper="Lin et al., 2017, arXiv 1712.01887",
        correction=values["momentum"],
        options=(SHARE, MOMENTUM),
        made=made,
    )


CODECS = (made({"share": SHARE.default, "momentum": MOMENTUM.default}),)
