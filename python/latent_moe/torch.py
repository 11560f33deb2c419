"""PyTorch: ranks from a process group, and the tail as custom operators.

    bootstrap = latent_moe.torch.process_group_ranks()
    context = latent_moe.Context(shape, bootstrap)
    layer = context.add_layer(7, up_proj.weight, norm.weight)
    context.seal()
    tail = latent_moe.torch.LatentTail(layer)
    out = tail(routed, shared, prefix)          # also inside torch.compile(fullgraph=True) and CUDA graphs

Importing this module registers, for CPU and GPU tensors, with fake kernels:

    torch.ops.latent_moe.tail(routed, shared?, prefix?, layer) -> Tensor
    torch.ops.latent_moe.tail_deferred(rows, weights, row_map, shared?, prefix?, layer) -> Tensor
    torch.ops.latent_moe.tail_out(routed, shared?, prefix?, out!, layer) -> ()
    torch.ops.latent_moe.all_reduce_rms_norm(x, gamma?, context) -> Tensor
    torch.ops.latent_moe.accumulate_projection(a, c_slice!, layer) -> ()

`layer` and `context` are the integers that `handle` gives. The operators are collective: every rank runs the same ones in
the same order, as with the collectives of torch.distributed. They have no derivatives. Calls in halves have no operators:
what a compiler does to an output between the halves would part them; `Layer.begin` takes tensors outside of compiled code.
"""

from __future__ import annotations

import hashlib
import itertools
import socket
import weakref

import torch

from latent_moe.context import Bootstrap, Context, Layer
from latent_moe.errors import LatentMoeError
from latent_moe.ranks import all_gather_ranks

_handles: dict[int, weakref.ref[Layer | Context]] = {}  # a WeakValueDictionary would take twice as long to ask
_numbers = itertools.count(1)


def handle(of: Layer | Context) -> int:
    """The number by which operators know a layer or a context; valid for as long as that lives."""
    number = getattr(of, "_torch_handle", None)
    if number is None:
        number = of._torch_handle = next(_numbers)
        _handles[number] = weakref.ref(of, lambda _: _handles.pop(number, None))
    return number


def _gone() -> None:
    return None


def _layer(number: int) -> Layer:
    found = _handles.get(number, _gone)()
    if not isinstance(found, Layer):
        raise ValueError(f"latent_moe: layer handle {number} belongs to no layer that lives")
    return found


def _context(number: int) -> Context:
    found = _handles.get(number, _gone)()
    if not isinstance(found, Context):
        raise ValueError(f"latent_moe: context handle {number} belongs to no context that lives")
    return found


def current_stream(device: torch.device) -> int:
    """The raw pointer of the current stream of a GPU; 0 for the CPU."""
    if device.type == "cpu":
        return 0
    index = device.index if device.index is not None else torch.cuda.current_device()
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a third of the time of the public call
    return raw(index) if raw is not None else torch.cuda.current_stream(device).cuda_stream


def process_group_ranks(group: torch.distributed.ProcessGroup | None = None) -> Bootstrap:
    """The ranks of a `torch.distributed` group (the default one), over gloo or NCCL. Collective over it.

    The group carries what contexts agree on while they are created. On a GPU tails do not use it; on the CPU they do.
    """
    dist = torch.distributed
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("torch.distributed has no default group: call init_process_group first")
    world = dist.get_world_size(group)
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def all_gather(part: bytes) -> list[bytes]:
        if not part:  # on every rank, and a tensor of no bytes cannot be made so
            return [part] * world
        own = torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device)
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own, group=group)
        return [each.cpu().numpy().tobytes() for each in parts]

    host = hashlib.sha256(socket.gethostname().encode()).digest()
    local_world = all_gather(host).count(host)
    return all_gather_ranks(dist.get_rank(group), world, all_gather, local_world)


