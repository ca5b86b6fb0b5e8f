"""Eager 1F1B, a schedule of your own: more forwards in flight, so that sends between stages hide behind them.

Zhuang et al., 2022, arXiv 2211.05322, section 4: rank r of p starts with 2 (p - r) - 1 forwards instead of p - r.
"""

import numpy as np

from meshwright import schedules
from meshwright.schedules.actions import Actions
from meshwright.schedules.timing import bubble_rate, peak_in_flight
from meshwright.schedules.verify import verify
from meshwright.schedules.weave import one_f_one_b


def eager_1f1b(p: int, m: int) -> Actions:
    """The order of p ranks over m microbatches."""
    microbatch = np.arange(m)
    warmup = 2 * np.arange(p)[::-1]  # forwards before the alternation starts
    kind, item = one_f_one_b(warmup, microbatch, microbatch)
    stage = np.broadcast_to(np.arange(p)[:, None], kind.shape)
    return Actions.of("eager-1f1b", kind, stage, item, num_stages=p, num_microbatches=m)


eager, usual = eager_1f1b(4, 16), schedules.build("1f1b", 4, 16)
assert not verify(eager)
print(eager.text())
for send in (0.0, 0.25, 0.5):
    rates = (bubble_rate(actions, 1.0, 1.0, 1.0, send) for actions in (usual, eager))
    print("send {:.2f}: bubble {:.1%} with 1f1b, {:.1%} with eager-1f1b".format(send, *rates))
print("activations held:", peak_in_flight(usual), "->", peak_in_flight(eager))
