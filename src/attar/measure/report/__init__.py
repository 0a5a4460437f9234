"""The report of a run: one HTML file that needs nothing else, drawn by the small functions of this folder."""
