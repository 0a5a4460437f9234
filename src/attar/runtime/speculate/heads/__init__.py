"""Proposers that read the target's hidden states. One file each."""
