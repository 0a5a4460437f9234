"""Models: what they are made of, how they are cut, how they are loaded and saved."""
