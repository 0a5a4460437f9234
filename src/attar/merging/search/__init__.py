"""Choices by held-out loss: a soup's ingredients, a merge's coefficients."""
