"""Ranks of factors chosen from what gradients lose by them, once in so many steps, by all copies alike (L-GreCo)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.run.codecs import on_tensors
from meshwright.run.coded import CodedSum
from meshwright.sync.codecs import Tensor, codec
from meshwright.sync.codecs.lgreco import candidates, chosen, sent
from meshwright.sync.fragments import REPEATED, TIED, WHOLE

#: Parameters that other ranks hold too, and encode alike: their code is the usual one.
ALIKE = (WHOLE, REPEATED, TIED)


def adapt(sums: Sequence[CodedSum]) -> None:
    """Choose the ranks of all matrices of some sums, or the code of each, where their codec does so after this step."""
    due = [one for one in sums if one.code.adapts and one.step % one.code.adapts == 0 and one.measured is not None]
    due = [one for one in due if not one.code.levels or one.kind not in ALIKE]
    sizes, errors, usual = [], [], []
    for one in due:
        lost = levels_lost(one) if one.code.levels else ranks_lost(one)
        dist.all_reduce(lost, group=one.group.handle)  # the sum over copies, that all choose by
        if one.code.levels:
            width = one.measured.element_size()
            sizes.append([codec(level).wire_bytes(one.length, width) for level in one.code.levels])
            errors.append(lost.tolist())
            usual.append(one.code.usual)
            continue
        ranks = ranks_of(one)
        for f, some, row in zip(one.factors, ranks, lost.split([len(some) for some in ranks])):
            sizes.append([f.times * sent(Tensor(f.rows, f.columns), r) for r in some])
            errors.append(row.tolist())
            usual.append(some.index(one.code.usual))
    picks = iter(chosen(sizes, errors, usual))
    for one in due:
        if one.code.levels:
            one.use(next(picks))
        else:
            one.cut_to([some[next(picks)] for some in ranks_of(one)])
        one.measured = None


def ranks_of(one: CodedSum) -> list[tuple[int, ...]]:
    """Return the ranks that each matrix of a sum may be cut to."""
    return [candidates(Tensor(f.rows, f.columns), one.code.usual) for f in one.factors]


def ranks_lost(one: CodedSum) -> torch.Tensor:
    """Return what every rank of every matrix would have lost of a sum's last values, squared, float64 [ranks]."""
    return torch.cat([errors_of(m, some) for m, some in zip(one.matrices(one.measured), ranks_of(one))])


def levels_lost(one: CodedSum) -> torch.Tensor:
    """Return what every code would have lost of a sum's last values, squared, float64 [codes]."""
    values, out = one.measured, []
    for level in one.code.levels:
        form = on_tensors(level)
        back = form.decode(form.encode(values, one.step), len(values), values.dtype, one.step)
        out.append((values - back).double().square().sum())
    return torch.stack(out)


def errors_of(matrices: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """The squared error of matrices [times, rows, columns] cut to each rank, by one step of a subspace iteration that
    has twice as many dimensions as the largest: float64 [ranks]."""
    wide = min(2 * max(ranks), *matrices.shape[1:])
    made = torch.Generator().manual_seed(0)
    draw = torch.randn((matrices.shape[2], wide), generator=made, dtype=torch.float64).to(matrices)
    basis = torch.linalg.qr(matrices.mT @ (matrices @ draw)).Q
    found = torch.linalg.svdvals(matrices @ basis).double().square()
    whole = matrices.double().square().sum()
    return torch.stack([(whole - found[:, :r].sum()).clamp(min=0.0) for r in ranks])
