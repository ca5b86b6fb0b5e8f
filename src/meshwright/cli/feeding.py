"""``--feed`` of ``meshwright predict`` and ``whatif``: where training steps get their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.answer.prediction import Prediction
    from meshwright.spec.feed import Feed


def read_feed(text: str) -> tuple[Feed | None, list[Diagnostic]]:
    """The feed that a text says, None for an empty one, and what is wrong with it."""
    from meshwright.spec.feed import parse

    try:
        return (parse(text) if text else None), []
    except MeshwrightError as error:
        return None, list(error.diagnostics)


def unfed(other: str) -> list[Diagnostic]:
    """Return X004 for a feed beside another question than a training step, in words."""
    help = "drop it, or ask for a training step: --train"
    return [Diagnostic(code="X004", message=f"--feed says nothing of {other}", place="--feed", help=help)]


def whatif_fed(parts: list[Any], feed: Feed, words: str, costs: Any) -> tuple[Prediction, Prediction]:
    """Return a step as it is fed, and with some words of its feed in place of others.

    Raises:
        MeshwrightError: W codes for words that are none of a feed; the codes of a prediction.
    """
    from meshwright.answer.predict import predict

    changed = feed.over(words)
    before, after = (predict(*parts, costs=costs, detail=False, feed=one) for one in (feed, changed))
    return before, after
