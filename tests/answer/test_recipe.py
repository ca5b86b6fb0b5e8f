"""Recipes of data operators: the fastest legal order against every order there is, and Data-Juicer's own rule."""

from itertools import permutations

import numpy as np
import pytest

from meshwright.answer.recipe import as_fused, fastest, ordered, priced_recipe
from meshwright.assign import ordering
from meshwright.errors import MeshwrightError
from meshwright.spec.recipe import DataOperator, DataRecipe, load

KINDS = ("filter", "filter", "filter", "mapper", "deduplicator")


def drawn(seed: int) -> DataRecipe:
    rng = np.random.default_rng(seed)
    fields = ("text", "meta", "image")
    operators = []
    for i in range(6):
        kind = str(rng.choice(KINDS))
        reads = (str(rng.choice(fields)),)
        operators.append(
            DataOperator(
                name=f"{i}_{kind}",
                kind=kind,
                takes_s=float(rng.uniform(0.1, 2.0)),
                keep=1.0 if kind == "mapper" else float(rng.uniform(0.1, 1.0)),
                shares=str(rng.choice(["", "words", "lines"])) if kind == "filter" else "",
                reads=reads,
                writes=reads if kind == "mapper" else (),
                memory_bytes=float(rng.choice([0, 1e9, 3e9])),
            )
        )
    contexts = {"words": float(rng.uniform(0, 3)), "lines": float(rng.uniform(0, 3))}
    how = {"samples": 1000, "contexts": contexts, "processes": 8, "memory_bytes": 16e9, "nodes": 2}
    how |= {"sample_bytes": 1e6, "read_bytes_s": 5e6, "cached": bool(seed % 2), "shuffle_bytes_s": 2e7}
    return DataRecipe(operators=tuple(operators), **how)


def legal(recipe, order):
    operators = recipe.operators
    at = {i: place for place, i in enumerate(order)}
    return all(at[i] < at[j] for j in at for i in range(j) if operators[i].before(operators[j]))


def groupings(recipe, order):
    """Every way to make some neighbours of one context one pass."""
    if not order:
        yield []
        return
    for size in range(1, len(order) + 1):
        mine = [recipe.operators[i] for i in order[:size]]
        alike = len({one.shares for one in mine}) == 1 and mine[0].shares and {one.kind for one in mine} == {"filter"}
        if size == 1 or alike:
            yield from ([tuple(sorted(order[:size])), *rest] for rest in groupings(recipe, order[size:]))


@pytest.mark.parametrize("seed", range(6))
def test_the_fastest_order_is_that_of_all_orders_and_passes(seed):
    recipe = drawn(seed)
    found = fastest(recipe)
    best = min(
        ordered(recipe, groups).seconds
        for order in permutations(range(6))
        if legal(recipe, order)
        for groups in groupings(recipe, order)
    )
    assert found.proved and found.cost == pytest.approx(best)
    assert ordered(recipe, found.groups).seconds == pytest.approx(best)


def test_filters_alone_are_sorted_by_what_they_cost_for_what_they_drop():
    def one(name, takes, keep):
        return DataOperator(name=name, kind="filter", takes_s=takes, keep=keep)

    operators = (one("slow", 4.0, 0.5), one("quick", 1.0, 0.5), one("useless", 0.1, 1.0), one("sharp", 2.0, 0.01))
    recipe = DataRecipe(operators=operators, samples=100, processes=2)
    answer = priced_recipe(recipe)
    # takes / (1 - keep): 2, 2.02, 8, infinite (Hellerstein and Stonebraker, SIGMOD 1993)
    assert answer.fastest.order == ("quick", "sharp", "slow", "useless")
    assert answer.fastest.seconds == pytest.approx((1 + 0.5 * 2 + 0.005 * 4 + 0.0025 * 0.1) * 100 / 2)
    assert answer.written.seconds == pytest.approx((4 + 0.5 * 1 + 0.25 * 0.1 + 0.25 * 2) * 100 / 2)


def test_a_shared_context_is_computed_once_where_that_is_less():
    def one(name, keep):
        return DataOperator(name=name, kind="filter", takes_s=0.1, keep=keep, shares="words")

    recipe = DataRecipe(operators=(one("a", 0.9), one("b", 0.9)), contexts={"words": 1.0}, samples=10)
    assert [one.operators for one in priced_recipe(recipe).fastest.passes] == [("a", "b")]
    sharp = DataRecipe(operators=(one("a", 0.9), one("b", 0.01)), contexts={"words": 0.01}, samples=10)
    assert [one.operators for one in priced_recipe(sharp).fastest.passes] == [("b",), ("a",)]


def test_filters_are_fused_as_data_juicer_fuses_them():
    # of tests/ops/test_op_fusion.py: those that share words are one, and one that shares nothing stays alone
    def one(name, takes, shares=""):
        return DataOperator(name=name, kind=name.rpartition("_")[2], takes_s=takes, shares=shares)

    operators = (
        one("language_id_score_filter", 0.1),
        one("whitespace_normalization_mapper", 1.0),
        one("flagged_words_filter", 1.0, "words"),
        one("text_length_filter", 0.1),
        one("stopwords_filter", 1.0, "words"),
        one("document_deduplicator", 1.0),
    )
    recipe = DataRecipe(operators=operators, contexts={"words": 1.0}, samples=1)
    assert as_fused(recipe) == [(0,), (1,), (3,), (2, 4), (5,)]


