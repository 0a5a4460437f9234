"""Signals: what a student gets from its teacher. One file each, and the table of their names.

A signal is made once by its function, ``SIGNALS[name](source, student, settings)``, and asked for the target
of every batch. The signal ``text`` has no teacher: the text is what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.distillation.signals.cached import cached_signal
from attar.distillation.signals.online import online_signal
from attar.distillation.signals.policy import policy_signal
from attar.distillation.signals.target import Signal

SIGNALS: dict[str, Callable[..., Signal | None]] = {
    "online": online_signal,
    "cached": cached_signal,
    "policy": policy_signal,
    "text": lambda source, student, settings: None,
}
