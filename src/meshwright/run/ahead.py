"""Code loaded ahead: what every rank needs for its first step, imported once in the process that ranks are forked
from."""

from __future__ import annotations

from importlib import import_module

from meshwright import layers, schedules
from meshwright.sync.codecs import codecs
from meshwright.sync.combines import combines
from meshwright.sync.rules import rules


def load_ahead() -> None:
    """Import what a rank otherwise imports by itself: what torch's optimizers load at their first use, and the names
    that plans are read by."""
    import_module("torch._dynamo")
    for registry in (layers.kinds, schedules.families, codecs, combines, rules):
        registry()
