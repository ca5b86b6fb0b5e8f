"""The kinds of catalog entries: a row of key numbers each for the list, and everything with its source for one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from meshwright import catalog
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.hardware import sourced


class EntryKind(msgspec.Struct, frozen=True):
    """How to list a kind (one dict per entry, the source last) and how to show one entry by name."""

    rows: Callable[[], list[dict[str, Any]]]
    entry: Callable[[str], dict[str, Any]]


def plural(kind: str) -> str:
    """A kind as it is listed: ``clusters`` for ``cluster``."""
    return f"{kind}s" if f"{kind}s" in KINDS else kind


def no_kind(word: str) -> Diagnostic:
    """X011 for a kind that does not exist; a name of an entry is told its kind."""
    for kind in KINDS:
        if any(word.lower() == row["name"] for row in KINDS[kind].rows()):
            help = f"meshwright catalog {kind} {word}"
            break
    else:
        help = nearest(word, list(KINDS))
    return Diagnostic(code="X011", message=f"no kind of entry {word!r}", place="meshwright catalog KIND", help=help)


def _models() -> list[dict[str, Any]]:
    from meshwright.spec.model import load

    models = [load(name) for name in catalog.names("models")]
    return [
        {
            "name": m.name,
            "params": m.num_params,
            "active": m.active_params,
            "layers": m.num_layers,
            "hidden": m.hidden,
            "context": m.max_seq_len,
            "source": m.source,
        }
        for m in models
    ]


def _model(name: str) -> dict[str, Any]:
    from meshwright.spec.model import load

    model = load(name)
    counts = {
        "num_params": model.num_params,
        "active_params": model.active_params,
        "num_layers": model.num_layers,
        "embedding_params": model.embedding_params,
        "head_params": model.head_params,
    }
    params = [model.block_params(kind).total + model.before_params(kind) for kind in range(len(model.blocks))]
    blocks = [
        {"layers": n, "params": each, **msgspec.to_builtins(block)}
        for n, each, block in zip(model.layers_by_kind, params, model.blocks)
    ]
    rest = msgspec.to_builtins(model)
    for key in ("blocks", "pattern", "source"):
        del rest[key]
    return {**rest, **counts, "blocks": blocks, "source": model.source}


def _recommenders() -> list[dict[str, Any]]:
    from meshwright.spec.recommender import load_recommender

    return [
        {
            "name": m.name,
            "params": m.num_params,
            "dense": m.dense_params(),
            "tables": len(m.tables),
            "dim": m.dim,
            "lookups": round(sum(table.pooling for table in m.tables)),
            "source": m.source,
        }
        for m in map(load_recommender, catalog.names("recommenders"))
    ]


def _recommender(name: str) -> dict[str, Any]:
    from meshwright.spec.recommender import load_recommender

    model = load_recommender(name)
    return {"num_params": model.num_params, "dense_params": model.dense_params(), **msgspec.to_builtins(model)}


def _graphs() -> list[dict[str, Any]]:
    from meshwright.spec.graphs import NodeEmbedding, load_graph_model

    return [
        {
            "name": m.name,
            "kind": "nodes' vectors" if isinstance(m, NodeEmbedding) else f"{m.layers} {m.layer} layers",
            "nodes": m.nodes if isinstance(m, NodeEmbedding) else m.vertices,
            "edges": m.edges,
            "params": m.num_params,
            "source": m.source,
        }
        for m in map(load_graph_model, catalog.names("graphs"))
    ]


def _graph(name: str) -> dict[str, Any]:
    from meshwright.spec.graphs import load_graph_model

    model = load_graph_model(name)
    return {"num_params": model.num_params, **msgspec.to_builtins(model)}


def _devices() -> list[dict[str, Any]]:
    from meshwright.spec.cluster import devices, source_of

    return [
        {
            "name": d.name,
            "memory_gib": round(d.memory_bytes / 2**30, 1),
            "memory_gb_s": d.memory_gb_s,
            "bf16_tflop_s": _tera(d.peak_flops.get("bf16")),
            "fp8_tflop_s": _tera(d.peak_flops.get("fp8")),
            "domain": d.domain_size,
            "link_gb_s": d.levels[0].gb_s,
            "tdp_w": d.tdp_w,
            "source": source_of(d, "peak_flops"),
        }
        for d in devices()
    ]


def _tera(flops: float | None) -> float | None:
    return None if flops is None else flops / 1e12


def _device(name: str) -> dict[str, Any]:
    from meshwright.spec.cluster import load_device

    return msgspec.to_builtins(load_device(name))


def _clusters() -> list[dict[str, Any]]:
    from meshwright.spec.cluster import clusters

    return [
        {
            "name": c.name,
            "devices": c.num_devices,
            "device": " + ".join(dict.fromkeys(i.device.name for i in c.islands)),
            "per_node": "/".join(dict.fromkeys(str(i.devices_per_node) for i in c.islands)),
            "levels": " > ".join(f"{v.name} {v.arity}" for v in c.islands[0].levels),
            "title": c.title,
            "source": c.sources.get("*") or c.islands[0].node.sources.get("*", ""),
        }
        for c in clusters()
    ]


def _cluster(name: str) -> dict[str, Any]:
    from meshwright.spec.cluster import load

    cluster = load(name)
    return {"num_devices": cluster.num_devices, **msgspec.to_builtins(cluster)}


def _schedules() -> list[dict[str, Any]]:
    from meshwright.schedules import families

    return [
        {
            "name": f.name,
            "placement": f.placement,
            "splits_backward": "F B W" if f.splits_backward else "F B",
            "vpp": " or ".join(map(str, f.vpps)) or "any",
            "title": f.title,
            "source": f.paper,
        }
        for f in families().values()
    ]


def _schedule(name: str) -> dict[str, Any]:
    """The family, what it means, and its order for 4 ranks and 8 microbatches as text."""
    from meshwright.cli.explain import look_up
    from meshwright.schedules import build, get

    family = get(name)
    fields = ("title", "placement", "splits_backward", "aliases", "default_vpp", "vpps", "params")
    return {
        "name": family.name,
        **{field: getattr(family, field) for field in fields},
        "text": look_up(family.name)["text"],
        "pp4_mb8": build(name, 4, 8).text().splitlines(),
        "source": family.paper,
    }


def _frameworks() -> list[dict[str, Any]]:
    from meshwright.cost.framework import frameworks

    return [
        {
            "name": f.name,
            "us_per_kernel": f.host_us_per_kernel,
            "us_per_collective": f.host_us_per_collective,
            "us_per_pass": f.host_us_per_pass,
            "memory_passes": f.elementwise_passes,
            "activation_copies": f.activation_copies,
            "source": f.source,
        }
        for f in frameworks().values()
    ]


def _framework(name: str) -> dict[str, Any]:
    from meshwright.cost.framework import load

    profile = load(name)
    return {**msgspec.to_builtins(profile), "sources": {"*": profile.source}}


def _links() -> list[dict[str, Any]]:
    from meshwright.spec.links import links

    return [
        {
            "name": link.name,
            "also": " ".join(link.aliases),
            "kind": link.kind,
            "gb_s": link.port_gb_s,
            "latency_us": link.latency_us,
            "title": link.title,
            "source": link.source("gbit_s") or link.source("gb_s"),
        }
        for link in links().values()
    ]


def _link(name: str) -> dict[str, Any]:
    from meshwright.spec.links import by_word, links, named

    word = name.strip().lower()
    link = links().get(word) or named(word)
    if link is None:
        raise MeshwrightError.one("X011", f"no link {name!r}", help=nearest(name, list(by_word())))
    return msgspec.to_builtins(link)


#: Kind -> how it is listed and shown, in the order they are listed.
def _presets() -> list[dict[str, Any]]:
    from meshwright.cli.question import preset

    found = [(name, preset(name)) for name in catalog.names("presets")]
    return [
        {"name": name, "model": q.model, "on": q.on, "train": q.train, "plan": q.plan, "title": q.title}
        for name, q in found
    ]


def _preset(name: str) -> dict[str, Any]:
    from meshwright.cli.question import WANTED, plain, preset

    question = preset(name)
    said = {field: getattr(question, field) for field in ("title", *WANTED)}
    return {"name": plain(name), **said, "command": f"meshwright predict {plain(name)}"}


def _traces() -> list[dict[str, Any]]:
    from meshwright.spec.request_catalog import entry

    columns = ("name", "rows", "published", "licence", "title", "source")
    return [{key: getattr(entry(name), key) for key in columns} for name in catalog.names("traces")]


def _trace(name: str) -> dict[str, Any]:
    """The entry, and how it is said."""
    from meshwright.spec.request_catalog import entry

    one = entry(name)
    return msgspec.to_builtins(one) | {"said": one.said}


def _samples() -> list[dict[str, Any]]:
    columns = ("samples", "held_out", "classes", "licence", "title", "source")
    return [{"name": name} | {key: _sampled(name)[key] for key in columns} for name in catalog.names("samples")]


def _sampled(name: str) -> dict[str, Any]:
    """The entry, and how it is said.

    Raises:
        MeshwrightError: X011 for a name that is none.
    """
    known = catalog.names("samples")
    if name not in known:
        raise MeshwrightError.one("X011", f"no labelled samples {name!r}", help=nearest(name, list(known)))
    entry = tomllib.loads(catalog.folder("samples").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    return {"name": name, **entry, "said": f"--data {name}"}


KINDS = {
    "models": EntryKind(_models, _model),
    "recommenders": EntryKind(_recommenders, _recommender),
    "graphs": EntryKind(_graphs, _graph),
    "devices": EntryKind(_devices, _device),
    "clusters": EntryKind(_clusters, _cluster),
    "schedules": EntryKind(_schedules, _schedule),
    "frameworks": EntryKind(_frameworks, _framework),
    "links": EntryKind(_links, _link),
    "presets": EntryKind(_presets, _preset),
    "traces": EntryKind(_traces, _trace),
    "samples": EntryKind(_samples, _sampled),
}


def lines(entry: dict[str, Any], indent: str = "") -> Iterator[str]:
    """An entry as indented lines, each number followed by the source that its own record names for it."""
    sources = entry.get("sources", {})
    for key, source in sources.items():
        if entry.get(key) is None and source.startswith("no "):  # it is known that there is none
            yield f"{indent}{key}: {source}"
    for key, value in entry.items():
        if key == "sources" or (not value and key != "arity"):  # an arity of 0 is "no limit"
            continue
        source = sourced(sources, key) if _is_sourced(key, value) else ""
        behind = f"   <- {source}" if source else ""
        if isinstance(value, dict):
            yield f"{indent}{key}{behind}"
            yield from lines(value, indent + "  ")
        elif isinstance(value, list | tuple) and isinstance(value[0], dict):
            for i, part in enumerate(value):
                yield f"{indent}{key}[{i}]"
                yield from lines(part, indent + "  ")
        elif key == "pp4_mb8":
            yield f"{indent}4 ranks, 8 microbatches:"
            yield from (f"{indent}  {line}" for line in value)
        else:
            yield f"{indent}{key}: {_plain(value)}{behind}"


def _is_sourced(key: str, value: Any) -> bool:
    """Numbers and tables of numbers have sources; names, and records with sources of their own, do not."""
    if isinstance(value, dict):
        return "sources" not in value and key != "efficiency" and not any(isinstance(v, dict) for v in value.values())
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e9 else f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
