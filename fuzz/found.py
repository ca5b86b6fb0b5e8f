"""Findings of the random search, made small and kept where `make test` replays them."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent.parent / "tests" / "fuzz_found"
#: Smaller examples that are tried at most, and seconds for each.
TRIES, TRY_S = 600, 5


def minimised(campaign: Any, example: dict, wanted: str, signature: Callable[[BaseException], str]) -> dict:
    """The smallest example found that fails as `wanted` says."""
    left, smaller = TRIES, True
    while smaller and left:
        smaller = False
        for less in campaign.smaller(example):
            left -= 1
            if _fails(campaign, less) and signature(_fails.error) == wanted:
                example, smaller = less, True
                break
            if not left:
                break
    return example


def _fails(campaign: Any, example: dict) -> bool:
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(TRY_S)
    try:
        campaign.look(example)
    except Exception as error:
        _fails.error = error
        return True
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return False


def _late(signum: int, frame: object) -> None:
    raise TimeoutError("a smaller example takes too long")


def keep(name: str, signature: str, was: str, example: dict, folder: Path = KEPT) -> Path:
    """Write a finding as an example; one of the same signature stays."""
    words = re.sub(r"[^a-z0-9]+", "-", signature.lower()).strip("-")[:80]
    path = folder / f"{name}-{words}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"campaign": name, "was": was, "example": example}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
    return path
