"""Search for a serving plan: how many devices, which layout, how many replicas, which scheduler.

:func:`meshwright.search.serving.find.find_serving` is the verb; the space is data (``space.py``), bounds that hold for
every request prune it (``bounds.py``), and the plans that are left are simulated as ``predict --serve`` does
(``evaluate.py``). "Proven" always means: under the cost model.
"""
