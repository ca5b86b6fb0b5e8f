"""``python -m tests.golden [--write]``: what differs from the kept answers; exit code 1 when something does."""

from __future__ import annotations

import json
import sys

from tests.golden import ANSWERS, answered, known, questions


def differences(before: dict, after: dict, path: str = "") -> list[str]:
    """Fields that differ, in bits: name, before, after and the relative change of a number."""
    out = []
    for key in {**before, **after}:
        a, b, name = before.get(key), after.get(key), f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f"{name}.")
        elif a != b:
            change = f"  ({b / a - 1:+.2e})" if isinstance(a, float) and isinstance(b, float) and a else ""
            out.append(f"  {name}: {a} -> {b}{change}")
    return out


def main() -> int:
    before, after = known(), {question: answered(question) for question in questions()}
    moved = 0
    for question in {**before, **after}:
        found = differences(before.get(question, {}), after.get(question, {}))
        moved += bool(found)
        if found:
            print(question, *found, sep="\n")
    print(f"{len(after)} questions, {moved} with another answer")
    if "--write" in sys.argv[1:]:
        ANSWERS.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
        return 0
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
