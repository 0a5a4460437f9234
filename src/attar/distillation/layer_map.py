"""Layer maps: which teacher layers a shallower student starts from, and which layers of both are compared
while it learns.

    uniform   evenly spread, the first and the last among them: round(i (L - 1) / (l - 1))      (DistilBERT,
        arXiv 1910.01108, takes every other one)
    ends      the first and the last layers, the middle left out: where block influence is smallest (ShortGPT,
        arXiv 2403.03853, figure 2)
    last      the last ones
    0,3,6     these

and, measured on text (:mod:`attar.importance`), by students/make.py:

    influence    those that turn the residual stream most (ShortGPT, eq. 1)
    kl           those that the teacher misses most, each left out alone
    run          all but the run of consecutive layers that it misses least (arXiv 2403.17887)

For few layers the choice decides much: what a layer reads may be written by one that was left out.

Pairs for features, student layer i with teacher layer g(i), from 0:

    uniform   g(i) = ceil((i + 1) L / l) - 1: the same part of the depth lies below both outputs; the last
        layers are a pair          (TinyBERT, arXiv 1909.10351, section 3.1; PKD-skip, arXiv 1908.09355)
    last      g(i) = L - l + i     (PKD-last)
    top       the last layers are the only pair      (DistilBERT, MiniLM)
    learned   all, with weights that are trained (features/learned_map.py)
    0:2,1:5   these

Letters: L teacher layers, l student layers.
"""

from __future__ import annotations

from attar.errors import SettingsError

NAMED = ("uniform", "ends", "last")
MEASURED = ("influence", "kl", "run")
LAYER_MAPS = NAMED + MEASURED
FEATURE_MAPS = ("uniform", "last", "top", "learned")


def is_map(kind: str) -> bool:
    """Whether it is a name of ``LAYER_MAPS``, or numbers with commas between them."""
    return kind in LAYER_MAPS or all(number.isdecimal() for number in kind.split(","))


def layer_count(kind: str, teacher: int, student: int = 0, keep: float = 0.5) -> int:
    """How many layers the student has: l, else as many as there are numbers, else ``keep`` of the teacher's,
    rounded down, at least one.

    Raises:
        SettingsError: the student has more layers than the teacher, or other ones than are named.
    """
    if kind not in LAYER_MAPS:
        return len(_numbers(kind, teacher, student))
    student = student or max(int(teacher * keep), 1)
    if not 1 <= student <= teacher:
        raise SettingsError("layers", student, f"between 1 and the teacher's {teacher}")
    return student


def layer_map(kind: str, teacher: int, student: int = 0, keep: float = 0.5) -> list[int]:
    """Teacher layer numbers, ascending and distinct, one per student layer.

    Args:
        kind: see :func:`is_map`, but no score.
        teacher: L.
        student: l; 0: ``keep`` of the teacher's, rounded down, or as many as there are numbers.
        keep: fraction.

    Raises:
        SettingsError: see :func:`layer_count`.
    """
    assert is_map(kind) and kind not in MEASURED, kind
    if kind not in NAMED:
        return _numbers(kind, teacher, student)
    student = layer_count(kind, teacher, student, keep)
    if kind == "last":
        return list(range(teacher - student, teacher))
    if kind == "ends":
        front = (student + 1) // 2
        return [*range(front), *range(teacher - (student - front), teacher)]
    if student == 1:
        return [teacher - 1]
    return [round(i * (teacher - 1) / (student - 1)) for i in range(student)]


def _numbers(kind: str, teacher: int, student: int) -> list[int]:
    layers = [int(number) for number in kind.split(",")]
    if layers != sorted(set(layers)) or layers[-1] >= teacher:
        raise SettingsError("layer_map", kind, f"ascending numbers below the teacher's {teacher} layers")
    if student not in (0, len(layers)):
        raise SettingsError("layers", student, f"0 or the {len(layers)} of layer_map {kind}")
    return layers


def is_feature_map(kind: str) -> bool:
    """Whether it is a name of ``FEATURE_MAPS``, or pairs with commas between them."""
    return kind in FEATURE_MAPS or all(
        left.isdecimal() and right.isdecimal()
        for left, _, right in (pair.partition(":") for pair in kind.split(","))
    )


def layer_pairs(kind: str, teacher: int, student: int) -> list[tuple[int, int]]:
    """Pairs (student layer, teacher layer), ascending in the student's.

    Args:
        kind: see :func:`is_feature_map`.
        teacher: L.
        student: l.

    Raises:
        SettingsError: a layer is named that a model does not have, or the student has more than the teacher.
    """
    assert is_feature_map(kind), kind
    if kind == "learned":
        return [(i, j) for i in range(student) for j in range(teacher)]
    if kind == "top":
        return [(student - 1, teacher - 1)]
    if kind == "uniform":
        return [(i, -(-(i + 1) * teacher // student) - 1) for i in range(student)]
    if kind == "last":
        if student > teacher:
            raise SettingsError(
                "feature_map", kind, f"uniform: the teacher has {teacher} layers, not {student}"
            )
        return [(i, teacher - student + i) for i in range(student)]
    pairs = sorted((int(i), int(j)) for i, _, j in (pair.partition(":") for pair in kind.split(",")))
    if len(set(pairs)) < len(pairs) or any(i >= student or j >= teacher for i, j in pairs):
        allowed = f"distinct pairs of the student's {student} layers and the teacher's {teacher}"
        raise SettingsError("feature_map", kind, f"{allowed}, counted from 0")
    return pairs
