"""JSON and YAML that anybody may have written: read, or refused by one kind of exception."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qknorm_fairseq.errors import QKNormError


class Unreadable(ValueError):
    """The file is not of its format; says why, in one line."""


def read_json(file: Path) -> Any:
    """
    Raises:
        Unreadable: it is not JSON, or nested without end.
        OSError: there is no such file, or the system does not give it.
    """
    try:
        return json.loads(file.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {one_line(error)}") from None


def read_object(file: Path) -> Mapping[str, Any]:
    """A JSON object; empty where there is no file.

    Raises:
        QKNormError: it is not JSON, or another value.
    """
    try:
        content = read_json(file)
    except FileNotFoundError:
        return {}
    except Unreadable as error:
        raise QKNormError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise QKNormError(f"{file}: not a JSON object")
    return content


def read_yaml(file: Path) -> Any:
    """
    Raises:
        Unreadable: it is not YAML, or holds what is no value (the 45th of a month, say).
        OSError: there is no such file, or the system does not give it.
    """
    content = file.read_bytes()
    try:
        return yaml.safe_load(content)
    except Exception as error:  # what its constructors raise for `!!timestamp x` and others is many
        raise Unreadable(f"not YAML: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
