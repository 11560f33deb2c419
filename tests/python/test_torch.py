"""PyTorch tensors: the operators, alone and compiled, ranks from a gloo group."""

import socket

import numpy as np
import pytest

import latent_moe as lm
from problem import TOLERANCE, Problem, relative_error

torch = pytest.importorskip("torch")
import latent_moe.torch as adapter  # noqa: E402

TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def tensor(array, dtype="bf16"):
    return None if array is None else torch.from_numpy(array.astype(np.float32)).to(TORCH_DTYPES[dtype])


def sealed(problem, bootstrap, **changes):
    context = lm.Context(problem.shape, bootstrap, problem.options(**changes))
    gamma = tensor(problem.gamma, problem.dtype)
    layer = context.add_layer(3, tensor(problem.weights, problem.dtype), gamma)
    context.seal()
    return layer


def inputs(problem, rank=0):
    return (
        tensor(problem.routed[rank], problem.dtype),
        tensor(problem.shared[rank], problem.dtype),
        tensor(problem.prefix, problem.dtype),
    )


def error_of(out, problem):
    return relative_error(out.float().numpy(), problem.reference())


def eager_chain(problem, weights, gamma, all_reduce):
    """What an engine runs today, in PyTorch's own operators."""

    def chain(routed, shared, prefix):
        x = all_reduce(routed).float()
        y = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gamma.float()).to(routed.dtype)
        return all_reduce(shared) + y @ weights.T + prefix

    return chain


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_layers_take_tensors_and_return_them(dtype):
    problem = Problem(world=1, dtype=dtype)
    layer = sealed(problem, lm.single_rank())
    out = layer.run(*inputs(problem))
    assert out.dtype == TORCH_DTYPES[dtype]
    assert error_of(out, problem) < TOLERANCE[dtype]


def test_tensors_and_numpy_arrays_give_the_same_bits():
    problem = Problem(world=1)
    from_torch = sealed(problem, lm.single_rank()).run(*inputs(problem))
    (layer,) = problem.context(lm.single_rank()).layers
    from_numpy = layer.run(problem.routed[0], problem.shared[0], problem.prefix)
    assert from_torch.view(torch.int16).numpy().tobytes() == from_numpy.tobytes()


class OwnTensor(torch.Tensor):
    """Read by Python's methods, as PyTorch's rarer classes are, and as all are in an older PyTorch."""

    __module__ = "torch.own"


def test_tensors_are_read_alike_by_their_table_and_by_their_methods():
    problem = Problem(world=1, tokens=6)
    layer = sealed(problem, lm.single_rank())
    wide = [torch.cat([each, each], dim=1)[:, : each.shape[1]] for each in inputs(problem)]  # a stride of twice the columns
    one_row = [each[2:3] for each in wide]
    flat = [each[2] for each in wide]
    no_rows = [each[:0] for each in wide]
    weights = [torch.nn.Parameter(each) for each in wide]  # they have gradients, which no tail makes
    for arrays in (inputs(problem), wide, one_row, flat, no_rows, weights):
        by_table = torch.zeros(arrays[1].shape, dtype=torch.bfloat16)
        by_methods = torch.zeros_like(by_table)
        layer.run(*arrays, by_table)
        layer.run(*(each.detach().as_subclass(OwnTensor) for each in arrays), by_methods.as_subclass(OwnTensor))
        assert torch.equal(by_table, by_methods)
        assert arrays is no_rows or by_table.any()


@pytest.mark.parametrize("own", [False, True])
def test_what_no_tail_can_read_is_refused_in_the_same_words_either_way(own):
    problem = Problem(world=1)
    layer = sealed(problem, lm.single_rank())
    routed, shared, _ = inputs(problem)

    def refused(error, text, given):
        with pytest.raises(error, match=text):
            layer.run(routed, given.as_subclass(OwnTensor) if own else given, out=torch.zeros_like(shared))

    refused(lm.LatentMoeError, "shared is torch.float64, expected bf16", shared.double())
    refused(lm.LatentMoeError, "shared is i32, expected bf16", shared.to(torch.int32))
    refused(lm.LatentMoeError, r"shared is \[5, 191\], expected \[5, 192\]", shared[:, 1:])
    refused(TypeError, "a tensor has 3 dimensions, expected", shared[None])
    refused(TypeError, "the elements of a row are 5 apart, expected them side by side", shared.T.contiguous().T)
    refused(lm.LatentMoeError, "shared is in memory of the gpu, expected the cpu", shared.to("meta"))
    with pytest.raises(lm.LatentMoeError, match="expected an array with DLPack"):
        layer.run((routed, routed, routed), shared, out=torch.zeros_like(shared))


