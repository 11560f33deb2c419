"""What a call costs the host in Python: PyTorch tensors of no rows on the CPU backend, so that the tail itself is nothing.

    python tests/python/host_time.py

Microseconds, the least of many bursts: it holds on a machine that has other work too. "an operator that does nothing" is
PyTorch's own part of an operator in Python, "the output" what making it costs. Not a test; `python_check.py` is for GPUs.
"""

import time

import torch

import latent_moe as lm
import latent_moe.torch as lmt

BURST, BURSTS = 100, 300


def least_us(calls):
    """Of each call; bursts of all of them in turn."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(BURSTS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / BURST * 1e6)
    return least


def main():
    torch.set_num_threads(1)
    width = 64
    context = lm.Context(lm.Shape(width, width), lm.single_rank(), lm.Options(backend="cpu", cpu_threads=1))
    layer = context.add_layer(0, torch.zeros(width, width, dtype=torch.bfloat16), torch.ones(width, dtype=torch.bfloat16))
    context.seal()
    routed, shared, prefix, out = (torch.zeros(0, width, dtype=torch.bfloat16) for _ in range(4))
    number = lmt.handle(layer)
    module = lmt.LatentTail(layer)
    library = torch.library.Library("latent_moe_host_time", "DEF")
    library.define("nothing(Tensor routed, Tensor? shared, Tensor? prefix, Tensor(a!) out, int layer) -> ()")
    library.impl("nothing", lambda *_: None, "CPU")
    ops = torch.ops.latent_moe
    calls = {
        "Layer.run into an output": lambda: layer.run(routed, shared, prefix, out),
        "Layer.run": lambda: layer.run(routed, shared, prefix),
        "torch.ops.latent_moe.tail_out": lambda: ops.tail_out(routed, shared, prefix, out, number),
        "torch.ops.latent_moe.tail": lambda: ops.tail(routed, shared, prefix, number),
        "LatentTail": lambda: module(routed, shared, prefix),
        "an operator that does nothing": lambda: torch.ops.latent_moe_host_time.nothing(routed, shared, prefix, out, number),
        "the output": lambda: routed.new_empty((0, width)),
    }
    with torch.inference_mode():
        for name, us in least_us(calls).items():
            print(f"{name:<32}{us:6.2f} us")


if __name__ == "__main__":
    main()
