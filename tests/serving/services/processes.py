"""Services as the processes that a user starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import contextmanager

import httpx

from tests.serving.http.test_live import until


@contextmanager
def service(folder, name, *options, model="attar:tiny", port=0, grpc_port=0):
    """``attar serve``: the process, its HTTP address and its gRPC endpoint (None without one)."""
    log = folder / name
    command = [sys.executable, "-m", "attar.cli.main", "serve", model, "--port", str(port), "--name", "tiny"]
    if "--role" in options and "coordinator" not in options:
        command += ["--grpc-port", str(grpc_port)]
    with log.open("a") as file:
        child = subprocess.Popen([*command, *options], stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        until(lambda: child.poll() is not None or "http://" in log.read_text(), 150)
        text = log.read_text()
        urls = re.findall(r"^http://\S+", text, re.MULTILINE)
        assert urls, text[-2000:]
        until(lambda: ready(urls[-1]), 150)
        grpc = re.findall(r"^grpc://(\S+)", text, re.MULTILINE)
        yield child, urls[-1], grpc[-1] if grpc else None
    finally:
        child.kill()
        child.wait()


def ready(url):
    """Whether it takes requests."""
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
