"""A random search for inputs that Meshwright does not take: `python -m fuzz`, or `make fuzz`.

Three campaigns, each a numbered row of examples that depend on a seed and their number alone: mutated *texts* through
the readers and `check`, legal *predictions* through `predict`, and *commands* through the command line. What is found
is made small and kept as an example that `make test` replays (``tests/fuzz_found``).
"""
