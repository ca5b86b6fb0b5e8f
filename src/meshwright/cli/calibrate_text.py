"""``meshwright calibrate --text``: how fast one core of this machine reads a text, as words for ``--feed``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshwright.cli.needs import lacking
from meshwright.cli.output import note, print_json
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import each

if TYPE_CHECKING:
    from meshwright.cli.calibrate_options import CalibrateOptions

#: The batches that are made, where nobody says.
USUAL = "batch=8,seq=1024"


def run_text(given: CalibrateOptions, wrong: list[Diagnostic]) -> int:
    """0 when the text was read.

    Raises:
        MeshwrightError: K001 for options that do not go together, D codes for what cannot be read.
    """
    for name in ("data", "device", "runs", "few", "here", "server", "only", "out"):
        if getattr(given, name):
            message = f"--text measures how a text is read, and --{name} measures or fits other things"
            wrong.append(Diagnostic(code="K001", message=message, place=f"--text --{name}", help="say one of them"))
    wrong += lacking("calibrate", "torch", "tokenizers")
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.run import data
    from meshwright.run.bench import reading
    from meshwright.run.data import tokenizer
    from meshwright.spec.workload import parse

    train, words = parse(given.train or USUAL), tokenizer.load(given.tokenizer)
    folder = data.build(given.text, words, data.cache_folder(), say=note)
    found = reading.measure(given.text, words, folder, train, vocab=words.num_tokens)
    if given.json:
        print_json(msgspec.to_builtins(found) | {"feed": found.words(), "train": train.text()})
        return 0
    print(f"{found.documents:,} documents, {found.tokens:,} tokens of {found.text_bytes:.3g} bytes; of a core a token:")
    for what, seconds in (("decode", found.decode_s), ("tokenise", found.tokenise_s), ("collate", found.collate_s)):
        print(f"  {what:9s} {each(seconds)}")
    print(f"--feed workers=4,{found.words()}")
    note("batches are of tokens that are there, as meshwright run has them: collate= alone is what its steps wait for")
    return 0
