"""Where the kernels are tested: `SALTERN_TEST_DEVICE`, "cpu" if it isn't set.

On CPU both backends run, Triton in its interpreter, which it chooses when its functions are made: so this module is
imported before anything else imports Triton. On a device (`SALTERN_TEST_DEVICE=cuda`) Triton alone runs, compiled.

This folder's tests need torch, triton, numpy and pytest, and Hypothesis only for those in files `test_drawn_*`:

    SALTERN_TEST_DEVICE=cuda python -m pytest tests/kernels --confcutdir=tests/kernels
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

import torch

DEVICE = torch.device(os.environ.get("SALTERN_TEST_DEVICE", "cpu"))

# After Triton's functions are made the variable means that `kernels.select` is to choose Triton, which only tests
# that say so want.
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import triton.experimental.gluon  # noqa: E402, F401 - a first launch imports it, which fails once the variable is gone

import kernels.triton_backend  # noqa: E402, F401

os.environ.pop("TRITON_INTERPRET", None)
