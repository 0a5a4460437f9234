"""attar: a language model made small and fast, with the evidence that it is still good."""

__version__ = "0.1.0"
