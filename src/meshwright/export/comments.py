"""Comments in an exported configuration: what each key or flag says, in a few words behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The first word of a line where it is a key or a flag, also as an item of a list: ``--seq-length 8192``,
#: ``seq_len = 8192``, ``"seq_len": 8192``, ``- "--seq-length=8192"``.
KEY = re.compile(r'\s*(?:- )?"?((?:--)?[A-Za-z][\w-]*)"?(?=$|[ :=])')
SECTION = re.compile(r"\[([\w.-]+)\]")


def commented(text: str, comments: Mapping[str, str]) -> str:
    """`text` with the comment of its key behind every line that begins with one; a line in a TOML table may have one
    of its own as ``TABLE.KEY``."""
    lines, section = [], ""
    for line in text.splitlines():
        if table := SECTION.fullmatch(line):
            section = table[1]
        found = KEY.match(line)
        about = found and (comments.get(f"{section}.{found[1]}") or comments.get(found[1]))
        lines.append(f"{line}  # {about}" if about else line)
    return "\n".join(lines) + "\n"
