"""Elastic runs: training goes on when any of its processes is killed, at any instant, with one step repeated at most.

host.py      the process that keeps a rank's memory; it starts the worker that trains
worker.py    one rank of a formation: restore, train, keep every step
memory.py    steps in memory: a rank's own, and the neighbour's that no other rank has
restore.py   the newest whole step in all memories, given to ranks under any plan
launcher.py  the real clock of the decider (:mod:`meshwright.world.elastic`)
"""
