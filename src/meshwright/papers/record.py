"""Paper: one published system as ``rows/ID.toml`` says it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from meshwright.errors import MeshwrightError, nearest
from meshwright.papers.published import Published, Words

#: The nine ideas, as rows name them, and the title of each one's page in the book.
IDEAS = {
    "layout": "Layout",
    "schedule": "Schedule",
    "overlap": "Overlap rewrites",
    "sync": "SyncPolicy",
    "state": "State tiers",
    "assignment": "Assignment",
    "serving": "Serving policy",
    "world": "World over time",
    "costs": "Cost chain",
}
#: The source of a row whose title, authors and year could not be confirmed.
UNVERIFIED = "unverified"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the technique is put over a plan: ``plan`` are words of a plan that replace what it says, ``python`` names
    a function of :mod:`meshwright.papers.recipes`. ``needs`` are axes that the plan must have more than one of.
    ``exact`` is said where the recipe is the exact part of a technique that is approximate as a whole."""

    plan: str = ""
    python: str = ""
    needs: tuple[str, ...] = ()
    exact: bool = False


class Switch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a user has the technique in a case of their own: ``words`` of a plan, a workload or a command, and a whole
    ``command`` with them in it (of ``meshwright``, without its name), ``first`` one that must have run before. MODEL,
    FOLDER, TRACE, PLACEMENTS and COMPUTATION in them are the user's own."""

    words: str
    command: str
    first: str = ""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The authors' claim, its hardware and baseline, and the version of the paper ("" = not stated)."""

    text: str = ""
    hardware: str = ""
    baseline: str = ""
    version: str = ""


class Paper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published system. ``source`` says where title, authors and year were confirmed, or ``unverified``;
    ``ideas`` are keys of :data:`IDEAS`; ``exact`` is whether the technique computes what training without it would.
    ``figures`` are those of the paper that the generic check evaluates, with what they share (``ask``, ``order``,
    ``models``: sizes of :func:`meshwright.spec.dimensions.transformer` by name) and ``assumptions``; ``check`` names a
    function for what needs a derivation. ``missing`` says what a row without either, or whose figures are a part of it,
    lacks. ``runs`` are plans of the recipe, as far as it can be trained, that real processes train with the losses,
    gradients and parameters of one process. ``switch`` is how a user has it."""

    id: str
    title: str
    area: str
    mechanism: str
    ideas: tuple[str, ...]
    exact: bool
    source: str
    authors: str = ""
    year: int | None = None
    arxiv: str = ""
    claim: Claim = Claim()
    recipe: Recipe | None = None
    check: str = ""
    figures: tuple[Published, ...] = ()
    ask: Words = {}
    order: Words = {}
    models: dict[str, dict[str, int | bool]] = {}
    assumptions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    switch: Switch | None = None
    missing: str = ""

    @property
    def verified(self) -> bool:
        return self.source != UNVERIFIED

    @property
    def checked(self) -> bool:
        """Whether anything of it is computed here."""
        return bool(self.check or self.figures)

    @property
    def recipe_exact(self) -> bool:
        """Whether training under the recipe computes what it would without."""
        return self.exact or (self.recipe is not None and self.recipe.exact)

    @property
    def cited(self) -> str:
        """Authors, year and arXiv id as far as they are confirmed."""
        said = [self.authors, str(self.year or ""), f"arXiv {self.arxiv}" if self.arxiv else ""]
        return ", ".join(s for s in said if s) if self.verified else UNVERIFIED


@cache
def papers() -> dict[str, Paper]:
    """Every row by its id, in the order of areas and ids."""
    folder = files("meshwright.papers").joinpath("rows")
    found = [
        msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), Paper)
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    ]
    return {paper.id: paper for paper in sorted(found, key=lambda p: (p.area, p.id))}


def paper(name: str) -> Paper:
    """The row called `name`.

    Raises:
        MeshwrightError: J001 with the nearest ids.
    """
    known = papers()
    if name.lower() in known:
        return known[name.lower()]
    raise MeshwrightError.one(
        "J001",
        f"no paper {name!r}",
        place=name,
        help=f"{nearest(name, list(known))}   (all: meshwright papers)",
    )


def areas() -> tuple[str, ...]:
    return tuple(dict.fromkeys(p.area for p in papers().values()))
