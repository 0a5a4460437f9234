"""A server that speaks S3 (moto), on this machine: from store to store, a kill on the way, what is refused.

``s3fs`` and ``moto`` are in this environment, or in the folder ``s3`` of ``ATTAR_PEERS``
(``pip install --target $ATTAR_PEERS/s3 s3fs moto flask flask-cors py-partiql-parser``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

PEERS = Path(os.environ.get("ATTAR_PEERS", "/nonexistent")) / "s3"
HERE = all(importlib.util.find_spec(name) for name in ("s3fs", "moto"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HERE and not PEERS.is_dir(), reason="neither s3fs and moto nor ATTAR_PEERS/s3"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables for attar in a process of its own, with a server behind them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    variables = os.environ | {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    if not HERE:
        variables["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{PEERS}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 90
    while time.monotonic() < limit:
        try:
            urllib.request.urlopen(address, timeout=1).close()
            break
        except OSError:
            time.sleep(0.3)
    urllib.request.urlopen(urllib.request.Request(f"{address}/models", method="PUT"), timeout=30).close()
    yield variables
    server.kill()
    server.wait()


def attar(*words, env):
    return subprocess.run([sys.executable, "-m", "attar", *words], env=env, capture_output=True, text=True)


def test_a_stage_from_s3_to_s3(environment, tmp_path):
    done = attar("upload", "attar:tiny", "s3://models/tiny", env=environment)
    assert done.returncode == 0, done.stderr
    words = ("--method", "rtn", "--check-tokens", "0")
    done = attar("quantize", "s3://models/tiny", "-o", "s3://models/w4", *words, env=environment)
    assert done.returncode == 0, done.stderr
    local = tmp_path / "w4"
    assert attar("quantize", "attar:tiny", "-o", str(local), *words, env=environment).returncode == 0
    shown = [
        json.loads(attar("inspect", model, "--json", env=environment).stdout)
        for model in ("s3://models/w4", str(local))
    ]
    assert shown[0]["parameters"] == shown[1]["parameters"]
    copies = list(Path(environment["XDG_CACHE_HOME"]).glob("attar/remote/*/*/w4/model.safetensors"))
    weights = (local / "model.safetensors").read_bytes()
    assert copies and all(copy.read_bytes() == weights for copy in copies)
    again = attar("quantize", "s3://models/tiny", "-o", "s3://models/w4", *words, env=environment)
    assert again.returncode == 1 and "already exists" in again.stderr


def test_an_upload_killed_on_the_way_goes_on(environment):
    """kill -9 after the first objects: no card there, and the same command ends it."""
    words = [sys.executable, "-m", "attar", "upload", "attar:tiny", "s3://models/killed"]
    uploading = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    probe = f"{environment['AWS_ENDPOINT_URL']}/models?list-type=2&prefix=killed/"
    listing, limit = "", time.monotonic() + 120
    while "<Key>" not in listing and time.monotonic() < limit:
        listing = urllib.request.urlopen(probe, timeout=30).read().decode()
    uploading.kill()
    uploading.wait()
    assert "<Key>" in listing
    done = attar("upload", "attar:tiny", "s3://models/killed", env=environment)
    assert done.returncode == 0, done.stderr
    assert attar("inspect", "s3://models/killed", env=environment).returncode == 0


def test_errors_are_one_line(environment):
    missing = attar("inspect", "s3://nowhere/tiny", env=environment)
    assert missing.returncode == 1 and "no model there" in missing.stderr
    nothing = attar("inspect", "s3://models/nothing", env=environment)
    assert nothing.returncode == 1 and "no model there" in nothing.stderr
    without = {name: text for name, text in environment.items() if not name.startswith("AWS_")}
    without |= {"AWS_ENDPOINT_URL": environment["AWS_ENDPOINT_URL"], "HOME": environment["XDG_CACHE_HOME"]}
    without |= {"AWS_EC2_METADATA_DISABLED": "true"}
    refused = attar("inspect", "s3://models/tiny", env=without)
    assert refused.returncode == 1 and "no credentials" in refused.stderr
    for answer in (missing, nothing, refused):
        assert "Traceback" not in answer.stderr and len(answer.stderr.splitlines()) <= 2
