"""PyTorch on GPUs: the operators against the eager chain, captured and replayed, and what a call costs the host.

    torchrun --nproc-per-node 2 tests/gpu/python_check.py            # one rank a GPU, over NCCL
    torchrun --nproc-per-node 2 tests/gpu/python_check.py --cpu      # what can be seen without: parity over gloo

Exits 1 if anything is wrong. Not part of CTest: it needs GPUs and PyTorch.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import latent_moe as lm
import latent_moe.torch as lmt


class Check:
    def __init__(self, arguments):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu") if arguments.cpu else torch.device("cuda", torch.cuda.current_device())
        self.shape = lm.Shape(arguments.hidden, arguments.latent)
        self.failed = 0
        options = lm.Options(
            backend="cpu" if arguments.cpu else "auto", max_tokens=512, deferred_finalize=True, keep_whole_weights=True
        )
        self.weights = self.draw(0, self.shape.hidden, self.shape.latent) * self.shape.latent**-0.5
        self.gamma = 1 + 0.1 * self.draw(1, 1, self.shape.latent)[0]
        self.context = lm.Context(self.shape, lmt.process_group_ranks(), options)
        self.layers = [self.context.add_layer(number, self.weights, self.gamma) for number in range(3)]
        self.context.seal()
        self.handles = [lmt.handle(layer) for layer in self.layers]

    def draw(self, seed, *shape):
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device).to(torch.bfloat16)

    def inputs(self, tokens, seed=0):
        own = 100 * (seed + 1) + self.rank
        shape = self.shape
        return (
            self.draw(own, tokens, shape.latent),
            self.draw(own + 50, tokens, shape.hidden),
            self.draw(2, tokens, shape.hidden),
        )

    def summed(self, partial, dtype):
        parts = [torch.empty_like(partial) for _ in range(self.world)]
        dist.all_gather(parts, partial)
        total = torch.zeros_like(partial, dtype=dtype)
        for part in parts:  # in rank order, as the chain is defined
            total += part.to(dtype)
        return total

    def chain(self, routed, shared, prefix):
        x = self.summed(routed, torch.float32).to(torch.bfloat16).float()
        y = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.gamma.float()).to(torch.bfloat16)
        return self.summed(shared, torch.float32).to(torch.bfloat16) + y @ self.weights.T + prefix

    def reference(self, routed, shared, prefix):
        x = self.summed(routed, torch.float64)
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.gamma.double()
        return self.summed(shared, torch.float64) + y @ self.weights.double().T + prefix.double()

    def expect(self, right, what):
        verdict = torch.tensor([0 if right else 1], device=self.device)
        dist.all_reduce(verdict)
        if verdict.item():
            self.failed += 1
        if self.rank == 0:
            print(f"{'FAIL' if verdict.item() else 'ok  '} {what}", flush=True)

    def parity(self, tokens):
        arguments = self.inputs(tokens)
        reference = self.reference(*arguments)

        def error(out):
            return ((out.double() - reference).norm() / reference.norm()).item()

        out = torch.ops.latent_moe.tail(*arguments, self.handles[0])
        chain = error(self.chain(*arguments))
        parts = [torch.empty_like(out) for _ in range(self.world)]
        dist.all_gather(parts, out)
        tail = self.context.plan(tokens).tail
        self.expect(error(out) <= 1.05 * chain, f"{tokens} tokens through {tail}: {error(out):.3e}, the chain's {chain:.3e}")
        self.expect(all(torch.equal(out, part) for part in parts), f"{tokens} tokens: the same bits on every rank")

    def uncombined(self, tokens, slots=16):
        _, shared, prefix = self.inputs(tokens)
        rows = self.draw(500 + self.rank, tokens * slots, self.shape.latent + 8)
        weights = torch.rand(tokens, slots, device=self.device) / slots
        row_map = torch.randperm(tokens * slots, device=self.device).to(torch.int32).view(tokens, slots).contiguous()
        row_map[:, 3] = -1
        combined = torch.zeros(tokens, self.shape.latent, device=self.device)
        for slot in range(slots):
            taken = rows[row_map[:, slot].clamp(min=0).long(), : self.shape.latent].float()
            combined += torch.where(
                row_map[:, slot : slot + 1] < 0, torch.zeros_like(taken), weights[:, slot : slot + 1] * taken
            )
        expected = torch.ops.latent_moe.tail(combined.to(torch.bfloat16), shared, prefix, self.handles[0])
        out = torch.ops.latent_moe.tail_deferred(rows, weights, row_map, shared, prefix, self.handles[0])
        self.expect(torch.equal(out, expected), f"{tokens} tokens of {slots} un-combined rows: the bits of combined ones")

    def replayed(self, tokens):
        static = [each.clone() for each in self.inputs(tokens)]

        def step():
            x = static[2]
            for number in self.handles:
                x = torch.ops.latent_moe.tail(static[0], static[1], x, number)
            return x

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        right = True
        for seed in range(20):
            for to, new in zip(static, self.inputs(tokens, seed), strict=True):
                to.copy_(new)
            graph.replay()
            replayed = out.clone()
            right = right and torch.equal(replayed, step())
        self.expect(right, f"{tokens} tokens: three tails captured once, replayed 20 times")

    def host_time(self, tokens):
        arguments = self.inputs(tokens)
        out = torch.empty_like(arguments[1])
        calls = {
            "torch.ops.latent_moe.tail": lambda: torch.ops.latent_moe.tail(*arguments, self.handles[0]),
            "torch.ops.latent_moe.tail_out": lambda: torch.ops.latent_moe.tail_out(*arguments, out, self.handles[0]),
            "Layer.run": lambda: self.layers[0].run(*arguments, out),
        }
        for name, call in calls.items():
            best = float("inf")
            for _ in range(20):
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    call()
                best = min(best, (time.perf_counter() - start) / 20 * 1e6)
            if self.rank == 0:
                print(f"     host time of {name}: {best:.1f} us a call at {tokens} tokens", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--latent", type=int, default=3584)
    parser.add_argument("--tokens", default="1,8,64,300")
    arguments = parser.parse_args()
    if not arguments.cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if arguments.cpu else "nccl")
    check = Check(arguments)
    tokens = [int(each) for each in arguments.tokens.split(",")]
    for count in tokens:
        check.parity(count)
    for count in tokens:
        check.uncombined(count)
    if not arguments.cpu:
        for count in tokens:
            check.replayed(count)
        check.host_time(8)
    del check.layers, check.context
    dist.destroy_process_group()
    return 1 if check.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
