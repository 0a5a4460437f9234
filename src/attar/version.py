"""The version of attar, below everything that records or shows it."""

__version__ = "0.1.0"
