"""Rollouts: rows that a model writes, and the student learns from."""
