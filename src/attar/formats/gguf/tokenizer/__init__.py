"""Tokenizers in GGUF metadata: to_gguf.py writes them, from_gguf.py reads them."""
