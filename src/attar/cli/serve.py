"""``attar serve MODEL``."""

from __future__ import annotations

import sys
from typing import Any

from attar.cli.command import (
    MODEL_HELP,
    Answer,
    GroupedCommand,
    argument,
    build_command,
    read_settings,
    settings_options,
    text_option,
)
from attar.cli.config_file import config_option
from attar.cli.vllm_names import with_our_names
from attar.options import option_fields
from attar.progress import Progress
from attar.runtime.settings import EngineSettings, SchedulingSettings
from attar.serving.http.settings import (
    EmbeddingSettings,
    LimitSettings,
    LoraLimitSettings,
    LoraSettings,
    ModelsSettings,
    ServerSettings,
    TemplateSettings,
)
from attar.serving.http.transport import ConnectionSettings
from attar.serving.services.settings import ServiceSettings
from attar.verbs import check_models

VARIABLES = "ATTAR_SERVE"
_LIMITS = "file of bounds and times of requests (YAML): max_queue: 64"


def build_serve(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", MODEL_HELP),
        config_option(),
        *settings_options(ServerSettings, without=_names(LimitSettings)),
        *settings_options(ModelsSettings),
        *settings_options(LoraSettings, without=_names(LoraLimitSettings)),
        text_option("limits", "--limits", help=_LIMITS, metavar="FILE"),
        *settings_options(TemplateSettings),
        *settings_options(ServiceSettings),
        *settings_options(ConnectionSettings),
        *settings_options(EmbeddingSettings),
        *settings_options(EngineSettings, without=_names(SchedulingSettings)),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.serving.http import serve

        def read(cls: type) -> Any:
            return read_settings(cls, verb, values, command.origins)

        check_models(values["model"])
        settings = read(ServerSettings)
        answers = read(TemplateSettings)
        services = read(ServiceSettings)
        transport = read(ConnectionSettings)
        embeddings = read(EmbeddingSettings)
        models = read(ModelsSettings)
        options = read(EngineSettings).options() | {"progress": progress}
        lora = read(LoraSettings)
        parts = (settings, answers, services, transport, embeddings, models, lora)
        serve(values["model"], *parts, limits_file=values["limits"], show=_print_line, **options)
        return Answer({"served": values["model"]}, "served until the signal came")

    help = (
        "Serve a model over HTTP, as OpenAI's API does.\n\nEvery option is a variable too: --kv-dtype is "
        "ATTAR_SERVE_KV_DTYPE. Options of vllm serve that mean the same are read."
    )
    example = "attar serve attar:tiny --port 8000"
    command = build_command(verb, help, example, parameters, act, cls=ServerCommand, variables=VARIABLES)
    return command


class ServerCommand(GroupedCommand):
    """The command that reads vLLM's options too, and options from variables and a file.

    Attributes:
        origins: the variable or file of an option that has its value from there, by its name.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.origins: dict[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """vLLM's as attar's; an error names the variable or the file that has the option."""
        words = super().parse_args(ctx, with_our_names(args))
        for name in ctx.params:
            source = getattr(ctx.get_parameter_source(name), "name", "")
            if source == "ENVIRONMENT":
                self.origins[name] = f"the variable {VARIABLES}_{name.upper()}"
            elif source == "DEFAULT_MAP":
                self.origins[name] = f"{ctx.params['config']}: {name}"
        return words


def _names(cls: type) -> tuple[str, ...]:
    """The options of a settings class that stand in the file of limits."""
    return tuple(option.field.name for option in option_fields(cls))


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
