"""Answers: a prediction of a step with its memory, its interval, its reasons, and the run it belongs to."""
