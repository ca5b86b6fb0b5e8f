"""SyncPolicy: which gradients and parameters replicas exchange, when, over which ranks, in which code.

``fragments`` is the one list of exchanges that both executors read: ``lower`` makes tasks of it, ``run`` buckets. A
rule (``rules/``) says what is exchanged of a group of parameters and when it is due; a codec (``codecs/``) says what a
value is on the wire. Each is a record and pure functions in one file, registered by name.
"""
