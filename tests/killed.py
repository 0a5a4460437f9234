"""What a test raises in place of ``kill -9``."""


class Killed(BaseException):
    """Stands for a process that dies between two steps, or between two files."""
