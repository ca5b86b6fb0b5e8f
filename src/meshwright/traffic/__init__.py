"""Traffic: requests of a serving workload sent to a server that speaks OpenAI's protocol, and what became of them.

:mod:`meshwright.traffic.replay` sends them, :mod:`meshwright.traffic.record` keeps what was seen in a file, and
:mod:`meshwright.traffic.timeline` makes of it the timeline that the simulator returns.
"""
