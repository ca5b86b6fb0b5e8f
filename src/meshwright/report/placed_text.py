"""Completed placements as text: where every tensor lies, what is exchanged and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from meshwright.layers.algebra import PARTIAL, Placement

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.answer.completion import PlacedPrediction
    from meshwright.plan.placements import Annotations
    from meshwright.run.annotated import PlacedRun


def tag(place: int) -> str:
    """A placement as a file writes it."""
    return f"S({place})" if place >= 0 else "P" if place == PARTIAL else "B"


def tagged(found: PlacedPrediction, place: Placement) -> list[str]:
    """A placement on all axes, as a file writes it."""
    return [f"{axis}:{tag(p)}" for (axis, _), p in zip(found.program.mesh.axes, place)]


def print_placed(found: PlacedPrediction, said: Annotations, run: PlacedRun | None, out: Console) -> None:
    """Print a table of tensors, one of exchanges, and the step; of a run its losses beside one process's."""
    network, homes = found.program.network, found.program.homes
    for kind, weight in (("weights", True), ("activations", False)):
        out.print(f"[{kind}]", markup=False)
        for name, tensor in network.tensors.items():
            if tensor.weight == weight and not name.endswith("'") and name != "loss":
                own = "" if name not in said.said else "   # said: " + ", ".join(said.said[name])
                shape = " x ".join(map(str, (*tensor.shape, *([tensor.each] if tensor.each > 1 else []))))
                words = ", ".join(f'"{word}"' for word in tagged(found, homes[name]))
                out.print(f"{chr(34) + name + chr(34):20} = [{words}]   # {shape}{own}", markup=False, soft_wrap=True)
        out.print()
    out.print("exchanges of a step", markup=False)
    for (op, axis), (count, size, seconds) in found.totals().items():
        out.print(
            f"  {op:14} over {axis:6} {count:6} times {size / 1e9:10.3f} GB {seconds * 1e3:10.3f} ms", markup=False
        )
    if not found.moves:
        out.print("  none", markup=False)
    out.print(
        f"step {found.step_s * 1e3:.3f} ms: {found.compute_s * 1e3:.3f} ms in operators, {found.exchange_s * 1e3:.3f} "
        f"ms in exchanges, nothing overlapped; weights of {found.weight_bytes / 1e9:.3f} GB on a rank",
        markup=False,
        soft_wrap=True,
    )
    run_text(run, out)


def run_text(run: PlacedRun | None, out: Console) -> None:
    """Print the losses of a run beside one process's, and how far apart they are; nothing where none was asked for."""
    if run is not None:
        out.print()
        for step, (mine, alone) in enumerate(zip(run.losses, run.alone)):
            out.print(f"step {step}: loss {mine:.12f}, on one process {alone:.12f}", markup=False)
        out.print(
            f"largest difference of gradients {run.gradient_error:.1e}, of weights {run.weight_error:.1e}", markup=False
        )


def plain(found: PlacedPrediction, run: PlacedRun | None) -> dict[str, Any]:
    """The answer as plain values."""
    network, homes = found.program.network, found.program.homes
    shown = {n: t for n, t in network.tensors.items() if not n.endswith("'") and n != "loss"}
    return {
        "mesh": dict(found.program.mesh.axes),
        "weights": {n: tagged(found, homes[n]) for n, t in shown.items() if t.weight},
        "activations": {n: tagged(found, homes[n]) for n, t in shown.items() if not t.weight},
        "step_s": found.step_s,
        "compute_s": found.compute_s,
        "exchange_s": found.exchange_s,
        "weight_bytes": found.weight_bytes,
        "exchanges": [
            {
                "tensor": m.tensor,
                "gradient": m.gradient,
                "op": m.op,
                "axis": m.axis,
                "bytes": m.num_bytes,
                "times": m.times,
                "seconds": m.seconds,
            }
            for m in found.moves
        ],
        "run": run and structs.asdict(run),
    }
