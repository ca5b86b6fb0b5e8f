"""``meshwright run --denoise``: images that a diffusion transformer makes under a plan, and how far those of an
approximate plan are from those of its exact form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, note, print_json
from meshwright.cli.question import WANTED, asked
from meshwright.cli.run_options import NEEDED, NUMBERS
from meshwright.cli.sheets import PartsRead
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.run.environment import is_first

if TYPE_CHECKING:
    from meshwright.answer.denoising import DenoisingPrediction
    from meshwright.cli.run_options import RunOptions

#: Options that such a run reads.
READ = (
    *("plan_file", "model", "on", "plan", "denoise", "framework", "weights", "seed", "dtype", "device", "out", "json"),
)
WEIGHTS = "--weights FOLDER, one for each expert: meshwright weights makes one of a run's checkpoint"
PLANNED = '--plan "cp2 allgather stale=patches"'
#: Types that --dtype may say.
DTYPES = ("fp32", "bf16", "fp16", "float64")
#: Steps of which the report says how far images are from those of the exact form, at most.
SHOWN = 8


def run_images(given: RunOptions, wrong: list[Diagnostic]) -> int:
    """Make images and print what was measured; 0.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *_unread(given), *lacking("run", *NEEDED)]
    if given.dtype and given.dtype not in DTYPES:
        wrong.append(_bad("X003", f"{given.dtype!r} is no type", f"--dtype {given.dtype}", f"{', '.join(DTYPES)}"))
    if given.out and Path(given.out).exists():
        message = f"{given.out} is there already"
        wrong.append(_bad("X104", message, f"--out {given.out}", "name a file that is not, such as images.npz"))
    numbers = options.numbers(given, {"seed": NUMBERS["seed"]}, wrong, command="run")
    said = {field: getattr(given, field) for field in ("on", "plan", "denoise", "framework")}
    reading = PartsRead(asked({"model": given.model or given.plan_file, **said}), wrong)
    needed = {"model": WANTED["model"], "on": WANTED["on"], "plan": PLANNED}
    reading.missing(needed, "run")
    reading.wrong += options.missing({"weights": given.weights}, {"weights": WEIGHTS}, command="run")
    from meshwright.spec.denoise import parse

    denoise = reading.part(given.denoise, lambda: parse(given.denoise))
    parts = reading.done(reading.model(), reading.cluster("images are made"), denoise, reading.costs(), reading.plan())
    if wrong := _weights(given.weights, parts[2]):
        raise MeshwrightError(wrong)
    prediction = _predicted(*parts)
    return _made(given, prediction, numbers.get("seed", 0))


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def _unread(given: RunOptions) -> list[Diagnostic]:
    """X004 for options of training."""
    found = []
    for field in given.__struct_fields__:
        if field not in READ and getattr(given, field):
            word = f"--{field.replace('_', '-')}"
            message = f"{word} is of training, and --denoise makes images"
            found.append(_bad("X004", message, "meshwright run --denoise", f"drop {word}, or --denoise"))
    return found


def _weights(text: str, denoise: Any) -> list[Diagnostic]:
    """X003 for other weights than those of each expert, and of the router."""
    found, count = [], len(text.split(",")) if denoise.experts > 1 or not Path(text).exists() else 1
    if count != denoise.experts:
        message = f"there are weights of {count} model{'s' * (count > 1)}, and experts={denoise.experts}"
        help = "name a folder for each expert: --weights expert-0,expert-1 (meshwright weights --replica 1 writes one)"
        found.append(_bad("X003", message, f"--weights {text}", help))
    if denoise.router and not Path(denoise.router).is_dir():
        message = f"{denoise.router} is no folder of weights, which a run weighs experts by"
        help = "meshwright weights makes one of the router's checkpoint"
        found.append(_bad("X003", message, f"--denoise router={denoise.router}", help))
    return found


