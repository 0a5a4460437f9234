"""Layer maps: which teacher layers a shallower student starts from.

    uniform   evenly spread, the first and the last among them: round(i (L - 1) / (l - 1))      (DistilBERT,
        arXiv 1910.01108, takes every other one)
    ends      the first and the last layers, the middle left out: where block influence is smallest (ShortGPT,
        arXiv 2403.03853, figure 2)
    last      the last ones

Letters: L teacher layers, l student layers.
"""

from __future__ import annotations

from attar.errors import SettingsError


def layer_map(kind: str, teacher: int, student: int) -> list[int]:
    """Teacher layer numbers, ascending and distinct, one per student layer.

    Raises:
        SettingsError: the student has more layers than the teacher, or none.
    """
    if not 1 <= student <= teacher:
        raise SettingsError("layers", student, f"between 1 and the teacher's {teacher}")
    if kind == "last":
        return list(range(teacher - student, teacher))
    if kind == "ends":
        front = (student + 1) // 2
        return [*range(front), *range(teacher - (student - front), teacher)]
    if student == 1:
        return [teacher - 1]
    return [round(i * (teacher - 1) / (student - 1)) for i in range(student)]
