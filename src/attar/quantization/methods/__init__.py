"""The rounding methods, one file each."""
