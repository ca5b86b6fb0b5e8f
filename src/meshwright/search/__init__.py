"""Search: the fastest plan that fits, out of the whole space, with the reason for every rejection.

:func:`meshwright.search.find.find` is the verb; the space is data (``space.py``), bounds prune it (``bounds.py``), a
strategy walks it (``strategies/``), and the plans that are left are evaluated to the last bit as ``predict`` does
(``evaluate.py``). "Proven" always means: under the cost model.
"""
