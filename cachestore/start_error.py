"""Why a start is refused, as one line for the operator.

    StartError
    └── ModelError   the model is missing, incomplete, broken or out of reach
"""

from __future__ import annotations


class StartError(Exception):
    """One line with the numbers and the remedy; the commands print it and exit with code 2."""


class ModelError(StartError):
    """The model can't be served: the line names the path and what is missing there."""
