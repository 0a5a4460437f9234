"""Replicas behind a router, Slurm, SkyPilot: the files are valid, the router keeps prefixes together."""

import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import yaml

from attar.cli.main import VERBS
from attar.recipe.stages import load

DEPLOY = Path(__file__).parents[2] / "deploy"
SKY_KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
"""Of SkyPilot's YAML (docs.skypilot.co/en/latest/reference/yaml-spec.html); the example uses no others."""


def interpolated(text):
    """As compose does it, with no variable set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def replicas():
    return yaml.safe_load(interpolated((DEPLOY / "compose.replicas.yaml").read_text()))


def test_the_compose_file_of_replicas_is_valid():
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_builtin_schema("vendor.compose-spec")
    jsonschema.validators.validator_for(schema)(schema).validate(replicas())
    services = replicas()["services"]
    assert services["replica"]["deploy"]["replicas"] == 2 and "ports" not in services["replica"]
    for service in services.values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["deploy"]["resources"]["limits"]


def bash(text):
    """Check a script's syntax."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def attar_commands(text):
    """``(verb, options)`` of each command line."""
    joined = text.replace("\\\n", " ")
    for line in re.findall(r"(?:^|[\s/\"])attar\"? (\w[\w-]*)([^\n]*)", joined):
        if line[0] in VERBS:
            yield line[0], set(re.findall(r"(?<=\s)--?[a-z][\w-]*", line[1]))


def options_of(verb):
    return {spelling for option in load(VERBS[verb][1])(verb).params for spelling in option.opts}


@pytest.mark.parametrize(
    "name, verbs", [("slurm.sh", {"status", "sweep"}), ("skypilot.yaml", {"run", "upload"})]
)
def test_commands_have_these_options(name, verbs):
    commands = list(attar_commands((DEPLOY / name).read_text()))
    assert {verb for verb, _ in commands} == verbs
    for verb, options in commands:
        assert options <= options_of(verb), f"{name}: attar {verb}"


def test_scripts_are_bash():
    bash((DEPLOY / "slurm.sh").read_text())
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(task) <= SKY_KEYS
    bash(task["setup"])
    bash(task["run"])
    headers = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (DEPLOY / "slurm.sh").read_text(), flags=re.M)
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time"} <= {name for name, _ in headers}
    with pytest.raises(AssertionError):
        bash("for node in; do")


def test_the_last_stage_of_the_examples_recipe():
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    from attar.recipe.schema import load_recipe

    recipe = load_recipe(DEPLOY.parent / task["envs"]["RECIPE"])
    assert task["envs"]["LAST"] == recipe.stages[-1].folder


class Replica:
    """A server that counts what it gets."""

    def __init__(self, port):
        self.bodies = Counter()
        replica = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(b"ready")

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                replica.bodies[body[:40]] += 1
                self.answer(str(port).encode())

            def answer(self, content):
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_requests_that_begin_alike_go_to_one_replica(tmp_path):
    """The file's own routing, with three replicas by their ports; then one of them goes."""
    ports, front = [free_port() for _ in range(3)], free_port()
    text = (DEPLOY / "haproxy.cfg").read_text().replace("bind :8000", f"bind 127.0.0.1:{front}")
    servers = "\n".join(f"    server s{port} 127.0.0.1:{port} check inter 200" for port in ports)
    text = re.sub(r"    server-template .*", servers, text)
    (tmp_path / "haproxy.cfg").write_text(text)
    replicas = {port: Replica(port) for port in ports}
    router = subprocess.Popen(
        ["haproxy", "-db", "-f", "haproxy.cfg"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(user, turn):
        system = f"You help user {user}. " + "Be exact. " * 300  # longer than the key
        messages = [{"role": "system", "content": system}, *[{"role": "user", "content": "and?"}] * turn]
        body = json.dumps({"model": "attar:tiny", "messages": messages}).encode()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{front}/v1/chat/completions", body, timeout=30
        ) as answer:
            return int(answer.read())

    try:
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            try:
                ask(0, 0)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        homes = {user: {ask(user, turn) for turn in range(5)} for user in range(40)}
        assert all(len(home) == 1 for home in homes.values())
        assert set().union(*homes.values()) == set(ports)
        gone = ports[0]
        replicas[gone].stop()
        time.sleep(2)
        after = {user: ask(user, 6) for user in range(40)}
        stayed = [user for user, home in homes.items() if home != {gone}]
        assert all({after[user]} == homes[user] for user in stayed)  # consistent: nobody else moves
        assert gone not in after.values()
    finally:
        router.kill()
        router.wait()
        for port in ports[1:]:
            replicas[port].stop()
