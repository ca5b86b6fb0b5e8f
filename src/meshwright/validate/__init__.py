"""Validation: every row of the measurement tables predicted, then scored. Nothing here fits anything, and only
``score.py`` reads what was measured.
"""
