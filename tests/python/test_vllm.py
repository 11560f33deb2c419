"""The vLLM plug-in, bound to stand-ins that look like vLLM's runners. vLLM itself is not needed."""

import socket
import sys
import types

import numpy as np
import pytest

from problem import TOLERANCE, Problem, relative_error

torch = pytest.importorskip("torch")
import latent_moe.vllm as plugin  # noqa: E402


def tensor(array):
    return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)


class Runner:
    """What of a latent-MoE runner the plug-in sees. Its own tails are told apart from the library's by their value."""

    OWN = 12345.0

    def __init__(self, problem, **config):
        norm = types.SimpleNamespace(weight=torch.nn.Parameter(tensor(problem.gamma)), variance_epsilon=1e-5)
        up_proj = types.SimpleNamespace(weight=torch.nn.Parameter(tensor(problem.weights)))
        self.routed_output_transform = types.SimpleNamespace(norm=norm, up_proj=up_proj)
        self.moe_config = types.SimpleNamespace(
            tp_size=problem.world, is_sequence_parallel=False, use_deferred_moe_finalize=True
        )
        self._shared_experts = object()
        self._fused_output_is_reduced = False
        for name, value in config.items():
            setattr(self.moe_config if hasattr(self.moe_config, name) else self, name, value)

    def _small_batch_tail(self, fused_output, shared_output, trunc_size):
        return torch.full_like(shared_output, self.OWN)

    def _shard_up_proj_tail(self, fused_output, shared_output, trunc_size):
        shared_output.fill_(self.OWN)
        return shared_output


def fresh_class():
    cls = type("LatentMoERunner", (Runner,), dict(Runner.__dict__))
    plugin.bind(cls)
    return cls


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch):
    monkeypatch.setattr(plugin, "_tails", plugin._Tails())
    monkeypatch.setattr(plugin, "_own_paths", {})
    monkeypatch.setattr(plugin, "_logged", set())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tp_size": 1}, "tp_size is 1"),
        ({"is_sequence_parallel": True}, "sequence-parallel"),
        ({"_shared_experts": None}, "no shared experts"),
        ({"_fused_output_is_reduced": True}, "reduced already"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        ({"routed_output_transform": None}, "no up-projection"),
    ],
)
def test_a_runner_outside_the_contract_keeps_its_own_tail_and_says_why_once(config, reason, caplog):
    problem = Problem()
    cls = fresh_class()
    for _ in range(2):
        runner = cls(problem, **config)
        assert (runner._shard_up_proj_tail(tensor(problem.routed[0]), tensor(problem.shared[0]), None) == Runner.OWN).all()
    messages = [each.message for each in caplog.records if reason in each.message]
    assert len(messages) == 1


def test_quantised_up_projections_stay_with_the_engine():
    runner = Runner(Problem())
    weight = runner.routed_output_transform.up_proj.weight.data.to(torch.float8_e4m3fn)
    runner.routed_output_transform.up_proj.weight = weight
    assert "expected torch.bfloat16" in plugin.missed_contract(runner)


def test_a_first_tail_that_fails_leaves_every_runner_its_own(caplog):
    problem = Problem()
    runners = [fresh_class()(problem) for _ in range(2)]
    for runner in runners:
        shared = tensor(problem.shared[0])
        out = runner._shard_up_proj_tail(tensor(problem.routed[0]), shared, None)
        assert (out == Runner.OWN).all()
        assert out.untyped_storage().data_ptr() != shared.untyped_storage().data_ptr()
    assert sum("vLLM keeps its own tails" in each.message for each in caplog.records) == 1


def test_binding_is_for_classes_with_tails_and_happens_once():
    cls = fresh_class()
    bound = cls._shard_up_proj_tail
    plugin.bind(cls)
    assert cls._shard_up_proj_tail is bound
    with pytest.raises(TypeError, match="Nothing has none of the tails"):
        plugin.bind(type("Nothing", (), {}))


