"""Contexts, layers and plans: `include/latent_moe/context.h` in Python. What a call promises is said there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from latent_moe import _core
from latent_moe._core import Bootstrap
from latent_moe.arrays import Array, empty_like, optional_view, row_count, view, wait_for
from latent_moe.ranks import run_thread_ranks

TailName = Literal["replicated", "overlap", "column_parallel", "token_parallel", "late_reduce", "fused"]
DtypeName = Literal["bf16", "f16", "f32", "e4m3"]


@dataclass(frozen=True)
class Shape:
    """What a layer looks like, as far as its tail is concerned."""

    hidden: int
    latent: int
    norm: Literal["rms", "none"] = "rms"
    epsilon: float = 1e-5
    routed_scale: float = 1.0
    activations: Literal["bf16", "f16", "f32"] = "bf16"

    @staticmethod
    def preset(model: str) -> Shape:
        """`kimi-k3`, `nemotron-3-super` or `nemotron-3-ultra`."""
        return Shape(*_core.shape_preset(model))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Options:
    """How a context is set up; the same on every rank. See `include/latent_moe/options.h`."""

    backend: str = "auto"
    capacity_tokens: int = 128
    max_tokens: int = 8192
    timeout_ms: int = 30_000
    keep_whole_weights: bool = False
    tail: TailName | None = None
    tail_token_limit: Mapping[TailName, int] = field(default_factory=dict)
    shared: Literal["partial", "reduced", "absent"] = "partial"
    sequence_parallel: bool = False
    expert_parallel: bool = False
    deferred_finalize: bool = False
    batch_invariant: bool = False
    float8_weights: bool = False
    cpu_threads: int = 0
    device: int = -1
    reserved_sms: int = 16
    self_check_period: int = 0
    """One call in so many of each layer is checked against the unfused chain; 0: none."""
    self_check_folder: str = ""
    """Where the inputs of a mismatch are saved; empty: the current folder."""
    tune_table: str = "auto"


@dataclass(frozen=True)
class DeferredRows:
    """The experts' un-combined rows, in place of `routed`, in a context with `deferred_finalize`:

    routed[t] = Σ_j weights[t, j] · rows[row_map[t, j]], in slot order, in float32. A negative entry drops its slot.
    """

    rows: Array
    """[any number, latent or more], in the activation dtype."""
    weights: Array
    """[tokens, slots], bf16 or f32, contiguous."""
    row_map: Array
    """[tokens, slots], int32, contiguous."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weights.shape[0], self.rows.shape[1]


@dataclass(frozen=True)
class TokenRange:
    """Rows of the output that a rank owns when it is sharded by tokens."""

    first: int
    count: int


@dataclass(frozen=True)
class Candidate:
    tail: TailName
    expected_us: float


@dataclass(frozen=True)
class Refusal:
    tail: TailName
    reason: str


@dataclass(frozen=True)
class Plan:
    """For one number of tokens: the choice, its rivals, and those that cannot run, each with the reason."""

    tokens: int
    tail: TailName | None
    """None: no tail can run."""
    expected_us: float
    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    source: str

    def __str__(self) -> str:
        if self.tail is None:
            lines = [f"{self.tokens} tokens: no tail can run"]
        else:
            lines = [f"{self.tokens} tokens: {self.tail}, expected {self.expected_us:.1f} us ({self.source})"]
        lines += [f"  {each.tail}: could run, expected {each.expected_us:.1f} us" for each in self.candidates[1:]]
        lines += [f"  {each.tail}: cannot run: {each.reason}" for each in self.refused]
        return "\n".join(lines)


@dataclass(frozen=True)
class Fault:
    """What went wrong first in a context; later calls fail with it too."""

    rank: int
    phase: str
    layer: int
    call: int
    message: str


@dataclass(frozen=True)
class Counters:
    """What a context has done since it was created. A call that was captured in a graph counts once, its replays do not."""

    calls: dict[str, int]
    """By tail."""
    refused: dict[str, int]
    """Calls that left the context usable, by the name of their status."""
    failed: dict[str, int]
    """Calls that did not, and those after them."""
    parts: int
    waits: int
    """For peers, where ranks wait on the host: on the CPU backend."""
    wait_us: int
    longest_wait_us: int
    self_checks: int


