"""Reads the results of sweeps and shows them: a table, and a page with charts."""