def test_registering_does_nothing_unless_asked_and_says_so_where_there_is_no_vllm(monkeypatch, caplog):
    monkeypatch.delenv("LATENT_MOE_VLLM", raising=False)
    plugin.register()
    assert not caplog.records
    monkeypatch.setenv("LATENT_MOE_VLLM", "1")
    module = "vllm.models.kimi_k3.nvidia.latent_moe_runner"
    monkeypatch.setitem(sys.modules, module, None)
    plugin.register()
    assert f"this vLLM has no {module}.LatentMoERunner" in caplog.text
    stand_in = types.ModuleType(module)
    stand_in.LatentMoERunner = type("LatentMoERunner", (Runner,), dict(Runner.__dict__))
    for name in ("vllm", "vllm.models", "vllm.models.kimi_k3", "vllm.models.kimi_k3.nvidia"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module, stand_in)
    plugin.register()
    assert stand_in.LatentMoERunner._latent_moe_bound


def test_vllms_variables_decide_how_far_the_overlap_goes(monkeypatch):
    monkeypatch.delenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", raising=False)
    monkeypatch.delenv("VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", raising=False)
    assert plugin.overlap_token_limit() == 256
    monkeypatch.setenv("VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", "64")
    assert plugin.overlap_token_limit() == 64
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    assert plugin.overlap_token_limit() == 0


def rank_of_an_engine(rank, world, port):
    """A process: two layers of a stand-in engine over a gloo group."""
    import os

    import torch.distributed as dist

    os.environ |= {"LATENT_MOE_VLLM_BACKEND": "cpu", "LATENT_MOE_VLLM_MAX_TOKENS": "20"}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    state = types.ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: types.SimpleNamespace(cpu_group=dist.group.WORLD)
    for name in ("vllm", "vllm.distributed"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm.distributed.parallel_state"] = state

    problem = Problem(world=world, tokens=6, with_prefix=False)
    cls = fresh_class()
    runners = [cls(problem), cls(problem)]
    routed, shared = tensor(problem.routed[rank]), tensor(problem.shared[rank])
    for runner in runners:
        out = runner._shard_up_proj_tail(routed, shared.clone(), None)
        assert relative_error(out.float().numpy(), problem.reference()) < TOLERANCE["bf16"]
    context = plugin._tails.layers[0].context
    assert len(context.layers) == 2
    assert plugin._tails.layers[1].context is context
    assert context.options.tail_token_limit == {"overlap": 256}

    # Padded columns are cut, on the way in and on the way out.
    wide = torch.nn.functional.pad(routed, (0, 8)), torch.nn.functional.pad(shared, (0, 16))
    cut = runners[0]._small_batch_tail(*wide, 100)
    assert torch.equal(cut, runners[1]._shard_up_proj_tail(routed, shared.clone(), None)[:, :100])

    # Un-combined rows: the same rows in two halves, a third slot dropped.
    halves = torch.cat([routed, routed]).contiguous()
    row_map = torch.tensor([[token, token + 6, -1] for token in range(6)], dtype=torch.int32)
    unfinalized = types.SimpleNamespace(
        gemm2_permuted=halves, expert_weights=torch.full((6, 3), 0.5), expanded_idx_to_permuted_idx=row_map
    )
    assert torch.equal(runners[0]._small_batch_tail(unfinalized, shared.clone(), None), out)

    # In a compiled graph, whole.
    compiled = torch.compile(
        lambda r, s: runners[0]._shard_up_proj_tail(r, s * 1, None), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(routed, shared), out)

    # A call that the context does not serve goes the engine's way, on every rank alike.
    many = torch.zeros(21, problem.latent, dtype=torch.bfloat16), torch.zeros(21, problem.hidden, dtype=torch.bfloat16)
    assert (runners[0]._shard_up_proj_tail(*many, None) == Runner.OWN).all()
    assert torch.equal(runners[0]._shard_up_proj_tail(routed, shared.clone(), None), out)
    dist.destroy_process_group()


def test_an_engines_layers_share_a_context_over_its_group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_of_an_engine, args=(2, port), nprocs=2)
