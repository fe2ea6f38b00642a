"""Fails when it is imported."""

raise ValueError("broken on purpose")
