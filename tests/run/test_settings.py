"""Learning rates against torch's own schedulers, step by step."""

import pytest
import torch

from meshwright.run.settings import Settings


def torchs(make, steps, lr=1.0):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=lr)
    scheduler, out = make(optimizer), []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return out


def ours(steps, **words):
    settings = Settings(lr=1.0, **words)
    return [settings.lr_at(step) for step in range(steps)]


def test_a_cosine_and_a_line_fall_as_torchs_do():
    lr = torch.optim.lr_scheduler
    cosine = torchs(lambda o: lr.CosineAnnealingLR(o, T_max=40, eta_min=0.1), 41)
    assert ours(41, decay_steps=40) == pytest.approx(cosine)
    line = torchs(lambda o: lr.LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=40), 50)
    assert ours(50, decay_steps=40, schedule="linear", min_lr=0.25) == pytest.approx(line)


def test_wsd_warms_up_stays_and_falls_over_the_last_tenth():
    rates = ours(120, warmup=10, decay_steps=100, schedule="wsd", min_lr=0.0)
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10:91] == [1.0] * 81
    assert rates[91:100] == pytest.approx([1 - n / 10 for n in range(1, 10)])
    assert rates[100:] == [0.0] * 20
