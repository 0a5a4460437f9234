"""File layouts of compressed checkpoints: bytes in, bytes out."""
