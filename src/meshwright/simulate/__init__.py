"""Executor 1: the plan on a virtual clock. Same graph in, same Timeline out as the real one in ``run/``."""
