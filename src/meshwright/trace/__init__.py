"""Timelines as files that other tools open, written and read back."""

from meshwright.trace.chrome import encode, write
from meshwright.trace.chrome_read import decode, read

__all__ = ["decode", "encode", "read", "write"]
