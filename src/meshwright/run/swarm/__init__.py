"""Swarms of peers as real processes: the decider of ``world/swarm.py`` on a real clock.

parcels.py   what whoever trains and a peer tell each other, and its way
stage.py     a stage of a plan as one peer computes it: passes, gradients, state
peer.py      the process of a peer
driver.py    whoever trains: a trainer whose steps peers take
"""