def test_memory_bounds_processes_and_a_deduplicator_moves_samples_between_nodes():
    filter_ = DataOperator(name="model_filter", kind="filter", takes_s=1.0, memory_bytes=6e9)
    dedup = DataOperator(name="document_deduplicator", kind="deduplicator", takes_s=0.0, keep=0.5)
    how = {"samples": 100, "processes": 8, "memory_bytes": 20e9, "sample_bytes": 1e6, "shuffle_bytes_s": 1e6}
    one, four = (priced_recipe(DataRecipe(operators=(filter_, dedup), nodes=n, **how)) for n in (1, 4))
    assert one.written.passes[0].processes == 3 and one.written.seconds == pytest.approx(100 / 3)
    assert four.written.passes[1].seconds == pytest.approx(100 * 1e6 * 0.75 / 4e6)  # three of four go elsewhere
    with pytest.raises(MeshwrightError, match="W023"):
        priced_recipe(DataRecipe(operators=(filter_,), samples=1, processes=1, memory_bytes=1e9))


def test_a_data_juicer_configuration_is_priced_by_a_table_of_costs(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "recipe.yaml").write_text(
        "project_name: demo\nprocess:\n  - stopwords_filter:\n      lang: en\n  - text_length_filter:\n"
    )
    (tmp_path / "costs.toml").write_text(
        'format_version = 1\nsamples = "1m"\n[[operators]]\nname = "text_length_filter"\ntakes = "10us"\nkeep = 0.5\n'
        '[[operators]]\nname = "stopwords_filter"\ntakes = "1ms"\n'
    )
    recipe = load(str(tmp_path / "recipe.yaml"), str(tmp_path / "costs.toml"))
    assert [one.name for one in recipe.operators] == ["stopwords_filter", "text_length_filter"]
    assert priced_recipe(recipe).fastest.order == ("text_length_filter", "stopwords_filter")
    with pytest.raises(MeshwrightError, match="W022"):
        load(str(tmp_path / "recipe.yaml"))
    (tmp_path / "bad.toml").write_text('format_version = 1\n[[operators]]\nname = "x"\nkeep = 2\nshares = "y"\n')
    with pytest.raises(MeshwrightError) as wrong:
        load(str(tmp_path / "bad.toml"))
    assert len(wrong.value.diagnostics) == 5  # samples, kind, takes, shares, keep


@pytest.mark.parametrize(
    "text", ["operators = [1, 2]", "operators = 5", "contexts = 4\n[[operators]]\nname='a_filter'"]
)
def test_a_recipe_of_other_types_says_so(text, tmp_path):
    (tmp_path / "recipe.toml").write_text(f'format_version = 1\nsamples = "1m"\n{text}\n')
    with pytest.raises(MeshwrightError, match="W022"):
        load(str(tmp_path / "recipe.toml"))


def test_what_prices_no_recipe_says_so(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "recipe.yaml").write_text("process: 5\n")
    for path, costs in (("recipe.yaml", "costs.toml"), ("examples/recipe.toml", "costs.toml")):
        with pytest.raises(MeshwrightError, match="W022"):
            load(str(tmp_path / path), costs)


def test_orders_that_are_too_many_to_look_at_are_not_begun():
    """Forty filters in any order have 2^40 sets of those that are done: a greedy order is taken at once."""
    asked = []

    def cost(done, unit):
        asked.append(unit)
        return float(unit[0] + 1)

    found = ordering.cheapest([0] * 40, [(i,) for i in range(40)], cost)
    assert not found.proved and len(asked) < 4 * 40**2
    chain = ordering.cheapest([(1 << i) - 1 for i in range(40)], [(i,) for i in range(40)], cost)  # one order alone
    assert chain.proved and chain.groups == tuple((i,) for i in range(40))


def test_of_too_many_orders_none_is_taken_that_is_slower_than_the_recipe_or_its_fused_one(monkeypatch):
    """By hand: the slow filter drops nearly all, and goes first for what it drops, not last for what it takes."""
    monkeypatch.setattr(ordering, "MOST_TRANSITIONS", 3)

    def one(name, takes, keep):
        return DataOperator(name=name, kind="filter", takes_s=takes, keep=keep)

    cheap = [one(f"cheap {i}", 0.5, 0.99) for i in range(6)]
    answer = priced_recipe(DataRecipe(operators=(*cheap, one("sharp", 1.0, 0.01)), samples=100))
    assert not answer.proved and answer.fastest.order[0] == "sharp"
    assert answer.fastest.seconds < answer.written.seconds
    for seed in range(6):
        answer = priced_recipe(drawn(seed))
        assert legal(drawn(seed), [i for unit in fastest(drawn(seed)).groups for i in unit])
        assert answer.fastest.seconds <= answer.written.seconds + 1e-9


def test_filters_of_a_context_whose_memory_no_node_has_together_stay_apart():
    def one(name):
        return DataOperator(name=name, kind="filter", takes_s=1.0, shares="words", memory_bytes=3e9)

    recipe = DataRecipe(operators=(one("a"), one("b")), samples=100, contexts={"words": 1.0}, memory_bytes=5e9)
    answer = priced_recipe(recipe)
    assert answer.fastest.seconds == answer.fused.seconds == answer.written.seconds == 400
    assert len(answer.fused.passes) == 2
