"""Serving engines: what an engine adds to the kernels of its iterations.

A profile is measured on real servers. A prediction that names none uses the round figures of ``default``: they are
flagged in its assumptions, and its intervals are wide.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

from meshwright import catalog
from meshwright.errors import MeshwrightError, nearest

FORMAT_VERSION = 1


class PublishedIterations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of a model's iterations on a device with ``tp`` ranks, as somebody published them, in milliseconds.

    Prompts of t tokens take a + b t + c (sum of the squares of their lengths); n sequences that decode behind k tokens
    together a + b k + c n, with other constants from ``large_from`` sequences on. A pipeline stage takes its part.
    """

    model: str
    device: str
    tp: int
    prefill_ms: tuple[float, float, float]
    decode_ms: tuple[float, float, float]
    large_decode_ms: tuple[float, float, float]
    large_from: int


class MeasuredServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one server, as probes measured them: the ``model`` it serves, the batching ``policy`` that explains
    it best with its ``budget`` of tokens an iteration (0: none), the most requests that it computes at a time
    (``max_batch``), and the tokens of its cache (``kv_tokens``, 0: it never was full). ``prefix_cache``: it keeps
    blocks of common prefixes, of as many last requests as ``slots`` says (0: of all, as long as there is room).
    ``reached`` is how many requests probes saw computed at a time: a ``max_batch`` beyond it is not measured. 0: nobody
    looked.
    """

    model: str
    policy: str = "orca"
    budget: int = 0
    max_batch: int = 1
    reached: int = 0
    kv_tokens: int = 0
    prefix_cache: bool = False
    slots: int = 0
    url: str = ""


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The profile of a version of a serving engine: the time and the memory that it adds to a device's.

    ``kernels``: time of its kernels in a server over what those of the tables take alone; ``prompts``: the same, on top
    of it, of iterations beyond the CUDA graphs' tokens, and ``prompts_over``: on top of that where the tables of the
    device's products are of a library's kernels and not of those that ``prompts`` was fitted over, by library. Host
    time in microseconds: ``step_us`` an iteration that the device waits for, ``request_us`` for every request in it,
    and ``layer_us`` to issue a layer's kernels where no CUDA graph is replayed (``experts_us`` more where the layer has
    experts, ``latent_us`` where its attention is latent, which is more products, norms and copies), which bounds the
    iteration from below. Graphs are replayed up to ``graph_tokens`` tokens where no prompt is among them. With
    ``each_stage`` the workers of every pipeline stage take the host's times, one stage after the other (each is called
    from afar), and not the first alone. At the engine's front a request takes ``serial_us`` and a token of its prompt
    ``serial_token_us``, one after the other; every token of an answer takes ``stream_us`` to leave, one after the other
    too. A client sees its tokens later than that: by ``front_us`` a request (connection, reply), ``token_us`` for every
    token of its prompt (the tokenizer), and ``front_steps`` iterations (polls of the scheduler, answers handed on one
    iteration later).

    ``policy`` is how it batches by itself. ``library`` is whose collectives it runs. Memory: ``context_bytes`` of a
    process before the first tensor, ``communicator_bytes`` of a group of ranks; ``of_free``: the share of the memory
    that it is given is of what weights and activations leave (TensorRT-LLM), and not of the whole device's.
    ``sigma`` is the relative error of iterations of models that the constants never saw, ``front_sigma`` of the times
    to a first token; ``pace_sigma`` of everything that a server takes, from one time to another. ``until``: the last
    month (``2024-12``) whose versions it stands for, "" for those of today.
    ``flagged``: nobody measured these. ``left_out``: absolute relative errors of measured servers when all of their
    ``model``, ``hardware``, ``engine`` or the ``run`` are left out of the fit, beside those ``in_sample``.
    ``iterations``, where there are any, stand for the priced kernels of the models that they are of, and it knows no
    others; they may be those of another profile (``published_as``). A profile of one ``server`` stands for that server
    as it is: no model, cluster or plan is priced.
    """

    name: str
    title: str = ""
    kernels: float = 1.0
    prompts: float = 1.0
    prompts_over: dict[str, float] = {}
    step_us: float = 1000.0
    request_us: float = 10.0
    layer_us: float = 100.0
    experts_us: float = 0.0
    latent_us: float = 0.0
    serial_us: float = 0.0
    serial_token_us: float = 0.0
    stream_us: float = 0.0
    front_us: float = 0.0
    token_us: float = 0.0
    front_steps: float = 0.0
    graph_tokens: int = 512
    each_stage: bool = False
    policy: str = "vllm-v1"
    library: str = "vllm"
    of_free: bool = False
    context_bytes: float = 1.0 * 2**30
    communicator_bytes: float = 256.0 * 2**20
    sigma: float = 0.2
    front_sigma: float = 0.3
    pace_sigma: float = 0.0
    until: str = ""
    source: str = ""
    flagged: bool = True
    left_out: dict[str, dict[str, float]] = {}
    published_as: str = ""
    iterations: tuple[PublishedIterations, ...] = ()
    server: MeasuredServer | None = None

    @property
    def engine(self) -> str:
        """The engine whose versions it stands for: its name without the month."""
        return self.name.removesuffix(f"-{self.until}") if self.until else self.name

    def published(self, model: str, device: str, tp: int) -> PublishedIterations | None:
        """Return the published times of a model's iterations on so many ranks of a device, if it has them."""
        found = (one for one in self.iterations if (one.model, one.device, one.tp) == (model, device, tp))
        return next(found, None)


