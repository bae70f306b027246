"""The TOML file of settings: found, read, and held to what the options accept, before any of it is used."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from gateway.options import ServeOptions
from gateway.settings import SettingsError

FILE_NAME = "saltern.toml"

# What the file may say: the settings of all commands, so that one file serves them all.
KEYS = tuple(field.name for field in dataclasses.fields(ServeOptions) if field.name != "config")
_TYPES = get_type_hints(ServeOptions)


def config_path(config: Path | None, data_dir: Path) -> Path:
    """Where the file is, or would be."""
    return (config or data_dir / FILE_NAME).expanduser().absolute()


def read_config(config: Path | None, data_dir: Path) -> dict[str, Any]:
    """What the file says, each value of the kind its option has; nothing where the default file is missing.

    Args:
        config: the file that was asked for; None for the one in `data_dir`.

    Raises:
        SettingsError: it can't be read, is no TOML, or has a key or a kind of value that no option has.
    """
    path = config_path(config, data_dir)
    try:
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        if config is None and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return {}
        remedy = "make it readable" if config is None else "choose another --config"
        raise SettingsError(f"{path} can't be read ({error.strerror}): {remedy}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is no TOML: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise SettingsError(f"{path} is no TOML for settings: it is nested too deep; write key = value lines") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is no TOML: {error}; write key = value lines, text in quotes") from None
    for key, value in values.items():
        _check_key(path, key)
        _check_kind(path, key, value)
    if config is None and "data_dir" in values:
        raise SettingsError(
            f"{path}: data_dir can't stand in the file that is found through it: use --data-dir or SALTERN_DATA_DIR, "
            "or name the file with --config"
        )
    return values


def check_values(path: Path, values: Mapping[str, Any], options: Mapping[str, Any], context: Any) -> None:
    """Hold values to what their options accept.

    Args:
        options: the command line's option of each key.
        context: of the command line.

    Raises:
        SettingsError: one is out of range, or none of those that are offered.
    """
    for key, value in values.items():
        try:
            options[key].process_value(context, value)
        except typer.BadParameter as error:
            reason = error.message.removeprefix("Value error, ").rstrip(".")
            raise SettingsError(f"{path}: {key} = {value} is not accepted: {reason}") from None
        except SettingsError as error:
            raise SettingsError(f"{path}: {key}: {error}") from None


def _check_key(path: Path, key: str) -> None:
    if key not in KEYS:
        close = difflib.get_close_matches(key.lower().replace("-", "_"), KEYS, n=1)
        remedy = f"did you mean {close[0]}?" if close else "`saltern config show` lists those that exist"
        raise SettingsError(f"{path}: {key!r} is no setting: {remedy}")


def _check_kind(path: Path, key: str, value: object) -> None:
    # The value itself is not repeated: it may be the URL of a database with a password in the wrong place.
    expected = get_args(_TYPES[key]) or (_TYPES[key],)
    if int in expected:
        fits, wanted = type(value) is int, f"a whole number, such as {key} = 8"
    elif float in expected:
        fits, wanted = type(value) in (int, float), f"a number, such as {key} = 2.5"
    else:
        fits, wanted = isinstance(value, str), f'text in quotes, such as {key} = "…"'
    if not fits:
        raise SettingsError(f"{path}: {key} is {_KINDS.get(type(value), 'a date or a time')}: write {wanted}")
    if isinstance(value, str) and (not value or "\0" in value):
        raise SettingsError(f"{path}: {key} is empty or has a zero byte: leave the line out for the default")


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "a table"}
