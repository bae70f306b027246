"""Another distribution also calls its package `kernels`; this is how a start tells them apart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cachestore.start_error import StartError


def require_own_kernels() -> None:
    """Refuse to run when `import kernels` finds another package than Saltern's.

    Ours lies beside this package and its `__init__.py` is empty; one that was installed over it leaves its own.

    Raises:
        StartError: it is missing or not ours.
    """
    spec = importlib.util.find_spec("kernels")
    expected = Path(__file__).resolve().parent.parent / "kernels" / "__init__.py"
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found != expected or expected.stat().st_size:
        raise StartError(
            f"the package `kernels` is not Saltern's (found: {found or 'none'}): run "
            "`pip uninstall kernels`, then install saltern again, or give it an environment of its own"
        )
