"""Paceline trains image classifiers on one machine or many with one command, and hands back the evidence."""

__version__ = "0.1.0"
