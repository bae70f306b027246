"""A command whose flags are the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

OptionsT = TypeVar("OptionsT")


def with_flags(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Make a function of one `options` the function of its fields that typer makes a command of."""

    def spread(run: Callable[[OptionsT], None]) -> Callable[..., None]:
        def run_with(**values: Any) -> None:
            run(options(**values))

        hints = get_type_hints(options, include_extras=True)
        fields = inspect.signature(options).parameters.values()
        flags = [field.replace(annotation=hints[field.name]) for field in fields]
        run_with.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
        run_with.__doc__ = run.__doc__
        return run_with

    return spread
