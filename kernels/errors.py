"""What the kernels refuse by name; wrong shapes are plain `ValueError`s."""


class Unsupported(Exception):
    """A part of the kernel contract that this backend lacks; the message says which, and what to use instead."""
