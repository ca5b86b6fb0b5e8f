"""The emulated cluster: ground truth for predictions on machines without GPUs.

Every rank is a process on a host of its own, a network namespace; its kernels are sleeps of their price, its messages
and collectives are real (gloo, TCP) over links of a given rate. What is run is the lowered plan, rank by rank and
stream by stream, with nothing simulated: order, waiting, overlap and shared links happen.
"""
