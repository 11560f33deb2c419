"""A vLLM plug-in: latent-MoE runners take this library's tails in place of their own.

    pip install latent-moe        # into vLLM's environment; vLLM finds it by its entry point
    LATENT_MOE_VLLM=1 vllm serve …

A runner is bound by what it looks like, not by its type: vLLM's classes for both vendors' GPUs, and others with the same
methods. Whenever the contract below does not hold the runner keeps its own path, and the reason is logged once.

How: each runner that is built is counted, in order. At the first tail all runners of a shape join one context, which is
collective, as the engine's own first step is; from then on each calls its layer. All that happens inside one operator, so
compiled graphs and captured ones see a single call.

What of vLLM is relied on is in `RELIED_ON`, which `scripts/check-vllm` compares with a released version.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from latent_moe import torch as adapter
from latent_moe.arrays import torch_dtype_name
from latent_moe.context import Context, Layer, Options, Shape

logger = logging.getLogger("latent_moe.vllm")

RUNNERS = (
    ("vllm.models.kimi_k3.nvidia.latent_moe_runner", "LatentMoERunner"),
    ("vllm.models.kimi_k3.amd.latent_moe_runner", "ROCmLatentMoERunner"),
)
TAILS = ("_small_batch_tail", "_overlap_allreduce_tail", "_shard_up_proj_tail")
TAIL_PARAMETERS = ["self", "fused_output", "shared_output", "trunc_size"]

RELIED_ON = {
    "modules": {
        "vllm.models.kimi_k3.nvidia.latent_moe_runner": {
            "LatentMoERunner": {name: TAIL_PARAMETERS for name in TAILS},
        },
        "vllm.models.kimi_k3.amd.latent_moe_runner": {
            "ROCmLatentMoERunner": {"_shard_up_proj_tail": TAIL_PARAMETERS},
        },
        "vllm.distributed.parallel_state": {"": {"get_tp_group": []}},
    },
    # Text that must still be in a module: attributes and variables.
    "words": {
        "vllm.models.kimi_k3.nvidia.latent_moe_runner": [
            "self.moe_config.tp_size",
            "self.moe_config.is_sequence_parallel",
            "self._fused_output_is_reduced",
            "self._shared_experts",
            "self.routed_output_transform",
            "transform.up_proj.weight",
            "norm.variance_epsilon",
        ],
        "vllm.models.kimi_k3.amd.latent_moe_runner": ["row_sharded", "self.routed_scaling_factor"],
        "vllm.distributed.parallel_state": ["cpu_group: ProcessGroup"],
        "vllm.model_executor.layers.fused_moe.moe_output": [
            "gemm2_permuted: torch.Tensor",
            "expert_weights: torch.Tensor",
            "expanded_idx_to_permuted_idx: torch.Tensor",
        ],
        "vllm.envs": ["VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", "VLLM_DISABLE_SHARED_EXPERTS_STREAM"],
        "vllm.plugins": ['"vllm.general_plugins"'],
    },
}

_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.warning("%s", message)


def overlap_token_limit() -> int:
    """Up to how many tokens the shared reduction may run on a second stream, as vLLM's own variables say."""
    if int(os.environ.get("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "0")):
        return 0
    return int(os.environ.get("VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", "256"))


def missed_contract(runner: Any) -> str | None:
    """Why a runner must keep its own path; None if it need not. Looks at nothing that changes from call to call."""
    transform = getattr(runner, "routed_output_transform", None)
    up_proj = getattr(transform, "up_proj", None)
    weight = getattr(up_proj, "weight", None)
    config = runner.moe_config
    if config.tp_size < 2:
        return f"tp_size is {config.tp_size}, expected at least 2"
    if config.is_sequence_parallel:
        return "the runner is sequence-parallel"
    if getattr(runner, "_shared_experts", None) is None:
        return "the runner has no shared experts"
    if getattr(runner, "_fused_output_is_reduced", False):
        return "the experts' output is reduced already"
    if weight is None or weight.dim() != 2:
        return "there is no up-projection with a weight [hidden, latent]"
    if torch_dtype_name(weight.dtype) not in ("bf16", "f16"):
        return f"the up-projection is {weight.dtype}, expected torch.bfloat16 or torch.float16"
    if getattr(runner, "routed_scaling_factor", 1.0) not in (None, 1.0):
        return f"routed_scaling_factor is {runner.routed_scaling_factor}, expected 1"
    return None


class _Tails:
    """All runners of this process, and the contexts that they share."""

    def __init__(self) -> None:
        self.runners: list[Any] = []
        self.layers: dict[int, Layer] = {}
        self.broken: str | None = None

    def add(self, runner: Any) -> int:
        self.runners.append(runner)
        return len(self.runners) - 1

    def layer(self, number: int) -> Layer | None:
        """The layer of a runner; None once anything has failed. Collective at the first call."""
        if self.broken is None and number not in self.layers:
            try:
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("the first tail comes under graph capture, expected an eager warm-up before it")
                self._join()
            except Exception as failure:  # whatever it is, the engine goes on with its own tails
                self.broken = str(failure)
                _log_once(f"latent_moe: vLLM keeps its own tails: {failure}")
        return None if self.broken is not None else self.layers[number]

    def _join(self) -> None:
        """One context a shape, for the runners that have none, in the order in which they were built."""
        group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group().cpu_group
        bootstrap = adapter.process_group_ranks(group)
        shapes: dict[Shape, list[int]] = {}
        for number, runner in enumerate(self.runners):
            if number not in self.layers:
                shapes.setdefault(_shape_of(runner, bootstrap.world), []).append(number)
        for shape, numbers in shapes.items():
            options = Options(
                backend=os.environ.get("LATENT_MOE_VLLM_BACKEND", "auto"),
                max_tokens=int(os.environ.get("LATENT_MOE_VLLM_MAX_TOKENS", "8192")),
                keep_whole_weights=bool(int(os.environ.get("LATENT_MOE_VLLM_WHOLE_WEIGHTS", "0"))),
                tail_token_limit={"overlap": overlap_token_limit()},
                deferred_finalize=any(_defers(self.runners[number]) for number in numbers),
                device=torch.cuda.current_device() if torch.cuda.is_available() else -1,
            )
            # A context a shape, over ranks of its own: they may be called in any order among each other.
            context = Context(shape, adapter.process_group_ranks(group), options)
            for number in numbers:
                transform = self.runners[number].routed_output_transform
                norm = getattr(transform, "norm", None)
                self.layers[number] = context.add_layer(
                    number, transform.up_proj.weight.data, None if norm is None else norm.weight.data
                )
            context.seal()
            logger.info("latent_moe: %d layers, %s, backend %s", len(numbers), shape, context.backend)


def _shape_of(runner: Any, world: int) -> Shape:
    transform = runner.routed_output_transform
    weight = transform.up_proj.weight
    norm = getattr(transform, "norm", None)
    return Shape(
        hidden=weight.shape[0] * (world if getattr(transform, "row_sharded", False) else 1),
        latent=weight.shape[1],
        norm="none" if norm is None else "rms",
        epsilon=1e-5 if norm is None else float(norm.variance_epsilon),
        activations=torch_dtype_name(weight.dtype),  # type: ignore[arg-type]
    )


def _defers(runner: Any) -> bool:
    return bool(getattr(runner.moe_config, "use_deferred_moe_finalize", False))


_tails = _Tails()
_own_paths: dict[tuple[int, str], Callable[..., torch.Tensor]] = {}


def _fits(layer: Layer, rows: torch.Tensor, shared: torch.Tensor, columns: int) -> str | None:
    """Why one call cannot go through the library; None if it can."""
    shape, options = layer.context.shape, layer.context.options
    tokens = shared.shape[0]
    if tokens > options.max_tokens:
        return f"a call has {tokens} tokens, expected at most LATENT_MOE_VLLM_MAX_TOKENS {options.max_tokens}"
    for what, tensor in (("experts' output", rows), ("shared output", shared)):
        if torch_dtype_name(tensor.dtype) != shape.activations:
            return f"the {what} is {tensor.dtype}, expected {shape.activations} as the weights are"
    if shared.shape[-1] < shape.hidden or rows.shape[-1] < shape.latent or columns > shape.hidden:
        return (
            f"the outputs have {rows.shape[-1]} and {shared.shape[-1]} columns, expected {shape.latent} and {shape.hidden}"
        )
    return None


def _through_library(number: int, rows, weights, row_map, shared, columns: int) -> torch.Tensor | None:
    layer = _tails.layer(number)
    if layer is None:
        return None
    reason = _fits(layer, rows, shared, columns)
    if reason is not None:
        _log_once(f"latent_moe: vLLM keeps its own tail: {reason}")
        return None
    shape = layer.context.shape
    out = shared.new_empty((shared.shape[0], shape.hidden))
    # The engine pads columns; they are cut here, by the stride.
    routed, uncombined = (rows[:, : shape.latent], None) if weights is None else (rows, (weights, row_map))
    layer._core.run(routed, uncombined, shared[:, : shape.hidden], None, out, None, None, True)
    return out


def _tail_kernel(rows, weights, row_map, shared, number: int, tail: str, columns: int) -> torch.Tensor:
    out = _through_library(number, rows, weights, row_map, shared, columns)
    if out is None:
        own = _own_paths[(number, tail)]
        fused = rows
        if weights is not None:
            output = importlib.import_module("vllm.model_executor.layers.fused_moe.moe_output")
            fused = output.UnfinalizedMoEOutput(rows, weights, row_map)
        out = own(fused, shared, None)
        if out.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr():
            out = out.clone()  # what an operator returns must be memory of its own
    return out[..., :columns]


_library = torch.library.Library("latent_moe_vllm", "DEF")
_library.define(
    "tail(Tensor rows, Tensor? weights, Tensor? row_map, Tensor(a!) shared, int number, str tail, int columns) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("tail", _tail_kernel, _key)
torch.library.register_fake(
    "latent_moe_vllm::tail",
    lambda rows, weights, row_map, shared, number, tail, columns: shared.new_empty((shared.shape[0], columns)),
    lib=_library,
)


def _replaced(name: str, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tail(self, fused_output, shared_output, trunc_size):
        number = getattr(self, "_latent_moe_number", None)
        if number is None:
            return own(self, fused_output, shared_output, trunc_size)
        columns = shared_output.shape[-1] if trunc_size is None else trunc_size
        parts = (fused_output, None, None)
        if hasattr(fused_output, "gemm2_permuted"):
            parts = (
                fused_output.gemm2_permuted,
                fused_output.expert_weights,
                fused_output.expanded_idx_to_permuted_idx,
            )
        return torch.ops.latent_moe_vllm.tail(*parts, shared_output, number, name, columns)

    tail.__name__, tail.__doc__, tail.__wrapped__ = name, own.__doc__, own  # type: ignore[attr-defined]
    return tail


def bind(cls: type) -> None:
    """Replaces the tails of a runner class. Once; binding it again does nothing."""
    if getattr(cls, "_latent_moe_bound", False):
        return
    own_init = cls.__init__
    own_tails = {name: getattr(cls, name) for name in TAILS if hasattr(cls, name)}
    if not own_tails:
        raise TypeError(f"{cls.__name__} has none of the tails {', '.join(TAILS)}")

    def init(self, *args, **kwargs):
        own_init(self, *args, **kwargs)
        reason = missed_contract(self)
        if reason is not None:
            _log_once(f"latent_moe: vLLM keeps its own tail: {reason}")
            return
        number = _tails.add(self)
        for name, own in own_tails.items():
            _own_paths[(number, name)] = own.__get__(self)
        self._latent_moe_number = number

    cls.__init__ = init  # type: ignore[misc]
    for name, own in own_tails.items():
        setattr(cls, name, _replaced(name, own))
    cls._latent_moe_bound = True


def register() -> None:
    """vLLM's entry point, called in every process that it starts, perhaps more than once. Does nothing unless asked."""
    if os.environ.get("LATENT_MOE_VLLM", "0") in ("", "0"):
        return
    vendor = "amd" if torch.version.hip is not None else "nvidia"
    for module, name in RUNNERS:
        if f".{vendor}." not in module:
            continue
        try:
            bind(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, TypeError) as failure:
            _log_once(f"latent_moe: this vLLM has no {module}.{name} to bind to: {failure}")
