"""PyTorch on GPUs: the operators against the eager chain, captured and replayed, and what a call costs the host.

    python tests/gpu/python_check.py --threads 2                     # ranks are threads, which share what GPUs there are
    torchrun --nproc-per-node 2 tests/gpu/python_check.py            # one rank a GPU, over NCCL
    torchrun --nproc-per-node 2 tests/gpu/python_check.py --cpu      # what can be seen without: parity over gloo

Exits 1 if anything is wrong. Not part of CTest: it needs GPUs and PyTorch.
"""

import argparse
import os
import threading
import time

# Streams of ranks that share a GPU must not queue behind each other, nor may a kernel be loaded while a peer waits.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
import torch.distributed as dist

import latent_moe as lm
import latent_moe.torch as lmt


class Group:
    """The ranks of torch.distributed's default group, which are processes and enqueue at once."""

    turns = 1

    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.bootstrap = lmt.process_group_ranks()

    def all_gather(self, part):
        parts = [torch.empty_like(part) for _ in range(self.world)]
        dist.all_gather(parts, part)
        return parts

    def meet(self):
        dist.barrier()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def take_turns(self):
        """Ranks that are processes do not wait for one another's interpreter."""


class Threads:
    """Ranks that are threads of this process and may share a GPU. Those that run ahead must not make the driver wait for
    the device while another rank's kernel waits for a launch, so ranks meet with nothing under way."""

    barrier = None
    parts = None

    def __init__(self, bootstrap):
        self.rank, self.world, self.bootstrap = bootstrap.rank, bootstrap.world, bootstrap
        self.turns = self.world

    def all_gather(self, part):
        self.parts[self.rank] = part
        self.meet()
        parts = [each.clone() for each in self.parts]
        self.meet()
        return parts

    def meet(self):
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.barrier.wait(60)

    def take_turns(self):
        self.barrier.wait(60)


class Check:
    def __init__(self, arguments, group):
        self.group, self.rank, self.world = group, group.rank, group.world
        self.device = torch.device("cpu") if arguments.cpu else torch.device("cuda", torch.cuda.current_device())
        self.shape = lm.Shape(arguments.hidden, arguments.latent)
        self.failed = 0
        options = lm.Options(
            backend="cpu" if arguments.cpu else "auto", max_tokens=512, deferred_finalize=True, keep_whole_weights=True
        )
        self.weights = self.draw(0, self.shape.hidden, self.shape.latent) * self.shape.latent**-0.5
        self.gamma = 1 + 0.1 * self.draw(1, 1, self.shape.latent)[0]
        self.context = lm.Context(self.shape, group.bootstrap, options)
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
        total = torch.zeros_like(partial, dtype=dtype)
        for part in self.group.all_gather(partial):  # in rank order, as the chain is defined
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
        wrong = sum(each.item() for each in self.group.all_gather(torch.tensor([0 if right else 1], device=self.device)))
        self.failed += 1 if wrong else 0
        if self.rank == 0:
            print(f"{'FAIL' if wrong else 'ok  '} {what}", flush=True)

    def together(self, calls):
        """What `calls` returns, which are tails alone: every rank makes them with nothing else under way."""
        self.group.meet()
        out = calls()
        self.group.meet()
        return out

    def parity(self, tokens):
        arguments = self.inputs(tokens)
        reference = self.reference(*arguments)

        def error(out):
            return ((out.double() - reference).norm() / reference.norm()).item()

        out = self.together(lambda: torch.ops.latent_moe.tail(*arguments, self.handles[0]))
        chain = error(self.chain(*arguments))
        parts = self.group.all_gather(out)
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
        combined = combined.to(torch.bfloat16)
        expected = self.together(lambda: torch.ops.latent_moe.tail(combined, shared, prefix, self.handles[0]))
        out = self.together(
            lambda: torch.ops.latent_moe.tail_deferred(rows, weights, row_map, shared, prefix, self.handles[0])
        )
        self.expect(torch.equal(out, expected), f"{tokens} tokens of {slots} un-combined rows: the bits of combined ones")

    def halves(self, tokens):
        routed, shared, prefix = self.inputs(tokens)
        out = self.together(lambda: self.layers[0].begin(shared).finish(routed, prefix))
        possible = {each.tail for each in self.context.plan(tokens).candidates}
        tails = possible & {"replicated", "column_parallel", "token_parallel"}
        whole = [
            self.together(lambda tail=tail: self.layers[0].run(routed, shared, prefix, tail=tail)) for tail in sorted(tails)
        ]
        self.expect(any(torch.equal(out, each) for each in whole), f"{tokens} tokens in halves: the bits of the whole call")

    def replayed(self, tokens):
        static = [each.clone() for each in self.inputs(tokens)]

        def step():
            x = static[2]
            for number in self.handles:
                x = torch.ops.latent_moe.tail(static[0], static[1], x, number)
            return x

        self.together(step)  # what a first call sets up is not for a capture
        graph = torch.cuda.CUDAGraph()
        for turn in range(self.world):  # a capture waits for the whole device first
            if turn == self.rank:
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    out = step()
            self.group.meet()
        right = True
        for seed in range(20):
            for to, new in zip(static, self.inputs(tokens, seed), strict=True):
                to.copy_(new)
            self.together(graph.replay)
            replayed = out.clone()
            right = right and torch.equal(replayed, self.together(step))
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
                self.group.meet()
                for turn in range(self.group.turns):  # threads would wait for each other's GIL
                    if turn == self.rank % self.group.turns:
                        start = time.perf_counter()
                        for _ in range(20):
                            call()
                        best = min(best, (time.perf_counter() - start) / 20 * 1e6)
                    self.group.take_turns()
            if self.rank == 0:
                print(f"     host time of {name}: {best:.1f} us a call at {tokens} tokens", flush=True)


def check_rank(arguments, group):
    """How many checks failed."""
    check = Check(arguments, group)
    tokens = [int(each) for each in arguments.tokens.split(",")]
    for count in tokens:
        check.parity(count)
    for count in tokens:
        check.uncombined(count)
        check.halves(count)
    if not arguments.cpu:
        for count in tokens:
            check.replayed(count)
        check.host_time(8)
    group.meet()
    return check.failed


def check_thread(arguments, bootstrap):
    if arguments.cpu:
        return check_rank(arguments, Threads(bootstrap))
    torch.cuda.set_device(bootstrap.rank % torch.cuda.device_count())
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        return check_rank(arguments, Threads(bootstrap))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--latent", type=int, default=3584)
    parser.add_argument("--tokens", default="1,8,64,300")
    arguments = parser.parse_args()
    if arguments.threads:
        Threads.barrier = threading.Barrier(arguments.threads)
        Threads.parts = [None] * arguments.threads
        return 1 if any(lm.run_thread_ranks(arguments.threads, lambda ranks: check_thread(arguments, ranks))) else 0
    if not arguments.cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if arguments.cpu else "nccl")
    failed = check_rank(arguments, Group())
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
