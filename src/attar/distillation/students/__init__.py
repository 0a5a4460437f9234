"""The student before its first step. ``plan.py`` says its sizes, before any weight is read; ``make.py``
chooses the teacher's units by their importance and cuts; ``fresh.py`` makes models with new weights.
"""

from attar.distillation.students.make import make_student

__all__ = ["make_student"]
