"""The version of the package, said once: what is built and what answers read it here."""

VERSION = "0.1.0"
