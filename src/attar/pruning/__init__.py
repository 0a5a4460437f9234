"""Structured pruning: whole heads and neurons, chosen by importance, really removed."""
