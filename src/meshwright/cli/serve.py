"""``meshwright serve``: a plan's engine behind OpenAI's protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.bench_serve import api_key
from meshwright.cli.guard import INTERRUPTED
from meshwright.cli.needs import lacking
from meshwright.cli.output import note, print_json
from meshwright.cli.question import Question, asked, path_of
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import parse_bytes

if TYPE_CHECKING:
    from meshwright.endpoint.app import EngineHolder, Served
    from meshwright.endpoint.front import Limits
    from meshwright.endpoint.seam import EngineSpec

DESCRIPTION = """Serve a published model with a plan's engine, behind OpenAI's protocol: completions, chats, streams.

Name the plan.toml or question.toml, or say --plan and --serve as to meshwright predict: the engine takes the words of
its batching, cache and speculation, and words of requests are left aside. The policies are those that predict
simulates.

OpenAI's own clients and the benchmarks of vLLM, SGLang and meshwright bench-serve talk to it; /metrics is Prometheus',
under vLLM's names, and /health is for probes. The engine has a process of its own: one that dies is replaced, and its
requests go on where they were.

It is on this machine only unless --host says otherwise. Ctrl-C or SIGTERM finishes what runs and refuses what comes;
once more ends at once. Exit code 0: ended on request; 1: the engine could not be had; 2: the options are wrong."""
NEEDED = ("torch", "safetensors", "tokenizers", "starlette", "uvicorn", "prometheus_client")
#: The port where none is said, which is vLLM's.
PORT = 8000
#: Seconds without a word after which an engine with work hangs, where nobody says: a long prompt takes some.
HANG_S = 300.0
DEVICES, DTYPES = ("auto", "cpu", "cuda"), ("fp32", "bf16", "fp16", "float64")
#: Numbers among the options: field -> (least, most, whole numbers only, what is wanted in words).
NUMBERS = {
    "port": (0, 65535, True, "a number from 0 to 65535; 0 takes a free one"),
    "max_queue": (0, 1e6, True, "a number of requests"),
    "timeout": (0.0, 1e6, False, "seconds, 0 for no end"),
    "hang": (1.0, 1e6, False, "seconds from 1 up"),
    "slow": (0.01, 1e6, False, "seconds above 0"),
}


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright serve``."""

    file: options.positional("FILE", "plan.toml or question.toml; or the model's folder.") = ""
    model: options.text("DIR", "Folder of a published model: config.json, safetensors, tokenizer.json.") = ""
    plan: options.text("PLAN", "Words such as 'tp2', or a .toml file: meshwright explain plan.") = ""
    serve: options.text("WORDS", "Of the engine: policy=vllm-v1,budget=2048,prefix_cache=yes.") = ""
    device: options.text("KIND", "cpu or cuda; a GPU where there is one if left out.") = ""
    dtype: options.text("TYPE", "Compute in fp32, bf16, fp16 or float64; the plan's or the weights' if left out.") = ""
    name: options.text("NAME", "What the model is called; its folder's name if left out.") = ""
    adapter: options.repeated("NAME=DIR", "A LoRA adapter in PEFT's form; requests name it as their model.") = ()
    host: options.text("ADDRESS", "Where it listens; 127.0.0.1, this machine only, if left out.") = ""
    port: options.text("NUMBER", f"Its port; {PORT}, or one that is free if that is taken, if left out.") = ""
    api_key: options.repeated("KEY", "Wanted of callers; env:NAME takes it from a variable. Each is a tenant.") = ()
    max_queue: options.text("COUNT", "Requests that may wait beside those that run; 1024 if left out.") = ""
    timeout: options.text("SECONDS", "Longest time of a request; 600 if left out, 0 for no end.") = ""
    slow: options.text("SECONDS", "Drop who reads nothing of an answer for so long; 30 if left out.") = ""
    hang: options.text(
        "SECONDS",
        "Replace a busy engine that is silent for so long; 300 if left out, less once it ran.",
    ) = ""
    tool_parser: options.text("NAME", "How the model writes calls of tools: hermes, as Qwen 2.5 and 3.") = ""
    max_body: options.text("BYTES", "Longest body of a request; 8MiB if left out.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 once it was ended on request."""
    given, wrong = options.read(ServeOptions, argv, command="serve", description=DESCRIPTION)
    spec, served = _read(given, wrong)
    from meshwright.endpoint import hosts
    from meshwright.endpoint.app import App
    from meshwright.endpoint.listen import listener

    made = hosts.bind(served.host, int(given.port) if given.port else None, PORT)
    url = hosts.address(made, served.host)
    if served.host not in hosts.ONLY_HERE and not served.keys:
        note(f"warning: {served.host} is open to others of the network, and nobody is asked for a key: say --api-key")
    note(f"building the engine of {spec.folder}")
    app = App(_engine(spec, float(given.hang or HANG_S), learns=not given.hang), served)

    def ready() -> None:
        if app.front.facts is not None:
            note(f"the cache has room for {app.front.facts.room:,} tokens")
        if given.json:
            print_json({"format_version": 1, "url": url, "model": served.names[0]})
        else:
            print(f"{url}v1   {served.names[0]}   (Ctrl-C ends it)", flush=True)

    server = listener(app, ready, note)
    with made:
        server.run(sockets=[made])
    if server.abandoned:
        return INTERRUPTED
    if isinstance(app.failed, Exception):
        raise app.failed
    note("closed")
    return 0


def _engine(spec: EngineSpec, hang_s: float, *, learns: bool) -> EngineHolder:
    """The engine in a process of its own, or of several replicas each in one, with its part of the machine.

    Raises:
        MeshwrightError: L002 where the machine has too few GPUs for them.
    """
    from meshwright import plan, serving
    from meshwright.endpoint.replicas import ReplicatedEngine
    from meshwright.endpoint.supervisor import EngineProcess
    from meshwright.run.serve.refused import one_replica
    from meshwright.spec.serve import engine_words

    if spec.replicas == 1:
        return EngineProcess(spec, say=note, stall_s=hang_s, learns=learns)
    layout, words = one_replica(plan.parse(spec.plan)).layout, engine_words(spec.serve)
    ranks, gpus, each = layout.tp * layout.pp, _gpus(), []
    if spec.device == "cuda" or (spec.device == "auto" and gpus):
        if ranks * spec.replicas > len(gpus):
            message = f"{spec.replicas} replicas of {ranks} ranks and {len(gpus)} GPUs on this machine"
            help = "a plan of fewer ranks, or --device cpu"
            raise MeshwrightError.one("L002", message, place="meshwright serve", help=help)
        spec = msgspec.structs.replace(spec, device="cuda")
        each = [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[at * ranks : (at + 1) * ranks])} for at in range(spec.replicas)]
    elif "OMP_NUM_THREADS" not in os.environ:  # else each would take all cores
        each = [{"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // spec.replicas))}] * spec.replicas
    holders = [
        EngineProcess(
            spec,
            say=lambda line, at=at: note(f"replica {at}: {line}"),
            stall_s=hang_s,
            learns=learns,
            environment=each[at] if each else {},
        )
        for at in range(spec.replicas)
    ]
    unit = words.block if words.prefix_cache else 0
    return ReplicatedEngine(holders, serving.get("routing", words.routing), unit=unit, say=note)


def _gpus() -> list[str]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES names them."""
    there = [str(at) for at, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if said is None else [one for one in said.split(",") if one] if there else []


def _read(given: ServeOptions, wrong: list[Diagnostic]) -> tuple[EngineSpec, Served]:
    """The engine to build and what is served with it, once nothing is wrong with either.

    Raises:
        MeshwrightError: everything that is wrong, `wrong` too.
    """
    wrong += lacking("serve", *NEEDED, extra="serve")
    if wrong and any(found.code == "L003" for found in wrong):
        raise MeshwrightError(wrong)
    from meshwright import plan, serving
    from meshwright.endpoint import hosts
    from meshwright.endpoint.app import Served
    from meshwright.endpoint.seam import EngineSpec
    from meshwright.endpoint.template import ChatTemplate
    from meshwright.endpoint.text import ModelText
    from meshwright.endpoint.tool_calls import PARSERS
    from meshwright.run.serve.refused import one_replica, refused  # which takes no torch
    from meshwright.spec import model as models
    from meshwright.spec.serve import EngineWords, Serve, engine_words

    def read(reader: Any, usual: Any) -> Any:
        try:
            return reader()
        except MeshwrightError as error:
            wrong.extend(error.diagnostics)
            return usual

    question = read(lambda: _question(given), Question())
    folder = Path(question.model).expanduser()
    text, model, count = None, None, 1
    if not question.model or not folder.is_dir():
        add = "name" if question.model else "add --model DIR,"
        help = f"{add} the folder of a published model: config.json, safetensors, tokenizer.json"
        said = f"--model {question.model}: there is no such folder" if question.model else "--model is missing"
        wrong.append(Diagnostic(code="X004", message=said, place="meshwright serve", help=help))
    else:
        model = read(lambda: models.load(folder), None)
        text = read(lambda: ModelText(folder), None)
    planned = path_of(question.plan, question.base)
    laid_out = read(lambda: plan.parse(planned), None)
    words = read(lambda: engine_words(question.serve, base=question.base), EngineWords())
    if not wrong and model is not None and laid_out is not None:
        chained = words.peers is not None
        wrong += refused(laid_out if chained else one_replica(laid_out), model, words)
        count = 1 if laid_out.several or chained else max(1, laid_out.layout.dp)
        read(lambda: serving.get("routing", words.routing), None)
    limits, keys = _limits(given, words.max_batch, wrong), _keys(given, wrong)
    for option, known in (("device", DEVICES), ("dtype", DTYPES), ("tool_parser", (*PARSERS,))):
        if (said := getattr(given, option)) and said not in known:
            wrong.append(_bad(f"--{option.replace('_', '-')} {said}", f"it is one of {', '.join(known)}"))
    adapters = {}
    for said in given.adapter:
        name, _, where = said.partition("=")
        if not name or not where or name in adapters:
            wrong.append(_bad(f"--adapter {said}", "it is NAME=DIR, each name once"))
        adapters[name] = where
    if wrong:
        raise MeshwrightError(wrong)
    try:
        template = ChatTemplate(folder)
    except MeshwrightError as error:
        template = None
        note(f"no chats: {error.diagnostics[0].message}")
    engine = Serve(engine=words).text()
    spec = EngineSpec(
        folder=str(folder),
        plan=planned,
        serve=engine,
        device=given.device or "auto",
        dtype=given.dtype,
        adapters=tuple(adapters.items()),
        replicas=count,
    )
    names = dict.fromkeys((given.name or folder.resolve().name, question.model, str(folder)))
    host = given.host or hosts.LOOPBACK
    assert text is not None
    return spec, Served(
        text=text,
        template=template,
        names=tuple(names),
        host=host,
        keys=keys,
        limits=limits,
        tool_parser=given.tool_parser,
    )


def _question(given: ServeOptions) -> Question:
    """The model's folder, plan and words, of the file with the options put over it."""
    is_file = given.file.endswith(".toml")
    model = given.model or ("" if is_file else given.file)
    if not is_file:
        return Question(model=model, plan=given.plan, serve=given.serve)
    said = {"model": given.file, "plan": given.plan, "serve": given.serve}
    question = asked({field: text for field, text in said.items() if text})
    if question.model and not model:
        model = path_of(question.model, question.base)
        model = str(Path(model).parent) if model.endswith("config.json") else model
    return msgspec.structs.replace(question, model=model)


def _limits(given: ServeOptions, running: int, wrong: list[Diagnostic]) -> Limits:
    from meshwright.endpoint.front import Limits

    numbers = options.numbers(given, NUMBERS, wrong, command="serve")
    body = parse_bytes(given.max_body) if given.max_body else None
    if given.max_body and not (body and 1 <= body <= 2**40):
        wrong.append(_bad(f"--max-body {given.max_body}", "it is a size such as 8MiB"))
    usual = Limits()
    return Limits(
        running=running,
        queue=numbers.get("max_queue", usual.queue),
        timeout_s=numbers.get("timeout", usual.timeout_s),
        slow_s=numbers.get("slow", usual.slow_s),
        body_bytes=int(body) if body else usual.body_bytes,
    )


def _keys(given: ServeOptions, wrong: list[Diagnostic]) -> tuple[str, ...]:
    found = []
    for text in given.api_key:
        key, faults = api_key(text)
        wrong += faults
        found += [key] if key else []
    return tuple(found)


def _bad(said: str, wanted: str) -> Diagnostic:
    return Diagnostic(code="L005", message=f"{said} cannot be", place="meshwright serve", help=wanted)
