"""Published systems: what each does, what it claims, and whether we get its figures.

One TOML file per system in ``rows/``, the figures of its paper in ``data/``, and the check that reproduces them in
``checks/``. Nothing says by itself that a system works: its state (``state.py``) is what its check found
(``checking.py``). What the checks found for a release is shipped with it (``shipped.py``).
"""
