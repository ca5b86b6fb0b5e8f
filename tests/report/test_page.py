"""Rows of a page: written at once where nothing has to wrap, as the table writes them."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from meshwright.report.page import Page

ROWS = [
    [(Text("a"), Text("1.5 s", justify="right"), Text("dim", "dim"))],
    [(Text("name"), Text("12", justify="right")), (Text("longer name"), Text("3", justify="right"))],
    [(Text("模型"), Text("wide")), (Text("x"), Text("y", justify="right"))],
    [(Text("!", "bold yellow"), Text("one")), (Text(" "), Text(""))],
]


def written(rows, *, table, colour):
    file = io.StringIO()
    console = Console(file=file, width=60, force_terminal=colour, color_system="standard" if colour else None)
    with Page(console) as page:
        if table:
            page.width = 0  # nothing fits, so that the table does it
        page.rows(rows)
    return file.getvalue()


@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_fit_are_written_as_the_table_writes_them(rows):
    assert written(rows, table=False, colour=False) == written(rows, table=True, colour=False)


def test_rows_that_fit_keep_their_colours():
    assert "\x1b[2mdim\x1b[0m" in written(ROWS[0], table=False, colour=True)


def test_a_row_that_does_not_fit_wraps_and_loses_nothing():
    shown = written([(Text("left"), Text("word " * 30))], table=False, colour=False)
    assert shown.count("word") == 30
    assert max(map(len, shown.splitlines())) <= 60


def test_a_long_word_stays_whole_where_a_text_beside_it_can_wrap():
    row = (Text("local:h=16,codec=int8"), Text("12.949 s"), Text("several words that may wrap " * 2))
    shown = written([row] * 2, table=False, colour=False)
    assert shown.count("local:h=16,codec=int8  12.949 s  several") == 2
    assert max(map(len, shown.splitlines())) <= 60
