"""Merging: one model out of several, tensor by tensor."""
