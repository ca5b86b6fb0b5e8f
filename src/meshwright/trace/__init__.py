"""Timelines as files that other tools open, written and read back."""

from meshwright.trace.chrome import write
from meshwright.trace.chrome_read import read

__all__ = ["read", "write"]
