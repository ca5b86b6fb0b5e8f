"""Experts that live in processes of their own, and whoever trains with them (``passes=dmoe``).

parcels.py   what whoever trains and a peer tell each other
experts.py   the experts of a mixture that a process holds, with an optimizer of their own
peer.py      the process of a peer
asking.py    who asks the peers for passes, and leaves out those that do not answer
train.py     a run whose mixtures ask
"""
