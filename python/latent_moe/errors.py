"""What the library refuses, and what failed."""

from __future__ import annotations

from latent_moe import _core


class LatentMoeError(RuntimeError):
    """One line that names the thing, what was found and what was expected.

    `code`: invalid argument, mismatch, unsupported, unavailable, out of memory, timeout, aborted, io or internal; see
    `include/latent_moe/status.h`.
    """

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


_core.set_error_type(LatentMoeError)
