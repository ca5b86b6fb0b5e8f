"""Real configurations: every one of the collected ``config.json`` files is read, or refused by name."""

from __future__ import annotations

import csv
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.spec.families.refused import MISSING
from meshwright.spec.model import load


def test_every_collected_configuration_is_read_or_refused_by_name(data_dir: Path) -> None:
    folder = data_dir / "models" if (data_dir / "models").is_dir() else data_dir
    with (folder / "index.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 157
    read, refused = [], []
    for row in rows:
        try:
            model = load(folder / row["file"])
        except MeshwrightError as error:
            assert all(d.code in ("M001", "M005") for d in error.diagnostics), error
            named = any(part in str(error) for part in MISSING.values())
            assert named or all("is missing" in d.message or "is null" in d.message for d in error.diagnostics), error
            refused.append(row["file"])
            continue
        read.append(row["file"])
        for column, value in (("layers", model.num_layers), ("hidden_size", model.hidden)):
            if row[column]:
                assert int(float(row[column])) == value, (row["file"], column)
        assert 0 < model.active_params <= model.num_params
    assert (len(read), len(refused)) == (102, 55)
