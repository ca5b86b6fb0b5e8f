"""Timelines as files of other tools, written and read back."""
