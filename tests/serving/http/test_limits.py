"""``--limits FILE``: what it sets, and errors by file and line."""

import pytest

from attar.cli.main import call
from attar.errors import RecipeError, SettingsError
from attar.options import option_fields
from attar.serving import http
from attar.serving.http import serve
from attar.serving.http.limits import ServerLimits, read_limits
from attar.serving.http.settings import LimitSettings, LoraSettings, ServerSettings
from attar.serving.http.transport import ConnectionSettings

TEXT = """\
# of a small machine
max_queue: 8
request_s: 2.5
priority: true
sequences: 4
max_loras: 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "limits.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def served(monkeypatch):
    """What a server would be started with."""
    commands = []
    monkeypatch.setattr("attar.serving.http.roles.SERVERS", {None: commands.append})
    return commands


def check(command):
    settings = command.settings
    assert (settings.max_queue, settings.request_s, settings.priority) == (8, 2.5, True)
    assert settings.max_body == LimitSettings().max_body and command.lora.max_loras == 2
    assert command.options["limits"].sequences == 4
    command.bound.close()


def test_a_file_sets_what_it_names_and_nothing_else(file, served):
    settings = ServerSettings(port=0, max_body=2048, max_queue=99, name="a")
    serve("attar:tiny", settings, lora=LoraSettings(lora=("a=b",)), limits_file=file)
    (command,) = served
    assert command.settings.max_body == 2048 and command.settings.name == "a"
    assert command.lora.paths == {"a": "b"}
    assert (command.settings.max_queue, command.options["limits"].sequences) == (8, 4)
    command.bound.close()


def test_the_command_line_takes_a_file(file, served):
    assert call(["serve", "attar:tiny", "--port", "0", "--limits", str(file), "-q"]) == 0
    check(*served)


def test_an_empty_part_of_the_file_leaves_the_engines_options(file, served):
    file.write_text("max_queue: 8\n")
    serve("attar:tiny", ServerSettings(port=0), limits_file=file)
    (command,) = served
    assert command.options["limits"].sequences == 64 and command.settings.max_queue == 8
    command.bound.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_queue: 8\nmax_queu: 9\n", r"limits.yaml:2: unknown key 'max_queu' in the limits.*max_queue"),
        ("\nmax_queue: 0\n", r"limits.yaml:2: max_queue is 0, but must be at least 1"),
        ("max_queue: many\n", r"limits.yaml:1: max_queue is 'many', but must be a whole number"),
        (
            "sequences: 9\nstep_tokens: 8\n",
            r"limits.yaml:1: sequences is 9, but must be at most step_tokens, 8",
        ),
        ("max_loras: 0\n", r"limits.yaml:1: max_loras is 0, but must be at least 1"),
        ("port: 1\n", r"limits.yaml:1: unknown key 'port'"),
        ("- 1\n", r"limits.yaml:1: limits are a mapping"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(file, text, words):
    file.write_text(text)
    with pytest.raises(RecipeError, match=words):
        read_limits(file)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(RecipeError, match=r"absent\.yaml"):
        serve("attar:tiny", ServerSettings(port=0), limits_file=tmp_path / "absent.yaml")


def test_the_example_has_every_limit_with_its_default():
    limits, names = (
        read_limits("deploy/limits.yaml"),
        {item.field.name for item in option_fields(ServerLimits)},
    )
    assert limits.given == names and limits.server == LimitSettings()
    assert (limits.scheduling, limits.loras) == (ServerLimits().scheduling, ServerLimits().loras)


def test_a_unix_socket_takes_no_certificate(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_check_extra", lambda *_: None)
    monkeypatch.setattr(ConnectionSettings, "__post_init__", lambda self: None)
    transport = ConnectionSettings(tls_cert="a", tls_key="b")
    with pytest.raises(SettingsError, match="tls_cert"):
        serve("attar:tiny", ServerSettings(host="unix:/tmp/x"), transport=transport)
    with pytest.raises(SettingsError, match="host"):
        ServerSettings(host="unix:")
