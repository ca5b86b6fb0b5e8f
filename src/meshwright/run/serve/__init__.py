"""The serving engine: deciders of :mod:`meshwright.serving` drive a model on torch, as they drive the simulator."""
