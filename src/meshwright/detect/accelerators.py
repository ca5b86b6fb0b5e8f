"""Accelerators as nvidia-smi, rocm-smi and lspci describe them, as records. Pure functions of their texts."""

from __future__ import annotations

import csv
import json
import re

import msgspec

#: What nvidia-smi is asked for each GPU, in this order (``nvidia-smi --help-query-gpu``).
QUERY = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NODE = re.compile(r"GPU\d+|NIC\d+|[a-z][a-z0-9]*_\d+")
_BRIDGED = ("PIX", "PXB")
"""Links of ``topo -m`` that pass PCIe switches alone: the NIC is the GPU's own."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator as its driver names it; None where the driver does not say."""

    name: str
    memory_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """How accelerators reach each other: ``links[i][j]`` as the tool writes it (``NV18``, ``PHB``, ``XGMI``), and which
    NICs are an accelerator's own."""

    links: tuple[tuple[str, ...], ...]
    nics: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


def nvidia_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``, memory in MiB."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(QUERY) or not row[0].strip():
            continue
        name, memory, generation, lanes = (cell.strip() for cell in row)
        mib = _whole(memory)
        found.append(
            Gpu(
                name=name,
                memory_bytes=None if mib is None else mib * 2**20,
                pcie_generation=_whole(generation),
                pcie_lanes=_whole(lanes),
            )
        )
    return tuple(found)


def nvidia_matrix(text: str) -> Matrix | None:
    """The matrix of ``nvidia-smi topo -m``; None where it is not one."""
    lines = _ANSI.sub("", text).splitlines()
    words = (line.split() for line in lines)
    head = next((row for row in words if row[:1] == ["GPU0"] and "X" not in row), [])
    columns = [word for word in head if _NODE.fullmatch(word)]
    rows = {}
    for line in lines:
        words = line.split()
        if len(words) > len(columns) and words[0] in columns and "X" in words:  # a row, not the heading
            rows.setdefault(words[0], words[1 : 1 + len(columns)])
    gpus = [i for i, name in enumerate(columns) if name.startswith("GPU")]
    if not gpus or any(columns[i] not in rows for i in gpus):
        return None
    names = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", _ANSI.sub("", text), re.MULTILINE))
    nics = [(i, names.get(name, name)) for i, name in enumerate(columns) if not name.startswith("GPU")]
    near = [name for i, name in nics if any(rows[columns[g]][i] in _BRIDGED for g in gpus)]
    links = tuple(tuple(rows[columns[i]][j] for j in gpus) for i in gpus)
    return Matrix(links=links, nics=tuple(name for _, name in nics), near=tuple(near))


def amd_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs of ``rocm-smi --showproductname --showmeminfo vram --json``."""
    start = text.find("{")
    try:
        table = json.loads(text[start:]) if start >= 0 else {}
    except (ValueError, RecursionError):
        return ()
    cards = [row for key, row in table.items() if key.startswith("card") and isinstance(row, dict)]
    found = []
    for card in cards:
        words = {str(key).lower(): str(value) for key, value in card.items()}
        name = words.get("card series", "") if "instinct" in words.get("card series", "").lower() else ""
        name = name or words.get("card model", "") or words.get("device name", "")
        found.append(Gpu(name=name, memory_bytes=_whole(words.get("vram total memory (b)", ""))))
    return tuple(found)


def amd_matrix(text: str) -> Matrix | None:
    """The matrix of ``rocm-smi --showtopotype``; None where it is not one."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if "Link Type between two GPUs" in line), None)
    if head is None:
        return None
    rows = []
    for line in lines[head + 1 :]:
        words = line.split()
        if len(words) > 1 and words[0].startswith("GPU") and not words[1].startswith("GPU"):
            rows.append(tuple(words[1:]))
        elif rows:
            break
    square = bool(rows) and all(len(row) == len(rows) for row in rows)
    return Matrix(links=tuple(rows)) if square else None


def lspci_gpus(text: str) -> tuple[Gpu, ...]:
    """NVIDIA's and AMD's accelerators in ``lspci``, by name alone."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r"(?:3D controller|VGA compatible controller|Processing accelerators): "
            r"(?:NVIDIA Corporation|Advanced Micro Devices, Inc\. \[AMD/ATI\]) (.*?)(?: \(rev \w+\))?$",
            line,
        )
        if match:
            found.append(Gpu(name=match[1]))
    return tuple(found)


def _whole(text: str) -> int | None:
    """A whole number; None for ``[N/A]`` and the like."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
