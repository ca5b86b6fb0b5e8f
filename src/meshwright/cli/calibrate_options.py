"""Options of ``meshwright calibrate``."""

from __future__ import annotations

import msgspec

from meshwright.cli import options


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright calibrate``."""

    data: options.text("DIR", "Folder with the tables.") = ""
    device: options.text("NAME", "Fit the curves of one device only.") = ""
    runs: options.text(
        "FILE", "Update a framework profile by your own runs, a CSV of model, on, train, plan, step_time_s or log."
    ) = ""
    framework: options.text("NAME", "With --runs: the profile to begin from; the likeliest stack if left out.") = ""
    keep_good: options.switch("With --runs: go on without the rows that are wrong.") = False
    few: options.text("COUNT", "With --device: learn its products' curves from so many of them.") = ""
    here: options.switch("Measure this machine instead, for --on 2xhere; minutes on a laptop.") = False
    quick: options.switch("With --here: fewer sizes and repeats, for small models; within a minute.") = False
    anyway: options.switch("With --here: keep a profile that cannot be believed, flagged.") = False
    ranks: options.text(
        "COUNT", "With --here: collectives between up to so many processes; 8 if left out, 2 with --quick."
    ) = ""
    server: options.text("URL", "Probe a server of OpenAI's protocol for some minutes, for --engine-profile FILE.") = ""
    save: options.text("FILE", "With --server: write its profile there, server.toml.") = ""
    seconds: options.text("SECONDS", "With --server: how long probes may take; 180 if left out.") = ""
    longest: options.text("TOKENS", "With --server: the longest prompt of probes; 1024 if left out.") = ""
    serve: options.text("WORDS", "With --server: traffic to be predicted, some of which is among the probes.") = ""
    model: options.text("NAME", "With --server: which of its models; the first if left out.") = ""
    api_key: options.text("KEY", "With --server: its key, or env:NAME.") = ""
    tokenizer: options.text("FILE", "A tokenizer.json, with --server to count prompts by, with --text to read by.") = ""
    text: options.text("PATH", "Measure how a text is read, as --data of run names it: sample, a file, a folder.") = ""
    train: options.text("WORKLOAD", "With --text: the batches that are made of it; batch=8,seq=1024 if left out.") = ""
    only: options.text(
        "CLASS[,CLASS]",
        "Some of gemm, attention, latent, moe, scan, network, framework, engine; all of them if left out.",
    ) = ""
    holdout: options.text("SHARE", "Share of whole groups held out to measure accuracy; 0.2 if left out.") = ""
    out: options.text("DIR", "Write the profiles there; nothing is written if left out.") = ""
    json: options.JSON = False
