"""The book's reference pages, written from the catalog when the book is built (a MkDocs hook)."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from meshwright import catalog
from meshwright.cli.entries import KINDS
from meshwright.quantity import big
from meshwright.spec.cluster import devices


def on_files(files: Files, config) -> Files:
    """Adds the generated pages to the book."""
    pages = {"terms": terms(), "codes": codes(), "devices": device_pages(), "catalog": lists()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def terms() -> str:
    """Every word, as ``meshwright explain`` says it."""
    out = ["# Words", "", "What `meshwright explain WORD` says."]
    for name, entry in sorted(catalog.tables("terms").items()):
        out += ["", f"## {name}", "", f"**{entry['title']}**", "", entry["text"].strip()]
        facts = [f"Unit: {entry['unit']}"] if "unit" in entry else []
        facts += [f"Source: {entry['source']}"] if "source" in entry else []
        if entry.get("see"):
            facts.append("See " + ", ".join(f"[{word}](#{word.lower()})" for word in entry["see"]))
        if entry.get("aliases"):
            facts.append("Also: " + ", ".join(f"`{word}`" for word in entry["aliases"]))
        out += ["", *(f"- {fact}" for fact in facts)]
    return "\n".join(out) + "\n"


def codes() -> str:
    """Every error code with what went wrong, why, and what to do."""
    out = ["# Error codes", "", "What `meshwright explain CODE` says."]
    for code, entry in sorted(catalog.tables("codes").items()):
        out += ["", f"## {code}: {entry['title']}", "", entry["text"].strip()]
    return "\n".join(out) + "\n"


def device_pages() -> str:
    """Key numbers of every device, then the source of each of its numbers."""
    out = ["# Devices", "", "Dense peaks; bandwidths per direction. `meshwright catalog devices NAME` shows all."]
    out += ["", *_table([{k: v for k, v in row.items() if k != "source"} for row in KINDS["devices"].rows()])]
    for device in devices():
        out += ["", f"## {device.title}", ""]
        sourced = {**device.sources, **{f"node.{k}": v for k, v in device.node.sources.items()}}
        for level in device.levels:
            sourced |= {f"{level.name}.{field}": source for field, source in level.sources.items()}
        if device.efficiency is not None:
            sourced["efficiency"] = device.efficiency.source
        out += [f"- `{field.replace('*', 'all other numbers')}`: {source}" for field, source in sourced.items()]
    return "\n".join(out) + "\n"


def lists() -> str:
    """Models, clusters, links and schedules with their sources."""
    out = ["# Models, clusters, links, schedules"]
    for kind in ("models", "clusters", "links", "schedules"):
        out += ["", f"## {kind.capitalize()}", "", *_table(KINDS[kind].rows())]
    return "\n".join(out) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    return lines + ["| " + " | ".join(map(_cell, row.values())) + " |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and value >= 10**6:
        return big(value)
    text = f"{value:,.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
