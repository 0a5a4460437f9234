"""A wheel and an sdist, installed into an environment of their own, run the compiled step.

The environment is a new one, in a folder with spaces; all packages but attar itself are those of this one;
in one test they are what pip finds for the wheel today.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from attar.kernels.levels import levels

ROOT = Path(__file__).parents[1]
GENERATE = ("attar", "generate", "attar:tiny", "--prompt", "Once", "--max-tokens", "5")
LOADED = """
import attar, sys
from attar.kernels import build
assert attar.__file__.startswith(sys.prefix), attar.__file__
library = build.load("decode")
print(library and library._name, build.why_missing("decode"))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not shutil.which("g++"), reason="no g++"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, with the libraries of the best level here, and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    if not levels():
        pytest.skip("no level is made for this processor")
    best = levels()[0]
    command = [sys.executable, "scripts/build_wheels.py", "--out", str(out), "--machine", best.machine]
    subprocess.run([*command, "--levels", best.name, "--sdist"], cwd=ROOT, check=True)
    return out


@pytest.fixture
def environment(tmp_path):
    """A folder with spaces, and in it an environment; returns its bin."""
    folder = tmp_path / "a folder with spaces" / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def install(environment, package):
    command = [environment / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
    subprocess.run([*command, str(package)], check=True)


def run(environment, *command, path, **more):
    """A command without a home, and with `path` for all that it finds programs in."""
    kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "LANG") if name in os.environ}
    variables = {**kept, "PATH": str(path), "HOME": "/nonexistent", **more}
    done = subprocess.run(
        [environment / command[0], *command[1:]], capture_output=True, text=True, env=variables
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_wheel_without_a_compiler_and_without_a_home(built, environment):
    (wheel,) = built.glob("*manylinux*.whl")
    install(environment, wheel)
    loaded = run(environment, "python", "-c", LOADED, path=environment)
    assert f"attar/kernels/prebuilt/decode-{levels()[0].name}.so" in loaded.stdout
    done = run(environment, *GENERATE, path=environment)
    assert done.stdout.strip() and "slower" not in done.stderr and "compiler" not in done.stderr


def test_a_wheel_with_what_pip_finds_for_it(built, tmp_path):
    """Dependencies are resolved anew, in a folder with spaces, and nothing on the way has a compiler."""
    (wheel,) = built.glob("*manylinux*.whl")
    folder = tmp_path / "a new folder"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    bin = folder / "bin"
    environment = {**os.environ, "PATH": str(bin), "HOME": str(tmp_path), "PYTHONPATH": ""}
    (torch,) = re.findall(
        "(?m)^torch==.*$", (ROOT / "constraints.txt").read_text()
    )  # without CUDA's packages
    for packages in ([torch], [f"{wheel}[serve]"]):
        command = [bin / "python", "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(command, env=environment, check=True, cwd=tmp_path)
    loaded = run(bin, "python", "-c", LOADED, path=bin)
    assert f"attar/kernels/prebuilt/decode-{levels()[0].name}.so" in loaded.stdout
    file = tmp_path / "with a space.gguf"
    done = run(
        bin, "attar", "export", "attar:tiny", "-o", str(file), path=bin, ATTAR_CACHE=str(tmp_path / "c")
    )
    assert "compiler" not in done.stderr and "compiling" not in done.stderr
    said = run(bin, *GENERATE[:2], str(file), *GENERATE[3:], path=bin)
    assert said.stdout.strip() and "slower" not in said.stderr and "compiler" not in said.stderr


def test_an_sdist_compiles_at_first_use(built, environment, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    install(environment, sdist)
    loaded = run(
        environment, "python", "-c", LOADED, path=os.environ["PATH"], ATTAR_CACHE=str(tmp_path / "c")
    )
    assert str(tmp_path / "c" / "kernels" / "decode-") in loaded.stdout
    warned = run(environment, *GENERATE, path=environment)
    assert warned.stdout.strip() and "no compiler" in warned.stderr