class Layer:
    """One layer's tail. A small handle, which keeps its context alive."""

    __slots__ = ("__weakref__", "_core", "_torch_handle", "context")

    def __init__(self, core: _core.Layer, context: Context) -> None:
        self._core = core
        self.context = context

    @property
    def id(self) -> int:
        return self._core.id

    def run(
        self,
        routed: Array | DeferredRows,
        shared: Array | None = None,
        prefix: Array | None = None,
        out: Array | None = None,
        *,
        stream: int | None = None,
        tail: TailName | None = None,
        consume_shared: bool = False,
    ) -> Array:
        """Enqueues one tail and returns `out`, which is made like `routed` if it is not given.

        `stream`: a raw stream pointer; the current stream of PyTorch tensors, the default stream of others. The arrays must
        live until the work is done. On the CPU it is done when this returns. Collective: every rank makes the same call.
        """
        rows, uncombined = routed, None
        if isinstance(routed, DeferredRows):
            rows, uncombined = routed.rows, (routed.weights, routed.row_map)
        if out is None:
            context = self.context
            tokens = routed.shape[0] if isinstance(routed, DeferredRows) else row_count("routed", routed)
            out = empty_like(rows, context.output_rows(tokens), context.shape.hidden)
        self._core.run(rows, uncombined, shared, prefix, out, stream, tail, consume_shared)
        return out

    def begin(
        self, shared: Array, out: Array | None = None, *, stream: int | None = None, tail: TailName | None = None
    ) -> Half:
        """The first half of a call: `shared` travels while the routed experts still compute. `Half.finish` is the second.

        Both together are bit for bit `run(…, tail=tail)`. `tail`: `replicated`, `column_parallel` or `token_parallel`; the
        cheapest of them if it is not given. `out` holds what was reduced until then; it may be `shared`. Collective.
        """
        context = self.context
        tokens = row_count("shared", shared)
        if out is None:
            out = empty_like(shared, context.output_rows(tokens), context.shape.hidden)
        self._core.begin(shared, out, stream, tail)
        return Half(self, tokens, out)


class Half:
    """A call whose shared rows are on their way. It takes `finish` once; until then the context takes no other call."""

    __slots__ = ("_layer", "_tokens", "out")

    def __init__(self, layer: Layer, tokens: int, out: Array) -> None:
        self._layer = layer
        self._tokens = tokens
        self.out = out

    def finish(self, routed: Array, prefix: Array | None = None, *, stream: int | None = None) -> Array:
        """Enqueues the rest of the call, on the same stream or another, and returns `out`. `prefix` is not `out`."""
        self._layer._core.finish(self._tokens, self.out.shape[0], routed, prefix, stream)
        return self.out


