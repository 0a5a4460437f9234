"""Speculative decoding: tokens proposed cheaply, verified exactly, in a number that pays."""
