"""Signals: what a student gets from its teacher. One file each, and the table of what makes a soft loss."""

from attar.distillation.signals.cached import cached_signal
from attar.distillation.signals.online import online_signal

SIGNALS = {"online": online_signal, "cached": cached_signal}
