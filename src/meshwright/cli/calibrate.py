"""``meshwright calibrate``: fit kernel curves to tables of measurements and say how good they are."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from meshwright.cli import options
from meshwright.cli.calibrate_options import CalibrateOptions
from meshwright.cli.needs import lacking
from meshwright.cli.output import note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError, nearest

DESCRIPTION = """Fit cost curves to tables of measurements (ops_gemm.csv, ops_attention.csv, ops_mla.csv, ops_moe.csv,
ops_ssm.csv, collectives.csv, training_steps.csv and serving_runs.csv, plain or gzipped), print constants, measured
against predicted by size, and errors on groups held out.

With --runs, a few runs of your own stack update what is known of others: the profile that comes out is written to the
file of --out, for --framework FILE of predict, search and the others.

With --server, probes of a running server fit a profile of it, with errors on probes left out: predict --serve then
answers for other traffic with --engine-profile FILE.

With --text, how fast one core of this machine reads a text, tokenises it and puts batches together: words for --feed of
predict.

With --few, a device that nobody measured gets curves of matrix products from a few of them, and from the curves of
known devices: without --data, the table of which to measure is written to --out; with --data, the curves are learned
from it and written where predictions look for them.

Profiles are written to --out (kernels/, network/, frameworks/ and engines/ in it); a prediction uses the catalog's
unless told otherwise."""
#: Where what was measured is kept until all of it is, in the folder of the profile.
PART = "here.part.json"
#: Options that say something of a server that is probed.
OF_A_SERVER = ("save", "seconds", "longest", "model", "api_key", "serve")
#: What is measured, where nothing says it.
CHOICES = "--here (this machine), --server URL, --runs FILE, --text PATH, --device NAME with --few COUNT, or --data DIR"
CLASSES = ("gemm", "attention", "latent", "moe", "scan", "network", "framework", "engine")


def run(argv: list[str]) -> int:
    """0 when the tables were fitted; tables that cannot be measurements are misuse."""
    given, wrong = options.read(CalibrateOptions, argv, command="calibrate", description=DESCRIPTION)
    if given.server:
        from meshwright.cli.calibrate_server import run_server

        return run_server(given, wrong)
    if given.text:
        from meshwright.cli.calibrate_text import run_text

        return run_text(given, wrong)
    wrong += _of_a_server(given) + _of_a_text(given)
    if given.runs:
        return _runs(given, wrong)
    if given.here:
        return _here(given, wrong)
    if given.quick:
        wrong.append(
            Diagnostic(code="K001", message="--quick says how much of this machine is measured, and nothing of it is",
                       place="--quick", help="say --here --quick, or leave --quick out")
        )  # fmt: skip
    if given.anyway:
        wrong.append(
            Diagnostic(code="K001", message="--anyway keeps a profile of this machine, and nothing of it is measured",
                       place="--anyway", help="say --here --anyway, or leave --anyway out")
        )  # fmt: skip
    if given.few:
        from meshwright.cli.calibrate_few import run_few

        return run_few(given, wrong)
    if not given.data:
        said, place = "nothing says what is calibrated", "meshwright calibrate"
        wrong.append(Diagnostic(code="X004", message=said, place=place, help=f"add {CHOICES}"))
    only = [name for name in given.only.split(",") if name] or _there(Path(given.data))
    wrong += [_unknown(name) for name in only if name not in CLASSES]
    share, fault = _share(given.holdout)
    wrong += fault
    if given.data and not Path(given.data).is_dir():
        wrong.append(Diagnostic(code="K001", message="not a folder", place=f"--data {given.data}"))
    if wrong:
        raise MeshwrightError(wrong)
    kernels = tuple(name for name in only if name not in ("network", "framework", "engine"))
    if kernels:
        _kernels(given, kernels, share)
    if "network" in only:
        _network(given, share)
    if "framework" in only:
        _frameworks(given)
    if "engine" in only:
        _engines(given)
    return 0


def _of_a_server(given: CalibrateOptions) -> list[Diagnostic]:
    """K001 for options of ``--server`` where none is said."""
    said = [f"--{name.replace('_', '-')}" for name in OF_A_SERVER if getattr(given, name)]
    help = "say --server URL, or leave it out"
    return [
        Diagnostic(code="K001", message=f"{name} is of a server, and none is said", place=name, help=help)
        for name in said
    ]


def _of_a_text(given: CalibrateOptions) -> list[Diagnostic]:
    """K001 for options of ``--text`` where none is said."""
    help = "say --text PATH, or leave it out"
    wrong = [name for name in ("train", "tokenizer") if getattr(given, name)]
    return [
        Diagnostic(code="K001", message=f"--{name} is of a text that is read, and none is said", place=f"--{name}",
                   help=help)
        for name in wrong
    ]  # fmt: skip


def _there(folder: Path) -> list[str]:
    """All classes; scans and engines where the folder has their table, which few have."""
    from meshwright.calibrate import tables

    few = {"latent": "ops_mla", "scan": "ops_ssm", "engine": "serving_runs"}
    return [name for name in CLASSES if name not in few or tables.find(folder, few[name]) is not None]


def _here(given: CalibrateOptions, wrong: list[Diagnostic]) -> int:
    """Measure this machine and write its profile to ``--out``, by default where predictions look for it. What was
    measured is kept there until all of it is, so that an interrupted measurement goes on."""
    if given.data:
        wrong.append(
            Diagnostic(code="K001", message="--here measures and --data reads measurements", place="--here --data",
                       help="say one of them")
        )  # fmt: skip
    wrong += lacking("calibrate", "torch")
    if given.ranks and not (given.ranks.isdecimal() and 2 <= int(given.ranks) <= 64):
        help = "a whole number from 2 to 64"
        wrong.append(Diagnostic(code="K012", message=f"{given.ranks!r} is no number of processes", place="--ranks",
                                help=help))  # fmt: skip
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright import catalog
    from meshwright.calibrate import here
    from meshwright.cli.progress import Progress
    from meshwright.run import bench
    from meshwright.run.bench import store as bench_kept

    folder = Path(given.out) if given.out else catalog.measured_here()
    part = folder / PART
    if bench_kept.is_refused(part) and not given.anyway:
        bench_kept.forget(part)
    if found := bench_kept.num_kept(part):
        note(f"going on from an interrupted measurement: {found} of its parts are kept ({part})")
    scope = bench.QUICK if given.quick else bench.FULL
    try:
        machine = bench.measure(
            most_ranks=int(given.ranks or (2 if given.quick else 8)), scope=scope, progress=Progress("benchmarks"),
            file=part,
        )  # fmt: skip
    except KeyboardInterrupt:
        note(f"parts that are kept: {bench_kept.num_kept(part)}; the same command goes on from there ({part})")
        raise
    found = here.fit(machine)
    if given.json and not (found.doubts and not given.anyway):
        print_json({"framework": found.framework, "rows": found.rows, "seconds": machine.seconds,
                    "left_out": found.left_out, "doubts": found.doubts, "drift": found.drift})  # fmt: skip
    elif not given.json:
        print(f"{machine.name}: {machine.cores} cores, measured in {machine.seconds:.0f} s")
        print("\n".join(here.report(found)))
    try:
        here.write(machine, folder, found=found, anyway=given.anyway)
    except here.Disbelieved:
        bench_kept.refuse(part)
        raise
    bench_kept.forget(part)
    where = f", with MESHWRIGHT_HOME={folder}" if given.out else ""
    note(f"wrote {folder}: predict with --on 2xhere{where}")
    return 0


def _runs(given: CalibrateOptions, wrong: list[Diagnostic]) -> int:
    """Update a framework profile by the user's own runs, and write it to the file of ``--out``."""
    for name in ("data", "here", "only"):
        if getattr(given, name):
            message = f"--runs updates a profile by runs of your own, and --{name} fits or measures other things"
            wrong.append(Diagnostic(code="K001", message=message, place=f"--runs --{name}", help="say one of them"))
    if given.out and not given.out.endswith(".toml"):
        wrong.append(
            Diagnostic(code="K001", message="a profile is one .toml file", place=f"--out {given.out}",
                       help="--out own.toml")
        )  # fmt: skip
    wrong += unwritable(given.out, "--out")
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.atomic import write_bytes
    from meshwright.calibrate import runs
    from meshwright.calibrate.framework_profiles import as_toml
    from meshwright.cost import standard

    base = runs.base_of(given.framework)
    found, left = runs.read(Path(given.runs), base, keep_good=given.keep_good)
    for one in left:
        note(f"left out: {one.place}: {one.message}")
    kinds = () if given.framework else runs.known_stacks()
    own = runs.fit(found, base, standard, name=Path(given.out).stem if given.out else "own", kinds=kinds)
    if given.json:
        print_json(own)
    else:
        print(f"{len(found)} runs; {base.name} before: {own.before:.1%} off; updated: {own.in_sample:.1%} in sample")
        print("  line   measured  predicted, the run left out")
        for line, measured, predicted in own.rows:
            print(f"  {line:4d}  {measured:8.3f} s  {predicted:8.3f} s  {predicted / measured - 1:+6.1%}")
        if own.left_out is not None:
            print(f"  left out: {own.left_out:.1%} mean error")
        if own.peaks is not None:
            keeps = (
                f"activation_copies {own.framework.activation_copies:g}, memory_sigma {own.framework.memory_sigma:g}"
            )
            print(f"  peaks of memory: {own.peaks:.1%} mean error in sample; {keeps}")
        said = (f"{name} {getattr(own.framework, name):.4g}" for name in runs.UPDATED)
        print(f"  {', '.join(said)}; step_sigma {own.framework.step_sigma:g}")
    if given.out:
        write_bytes(Path(given.out), as_toml(own.framework).encode())
        note(f"wrote {given.out}: predict with --framework {given.out}")
    return 0


