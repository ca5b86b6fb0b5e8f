"""Facts of the software that ran a row: its name, its date, and the evidence where nobody knows the name."""

from __future__ import annotations

import re

from meshwright.cost.unknown import Evidence, evidence
from meshwright.spec import cluster as clusters
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.validate.tables import whole


def software_name(row: dict[str, str]) -> str:
    """The software that a row names, without its version."""
    return row["framework"].lower().split(" ")[0]


def evidence_of(row: dict[str, str]) -> Evidence:
    """The facts of a row that tell kinds of stack apart."""
    dtype = row["dtype"] if row["dtype"] in DTYPE_BYTES else "bf16"
    compiled = "compiled" if "compile" in row["flags"].split(";") else ""
    words = row["attention_kernel"].lower()
    flash = next((generation for word, generation in GENERATIONS.items() if word in words), None)
    device = clusters.load_device(row["hardware"])
    return evidence(device, dtype, year=date_of(row), kernels=compiled, flash=flash)


#: Words for an attention kernel that say the generation of FlashAttention it is: PyTorch's own attention is its second.
GENERATIONS = {"flash_attention_2": 2, "flash2": 2, "fa2": 2, "sdpa": 2, "flash_attention_3": 0, "fa3": 0}
#: When rounds of MLPerf Training were published, in years.
MLPERF = {"v3.0": 2023.5, "v3.1": 2023.9, "v4.0": 2024.5, "v4.1": 2024.9, "v5.0": 2025.4, "v5.1": 2025.9}


def date_of(row: dict[str, str]) -> float | None:
    """The year of a row's publication, with the part of it that is gone, where its reference says a round of MLPerf, a
    number of arXiv or a month, or its framework a release by year and month; None where nothing does."""
    reference = f"{row.get('source_ref', '')} {row['notes']}"
    if (round_ := re.search(r"training_results_(v\d\.\d)", reference)) and round_[1] in MLPERF:
        return MLPERF[round_[1]]
    month = r"(0[1-9]|1[0-2])"
    found = (
        re.search(rf"\b(\d\d)\.{month}\b", row["framework"])
        or re.search(rf"\b(2\d){month}\.\d{{5}}\b", reference)
        or re.search(rf"\b20(\d\d)-?{month}(?!\d)", row.get("source_ref", "").replace("_", " "))
    )
    return None if found is None else 2000 + int(found[1]) + (int(found[2]) - 1) / 12


#: What makes two models one, whatever they are called: what every row states (a width or a vocabulary that one row
#: leaves out would make two of one).
SHAPE = ("layers", "hidden", "heads", "experts")


def shape_of(row: dict[str, str]) -> str:
    """The shape of a row's model, by which rows are left out together: names of one shape are one model."""
    return " ".join(f"{whole(row, column)}" for column in SHAPE)


def unnamed(row: dict[str, str]) -> dict[str, str]:
    """The row as one of software that nobody knows: without its framework, and without flags that say its version. That
    layers are compiled is a fact of the job, not a name."""
    flags = (f for f in row["flags"].split(";") if not f.startswith("era_"))
    return row | {"framework": "", "flags": ";".join(flags)}
