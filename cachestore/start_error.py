"""Why a start is refused, as one line for the operator."""

from __future__ import annotations


class StartError(Exception):
    """One line with the numbers and the remedy; the commands print it and exit with code 2."""
