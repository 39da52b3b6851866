"""What typer refuses on the command line, as an error of ours: it says what is allowed.

typer brings its own click or uses the installed one, by version; so its errors are known by the
base of the one that it exports.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from pydantic import ValidationError

from dspark.config.faults import did_you_mean, nearest, unknown_choice
from dspark.errors import ConfigError

UsageError: Any = typer.BadParameter.__base__


def usage_error(error: Any) -> ConfigError | None:
    """``error`` (a ``UsageError``) in four parts; None for one that only shows the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    verb = "dspark" if error.ctx is None else error.ctx.command_path
    ask = f"`{verb} --help` shows what it takes."
    message: str = error.format_message()
    if unknown := re.search(r"No such command '([^']*)'", message):
        verbs = error.ctx.command.list_commands(error.ctx)
        return ConfigError(
            expected=f"a verb: {', '.join(verbs)}",
            found=repr(unknown[1]),
            where=verb,
            fix=f"{did_you_mean(unknown[1], verbs)} {ask}",
        )
    if getattr(error, "option_name", None) is not None:
        return _option_error(error, verb, ask, unknown="No such option" in message)
    return _value_error(error, verb, ask, message)


def _option_error(error: Any, verb: str, ask: str, *, unknown: bool) -> ConfigError:
    option: str = error.option_name
    if not unknown:
        return ConfigError(
            expected="a value behind it", found="none", where=f"{verb} {option}", fix=ask
        )
    known = [name for p in error.ctx.command.params for name in p.opts if name.startswith("--")]
    near = nearest(option, known)
    return ConfigError(
        expected=f"an option of {verb}",
        found=repr(option),
        where=verb,
        fix=f"Did you mean {near}? {ask}" if near else ask,
    )


def _value_error(error: Any, verb: str, ask: str, message: str) -> ConfigError:
    parameter = getattr(error, "param", None)
    name, told = _name(parameter), (getattr(parameter, "help", None) or "").rstrip(".")
    told = f" ({told})" if told else ""
    if type(error).__name__ == "MissingParameter":
        usage = " ".join(error.ctx.get_usage().split()).removeprefix("Usage: ")
        return ConfigError(
            expected=f"{name}{told}", found="none", where=verb, fix=f"Write {usage}; {ask}"
        )
    where = f"{verb} {name}".rstrip()
    if choice := re.search(r"'([^']*)' is not one of (.*)", message):
        return unknown_choice(choice[1], re.findall(r"'([^']*)'", choice[2]), where, ask)
    if absent := re.search(r"'([^']*)' does not exist", message):
        return ConfigError(
            expected=f"a file or folder that is there{told}",
            found=f"no such file or folder: {absent[1]!r}",
            where=where,
            fix=f"Check the path; it is read from the current folder. {ask}",
        )
    need = re.search("Input should be ([^,]*)", message)
    return ConfigError(
        expected=f"{need[1].rstrip('.') if need else 'a value that it takes'}{told}",
        found=_given(error) or message,
        where=where,
        fix=ask,
    )


def _given(error: Any) -> str:
    """The value as it was typed, where typer's reason (pydantic's) still has it."""
    reason = error.__cause__ or error.__context__
    return repr(reason.errors()[0]["input"]) if isinstance(reason, ValidationError) else ""


def _name(parameter: Any) -> str:
    """As the user types it; arguments by what they stand for."""
    if parameter is None:
        return ""
    long = [name for name in parameter.opts if name.startswith("--")]
    return str(long[0] if long else parameter.metavar or parameter.name.upper())
