"""Models: their parts, surgery, loading and saving."""
