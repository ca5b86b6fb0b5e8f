"""Words for the tiers of memory behind a node's devices: ``host=1.5tb@200,copy=3,nvme=28tb@25/20``.

``host`` is the memory of one node and, behind an ``@``, its bandwidth in GB/s and, behind a slash, what the node's
processors reach at most in products, in TFLOP/s; ``copy`` what copies between one device
and that memory reach per direction; ``nvme`` the node's drives, the rate at which they are read, and behind a slash
that at which they are written.
"""

from __future__ import annotations

import re

import msgspec

from meshwright.spec.hardware import Node

#: The words, each with an example.
EXAMPLES = {"host": "host=1.5tb@200", "copy": "copy=12.5", "nvme": "nvme=28tb@25/20"}
_UNITS = {"gb": 1e9, "gib": 2**30, "tb": 1e12, "tib": 2**40}
_RATE = r"\d{1,6}(?:\.\d{1,6})?"
_SIZE = re.compile(rf"({_RATE})({'|'.join(_UNITS)})(?:@({_RATE})(?:/({_RATE}))?)?")


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers of a node as words say them: bytes, rates in GB/s, and TFLOP/s of its processors, 0 where no word says one;
    ``said`` are the words."""

    host_bytes: int = 0
    host_gb_s: float = 0.0
    host_tflops: float = 0.0
    copy_gb_s: float = 0.0
    nvme_bytes: int = 0
    nvme_gb_s: float = 0.0
    write_gb_s: float = 0.0
    said: tuple[str, ...] = ()

    def on(self, node: Node) -> Node:
        """Return the node with what the words say in place of its own."""
        values = {
            "host_memory_bytes": self.host_bytes,
            "host_memory_gb_s": self.host_gb_s,
            "host_tflops": self.host_tflops,
            "copy_gb_s": self.copy_gb_s,
            "nvme_bytes": self.nvme_bytes,
            "nvme_gb_s": self.nvme_gb_s,
            "nvme_write_gb_s": self.write_gb_s,
        }
        told = {field: value for field, value in values.items() if value}
        if not told:
            return node
        sources = {**node.sources, **dict.fromkeys(told, f"said: {','.join(self.said)}")}
        return msgspec.structs.replace(node, **told, sources=sources)


def read(key: str, text: str) -> tuple[float, ...] | None:
    """The numbers of a word's value: bytes, rate and second rate of a tier (0 where they are left out), or the rate of
    ``copy``; None for anything else."""
    text = text.removesuffix("gb/s").strip()
    if key == "copy":
        return (float(text),) if re.fullmatch(_RATE, text) and 0.1 <= float(text) <= 1e4 else None
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    size, rate, second = float(match[1]) * _UNITS[match[2]], float(match[3] or 0), float(match[4] or 0)
    fits = 1e8 <= size <= 1e16 and all(one == 0 or 0.01 <= one <= 1e5 for one in (rate, second))
    return (size, rate, second) if fits and not (match[3] and not rate) and not (match[4] and not second) else None


def said(words: dict[str, tuple[float, ...]]) -> Tiers:
    """The tiers of the values of words by their keys."""
    host, nvme = words.get("host", (0.0, 0.0, 0.0)), words.get("nvme", (0.0, 0.0, 0.0))
    return Tiers(
        host_bytes=round(host[0]),
        host_gb_s=host[1],
        host_tflops=host[2],
        copy_gb_s=words.get("copy", (0.0,))[0],
        nvme_bytes=round(nvme[0]),
        nvme_gb_s=nvme[1],
        write_gb_s=nvme[2],
        said=tuple(written(key, words[key]) for key in EXAMPLES if key in words),
    )


def written(key: str, value: tuple[float, ...]) -> str:
    """A word as :func:`read` takes its value."""
    if key == "copy":
        return f"copy={value[0]:g}"
    size, rate, second = value
    rates = (f"@{rate:g}" if rate else "") + (f"/{second:g}" if second else "")
    units = (("gb", 1e9), ("gib", float(2**30))) if size < 1e12 else (("tb", 1e12), ("tib", float(2**40)))
    shown = next((f"{size / unit:g}{name}" for name, unit in units if float(f"{size / unit:g}") * unit == size), "")
    return f"{key}={shown or f'{size / 1e9:.6f}gb'}{rates}"