def _output_like(routed: torch.Tensor, context: Context, tokens: int | None = None) -> torch.Tensor:
    tokens = routed.shape[0] if tokens is None else tokens
    if context.options.sequence_parallel:
        # As Context.own_tokens, in arithmetic that a symbolic number of tokens can follow.
        tokens = tokens * (context.rank + 1) // context.world - tokens * context.rank // context.world
    return routed.new_empty((tokens, context.shape.hidden))


def _tail(routed, shared, prefix, layer: int):
    of = _layer(layer)
    out = _output_like(routed, of.context)
    of._core.run(routed, None, shared, prefix, out, None, None, False)
    return out


def _tail_fake(routed, shared, prefix, layer: int):
    context = _layer(layer).context
    torch._check(routed.dim() == 2 and routed.shape[1] == context.shape.latent, lambda: "routed: expected [tokens, latent]")
    return _output_like(routed, context)


def _tail_deferred(rows, weights, row_map, shared, prefix, layer: int):
    of = _layer(layer)
    out = _output_like(rows, of.context, weights.shape[0])
    of._core.run(rows, (weights, row_map), shared, prefix, out, None, None, False)
    return out


def _tail_deferred_fake(rows, weights, row_map, shared, prefix, layer: int):
    return _output_like(rows, _layer(layer).context, weights.shape[0])


def _tail_out(routed, shared, prefix, out, layer: int) -> None:
    _layer(layer)._core.run(routed, None, shared, prefix, out, None, None, False)


def _all_reduce_rms_norm(x, gamma, context: int):
    y = x.new_empty(x.shape)
    _context(context)._core.all_reduce_rms_norm(x, gamma, y, None)
    return y


def _accumulate_projection(a, c_slice, layer: int) -> None:
    of = _layer(layer)
    of.context._core.accumulate_projection(a, of._core, c_slice, None)


def _register() -> torch.library.Library:
    # Operators by `Library` rather than by `custom_op`: half the host time of a call.
    library = torch.library.Library("latent_moe", "DEF")
    tags = (torch.Tag.pt2_compliant_tag,)
    for schema, kernel, fake in (
        ("tail(Tensor routed, Tensor? shared, Tensor? prefix, int layer) -> Tensor", _tail, _tail_fake),
        (
            "tail_deferred(Tensor rows, Tensor weights, Tensor row_map, Tensor? shared, Tensor? prefix, int layer)"
            " -> Tensor",
            _tail_deferred,
            _tail_deferred_fake,
        ),
        (
            "tail_out(Tensor routed, Tensor? shared, Tensor? prefix, Tensor(a!) out, int layer) -> ()",
            _tail_out,
            lambda routed, shared, prefix, out, layer: None,
        ),
        (
            "all_reduce_rms_norm(Tensor x, Tensor? gamma, int context) -> Tensor",
            _all_reduce_rms_norm,
            lambda x, gamma, context: x.new_empty(x.shape),
        ),
        (
            "accumulate_projection(Tensor a, Tensor(a!) c_slice, int layer) -> ()",
            _accumulate_projection,
            lambda a, c_slice, layer: None,
        ),
    ):
        name = schema.partition("(")[0]
        library.define(schema, tags=tags)
        for key in ("CPU", "CUDA"):  # PyTorch calls AMD's GPUs CUDA too
            library.impl(name, kernel, key)
        torch.library.register_fake(f"latent_moe::{name}", fake, lib=library)
    return library


_library = _register()


class LatentTail(torch.nn.Module):
    """One layer's tail as a module: `out = tail(routed, shared, prefix)`. It keeps the layer alive."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.handle = handle(layer)

    def forward(
        self, routed: torch.Tensor, shared: torch.Tensor | None = None, prefix: torch.Tensor | None = None
    ) -> torch.Tensor:
        # Here, and not as an autograd formula that every call of the operator would be asked for.
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (routed, shared, prefix)):
            raise LatentMoeError(
                "an input of the tail requires a gradient, and it has none to give: call it under torch.no_grad()",
                "unsupported",
            )
        return torch.ops.latent_moe.tail.default(routed, shared, prefix, self.handle)
