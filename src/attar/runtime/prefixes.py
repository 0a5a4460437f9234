"""The prefix store of a loaded model: what it refuses, and what its blocks are identified by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attar.errors import SettingsError
from attar.runtime.kv.prefix_store import PrefixStore, store_setting
from attar.runtime.loading import Loaded

PROCESS = ("threads", "kv_bytes", "hidden_bytes")  # facts that no number depends on
FORM = 3  # of the files, and of what their numbers are rounded by


def check_store(
    text: str, prefix_cache: bool | None, options: Mapping[str, Any], hidden_layers: Sequence[int]
) -> None:
    """Refuse what a block on disk does not have.

    Args:
        options: of :class:`attar.runtime.runner.choice.RunnerSettings`.

    Raises:
        SettingsError: names the setting that must change.
    """
    store_setting(text)
    eviction, kv_dtype = options.get("eviction"), str(options.get("kv_dtype", "auto"))
    if prefix_cache is False:
        raise SettingsError("prefix_cache", "off", "on with a prefix store")
    if eviction is not None:
        name = type(eviction).__name__
        raise SettingsError("eviction", name, "none with a prefix store: blocks there hold every token")
    if kv_dtype.startswith("kivi"):
        raise SettingsError("kv_dtype", kv_dtype, "another one with a prefix store: KIVI's blocks change")
    if hidden_layers:
        why = "none that read hidden states with a prefix store, which has keys and values alone"
        raise SettingsError("draft or embeddings", "given", why)


def open_store(text: str, loaded: Loaded) -> PrefixStore:
    """The store of a model that runs; reads the checkpoint's bytes, once for each content.

    Raises:
        SettingsError: the runner keeps more of a sequence than blocks, or shares no prefixes.
        OutputError: the folder cannot be written.
    """
    from attar import __version__

    runner: Any = loaded.runner
    if "states" in getattr(runner, "features", ()):
        raise SettingsError("prefix_store", text, "none: layers of this model keep a state beside blocks")
    folder, most = store_setting(text)
    facts = {name: value for name, value in runner.facts.items() if name not in PROCESS}
    parts = [FORM, __version__, loaded.fingerprint(), type(runner).__name__, runner.block_size, facts]
    identity = json.dumps(parts, sort_keys=True)
    blocks = getattr(runner, "planes", runner)
    return PrefixStore(folder, most, identity, read=blocks.read_block, write=blocks.write_block)
