"""The three ways to go over a model: stream, sweep, train."""
