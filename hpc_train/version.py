"""Holds the version of the package."""

__version__ = "0.9.0"
