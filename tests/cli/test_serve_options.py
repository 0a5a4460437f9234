"""Options of `attar serve` from a file, from variables, and under vLLM's names."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import attar.serving.http as http
from attar.cli.main import call
from attar.cli.vllm_names import ELSEWHERE, SAME, VALUES, with_our_names

FILE = "model: attar:tiny\nport: 8123\npage: false\nkv-dtype: int8\ncors-origin: [https://a.example]\n"


@pytest.fixture
def served(monkeypatch):
    """What the server is started with: its model, settings and the engine's options."""
    started = []
    monkeypatch.setattr(
        http, "serve", lambda model, *parts, **options: started.append((model, parts, options))
    )
    return started


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def test_options_of_a_file(served, file):
    assert call(["serve", "--config", str(file)]) == 0
    ((model, parts, options),) = served
    assert model == "attar:tiny" and parts[0].port == 8123 and parts[0].page is False
    assert parts[3].cors_origin == ("https://a.example",) and options["kv_dtype"] == "int8"


def test_the_command_line_comes_before_variables_and_variables_before_the_file(served, file, monkeypatch):
    monkeypatch.setenv("ATTAR_SERVE_PORT", "7000")
    monkeypatch.setenv("ATTAR_SERVE_CORS_ORIGIN", "https://b.example https://c.example")
    monkeypatch.setenv("ATTAR_SERVE_NAME", "of-a-variable")
    assert call(["serve", "attar:draft", "--config", str(file), "--port", "9000", "--page"]) == 0
    ((model, parts, options),) = served
    assert model == "attar:draft" and parts[0].port == 9000 and parts[0].page is True
    assert parts[0].name == "of-a-variable" and options["kv_dtype"] == "int8"
    assert parts[3].cors_origin == ("https://b.example", "https://c.example")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1\n", "serve.yaml:1: unknown option 'prot'; did you mean 'port'?"),
        ("host: localhost\nport: [1, 2]\n", "serve.yaml:2: port is list, but must be a single value"),
        ("limits: {max_queue: 3}\n", "serve.yaml:1: limits is dict, but must be a single value"),
        ("- port\n", "serve.yaml:1: options are a mapping"),
        ("port: abc\n", "serve.yaml: port is 'abc', but must be a whole number"),
        ("config: other.yaml\n", "unknown option 'config'"),
        ("port: 1\nport: 2\n", "serve.yaml:2"),
    ],
)
def test_a_wrong_file_is_refused_in_a_line(served, file, capsys, text, told):
    file.write_text(text)
    assert call(["serve", "attar:tiny", "--config", str(file)]) == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("error: ") and told in line and not served


def test_options_of_vllm_that_mean_the_same(served):
    line = "--served-model-name gpt --kv-cache-dtype=fp8_e4m3 --enable-prefix-caching --dtype half"
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_xml"]
    assert call(["serve", "attar:tiny", *line.split(), *tools]) == 0
    ((_, parts, options),) = served
    assert parts[0].name == "gpt" and options["kv_dtype"] == "fp8" and options["dtype"] == "float16"
    assert options["prefix_cache"] is True and parts[1].tool_parser == "qwen_xml"


def test_a_wrong_variable_is_named(served, capsys, monkeypatch):
    """Kubernetes sets it so for a service of the name attar-serve."""
    monkeypatch.setenv("ATTAR_SERVE_PORT", "tcp://10.0.0.1:80")
    assert call(["serve", "attar:tiny"]) == 2
    assert "ATTAR_SERVE_PORT is 'tcp://10.0.0.1:80', but must be a whole number" in capsys.readouterr().err
    assert call(["serve", "attar:tiny", "--port", "80"]) == 0 and served[0][1][0].port == 80


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_vllm_has_otherwise_is_answered_in_a_line(served, capsys, name):
    assert call(["serve", "attar:tiny", f"--{name.replace('_', '-')}", "1"]) == 2
    assert ELSEWHERE[name] in capsys.readouterr().err.splitlines()[0] and not served


def test_values_that_are_no_option_s_stay():
    assert with_our_names(["half", "--name", "half", "--port", "8"]) == [
        "half",
        "--name",
        "half",
        "--port",
        "8",
    ]


def test_the_translations_are_options_and_values_of_attar(served):
    for theirs, ours in SAME.items():
        value = next(iter(VALUES.get(ours, {})), "a=b.pem")
        call(["serve", "attar:tiny", theirs, value])  # raises nothing, whatever it says of the value
        assert with_our_names([theirs, value])[0] == ours
    for option, values in VALUES.items():
        for theirs in values:
            assert call(["serve", "attar:tiny", option, theirs]) == 0, (option, theirs)
