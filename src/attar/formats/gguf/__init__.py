"""GGUF: one file with weights, tokenizer and all that llama.cpp needs to run a model."""
