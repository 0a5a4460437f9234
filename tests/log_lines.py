"""A progress that keeps what is logged."""

from attar.progress import Silent


class LogLines(Silent):
    """Keeps its lines."""

    def __init__(self):
        self.lines = []

    def log(self, line):
        self.lines.append(line)
