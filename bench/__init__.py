"""How fast Meshwright is, beside its plain reference in the same run: ``python -m bench``."""