def test_float8_tensors_are_weights():
    problem = Problem(world=1)
    stored = (tensor(problem.weights) * 4).to(torch.float8_e4m3fn)
    context = lm.Context(problem.shape, lm.single_rank(), problem.options())
    layer = context.add_layer(0, stored, tensor(problem.gamma), scale=0.25)
    context.seal()
    problem.weights = stored.float().numpy() * 0.25
    assert error_of(layer.run(*inputs(problem)), problem) < TOLERANCE["bf16"]


def test_a_call_in_halves_takes_tensors():
    problem = Problem(world=1)
    layer = sealed(problem, lm.single_rank())
    routed, shared, prefix = inputs(problem)
    whole = torch.ops.latent_moe.tail(routed, shared, prefix, adapter.handle(layer))
    assert torch.equal(layer.begin(shared).finish(routed, prefix), whole)


def test_operators_are_well_formed():
    """PyTorch's own check: schema, fake kernel, and a trace through AOT with changing shapes."""
    problem = Problem(world=1)
    layer = sealed(problem, lm.single_rank())
    number = adapter.handle(layer)
    routed, shared, prefix = inputs(problem)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.latent_moe
    context = adapter.handle(layer.context)
    torch.library.opcheck(ops.tail.default, (routed, shared, prefix, number), test_utils=checks)
    torch.library.opcheck(ops.tail.default, (routed, shared, None, number), test_utils=checks)
    torch.library.opcheck(ops.tail_out.default, (routed, shared, prefix, shared.clone(), number), test_utils=checks)
    torch.library.opcheck(ops.all_reduce_rms_norm.default, (routed, tensor(problem.gamma), context), test_utils=checks)
    torch.library.opcheck(ops.accumulate_projection.default, (routed, shared.clone(), number), test_utils=checks)


def test_uncombined_rows_are_taken_by_an_operator():
    problem = Problem(world=1)
    layer = sealed(problem, lm.single_rank(), deferred_finalize=True)
    routed, shared, prefix = inputs(problem)
    rows = torch.cat([routed, routed])
    row_map = torch.tensor([[token + 5, token] for token in range(5)], dtype=torch.int32)
    arguments = rows, torch.full((5, 2), 0.5, dtype=torch.bfloat16), row_map, shared, prefix, adapter.handle(layer)
    out = torch.ops.latent_moe.tail_deferred(*arguments)
    assert torch.equal(out, torch.ops.latent_moe.tail(routed, shared, prefix, adapter.handle(layer)))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.latent_moe.tail_deferred.default, arguments, test_utils=checks)


def test_the_parts_are_operators():
    problem = Problem(world=1)
    layer = sealed(problem, lm.single_rank())
    routed, shared, _ = inputs(problem)
    gamma = tensor(problem.gamma)
    y = torch.ops.latent_moe.all_reduce_rms_norm(routed, gamma, adapter.handle(layer.context))
    assert relative_error(y.float().numpy(), problem.normed()) < TOLERANCE["bf16"]
    torch.ops.latent_moe.accumulate_projection(y, shared, adapter.handle(layer))
    problem.prefix = None
    assert error_of(shared, problem) < 2 * TOLERANCE["bf16"]


