"""The chat template of a file, in place of the model's own (``--chat-template``)."""

from __future__ import annotations

from pathlib import Path

import jinja2

from attar.chat_template import PLAIN, check_template
from attar.errors import DataError


def read_template(file: str) -> str:
    """The template of a file; ``plain``: the messages' texts alone.

    Raises:
        DataError: the file cannot be read, or is no template.
    """
    if file == "plain":
        return PLAIN
    if not Path(file).is_file():
        hint = "--chat-template takes a file with a Jinja template, or plain"
        raise DataError(f"{file}: no such file", hint=hint)
    try:
        template = Path(file).read_text(encoding="utf-8")
        check_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{file}: line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise DataError(f"{file}: the chat template cannot be read: {error}") from error
    except (OSError, UnicodeError) as error:
        raise DataError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return template
