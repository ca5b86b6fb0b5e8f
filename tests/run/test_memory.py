"""What torch's own functions hold in memory, which the planner counts."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile


def test_cross_entropy_holds_twelve_bytes_a_logit_beside_the_logits():
    """Probabilities in fp32, the loss's gradient and the softmax's: what ``layers/head.py`` counts for ``eager``."""
    logits = torch.randn(64, 50_000, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 50_000, (64,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        functional.cross_entropy(logits.float(), targets, reduction="sum").backward()
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    alive = np.cumsum([event.nbytes() for event in events if event.name() == "[memory]"])
    assert alive.max() / logits.numel() == pytest.approx(12.0, rel=1e-3)
