"""The world over time: interruptions and speeds of a training job as a trace, and the deciders that answer them.

``trace.py`` reads or draws what happens; ``recovery.py`` decides what a job does about it. Nothing here has a clock,
does I/O or imports torch: ``simulate/job.py`` drives a decider on a virtual clock, an executor would on a real one.
"""
