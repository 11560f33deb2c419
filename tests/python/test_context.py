"""Contexts and layers over NumPy arrays, ranks as threads."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest

import latent_moe as lm
from problem import DTYPES, TOLERANCE, Problem, relative_error, same_bits


def run_every_tail(problem, bootstrap):
    context = problem.context(bootstrap)
    arrays = problem.routed[bootstrap.rank], problem.shared[bootstrap.rank], problem.prefix
    tails = [each.tail for each in context.plan(problem.tokens).candidates]
    return {tail: context.layers[0].run(*arrays, tail=tail) for tail in tails}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tokens", [0, 1, 17, 300])
def test_every_tail_matches_numpy_with_the_same_bits_on_every_rank(world, tokens):
    problem = Problem(world=world, tokens=tokens)
    outs = lm.run_thread_ranks(world, lambda bootstrap: run_every_tail(problem, bootstrap))
    several = {"replicated", "overlap", "column_parallel", "token_parallel"}
    assert set(outs[0]) == ({"replicated"} if world == 1 else several)
    for tail, first in outs[0].items():
        assert first.dtype == ml_dtypes.bfloat16
        if tokens:
            assert relative_error(first, problem.reference()) < TOLERANCE["bf16"], tail
        assert all(same_bits(first, out[tail]) for out in outs), tail


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["rms", "none"])
def test_every_activation_type_with_and_without_a_norm(dtype, norm):
    problem = Problem(dtype=dtype, norm=norm, routed_scale=0.5)
    outs = lm.run_thread_ranks(2, lambda bootstrap: run_every_tail(problem, bootstrap))[0]
    assert ("late_reduce" in outs) == (norm == "none")
    for tail, out in outs.items():
        bound = TOLERANCE[dtype] * (1.3 if tail == "late_reduce" else 1)
        assert relative_error(out, problem.reference()) < bound, tail


def test_raw_bits_are_taken_for_the_contexts_dtype():
    problem = Problem(world=1)
    (layer,) = problem.context(lm.single_rank()).layers
    named = layer.run(problem.routed[0], problem.shared[0], problem.prefix)
    bits = layer.run(*(each.view(np.uint16) for each in (problem.routed[0], problem.shared[0], problem.prefix)))
    assert bits.dtype == np.uint16
    assert same_bits(named, bits)


def test_an_output_may_be_given_and_rows_may_be_strided():
    problem = Problem(world=1)
    (layer,) = problem.context(lm.single_rank()).layers
    expected = layer.run(problem.routed[0], problem.shared[0], problem.prefix)

    def padded(array, columns):
        wide = np.zeros((array.shape[0], array.shape[1] + columns), array.dtype)
        wide[:, : array.shape[1]] = array
        return wide[:, : array.shape[1]]

    out = padded(np.zeros_like(expected), 24)
    given = layer.run(padded(problem.routed[0], 8), padded(problem.shared[0], 40), problem.prefix, out)
    assert given is out
    assert same_bits(np.ascontiguousarray(out), expected)
    assert not out.base[:, problem.hidden :].any()


@pytest.mark.parametrize("state", ["absent", "reduced"])
def test_shared_may_be_absent_or_reduced(state):
    problem = Problem(shared_state=state)
    for tail, out in lm.run_thread_ranks(2, lambda bootstrap: run_every_tail(problem, bootstrap))[0].items():
        assert relative_error(out, problem.reference()) < TOLERANCE["bf16"], tail


def test_a_sequence_parallel_rank_gets_its_own_rows():
    problem = Problem(world=3, tokens=8)

    def body(bootstrap):
        context = problem.context(bootstrap, sequence_parallel=True)
        own = context.own_tokens(8)
        prefix = problem.prefix[own.first : own.first + own.count]
        return own, context.layers[0].run(problem.routed[bootstrap.rank], problem.shared[bootstrap.rank], prefix)

    parts = lm.run_thread_ranks(3, body)
    assert [own.count for own, _ in parts] == [part.shape[0] for _, part in parts]
    whole = np.concatenate([part for _, part in parts])
    assert relative_error(whole, problem.reference()) < TOLERANCE["bf16"]


def test_weights_may_be_a_shard_and_float8_with_scales():
    problem = Problem()
    scales = np.linspace(0.5, 2, problem.hidden, dtype=np.float32)
    stored = (problem.weights.astype(np.float32) * 4).astype(ml_dtypes.float8_e4m3fn)
    half = problem.hidden // 2

    def body(bootstrap, raw):
        own = slice(bootstrap.rank * half, (bootstrap.rank + 1) * half)
        context = lm.Context(problem.shape, bootstrap, problem.options(keep_whole_weights=False))
        rows, dtype = (stored[own].view(np.uint8), "e4m3") if raw else (stored[own], None)
        layer = context.add_layer(0, rows, problem.gamma, dtype=dtype, scale=0.25, row_scales=scales[own])
        context.seal()
        return layer.run(problem.routed[bootstrap.rank], problem.shared[bootstrap.rank], problem.prefix)

    named = lm.run_thread_ranks(2, lambda bootstrap: body(bootstrap, False))[0]
    raw = lm.run_thread_ranks(2, lambda bootstrap: body(bootstrap, True))[0]
    problem.weights = stored.astype(np.float64) * scales[:, None] * 0.25
    assert relative_error(named, problem.reference()) < TOLERANCE["bf16"]
    assert same_bits(named, raw)


@pytest.mark.parametrize("weight_dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_tail_combines_the_experts_rows_itself(weight_dtype):
    """Two experts a token, rows in reverse order and wider than the latent, a third slot dropped."""
    problem = Problem(tokens=7)
    weights = np.array([[0.75, 0.5, 9]] * 7, weight_dtype)
    row_map = np.array([[13 - token, 6 - token, -1] for token in range(7)], np.int32)

    def body(bootstrap):
        context = problem.context(bootstrap, deferred_finalize=True)
        routed = problem.routed[bootstrap.rank]
        wide = np.full((14, problem.latent + 8), 7, routed.dtype)
        wide[:, : problem.latent] = np.concatenate([routed, -routed])[::-1]
        rows = lm.DeferredRows(wide, weights, row_map)
        combined = (routed.astype(np.float32) * 0.25).astype(routed.dtype)
        for tail in ("replicated", "overlap", "column_parallel", "token_parallel"):
            arrays = problem.shared[bootstrap.rank], problem.prefix
            expected = context.layers[0].run(combined, *arrays, tail=tail)
            assert same_bits(context.layers[0].run(rows, *arrays, tail=tail), expected), tail

    lm.run_thread_ranks(2, body)


def test_deferred_rows_that_do_not_fit_are_refused_by_name():
    problem = Problem(world=1, tokens=2)
    layer = problem.context(lm.single_rank(), deferred_finalize=True).layers[0]
    rows, weights, row_map = problem.routed[0], np.ones((2, 1), np.float32), np.zeros((2, 1), np.int32)
    for parts, text in (
        ((rows[:, :32], weights, row_map), "expected at least 64 columns"),
        ((rows.astype(np.float32), weights, row_map), "the deferred rows is f32, expected bf16"),
        ((rows, weights.astype(np.float16), row_map), "the deferred weights are f16"),
        ((rows, weights, row_map.astype(np.float32)), r"row map is \[2, 1\] of f32"),
        ((rows, weights, row_map[:1]), r"row map is \[1, 1\] of i32, expected \[2, 1\]"),
        ((rows, weights, row_map + 2), "says 2 for slot 0 of token 0, expected below 2"),
    ):
        out = np.zeros((2, problem.hidden), rows.dtype)
        refused(
            lambda parts=parts, out=out: layer.run(lm.DeferredRows(*parts), problem.shared[0], out=out),
            "invalid argument",
            text,
        )


def test_a_batch_invariant_context_gives_a_row_the_same_bits_in_any_batch():
    problem = Problem(tokens=40)

    def body(bootstrap):
        context = problem.context(bootstrap, batch_invariant=True)
        assert len(context.plan(40).candidates) == 1
        arrays = problem.routed[bootstrap.rank], problem.shared[bootstrap.rank], problem.prefix
        whole = context.layers[0].run(*arrays)
        for rows in (slice(0, 1), slice(7, 8), slice(3, 30)):
            assert same_bits(context.layers[0].run(*(each[rows] for each in arrays)), whole[rows])

    lm.run_thread_ranks(2, body)


def test_weights_are_packed_as_float8_where_asked():
    problem = Problem(world=1)
    plain = problem.context(lm.single_rank())
    packed = problem.context(lm.single_rank(), float8_weights=True)
    assert packed.weight_bytes < 0.6 * plain.weight_bytes
    out = packed.layers[0].run(problem.routed[0], problem.shared[0], problem.prefix)
    assert relative_error(out, problem.reference()) < 0.03


def test_the_plan_says_which_tail_and_why_not_the_others():
    plans = lm.explain(lm.Shape.preset("kimi-k3"), 2, [1, 4096], lm.Options(backend="cpu", max_tokens=1024))
    assert plans[0].tail == "column_parallel"
    assert {each.tail: each.reason for each in plans[0].refused}["late_reduce"].startswith("the norm needs")
    assert plans[1].tail is None
    assert all("exceed max_tokens 1024" in each.reason for each in plans[1].refused)
    assert "late_reduce: cannot run: the norm needs" in str(plans[0])


def test_the_first_part_is_the_reduction_and_the_norm():
    problem = Problem(tokens=9)

    def body(bootstrap):
        context = problem.context(bootstrap)
        x = problem.routed[bootstrap.rank].copy()
        y = context.all_reduce_rms_norm(x, problem.gamma)
        assert context.all_reduce_rms_norm(x, problem.gamma, x) is x
        assert same_bits(x, y)
        return y

    outs = lm.run_thread_ranks(2, body)
    assert relative_error(outs[0], problem.normed()) < TOLERANCE["bf16"]
    assert same_bits(*outs)


def test_the_second_part_adds_to_the_ranks_column_slice_in_place():
    problem = Problem(tokens=9)
    half = problem.hidden // 2

    def body(bootstrap):
        context = problem.context(bootstrap)
        c = problem.shared[bootstrap.rank].copy()
        own = slice(bootstrap.rank * half, (bootstrap.rank + 1) * half)
        context.accumulate_projection(problem.routed[0], context.layers[0], c[:, own])
        return c

    product = problem.routed[0].astype(np.float64) @ problem.weights.astype(np.float64).T
    for rank, c in enumerate(lm.run_thread_ranks(2, body)):
        expected = problem.shared[rank].astype(np.float64)
        own = slice(rank * half, (rank + 1) * half)
        expected[:, own] += product[:, own]
        assert relative_error(c, expected) < TOLERANCE["bf16"]
        other = slice((1 - rank) * half, (2 - rank) * half)
        assert same_bits(c[:, other], problem.shared[rank][:, other])


def test_suspend_gives_the_workspace_back():
    problem = Problem(world=1)
    context = problem.context(lm.single_rank())
    before = context.workspace_bytes
    out = context.layers[0].run(problem.routed[0], problem.shared[0], problem.prefix)
    context.suspend()
    assert context.workspace_bytes == 0
    with pytest.raises(lm.LatentMoeError, match="suspended") as caught:
        context.layers[0].run(problem.routed[0], problem.shared[0], problem.prefix)
    assert caught.value.code == "unsupported"
    context.resume()
    assert context.workspace_bytes == before
    assert same_bits(out, context.layers[0].run(problem.routed[0], problem.shared[0], problem.prefix))
    assert context.weight_bytes == problem.weights.nbytes + problem.gamma.nbytes


def test_a_context_counts_its_calls_and_refusals():
    problem = Problem(world=1)
    context = lm.Context(problem.shape, lm.single_rank(), lm.Options(backend="cpu", self_check_period=2))
    layer = context.add_layer(3, problem.weights, problem.gamma)
    context.seal()
    for _ in range(3):
        layer.run(problem.routed[0], problem.shared[0], problem.prefix)
    with pytest.raises(lm.LatentMoeError):
        layer.run(problem.routed[0], problem.shared[0], problem.prefix, tail="fused")
    counters = context.counters()
    assert counters.calls == {"replicated": 3}
    assert counters.refused == {"unsupported": 1}
    assert counters.failed == {}
    assert counters.self_checks == 2


def test_a_layer_keeps_its_context_alive():
    problem = Problem(world=1)
    (layer,) = problem.context(lm.single_rank()).layers
    assert layer.run(problem.routed[0], problem.shared[0]).shape == (5, problem.hidden)
    assert layer.id == 3


def test_other_python_threads_run_while_a_rank_waits():
    """Rank 1 comes late. A rank that kept the GIL would keep it from coming at all."""
    problem = Problem()
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.005)

    def body(bootstrap):
        context = problem.context(bootstrap)
        if bootstrap.rank == 1:
            time.sleep(0.3)
        return context.layers[0].run(problem.routed[bootstrap.rank], problem.shared[bootstrap.rank])

    ticker = threading.Thread(target=tick)
    ticker.start()
    lm.run_thread_ranks(2, body)
    done.set()
    ticker.join()
    assert ticks > 20


# What is refused, and how.


def refused(call, code, text):
    with pytest.raises(lm.LatentMoeError, match=text) as caught:
        call()
    assert caught.value.code == code


def test_arrays_that_do_not_fit_are_refused_by_name():
    problem = Problem(world=1)
    (layer,) = problem.context(lm.single_rank()).layers
    routed, shared = problem.routed[0], problem.shared[0]
    frozen = np.zeros_like(shared)
    frozen.flags.writeable = False
    both = np.zeros((8, 192), shared.dtype)

    for text, arrays, rest in (
        (r"shared is \[4, 192\], expected \[5, 192\]", (routed, shared[:4]), {}),
        (r"routed is \[5, 32\], expected \[5, 64\]", (routed[:, :32], shared), {}),
        ("routed is f32, expected bf16", (routed.astype(np.float32), shared), {"out": shared.copy()}),
        (r"prefix is \[5, 64\], expected \[5, 192\]", (routed, shared, routed), {}),
        ("shared is null, expected", (routed,), {}),
        ("side by side", (routed, shared.T[:5]), {}),
        ("DLPack type", (routed, np.zeros((5, 192))), {}),
        ("3 dimensions", (routed, shared[None]), {}),
        ("buffer protocol", (routed, "shared"), {}),
        ("out overlaps shared", (routed, both[1:6]), {"out": both[2:7]}),
        ("tail is 'fastest', expected one of replicated", (routed, shared), {"tail": "fastest"}),
        ("out is read-only", (routed, shared), {"out": frozen}),
    ):
        refused(lambda arrays=arrays, rest=rest: layer.run(*arrays, **rest), "invalid argument", text)
    refused(lambda: layer.run(routed, shared, tail="overlap"), "unsupported", "cannot run 5 tokens: there is one rank")
    with pytest.raises(TypeError, match="cannot make an array like memoryview"):
        layer.run(memoryview(routed.view(np.uint16)), shared)
    assert layer.run(routed, shared).shape == (5, 192), "a refused call leaves the context usable"


def test_set_up_that_does_not_fit_is_refused_by_name():
    one = lm.single_rank()
    cpu = lm.Options(backend="cpu")
    refused(lambda: lm.Context(lm.Shape(65, 64), one, cpu), "invalid argument", "hidden is 65")
    refused(lambda: lm.Context(lm.Shape(64, 64, norm="layer"), one, cpu), "invalid argument", "norm is 'layer'")
    refused(lambda: lm.Context(lm.Shape(64, 64), one, lm.Options(backend="abacus")), "unavailable", "abacus")
    refused(lambda: lm.Shape.preset("kimi-k9"), "invalid argument", "expected one of kimi-k3")
    quick = lm.Options(backend="cpu", tail_token_limit={"quick": 3})
    refused(lambda: lm.Context(lm.Shape(64, 64), one, quick), "invalid argument", "tail is 'quick'")
    context = lm.Context(lm.Shape(64, 64), one, cpu)
    weights = np.zeros((64, 64), ml_dtypes.bfloat16)
    gamma = np.ones(64, ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="raw bits"):
        context.add_layer(0, weights.view(np.uint16), gamma)
    for text, arrays, rest in (
        ("expected 64 columns", (weights[:, :32], gamma), {}),
        ("layer 0: gamma is null", (weights,), {}),
        (r"gamma is \[1, 8\]", (weights, gamma[:8]), {}),
        ("has 32 rows", (weights[:32], gamma), {}),
        ("row_scales is", (weights, gamma), {"row_scales": np.ones(3, np.float32)}),
    ):
        refused(lambda arrays=arrays, rest=rest: context.add_layer(0, *arrays, **rest), "invalid argument", text)
    refused(lambda: context.plan(-1), "invalid argument", "tokens is -1")
    context.seal()
    refused(context.seal, "unsupported", "sealed already")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": 1.5}, "max_tokens is 1.5, expected a whole number of 64 bits"),
        ({"max_tokens": 2**70}, "max_tokens is 1180591620717411303424, expected a whole number of 64 bits"),
        ({"timeout_ms": 2**40}, "timeout_ms is 1099511627776, expected a whole number of 32 bits"),
        ({"backend": 3}, "backend is 3, expected text"),
        ({"backend": "\ud800"}, r"backend is '\\ud800', expected text"),
        ({"tail": 1}, "tail is 1, expected the name of a tail or None"),
        ({"tail_token_limit": {"fused": "many"}}, "tail_token_limit has 'fused': 'many', expected"),
    ],
)
def test_options_of_another_type_are_refused_by_name(changes, text):
    with pytest.raises(lm.LatentMoeError, match=text) as caught:
        Problem(world=1).context(lm.single_rank(), **changes)
    assert caught.value.code == "invalid argument"
    with pytest.raises(lm.LatentMoeError, match=r"hidden is 1\.5, expected a whole number"):
        lm.Context(lm.Shape(1.5, 8), lm.single_rank())


def test_what_is_no_array_is_refused_by_name():
    problem = Problem(world=1)
    layer = problem.context(lm.single_rank()).layers[0]
    for none, name in ((None, "NoneType"), ([1.0], "list"), ("text", "str")):
        with pytest.raises(TypeError, match=f"routed is {name}, expected an array"):
            layer.run(none, problem.shared[0])


def test_ranks_that_disagree_are_told_so_on_both():
    def body(bootstrap):
        with pytest.raises(lm.LatentMoeError) as caught:
            lm.Context(lm.Shape(64, 64, epsilon=1e-5 + bootstrap.rank * 1e-6), bootstrap, lm.Options(backend="cpu"))
        return caught.value.code, str(caught.value)

    for code, message in lm.run_thread_ranks(2, body):
        assert code == "mismatch"
        assert "epsilon" in message


def test_a_rank_that_aborts_ends_the_others_wait():
    problem = Problem()

    def body(bootstrap):
        context = problem.context(bootstrap)
        assert context.poll_fault() is None
        if bootstrap.rank == 1:
            time.sleep(0.05)
            context.abort("the engine shuts down")
            return context.poll_fault()
        with pytest.raises(lm.LatentMoeError, match="rank 1 gave up: the engine shuts down") as caught:
            context.layers[0].run(problem.routed[0], problem.shared[0])
        assert caught.value.code == "aborted"
        return context.poll_fault()

    faults = lm.run_thread_ranks(2, body)
    assert all("the engine shuts down" in fault.message for fault in faults)
    assert faults[0].layer == 3


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_call_in_halves_gives_the_bits_of_the_whole_call(sequence_parallel):
    problem = Problem(world=3, tokens=17)

    def body(bootstrap):
        context = problem.context(bootstrap, sequence_parallel=sequence_parallel)
        (layer,) = context.layers
        routed, shared = problem.routed[bootstrap.rank], problem.shared[bootstrap.rank]
        own = context.own_tokens(problem.tokens)
        prefix = problem.prefix[own.first : own.first + own.count] if sequence_parallel else problem.prefix
        possible = {each.tail for each in context.plan(problem.tokens).candidates}
        for tail in possible & {"replicated", "column_parallel", "token_parallel"}:
            whole = layer.run(routed, shared, prefix, tail=tail)
            half = layer.begin(shared, tail=tail)
            with pytest.raises(lm.LatentMoeError, match="layer 3 has begun and not finished"):
                layer.run(routed, shared, prefix)
            assert half.finish(routed, prefix) is half.out
            assert same_bits(half.out, whole), tail
        into = shared.copy()
        if not sequence_parallel:
            assert layer.begin(into, into).finish(routed).shape == (problem.tokens, problem.hidden)
        with pytest.raises(lm.LatentMoeError, match="layer 3 has not begun"):
            half.finish(routed, prefix)
        with pytest.raises(lm.LatentMoeError, match=r"overlap has no halves|wants its own tokens only"):
            layer.begin(shared, tail="overlap")
        return len(possible)

    assert min(lm.run_thread_ranks(3, body)) >= 1


def test_the_error_of_the_rank_that_failed_first_is_raised():
    problem = Problem()

    def body(bootstrap):
        context = problem.context(bootstrap, timeout_ms=500)
        if bootstrap.rank == 1:
            raise KeyError("a defect of the caller's")
        context.layers[0].run(problem.routed[0], problem.shared[0])

    with pytest.raises(KeyError, match="a defect of the caller's"):
        lm.run_thread_ranks(2, body)
