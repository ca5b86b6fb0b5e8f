"""Rows as a pandas data frame, where pandas is installed; nothing else here needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from pandas import DataFrame


def dataframe(columns: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> DataFrame:
    """A data frame of columns, or of rows.

    Raises:
        MeshwrightError: X021 when pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MeshwrightError.one(
            "X021",
            "a data frame needs pandas, not installed here",
            place="to_dataframe()",
            help="pip install pandas; to_json() has the same values as plain ones",
        ) from None
    return pandas.DataFrame(columns)
