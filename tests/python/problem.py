"""A small tail to compute with NumPy: inputs of all ranks, weights, and what should come out."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

import latent_moe as lm

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
TOLERANCE = {"bf16": 5e-3, "f16": 7e-4, "f32": 1e-6}


@dataclass
class Problem:
    world: int = 2
    tokens: int = 5
    hidden: int = 192
    latent: int = 64
    dtype: str = "bf16"
    norm: str = "rms"
    shared_state: str = "partial"
    with_prefix: bool = True
    routed_scale: float = 1.0
    routed: list = field(init=False)
    shared: list = field(init=False)

    def __post_init__(self):
        random = np.random.default_rng(7)
        kind = DTYPES[self.dtype]

        def draw(*shape, deviation=1.0):
            return (random.standard_normal(shape) * deviation).astype(kind)

        self.weights = draw(self.hidden, self.latent, deviation=self.latent**-0.5)
        self.gamma = (1 + 0.2 * random.standard_normal(self.latent)).astype(kind) if self.norm == "rms" else None
        self.routed = [draw(self.tokens, self.latent) for _ in range(self.world)]
        self.shared = [draw(self.tokens, self.hidden) for _ in range(self.world)]
        if self.shared_state == "reduced":
            self.shared = [self.shared[0]] * self.world
        if self.shared_state == "absent":
            self.shared = [None] * self.world
        self.prefix = draw(self.tokens, self.hidden) if self.with_prefix else None

    @property
    def shape(self):
        return lm.Shape(self.hidden, self.latent, norm=self.norm, routed_scale=self.routed_scale, activations=self.dtype)

    def options(self, **changes):
        usual = {"backend": "cpu", "max_tokens": 512, "timeout_ms": 10_000, "keep_whole_weights": True, "cpu_threads": 1}
        return lm.Options(**(usual | {"shared": self.shared_state} | changes))

    def context(self, bootstrap, **changes):
        """A sealed context with one layer, number 3."""
        context = lm.Context(self.shape, bootstrap, self.options(**changes))
        context.add_layer(3, self.weights, self.gamma)
        context.seal()
        return context

    def normed(self):
        x = sum(each.astype(np.float64) for each in self.routed)
        if self.norm == "rms":
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.gamma.astype(np.float64)
        return x

    def reference(self):
        """The formula in float64."""
        out = self.routed_scale * self.normed() @ self.weights.astype(np.float64).T
        shared = self.shared[:1] if self.shared_state == "reduced" else self.shared
        out = out + sum(each.astype(np.float64) for each in shared if each is not None)
        return out if self.prefix is None else out + self.prefix.astype(np.float64)


def relative_error(value, reference):
    return np.linalg.norm(value.astype(np.float64) - reference) / np.linalg.norm(reference)


def same_bits(left, right):
    return left.tobytes() == right.tobytes()
