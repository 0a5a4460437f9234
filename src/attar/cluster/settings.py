"""Where tasks run (``--on``, ``--jobs``), and what each of them asks of a machine, as settings."""

from __future__ import annotations

from dataclasses import dataclass

from attar.cluster.tasks import Resources
from attar.errors import SettingsError
from attar.options import setting

RAY = "ray://"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Where work runs, and what each task of it asks of a machine."""

    on: str = setting(
        "",
        "a Ray cluster: local starts one on this machine, auto joins this machine's, "
        "ray://HOST:PORT is another; empty: processes of this machine",
    )
    jobs: int = setting(1, "processes side by side on this machine; actors of a Ray cluster")
    cpus: int = setting(1, "processors of a task on a Ray cluster")
    gpus: float = setting(0.0, "GPUs of a task on a Ray cluster, or a part of one")
    memory_gb: float = setting(0.0, "memory of a task on a Ray cluster, in 10^9 bytes; 0: not asked for")

    def __post_init__(self) -> None:
        known = self.on in ("", "local", "auto") or (self.on.startswith(RAY) and len(self.on) > len(RAY))
        if not known:
            raise SettingsError("on", self.on, "local, auto or ray://HOST:PORT")
        for name in ("jobs", "cpus"):
            if getattr(self, name) < 1:
                raise SettingsError(name, getattr(self, name), "1 or more")
        for name in ("gpus", "memory_gb"):
            if not 0 <= getattr(self, name) < 1e9:
                raise SettingsError(name, getattr(self, name), "0 or more")

    @property
    def resources(self) -> Resources:
        """What each task asks."""
        return Resources(self.cpus, self.gpus, int(self.memory_gb * 1e9))
