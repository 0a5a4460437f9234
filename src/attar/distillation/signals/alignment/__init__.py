"""Teachers with another tokenizer than their student's: which tokens cover the same bytes of a text, and what
is compared there."""
