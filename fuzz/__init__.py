"""A random search for inputs that Meshwright does not take: `python -m fuzz`, or `make fuzz`.

Five campaigns, each a numbered row of examples that depend on a seed and their number alone: mutated *texts* through
the readers and `check`, legal *predictions* and *serving* questions through `predict`, *commands* through the command
line, and requests of *http* through the server. What is found is made small and kept as an example that `make test`
replays (``tests/fuzz_found``).
"""
