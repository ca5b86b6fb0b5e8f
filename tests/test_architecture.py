"""The architecture of DESIGN's "The house", held: imports run one way, files stay small, codes are explained."""

import re
import tomllib
from pathlib import Path

import pytest

from meshwright import catalog
from tests.sources import FILES, SOURCE, facts

#: Left is imported by right, never the other way. Names on one line may import each other.
ORDER = (
    ("version", "errors", "quantity", "atomic", "dataframe"),
    ("native",),
    ("toposort",),
    ("graph",),
    ("causes", "timeline"),
    ("catalog",),
    ("spec",),
    ("work", "world"),
    ("detect",),
    ("layers", "schedules", "sync", "assign", "serving"),
    ("endpoint",),
    ("plan",),
    ("cost", "lower"),
    ("simulate",),
    ("answer",),
    ("traffic",),
    ("compare", "replay"),
    ("trace",),
    ("run",),
    ("calibrate", "validate"),
    ("search",),
    ("export", "papers"),
    ("report",),
    ("ui", "cli"),
    ("__main__",),
)
RANK = {name: place for place, names in enumerate(ORDER) for name in names}
LONGEST = 450


def part(path: Path) -> str:
    """The package or module of the house that a file belongs to; "" for the package's own front."""
    first = path.relative_to(SOURCE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def test_every_part_of_the_house_has_its_place_in_the_import_order():
    assert {part(f) for f in FILES} - {""} <= RANK.keys()


def test_imports_run_one_way():
    against = [
        f"{file.relative_to(SOURCE)} imports {module}"
        for file in FILES
        if part(file)
        for module in sorted(facts(file).imports)
        if module.startswith("meshwright.")
        and (other := module.split(".")[1]) in RANK
        and other != part(file)
        and RANK[other] > RANK[part(file)]
    ]
    assert against == []


def test_torch_is_imported_nowhere_outside_run():
    users = {part(f) for f in FILES for module in facts(f).imports if module.split(".")[0] == "torch"}
    assert users <= {"run"}


@pytest.mark.parametrize("folder", ["spec", "cli", "catalog"])
def test_what_help_loads_imports_neither_numba_nor_torch(folder):
    heavy = {"numba", "torch"}
    assert not [f for f in (SOURCE / folder).rglob("*.py") if {m.split(".")[0] for m in facts(f).imports} & heavy]


def test_every_error_code_in_the_source_is_explained_and_every_explanation_is_used():
    used = set()
    for file in FILES:
        used |= set(re.findall(r'"([A-Z]\d{3})"', file.read_text(encoding="utf-8")))
    assert used == set(catalog.tables("codes"))


def test_every_explanation_of_a_code_has_a_title_and_some_sentences():
    for code, entry in catalog.tables("codes").items():
        assert entry["title"] and entry["text"].count(".") >= 2, code


def test_no_file_is_long():
    assert {str(f.relative_to(SOURCE)): n for f in FILES if (n := len(f.read_text().splitlines())) >= LONGEST} == {}


def test_no_file_knows_an_absolute_path():
    rooted = re.compile(r"[\"'](/(?:home|root|work|tmp|usr|opt|Users)/)")
    assert [f for f in FILES if rooted.search(f.read_text(encoding="utf-8"))] == []


def test_every_module_says_what_it_is():
    silent = [f for f in FILES if f.stat().st_size and not facts(f).documented]
    assert silent == []


def test_every_docstring_names_its_subject_first():
    def begins(path: Path) -> list[str]:
        return [f"{path.name}:{number}" for number, line in enumerate(path.read_text().splitlines(), 1) if clause(line)]

    clause = re.compile(r'^\s*r?"""(What|Those) ').match
    assert clause('    """What a rank holds."""') and not clause('    """What-if: a plan with recipes over it."""')
    assert [place for path in FILES for place in begins(path)] == []


def test_no_code_or_word_is_explained_in_two_files():
    for kind in ("codes", "terms"):
        files = [f for f in (SOURCE / "catalog" / kind).iterdir() if f.suffix == ".toml"]
        names = [name for f in files for name in tomllib.loads(f.read_text(encoding="utf-8"))]
        assert len(names) == len(set(names)), kind


@pytest.mark.parametrize("folder", ["layers", "lower", "cost"])
def test_below_the_workload_nothing_reads_how_long_its_sequences_are(folder):
    # items of a batch say it: layers.pieces.Context.seq_len is worked out from them
    workload = re.compile(r"train\.(seq_len|lengths|attended|longest_document|global_batch \* )")
    assert [f for f in (SOURCE / folder).rglob("*.py") if workload.search(f.read_text(encoding="utf-8"))] == []


def test_no_two_public_classes_share_a_name():
    where: dict[str, list[str]] = {}
    for file in FILES:
        for name in facts(file).classes:
            if not name.startswith("_"):
                where.setdefault(name, []).append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_no_two_files_import_each_other():
    """A package from which a submodule is taken is not what is imported: the submodule is."""
    dotted = {".".join(("meshwright", *f.relative_to(SOURCE).with_suffix("").parts)): f for f in FILES}
    known = {name.removesuffix(".__init__"): file for name, file in dotted.items()}
    used = {}
    for module, file in known.items():
        found = facts(file).imports & known.keys()
        parents = {name.rpartition(".")[0] for name in found}
        taken = {
            origin
            for origin, names in facts(file).taken
            if origin in parents and all(f"{origin}.{name}" in known for name in names)
        }
        used[module] = found - taken
    assert [(a, b) for a, found in used.items() for b in sorted(found) if a < b and a in used[b]] == []