def _predicted(model: Any, cluster: Any, denoise: Any, costs: Any, plan: Any) -> DenoisingPrediction:
    """The prediction, once nothing keeps the plan from being run."""
    from meshwright.answer.denoising import predict_denoising
    from meshwright.plan.image_making import unexecutable_images

    found = predict_denoising(model, cluster, denoise, plan, costs=costs)
    if wrong := unexecutable_images(found.plan, model, denoise):
        raise MeshwrightError(wrong)
    return found


def _made(given: RunOptions, prediction: DenoisingPrediction, seed: int) -> int:
    from meshwright.run import launch
    from meshwright.run.images import ImagesJob, make

    plan, denoise = prediction.plan, prediction.denoise
    job = ImagesJob(
        model=prediction.model,
        plan=plan,
        denoise=denoise,
        weights=given.weights,
        dtype=given.dtype or denoise.dtype,
        seed=seed,
    )
    if is_first():
        many = f"{plan.num_ranks} process{'es' * (plan.num_ranks > 1)}"
        note(f"making {denoise.text()} with {prediction.model.name} under {plan.text()}, on {many}")
    found = launch.start(make, job, bool(given.out), num_ranks=plan.num_ranks, device=given.device or "auto")
    if found is None:
        return 0
    images = found.pop("images", None)
    if given.out:
        _write(given.out, images, job)
    if plan.layout.cp > 1 and plan.sequence.algorithm == "allgather" and not denoise.frames:
        found["predicted_sent_bytes"] = prediction.times.sent_bytes * _width(job.dtype, denoise.dtype)
    elif denoise.experts > 1:  # summed in 32 bits at least
        found["predicted_sent_bytes"] = prediction.times.mixed_bytes * (2 if job.dtype == "float64" else 1)
    else:  # exchanges of other ways are not counted
        found.pop("sent_bytes"), found.pop("exact_sent_bytes", None)
    found["predicted_s"] = prediction.latency.value
    if given.json:
        print_json({"model": prediction.model.name, "denoise": denoise.text(), "plan": plan.text(), **found})
        return 0
    _print(prediction, found)
    if given.out:
        note(f"wrote {given.out}")
    return 0


def _width(computed: str, said: str) -> float:
    """Bytes of a number that is computed with, over those that the prediction has."""
    sizes = {"fp32": 4, "float64": 8}
    return sizes.get(computed, 2) / sizes.get(said, 2)


def _write(path: str, images: Any, job: Any) -> None:
    """Write the samples and the classes that they are of, as --data reads them."""
    import numpy as np

    from meshwright.atomic import write_by

    classes = max(1, job.model.embedding.classes - 1)
    found = {"images": np.array(images, np.float32), "labels": np.arange(len(images)) % classes}
    write_by(Path(path), lambda file: np.savez(file, **found))


def _print(prediction: DenoisingPrediction, found: dict[str, Any]) -> None:
    out, denoise = console(), prediction.denoise
    each = found["seconds"] / denoise.steps
    what = f"{denoise.images} image{'s' * (denoise.images > 1)}"
    out.print(f"{what} in {found['seconds']:.3g} s: {each * 1e3:.3g} ms a step")
    if (apart := found.get("apart")) is not None:
        exact = found["exact_seconds"]
        waits = denoise.whole
        first, other = ("waiting for every exchange", "waiting makes") if waits else ("all experts", "all experts make")
        out.print(f"{first}: {exact:.3g} s, {exact / found['seconds']:.3g} times as long")
        out.print(f"images differ from those that {other} by {apart[-1]:.2%} of their length at the end; by step:")
        every = max(1, -(-len(apart) // SHOWN))
        steps = sorted({*range(every, len(apart), every), len(apart)})
        out.print("  " + ", ".join(f"{step}: {apart[step - 1]:.2%}" for step in steps))
    if "sent_bytes" in found:
        what = "sent between patches by the busiest rank" if denoise.experts == 1 else "summed over experts by a rank"
        line = f"{what} in a step: {found['sent_bytes']:,.0f} bytes"
        out.print(f"{line}, predicted {found['predicted_sent_bytes']:,.0f}")
    out.print(f"predicted {found['predicted_s']:.3g} s on {prediction.cluster.name}")