class Context:
    """Ranks that agreed on a shape, the layers' weights and one workspace.

    One thread of a rank at a time, except `poll_fault`, `counters` and `abort`. The GIL is released while a call waits.
    """

    def __init__(self, shape: Shape, bootstrap: Bootstrap, options: Options | None = None) -> None:
        """Collective. Raises on every rank if any rank fails or if ranks differ, naming the field."""
        self.shape = shape
        self.options = Options() if options is None else options
        self._core = _core.Context.create(shape, bootstrap, self.options)
        self._layers: list[_core.Layer] = []

    def add_layer(
        self,
        id: int,
        weights: Array,
        gamma: Array | None = None,
        *,
        dtype: DtypeName | None = None,
        scale: float = 1.0,
        row_scales: Array | None = None,
    ) -> Layer:
        """Local. Packs `weights` (the whole W_up or this rank's rows of it); they may be freed afterwards.

        `dtype`: what raw bits are (uint16, uint8); otherwise the array's own. `row_scales`: float32, one a row, host memory.
        """
        rows = view(weights)
        if dtype is None:
            if rows.dtype in ("u16", "u8"):
                raise TypeError(f"weights are raw bits ({rows.dtype}): say which dtype they are")
            dtype = rows.dtype  # type: ignore[assignment]
        wait_for(weights, gamma)
        core = self._core.add_layer(id, rows, optional_view(gamma), dtype, scale, optional_view(row_scales))
        self._layers.append(core)
        return Layer(core, self)

    def seal(self) -> None:
        """Collective; once, after the last layer and before the first call."""
        self._core.seal()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """In the order of `add_layer`."""
        return tuple(Layer(core, self) for core in self._layers)

    @property
    def backend(self) -> str:
        return self._core.backend

    @property
    def rank(self) -> int:
        return self._core.rank

    @property
    def world(self) -> int:
        return self._core.world

    @property
    def weight_bytes(self) -> int:
        """Packed weights of all layers on this rank."""
        return self._core.weight_bytes

    @property
    def workspace_bytes(self) -> int:
        """Everything else that the context holds for its calls."""
        return self._core.workspace_bytes

    def own_tokens(self, tokens: int, rank: int | None = None) -> TokenRange:
        """The rows of the output that `rank` (this one) owns when it is sharded by tokens."""
        return TokenRange(*self._core.own_tokens(tokens, self.rank if rank is None else rank))

    def output_rows(self, tokens: int) -> int:
        """Rows that `Layer.run` writes: all, or this rank's own of a sequence-parallel context."""
        return self.own_tokens(tokens).count if self.options.sequence_parallel else tokens

    def plan(self, tokens: int) -> Plan:
        """What would run for so many tokens, and why."""
        tail, expected_us, candidates, refused, source = self._core.plan(tokens)
        return Plan(
            tokens,
            tail,  # type: ignore[arg-type]
            expected_us,
            tuple(Candidate(*each) for each in candidates),  # type: ignore[arg-type]
            tuple(Refusal(*each) for each in refused),  # type: ignore[arg-type]
            source,
        )

    def poll_fault(self) -> Fault | None:
        """The first fault, if any. Never blocks; any thread."""
        fault = self._core.poll_fault()
        return None if fault is None else Fault(*fault)

    def counters(self) -> Counters:
        """What the context has done since it was created; any thread."""
        calls, refused, failed, others = self._core.counters()
        return Counters(dict(calls), dict(refused), dict(failed), **dict(others))

    def abort(self, reason: str = "abort() was called") -> None:
        """Any thread; local. Peers that wait for this rank are told as soon as they can know."""
        self._core.abort(reason)

    def suspend(self) -> None:
        """Collective: gives the workspace back, keeps the layers."""
        self._core.suspend()

    def resume(self) -> None:
        """Collective: builds the workspace again."""
        self._core.resume()

    def all_reduce_rms_norm(
        self, x: Array, gamma: Array | None = None, y: Array | None = None, *, stream: int | None = None
    ) -> Array:
        """y = norm(Σ_ranks x), the tail's first part as an operation of its own. `y` may be `x`. Collective."""
        if y is None:
            y = empty_like(x, row_count("x", x), self.shape.latent)
        self._core.all_reduce_rms_norm(x, gamma, y, stream)
        return y

    def accumulate_projection(self, a: Array, layer: Layer, c_slice: Array, *, stream: int | None = None) -> Array:
        """c_slice += routed_scale · a · W_upᵀ over the rank's own rows of W_up, in place. Waits for no rank.

        `c_slice` is this rank's columns of C: `c[:, rank * hidden // world : (rank + 1) * hidden // world]`.
        """
        self._core.accumulate_projection(a, layer._core, c_slice, stream)
        return c_slice


def explain(shape: Shape, world: int, tokens: Iterable[int], options: Options | None = None) -> list[Plan]:
    """What contexts of `world` ranks would run on this machine, without layers or inputs: ranks are threads here."""
    wanted = list(tokens)

    def plans(bootstrap: Bootstrap) -> list[Plan]:
        context = Context(shape, bootstrap, options)
        return [context.plan(count) for count in wanted]

    return run_thread_ranks(world, plans)[0]
