"""Models on a hub: a server on this machine that speaks its protocol (hub_server.py), and huggingface_hub as
its client. Uploads and downloads that are cut off go on; the card comes last."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def hub(tmp_path):
    """Variables for attar in a process of its own, with a hub behind them, and the hub's log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "log"
    log.touch()
    script = Path(__file__).with_name("hub_server.py")
    server = subprocess.Popen([sys.executable, str(script), str(port), str(log)])
    variables = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{variables['HF_ENDPOINT']}/api/models/no/model", timeout=1).close()
        except urllib.error.HTTPError:
            break
        except OSError:
            time.sleep(0.1)
    yield variables, log
    server.kill()
    server.wait()


def attar(*words, env):
    return subprocess.run([sys.executable, "-m", "attar", *words], env=env, capture_output=True, text=True)


def test_from_hub_to_hub(hub, tmp_path):
    variables, log = hub
    done = attar("upload", "attar:tiny", "hf://org/tiny", env=variables)
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    assert lines[0].startswith("PUT") and lines[-1] == "COMMIT attar.json"
    words = ("--method", "rtn", "--check-tokens", "0")
    done = attar("quantize", "hf://org/tiny", "-o", "hf://org/w4", *words, env=variables)
    assert done.returncode == 0, done.stderr
    local = tmp_path / "w4"
    assert attar("quantize", "attar:tiny", "-o", str(local), *words, env=variables).returncode == 0
    shown = [attar("inspect", model, "--json", env=variables) for model in ("hf://org/w4", str(local))]
    there, here = (json.loads(one.stdout) for one in shown)
    assert there["parameters"] == here["parameters"]
    copies = list((tmp_path / "hub").glob("hub/models--org--w4/snapshots/*/model.safetensors"))
    assert [copy.read_bytes() for copy in copies] == [(local / "model.safetensors").read_bytes()]
    again = attar("quantize", "hf://org/tiny", "-o", "hf://org/w4", *words, env=variables)
    assert again.returncode == 1 and "already exists" in again.stderr


def test_an_upload_that_failed_goes_on_and_sends_no_large_file_twice(hub):
    variables, log = hub
    log.with_name("refuse").touch()
    failed = attar("upload", "attar:tiny", "hf://org/tiny", env=variables)
    assert failed.returncode == 1 and "error: hf://org/tiny: " in failed.stderr, failed.stderr
    sent = log.read_text().count("PUT")
    assert sent == 2 and "COMMIT" not in log.read_text()  # weights and tokenizer
    log.with_name("refuse").unlink()
    done = attar("upload", "attar:tiny", "hf://org/tiny", env=variables)
    assert done.returncode == 0, done.stderr
    assert log.read_text().count("PUT") == sent and log.read_text().endswith("COMMIT attar.json\n")


def test_a_download_that_is_cut_off_goes_on_at_its_byte(hub):
    variables, log = hub
    assert attar("upload", "attar:tiny", "hf://org/tiny", env=variables).returncode == 0
    log.with_name("cut").touch()
    done = attar("inspect", "hf://org/tiny", env=variables)
    assert done.returncode == 0, done.stderr
    starts = [int(line.split()[-1]) for line in log.read_text().splitlines() if "GET model.saf" in line]
    assert starts[0] == 0 and len(starts) == 2 and 0 < starts[1] <= 12_000_000


def test_errors_are_one_line(hub):
    variables, _ = hub
    missing = attar("inspect", "hf://org/nothing", env=variables)
    assert missing.returncode == 1 and "no such model on the hub" in missing.stderr
    attar("upload", "attar:tiny", "hf://org/tiny", env=variables)
    revision = attar("inspect", "hf://org/tiny@other", env=variables)
    assert revision.returncode == 1 and "no such revision" in revision.stderr
    for answer in (missing, revision):
        assert "Traceback" not in answer.stderr and len(answer.stderr.splitlines()) <= 2