def _frameworks(given: CalibrateOptions) -> None:
    from meshwright.calibrate import framework, framework_memory, framework_profiles
    from meshwright.cost import standard

    data = Path(given.data)
    fits = list(framework.fit_all(data, standard, progress=note))
    memory = list(framework_memory.fit_all(data, standard))
    if given.json:
        print_json({"steps": fits, "memory": memory})
    else:
        print("\n".join(framework_profiles.report(fits) + framework_memory.report(memory)))
    if given.out:
        found = framework_profiles.profiles(fits, memory)
        for path in framework_profiles.write(found, Path(given.out) / "frameworks"):
            note(f"wrote {path}")


def _engines(given: CalibrateOptions) -> None:
    from meshwright.calibrate import engine, engine_runs

    folder = Path(given.data)
    fits, runs = engine.fit_all(engine.samples(folder, progress=note)), engine_runs.fit_runs(folder, progress=note)
    if given.json:
        print_json({"engines": [one.profile for one in (*fits, *runs)]})
    else:
        print("\n".join([*engine.report(fits), *engine_runs.report(runs)]))
    if given.out:
        for path in engine.write([one.profile for one in (*fits, *runs)], Path(given.out) / "engines"):
            note(f"wrote {path}")


def _kernels(given: CalibrateOptions, classes: tuple[str, ...], share: float) -> None:
    from meshwright.calibrate import report
    from meshwright.calibrate.run import calibrate, write
    from meshwright.spec.cluster import load_device

    device = load_device(given.device).name if given.device else ""
    done = calibrate(Path(given.data), classes=classes, device=device, holdout=share, progress=note)
    if given.json:
        print_json(report.as_json(done.fits, done.left, done.skipped))
    else:
        print("\n".join(report.lines(done.fits, done.left, done.skipped, share)))
    if given.out:
        for path in write(done, classes, Path(given.out) / "kernels"):
            note(f"wrote {path}")


def _network(given: CalibrateOptions, share: float) -> None:
    from meshwright.calibrate import network

    # Its report is text; with --json stdout is the kernels' alone.
    with contextlib.redirect_stdout(sys.stderr if given.json else sys.stdout):
        network.run(Path(given.data), share, Path(given.out) / "network" if given.out else None)


def _unknown(name: str) -> Diagnostic:
    return Diagnostic(
        code="K009", message=f"nothing to fit called {name!r}", place="--only", help=nearest(name, CLASSES)
    )


def _share(text: str) -> tuple[float, list[Diagnostic]]:
    try:
        share = float(text or "0.2")
    except ValueError:
        share = -1.0
    if 0 <= share < 0.9:
        return share, []
    fault = Diagnostic(
        code="K010", message=f"{text!r} is not a share of groups", place="--holdout", help="a number from 0 to 0.9"
    )
    return 0.2, [fault]
