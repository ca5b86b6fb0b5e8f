"""No deadline on generated examples: the first one of a process may compile or load compiled code."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
