"""Experiment trackers: what a run reports anyway goes to them too."""
