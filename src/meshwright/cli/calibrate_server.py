"""``meshwright calibrate --server``: probes of a running server, and the profile that they fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from meshwright.cli import options
from meshwright.cli.bench_serve import api_key
from meshwright.cli.output import note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError

#: Seconds that probes take, and tokens of their longest prompt, where neither is said.
USUAL_S, USUAL_LONGEST = 180.0, 1024
#: Other things that are calibrated.
OTHERS = ("data", "runs", "here", "only", "out", "device", "framework")


def run_server(given: Any, wrong: list[Diagnostic]) -> int:
    """0 when the server was probed and its profile fitted, 1 where it cannot be believed, and is not written."""
    for name in OTHERS:
        if getattr(given, name):
            message = f"--server probes a server, and --{name} is of other measurements"
            wrong.append(Diagnostic(code="K001", message=message, place=f"--server --{name}", help="say one of them"))
    wanted = {
        "seconds": (10.0, 86400.0, False, "seconds from 10 up"),
        "longest": (64, 1 << 20, True, "a whole number of tokens from 64 up"),
    }
    said = options.numbers(given, wanted, wrong, command="calibrate")
    key, fault = api_key(given.api_key)
    wrong += fault + unwritable(given.save, "--save")
    if given.save and not given.save.endswith(".toml"):
        wrong.append(
            Diagnostic(code="K001", message="a profile is one .toml file", place=f"--save {given.save}",
                       help="--save server.toml")
        )  # fmt: skip
    like = None
    if given.serve:
        from meshwright.spec.serve import parse

        try:
            like = parse(given.serve).drawn()
        except MeshwrightError as error:
            wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    probes, where, model = asyncio.run(
        _probed(given, key, said.get("seconds", USUAL_S), said.get("longest", USUAL_LONGEST), like)
    )
    from meshwright.atomic import write_bytes
    from meshwright.calibrate import engine, server, server_report

    name = Path(given.save).stem if given.save else "server"
    found = server.fit_server(probes, model=model, url=where, name=name, say=note)
    if given.json:
        print_json(found)
    else:
        print("\n".join(server_report.report(found)))
    if found.doubts:
        note(f"{f'{given.save} is not written' if given.save else 'no profile'}: {found.doubts[0]}")
        note("probe it again when its machine is quiet, or for longer: --seconds 600")
        return 1
    if given.save:
        write_bytes(Path(given.save), engine.as_toml(found.profile).encode())
        note(f"wrote {given.save}: meshwright predict --serve ... --engine-profile {given.save}")
    return 0


async def _probed(given: Any, key: str, budget_s: float, longest: int, like: Any) -> tuple[Any, str, str]:
    from meshwright.calibrate.server_probes import Prober, longest_prompt
    from meshwright.traffic.session import opened

    session = await opened(given.server, model=given.model, api_key=key, tokenizer=given.tokenizer)
    where = session.client.where.text
    longest = longest_prompt(session.dialect, longest)
    if longest < 64:
        message = f"the server's context of {session.dialect.context} tokens leaves no room for probes"
        raise MeshwrightError.one("T009", message, place=where, help="serve the model with a longer context")
    note(f"{session.dialect.model} at {where}; prompts: {session.prompts.how}")
    clock = asyncio.get_running_loop().time
    prober = Prober(session, longest=longest, budget_s=budget_s, say=note, clock=clock, like=like)
    probes = await prober.make()
    if prober.errors:
        note(f"{len(prober.errors)} probes were not answered, the first: {prober.errors[0]}")
    if not probes:
        help = "the server's own log often says why"
        message = f"no probe was answered: {prober.errors[0] if prober.errors else 'no time was left'}"
        raise MeshwrightError.one("T009", message, place=where, help=help)
    return probes, where, session.dialect.model
