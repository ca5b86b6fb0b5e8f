"""Sync policies by their time to a loss, as text: the soonest first, with the interval of each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from meshwright.quantity import big, seconds
from meshwright.report.page import Page
from meshwright.search.to_loss import LossTimes, PolicyTime
from meshwright.sync.record import USUAL
from meshwright.sync.tokens import TokensFactor

HEADS = ("", "to the loss", "80% interval", "step", "tokens", "80% interval")


def render(answer: LossTimes, console: Console, remarks: Sequence[str] = ()) -> None:
    """Print the policies, what was given up and what nothing is known of."""
    with Page(console) as page:
        page.print(Text(verdict(answer), "bold"))
        if answer.policies:
            page.title(f"To the loss of sync={USUAL} after {big(answer.tokens)} tokens")
            _table(answer.policies, page)
        if any(one.factor.basis == "fitted" for one in answer.policies):
            page.quiet("* not measured in the study: fitted to the policies that were")
        if answer.slower:
            page.quiet("slower, given up by their bounds: " + ", ".join(answer.slower))
        for policy, why in answer.unknown:
            page.quiet(f"{policy}: {why}")
        if answer.assumed:
            page.quiet("no tokens= is said: 20 for each parameter are taken (arXiv 2203.15556)")
        page.quiet(f"tokens: how many times those of sync={USUAL}, by the study {answer.study} of small models")
        page.quiet("less sure outside of what was measured: meshwright explain tokens_factor")
        for remark in remarks:
            page.quiet(remark)


def verdict(answer: LossTimes) -> str:
    """The soonest policy, and how much sooner it is than exchanging gradients in every step."""
    best = answer.best
    if best is None:
        return "stopped before a plan was found" if answer.stopped else "no plan of any policy fits"
    usual = next((one for one in answer.policies if one.policy == USUAL), None)
    than = (
        f", {usual.seconds / best.seconds:.3g} times sooner than the best plan found of sync={USUAL}"
        if usual not in (None, best)
        else ""
    )
    return f"sync={best.policy}: {seconds(best.seconds)} to the loss{than}; {best.plan.text()}"


def _table(policies: Sequence[PolicyTime], page: Page) -> None:
    """Numbers on one line and the plan under them, so that its words stay together on narrow terminals."""
    lines = [HEADS, *(_cells(place, one) for place, one in enumerate(policies, 1))]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line, one in zip(lines, [None, *policies]):
        shown = "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        page.print(Text(shown, "dim" if one is None else ""), indent=2, one_line=True)
        if one is not None:
            rest = [word for word in one.plan.text().split() if not word.startswith("sync=")]
            page.print(Text(" ".join([f"sync={one.policy}", *rest])), indent=5)


def _cells(place: int, one: PolicyTime) -> tuple[str, ...]:
    """Return the values of a policy under :data:`HEADS`."""
    factor = one.factor
    return (
        str(place),
        seconds(one.seconds),
        _between(seconds(one.low), seconds(one.high)),
        seconds(one.step_time_s),
        f"{factor.value:.3g}x",
        _told(factor),
    )


def _told(factor: TokensFactor) -> str:
    """The interval of a factor, with a mark where the policy itself was not measured."""
    if factor.basis == "exact":
        return "exact"
    return f"[{factor.low:.3g}, {factor.high:.3g}]" + ("" if factor.basis == "measured" else "*")


def _between(low: str, high: str) -> str:
    """``[5.4, 20.5 days]`` for ``5.4 days`` and ``20.5 days``: a unit that both have is said once."""
    number, _, unit = low.partition(" ")
    return f"[{number if high.endswith(f' {unit}') else low}, {high}]"
