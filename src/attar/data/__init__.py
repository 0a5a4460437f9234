"""Text: where it comes from, how it becomes rows of tokens."""
