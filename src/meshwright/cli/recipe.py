"""``meshwright recipe``: the fastest legal order of a recipe of data operators, with its time and memory."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, print_json
from meshwright.errors import MeshwrightError

DESCRIPTION = """Price a recipe of data operators (mappers, filters, deduplicators): as it is written, with the filters
of a context fused, and in the fastest order that leaves the same samples.

FILE is a recipe.toml, which says samples, operators with what each takes, keeps and shares, and the machines; or a
Data-Juicer configuration (.yaml), whose operators are priced by the recipe.toml of --costs.

Exit code 0: priced; 2: the recipe is wrong."""
NUMBERS = {
    "nodes": (1, 1e6, True, "a number of nodes"),
    "processes": (1, 1e6, True, "a number of processes a node"),
}


class RecipeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright recipe``."""

    file: options.positional("FILE", "recipe.toml, or a Data-Juicer configuration in YAML.") = ""
    costs: options.text("FILE.toml", "What the operators of a Data-Juicer configuration take: a recipe.toml.") = ""
    nodes: options.text("COUNT", "Nodes, over the file's.") = ""
    processes: options.text("COUNT", "Processes of a node, over the file's.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the recipe was priced."""
    given, wrong = options.read(RecipeOptions, argv, command="recipe", description=DESCRIPTION)
    wrong += options.missing({"file": given.file}, {"file": "FILE, a recipe.toml or a .yaml"}, command="recipe")
    numbers = options.numbers(given, NUMBERS, wrong, command="recipe")
    wrong += lacking("recipe", "yaml", extra="recipe") if given.file.endswith((".yaml", ".yml")) else []
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.answer.recipe import priced_recipe
    from meshwright.spec.recipe import load

    recipe = msgspec.structs.replace(load(given.file, given.costs), **numbers)
    found = priced_recipe(recipe)
    if given.json:
        print_json(found.to_json())
    else:
        from meshwright.report.recipe_text import render

        render(found, console())
    return 0