@cache
def engines() -> dict[str, EngineProfile]:
    """Every profile of the catalog by name."""
    found = {}
    for file in sorted(catalog.folder("engines").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            table = tomllib.loads(file.read_text(encoding="utf-8"))
            if table.pop("format_version") != FORMAT_VERSION:
                raise AssertionError(f"{file.name} is of another format_version")
            profile = msgspec.convert(table, EngineProfile)
            found[profile.name] = profile
    for name, profile in found.items():
        if profile.published_as:
            found[name] = msgspec.structs.replace(profile, iterations=found[profile.published_as].iterations)
    return found


def load(path: str | Path) -> EngineProfile:
    """Read the profile of a file, as ``meshwright calibrate`` writes them.

    Raises:
        MeshwrightError: T008 for a file that cannot be read or holds no profile.
    """
    place = f"--engine-profile {path}"
    help = "a file that meshwright calibrate --server URL --save FILE wrote, or --only engine --out DIR"
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        version = table.pop("format_version", None)
        if version != FORMAT_VERSION:
            said = f"its format_version is {version!r}, this version reads {FORMAT_VERSION}"
            raise MeshwrightError.one(
                "T008", f"cannot read {path} as an engine profile: {said}", place=place, help=help
            )
        return _sound(msgspec.convert(table, EngineProfile))
    except (OSError, ValueError, msgspec.ValidationError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise MeshwrightError.one(
            "T008", f"cannot read {path} as an engine profile: {said}", place=place, help=help
        ) from None


def of_a_server(path: str | Path) -> bool:
    """Whether a file is the profile of one server, sound or not."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(table.get("server"), dict)


def _sound(profile: EngineProfile) -> EngineProfile:
    """Return a profile whose numbers are times, or raise what is wrong with them."""
    times = [value for value in msgspec.structs.astuple(profile) if isinstance(value, float)]
    times += profile.prompts_over.values()
    times += [ms for one in profile.iterations for ms in (*one.prefill_ms, *one.decode_ms, *one.large_decode_ms)]
    if not all(0 <= value < 1e15 for value in times):
        raise ValueError("a time in it is negative or not finite")
    server = profile.server
    if server is not None and (
        server.max_batch < 1 or min(server.budget, server.kv_tokens, server.slots, server.reached) < 0
    ):
        raise ValueError("a limit of its server is negative")
    if server is not None and len(profile.iterations) != 1:
        raise ValueError("it has a server, and not the one table of iterations that is its")
    return profile


def engine_profile(name: str = "default") -> EngineProfile:
    """The profile of that name.

    Raises:
        MeshwrightError: W013 when there is none; names the nearest.
    """
    found = engines().get(name)
    if found is None:
        help = nearest(name, list(engines()))
        raise MeshwrightError.one("W013", f"no engine profile {name!r}", place=f"--serve engine={name}", help=help)
    return found
