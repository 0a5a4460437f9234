"""The report of a run: one HTML file that needs nothing else, drawn by the small functions of this folder."""

from attar.measure.report.page import build, page
from attar.measure.report.quality import write_quality_svg

__all__ = ["build", "page", "write_quality_svg"]
