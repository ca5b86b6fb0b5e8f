"""Endpoint: the OpenAI-compatible front of a serving engine, and the supervision of the engine's process; no torch."""
