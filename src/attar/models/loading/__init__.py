"""A checkpoint as a model of transformers: fit, loading, experts, tokenizer, places of stored tensors."""
