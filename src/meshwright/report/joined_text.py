"""A placed computation as text: how every join is made and what other ways would take, where tensors lie, what is
exchanged."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from msgspec import structs

from meshwright.report.placed_text import run_text, tag
from meshwright.spec.computation import UPDATE

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.answer.joined import JoinedPrediction, JoinWay
    from meshwright.run.annotated import PlacedRun

#: Ways of a join that are shown beside the one that is taken, the nearest first.
SHOWN = 3


def _print(out: Console, text: str = "") -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _tagged(found: JoinedPrediction, name: str) -> str:
    """Where a tensor lies, on every axis: a cut by its key's name."""
    shape = found.computation.tensors[name].keys
    words = []
    for (axis, _), p in zip(found.mesh.axes, found.homes[name]):
        key = shape[p] if 0 <= p < len(shape) else "rows" if p >= 0 else ""
        words.append(f"{axis}:{f'S({key})' if key else tag(p)}")
    return ", ".join(words)


def print_joined(found: JoinedPrediction, run: PlacedRun | None, out: Console, *, backward: bool) -> None:
    """Print joins, inputs, exchanges and the step; of a run its losses beside one process's. `backward`: the derived
    steps, too."""
    made, forward = found.computation, len([s for s in found.steps if not _is_derived(s.step.output)])
    axes = " * ".join(f"{axis} {size}" for axis, size in found.mesh.axes)
    _print(out, f"{made.name}: {forward} steps forward, {len(found.steps) - forward} derived, on a mesh of {axes}")
    if backward:
        _print(out)
        _print(out, "derived")
        for placed in found.steps:
            if _is_derived(placed.step.output):
                _print(out, f"  {placed.step.text}")
    _print(out)
    _print(out, "joins")
    for placed in found.steps:
        ways = [w for w in found.ways if w.join == placed.step.output]
        if ways:
            _print(out, f"  {placed.step.text}   # {placed.seconds * 1e3:.3f} ms")
            for axis, _ in found.mesh.axes:
                _print(out, "    " + _ways(found, [w for w in ways if w.axis == axis]))
    _print(out)
    _print(out, "inputs")
    for tensor in made.inputs:
        size = " x ".join(f"{key} {made.dims[key]}" for key in tensor.keys) or "a number"
        more = ", trained" if tensor.trained else ""
        rows = f", {made.nonzeros[tensor.name]} rows" if tensor.rows_of else ""
        _print(out, f"  {tensor.name:12} {_tagged(found, tensor.name):24} # {size}{rows}{more}")
    _print(out)
    _print(out, "exchanges of a step")
    for m in found.moves:
        row = f"  {m.op:14} over {m.axis:6} {m.num_bytes / 1e9:10.3f} GB {m.seconds * 1e3:10.3f} ms   # {m.tensor}"
        _print(out, row)
    if not found.moves:
        _print(out, "  none")
    proven = "nothing is faster" if not found.gap else f"at most {found.gap:.1%} over the fastest"
    _print(
        out,
        f"step {found.step_s * 1e3:.3f} ms: {found.compute_s * 1e3:.3f} ms in operators, {found.exchange_s * 1e3:.3f} "
        f"ms in exchanges, nothing overlapped; {proven}",
    )
    _print(
        out,
        f"a rank holds {found.held_bytes / 2**30:.3g} GiB of {found.capacity_bytes / 2**30:.3g} GiB, nothing freed "
        "before the end of a step" + ("; rows are taken to be spread evenly over keys" if made.nonzeros else ""),
    )
    run_text(run, out)


def _is_derived(name: str) -> bool:
    """Whether a step made this tensor that no file says: no name of a file has such signs in it."""
    return not name.isidentifier()


def _ways(found: JoinedPrediction, ways: list[JoinWay]) -> str:
    """The way that is taken on an axis, and what a step takes longer with the nearest others."""
    taken = next(w for w in ways if w.taken)
    others = sorted((w for w in ways if not w.taken), key=lambda w: w.step_s)[:SHOWN]
    said = []
    for w in others:
        more = f"+{max(0.0, w.step_s - found.step_s) * 1e3:.3f} ms" if isfinite(w.step_s) else "does not fit"
        said.append(f"{w.way} {more}")
    return f"{taken.axis}: {taken.way}" + (f"; else {'; '.join(said)}" if said else "")


def plain(found: JoinedPrediction, run: PlacedRun | None) -> dict[str, Any]:
    """The answer as plain values."""
    made = found.computation
    return {
        "mesh": dict(found.mesh.axes),
        "steps": [
            {
                "step": placed.step.text,
                "derived": _is_derived(placed.step.output),
                "reads": [[tag(p) for p in place] for place in placed.ins],
                "makes": [tag(p) for p in placed.out],
                "seconds": placed.seconds,
            }
            for placed in found.steps
        ],
        "inputs": {t.name: [tag(p) for p in found.homes[t.name]] for t in made.inputs},
        "joins": [
            {"join": w.join, "axis": w.axis, "way": w.way, "taken": w.taken, "step_s": w.step_s} for w in found.ways
        ],
        "updates": [placed.step.text for placed in found.steps if placed.step.kind == UPDATE],
        "step_s": found.step_s,
        "compute_s": found.compute_s,
        "exchange_s": found.exchange_s,
        "bound_s": found.bound_s,
        "held_bytes": found.held_bytes,
        "capacity_bytes": found.capacity_bytes,
        "exchanges": [
            {"tensor": m.tensor, "op": m.op, "axis": m.axis, "bytes": m.num_bytes, "seconds": m.seconds}
            for m in found.moves
        ],
        "run": run and structs.asdict(run),
    }