def test_a_module_runs_compiled_as_a_whole_graph_at_any_number_of_tokens():
    problem = Problem(world=1, tokens=40)
    tail = adapter.LatentTail(sealed(problem, lm.single_rank()))
    routed, shared, prefix = inputs(problem)

    def model(routed, shared, prefix):
        return tail(routed * 2, shared + 1, prefix).relu()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (40, 17, 3):
        arguments = tuple(each[:tokens].clone() for each in (routed, shared, prefix))
        torch.testing.assert_close(compiled(*arguments), model(*arguments), rtol=0, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_module_refuses_inputs_that_want_a_gradient():
    problem = Problem(world=1)
    tail = adapter.LatentTail(sealed(problem, lm.single_rank()))
    routed, shared, _ = inputs(problem)
    routed.requires_grad_()
    with pytest.raises(lm.LatentMoeError, match="requires a gradient") as caught:
        tail(routed, shared)
    assert caught.value.code == "unsupported"
    with torch.no_grad():
        assert tail(routed, shared).shape == shared.shape


def test_handles_of_what_is_gone_are_refused():
    problem = Problem(world=1)
    layer = sealed(problem, lm.single_rank())
    number = adapter.handle(layer)
    assert adapter.handle(layer) == number
    routed, shared, prefix = inputs(problem)
    with pytest.raises(ValueError, match="belongs to no context"):
        torch.ops.latent_moe.all_reduce_rms_norm(routed, None, number)
    del layer
    with pytest.raises(ValueError, match=f"layer handle {number} belongs to no layer that lives"):
        torch.ops.latent_moe.tail(routed, shared, prefix, number)


def test_tensors_that_do_not_fit_are_refused_by_name():
    problem = Problem(world=1)
    layer = sealed(problem, lm.single_rank())
    routed, shared, prefix = inputs(problem)
    with pytest.raises(lm.LatentMoeError, match=r"shared is \[4, 192\], expected \[5, 192\]"):
        torch.ops.latent_moe.tail(routed, shared[:4], prefix, adapter.handle(layer))
    with pytest.raises(lm.LatentMoeError, match="routed is f32, expected bf16"):
        layer.run(routed.float(), shared)
    with pytest.raises(TypeError, match="side by side"):
        layer.run(routed, shared.T.contiguous().T)
    with pytest.raises(TypeError, match="3 dimensions"):
        layer.run(routed, shared[None])


def rank_of_a_group(rank, world, port):
    """A process: parity with the eager chain, ranks from torch.distributed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    problem = Problem(world=world, tokens=13)
    layer = sealed(problem, adapter.process_group_ranks())
    assert (layer.context.rank, layer.context.world) == (rank, world)
    tail = adapter.LatentTail(layer)

    def all_reduce(partial):
        whole = partial.float()
        dist.all_reduce(whole)
        return whole.to(partial.dtype)

    arguments = inputs(problem, rank)
    chain = eager_chain(problem, tensor(problem.weights), tensor(problem.gamma), all_reduce)
    chain_error = error_of(chain(*arguments), problem)
    out = tail(*arguments)
    assert error_of(out, problem) <= 1.05 * chain_error, (error_of(out, problem), chain_error)
    parts = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(parts, out)
    assert all(torch.equal(out, each) for each in parts)

    # As a whole graph; the code generator has its turn in a test of one process.
    whole_graph = {"fullgraph": True, "backend": "aot_eager"}
    assert torch.equal(torch.compile(tail, **whole_graph)(*arguments), out)
    sharded = sealed(problem, adapter.process_group_ranks(), sequence_parallel=True)
    own = sharded.context.own_tokens(13)
    prefix = arguments[2][own.first : own.first + own.count]
    part = torch.compile(adapter.LatentTail(sharded), dynamic=True, **whole_graph)(*arguments[:2], prefix)
    assert part.shape == (own.count, problem.hidden)
    assert error_of(part, problem_rows(problem, own)) < TOLERANCE["bf16"]
    dist.destroy_process_group()


def problem_rows(problem, own):
    """The same problem, of some of its tokens."""
    rows = slice(own.first, own.first + own.count)
    part = Problem(world=problem.world, tokens=problem.tokens)
    part.routed = [each[rows] for each in part.routed]
    part.shared = [each[rows] for each in part.shared]
    part.prefix = part.prefix[rows]
    return part


def test_processes_of_a_gloo_group_are_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_of_a_group, args=(2, port), nprocs=2)


def test_a_group_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="call init_process_group first"):
        adapter.process_group_ranks()
