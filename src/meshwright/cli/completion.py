"""``meshwright completion``: words that a shell completes, from the commands, their options and the catalog."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

import msgspec

from meshwright.cli import COMMANDS, options
from meshwright.cli.output import print_json
from meshwright.errors import MeshwrightError, nearest

DESCRIPTION = """Print what makes a shell complete commands, options, models, clusters and words of a plan.

  bash: eval "$(meshwright completion bash)"      (in ~/.bashrc)
  zsh:  eval "$(meshwright completion zsh)"       (in ~/.zshrc)
  fish: meshwright completion fish | source       (in ~/.config/fish/config.fish)

--words asks for the completions of a line that is being typed, one a line."""
FORMAT_VERSION = 1

#: The function asks `meshwright completion --words` for what may stand where the cursor is; files are the shell's own.
SCRIPTS = {
    "bash": """_meshwright() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
  COMPREPLY=($(meshwright completion --words "$line" 2>/dev/null))
  [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace
}
complete -o default -F _meshwright meshwright
""",
    "zsh": """_meshwright() {
  local -a found
  found=(${(f)"$(meshwright completion --words "${LBUFFER}" 2>/dev/null)"})
  (( $#found )) && compadd -Q -a found || _files
}
compdef _meshwright meshwright
""",
    "fish": "complete -c meshwright -a '(meshwright completion --words (commandline -cp) 2>/dev/null)'\n",
}


class CompletionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright completion``."""

    shell: options.positional("SHELL", "bash, zsh or fish.") = ""
    words: options.text("LINE", "A line as far as it is typed.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0; a shell without a script is misuse (X012)."""
    if len(argv) == 2 and argv[0] == "--words":  # the line may be empty, and may look like anything
        print("\n".join(candidates(argv[1])))
        return 0
    given, wrong = options.read(CompletionOptions, argv, command="completion", description=DESCRIPTION)
    wrong += options.missing({"shell": given.shell}, {"shell": "SHELL: bash, zsh or fish"}, command="completion")
    if wrong:
        raise MeshwrightError(wrong)
    if given.shell not in SCRIPTS:
        help = nearest(given.shell, list(SCRIPTS))
        raise MeshwrightError.one("X012", f"no completion for {given.shell!r}", place="completion SHELL", help=help)
    if given.json:
        print_json({"format_version": FORMAT_VERSION, "shell": given.shell, "script": SCRIPTS[given.shell]})
    else:
        print(SCRIPTS[given.shell], end="")
    return 0


def candidates(line: str) -> list[str]:
    """List the completions of the last word of a line (empty behind a space), sorted; none for a file or free text.

    Inside the quotes of ``--plan "tp8 pp`` it is the plan's last word.
    """
    before, quote, quoted = line.rpartition('"') if line.count('"') % 2 else (line, "", "")
    words = before.split()[1:]
    typed = "" if quote or line[-1:].isspace() or not words else words.pop()
    if quote:
        typed = "" if quoted[-1:].isspace() or not quoted.split() else quoted.split()[-1]
    return sorted(word for word in _possible(words, typed) if word.startswith(typed))


def _possible(words: list[str], typed: str) -> Iterable[str]:
    """Every word that may stand behind `words`; `typed` is its beginning."""
    if not words:
        return [*COMMANDS, "--help", "--version"]
    command, *rest = words
    if command not in COMMANDS:
        return []
    if rest and (known := VALUES.get(rest[-1])):
        return known()
    if typed.startswith("-"):
        return _options(command)
    return POSITIONAL[command]() if command in POSITIONAL and not rest else []


def _options(command: str) -> list[str]:
    """The options of a command, as its ``--help`` lists them."""
    module = import_module(f"meshwright.cli.{command.replace('-', '_')}")
    record = getattr(module, f"{command.title().replace('-', '')}Options", None)
    return [*(options.names(record) if record else ()), "--help"]


def _models() -> Iterable[str]:
    from meshwright import catalog

    return catalog.names("models")


def _presets() -> Iterable[str]:
    from meshwright import catalog

    return catalog.names("presets")


def _questions() -> Iterable[str]:
    return [*_models(), *_presets()]


def _clusters() -> Iterable[str]:
    from meshwright import catalog

    return [*catalog.names("clusters"), *(f"8x{name}" for name in catalog.names("devices"))]


def _frameworks() -> Iterable[str]:
    from meshwright.cost.framework import frameworks

    return frameworks()


def _plan_words() -> Iterable[str]:
    from meshwright.plan.text import examples

    return examples()


def _workload_words() -> Iterable[str]:
    from meshwright.spec.workload import KEYS

    return [f"{key}=" for key in KEYS]


def _targets() -> Iterable[str]:
    from meshwright.export import TARGETS

    return TARGETS


def _recipes() -> Iterable[str]:
    from meshwright.papers.record import papers

    return ["all", *(one.id for one in papers().values() if one.recipe is not None)]


def _papers() -> Iterable[str]:
    from meshwright.papers.record import papers

    return papers()


def _terms() -> Iterable[str]:
    from meshwright import catalog

    return catalog.tables("codes") | catalog.tables("terms")


def _kinds() -> Iterable[str]:
    from meshwright.cli.entries import KINDS

    return KINDS


def _passes() -> Iterable[str]:
    from meshwright.cli.lower import PASSES

    return PASSES


#: Option -> the values that are known for it.
VALUES = {
    "--on": _clusters,
    "--framework": _frameworks,
    "--preset": _presets,
    "--model": _models,
    "--plan": _plan_words,
    "--train": _workload_words,
    "--to": _targets,
    "--try": _recipes,
    "--objective": lambda: ["step", "cost", "energy"],
    "--show": _passes,
    "--strategy": lambda: ["exhaustive", "beam", "anneal"],
}
#: Command -> what its first argument may be.
POSITIONAL = {
    **dict.fromkeys(("predict", "search", "run", "export", "whatif", "emulate", "lower"), _questions),
    **dict.fromkeys(("diff", "weights", "place"), _models),
    "explain": _terms,
    "catalog": _kinds,
    "reproduce": _papers,
    "completion": lambda: SCRIPTS,
}
