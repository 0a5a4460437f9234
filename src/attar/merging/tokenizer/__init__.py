"""One tokenizer for the models of a merge, and every embedding in its order."""
