"""Measurements: how good, how big and how fast a checkpoint is, and the report that shows it."""
