"""The files of deploy/: valid, and their commands run as plain processes."""

import json
import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from attar.checkpoint import open_checkpoint
from attar.runtime.loading import tokenizer_of
from attar.version import __version__

DEPLOY = Path(__file__).parents[2] / "deploy"
CPU, GPU = DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml"
ENVIRONMENT = {"ATTAR_SERVICE_KEY": "a-key-of-services", "MAX_DRAFT_TOKENS": "4"}


def interpolated(value, environment):
    """As compose does it: ``${NAME:-default}`` and ``${NAME:?error}``."""
    if isinstance(value, dict):
        return {key: interpolated(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, environment) for item in value]
    if not isinstance(value, str):
        return value

    def replaced(match):
        name, kind, rest = match[1], match[2], match[3]
        assert kind == ":-" or environment.get(name), f"{name} {rest}"
        return environment.get(name) or rest

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", replaced, value)


def read(file, environment=ENVIRONMENT):
    return interpolated(yaml.safe_load(file.read_text()), environment)


def manifests():
    return [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one]


def pods():
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in manifests()
        if "template" in one["spec"]
    }


@pytest.mark.parametrize("file", [CPU, GPU], ids=lambda file: file.name)
def test_compose_files_are_valid(file):
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_builtin_schema("vendor.compose-spec")
    jsonschema.validators.validator_for(schema)(schema).validate(read(file))
    wrong = read(file)
    wrong["services"]["target"]["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validators.validator_for(schema)(schema).validate(wrong)


def test_a_key_between_the_services_is_asked_for():
    with pytest.raises(AssertionError, match="the key between the services"):
        read(CPU, {})


def test_the_gpu_file_changes_the_target_alone():
    base, over = read(CPU)["services"], read(GPU)["services"]
    assert list(over) == ["target"]
    assert over["target"]["command"] == [*base["target"]["command"], "--device", "cuda"]


def test_kubernetes_runs_what_compose_runs():
    """But for the names of other services."""
    services, containers = read(CPU)["services"], {name: pod["containers"][0] for name, pod in pods().items()}
    for name, service in (("attar-draft", "draft"), ("attar-target", "target"), ("attar", "coordinator")):
        wanted, given = services[service]["command"], containers[name]["args"]
        assert wanted[: wanted.index("--host") + 2] == given[: given.index("--host") + 2]
        assert {one for one in wanted if one.startswith("--")} == {
            one for one in given if one.startswith("--")
        }


def test_no_container_may_more_than_it_must():
    for service in read(CPU)["services"].values():
        assert (
            service["read_only"]
            and service["cap_drop"] == ["ALL"]
            and service["deploy"]["resources"]["limits"]
        )
        assert service["healthcheck"]["test"][0] == "CMD" and "curl" not in str(service["healthcheck"])
    assert list(read(CPU)["services"]["coordinator"]["ports"]) == ["127.0.0.1:8000:8000"]
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] and container["resources"]["limits"]
        assert container["readinessProbe"] and container["livenessProbe"]


def test_kubernetes_knows_every_field():
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests():
        validate.validate(manifest, "1.31", strict=True)


def test_the_image_is_built_from_what_is_there():
    """Each file that is copied or run exists, and the levels are known."""
    from attar.kernels.levels import LEVELS

    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line for line in lines if line and not line.startswith("#")]
    assert [step for step in steps if step.startswith("USER")] == ["USER 10001"]
    root = DEPLOY.parent
    kept = [
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    assert all((root / path).exists() for path in kept)
    scripts = re.findall(r"/src/(\S+\.py)", "\n".join(steps))
    assert scripts and all(script in kept and (root / script).is_file() for script in scripts)
    (level,) = re.findall(r"ARG LEVELS=(\S+)", "\n".join(steps))
    assert level in {one.name for one in LEVELS}
    for step in steps:
        if step.startswith(("CMD", "ENTRYPOINT")):
            assert json.loads(step.split(maxsplit=1)[1])
        if step.startswith("RUN"):
            assert shlex.split(step)


def example():
    """Path and body of the request in compose.yaml's own comment."""
    text = re.sub(r"^# ?", "", CPU.read_text(), flags=re.M).replace("\\\n", " ")
    (line,) = re.findall(r"^ *curl localhost:8000.*$", text, flags=re.M)
    words = shlex.split(line)
    return words[1].removeprefix("localhost:8000"), json.loads(words[words.index("-d") + 1])


def test_the_example_of_compose_is_a_request_that_its_model_answers():
    path, body = example()
    model = read(CPU)["services"]["coordinator"]["command"][1]
    assert body["model"] == model and path == "/v1/completions" and tokenizer_of(open_checkpoint(model))


def test_images_have_a_tag_and_homes_can_be_written():
    images = [service["image"] for service in read(CPU)["services"].values()]
    images += [pod["containers"][0]["image"] for pod in pods().values()]
    assert set(images) == {f"attar:{__version__}"}
    for pod in pods().values():
        mounts = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounts >= {"/tmp", "/home/attar", "/models"}
    variables = {one["name"] for one in pods()["attar"]["containers"][0]["env"]}
    assert variables == {"ATTAR_SERVICE_KEY", "ATTAR_API_KEY"}


@pytest.mark.slow
def test_the_commands_of_compose_answer_a_client(tmp_path, monkeypatch):
    pytest.importorskip("grpc")
    httpx = pytest.importorskip("httpx")
    from tests.serving.services.processes import service

    monkeypatch.setenv("ATTAR_SERVICE_KEY", ENVIRONMENT["ATTAR_SERVICE_KEY"])
    monkeypatch.setenv("ATTAR_KERNELS", "required")
    found = {}

    def options(name):
        """Those of a service, on this machine: loopback, ports that are free."""
        command = list(read(CPU)["services"][name]["command"])
        assert command.pop(0) == "serve"
        model, command = command[0], command[1:]
        for option, value in (("--host", "127.0.0.1"), ("--grpc-port", "0")):
            if option in command:
                command[command.index(option) + 1] = value
        return model, [found.get(part.partition(":")[0], part) for part in command]

    with ExitStack() as stack:
        for name in ("draft", "target", "coordinator"):
            model, command = options(name)
            process = service(tmp_path, name, *command, model=model)
            _, url, found[name] = stack.enter_context(process)
        path, body = example()
        body |= {"model": "tiny", "temperature": 0}
        answer = httpx.post(f"{url}{path}", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == body["max_tokens"], answer
        chat = {**body, "messages": [{"role": "user", "content": body["prompt"]}]}
        del chat["prompt"]
        told = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()
        assert told["choices"][0]["message"]["content"] == answer["choices"][0]["text"], told
        test = read(CPU)["services"]["draft"]["healthcheck"]["test"]
        assert compile(test[-1], "healthcheck", "exec")
