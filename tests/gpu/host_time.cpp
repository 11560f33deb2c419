// What a call outside of a graph costs the host: how long `Layer::run` takes to enqueue a tail, and beside it how long one
// launch of an empty kernel takes. Ranks are threads of this process, one GPU each or several on one; they enqueue in turn,
// as processes do, which have no driver lock in common, and at once. Not a pass or a fail: it prints microseconds.
//
//     host_time [ranks=1,2] [tokens=1,8,64]
//
// `host_time_stub` is the same over a runtime that launches nothing (stub/): what is left is this library's own part. It
// also prints what a call asks of the runtime beside launches, and fails if a call allocates.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "gpu/kernels/kernels.h"
#include "gpu/runtime/resources.h"
#include "latent_moe/latent_moe.h"
#include "ranks.h"
#ifdef LATENT_MOE_STUB_RUNTIME
#include "stub/counts.h"
#endif

using namespace latent_moe;
using gpu::check;
using test::devices;
using test::meet;

namespace {

constexpr int burst = 20;   // calls that are enqueued in a row: no queue is full
constexpr int bursts = 50;  // the median counts

std::vector<std::int64_t> numbers(const std::string& text) {
    std::vector<std::int64_t> found;
    for (const char* at = text.c_str(); *at != '\0'; at += *at == ',')
        found.push_back(std::strtol(at, const_cast<char**>(&at), 10));
    return found;
}

/// Of one call on rank 0.
template <typename Call>
double median_us(const Bootstrap& boot, cudaStream_t stream, bool in_turn, Call call) {
    std::vector<double> times;
    for (int each = 0; each < bursts; ++each) {
        check(cudaStreamSynchronize(stream), "calls");
        meet(boot);
        for (int turn = 0; turn < (in_turn ? boot.world : 1); ++turn) {
            if (!in_turn || turn == boot.rank) {
                const auto begin = std::chrono::steady_clock::now();
                for (int each_call = 0; each_call < burst; ++each_call) call();
                const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
                times.push_back(took.count() / burst);
            }
            if (in_turn) meet(boot);
        }
    }
    check(cudaStreamSynchronize(stream), "calls");
    meet(boot);
    std::ranges::sort(times);
    return times[bursts / 2];
}

void measure(const Bootstrap& boot, const std::vector<std::int64_t>& tokens) {
    const gpu::CurrentDevice device(boot.rank % devices());
    const Shape shape = *shape_preset("kimi-k3");
    const std::int64_t most = *std::ranges::max_element(tokens);
    Context context = Context::create(
        shape, boot, {.backend = "cuda", .max_tokens = std::max<std::int64_t>(most, 64), .keep_whole_weights = true});
    const gpu::DeviceMemory weights(static_cast<std::size_t>(shape.hidden * shape.latent) * 2, "W_up");
    const gpu::DeviceMemory gamma(static_cast<std::size_t>(shape.latent) * 2, "gamma");
    check(cudaMemset(weights.get(), 0, weights.bytes()), "cudaMemset");
    check(cudaMemset(gamma.get(), 0, gamma.bytes()), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
    const Layer layer = context.add_layer(0, {.data = weights.get(), .rows = shape.hidden}, gamma.get());
    context.seal();
    const gpu::Stream stream = gpu::make_stream();
    const auto rows = static_cast<std::size_t>(most);
    const gpu::DeviceMemory routed(rows * static_cast<std::size_t>(shape.latent) * 2, "inputs");
    const gpu::DeviceMemory shared(rows * static_cast<std::size_t>(shape.hidden) * 2, "inputs");
    const gpu::DeviceMemory out(rows * static_cast<std::size_t>(shape.hidden) * 2, "outputs");
    for (const gpu::DeviceMemory* memory : {&routed, &shared})
        check(cudaMemsetAsync(memory->get(), 0, memory->bytes(), stream.get()), "cudaMemset");
    const double launch = median_us(boot, stream.get(), true,
                                    [&] { check(gpu::zero_rows({out.get()}, 1, 8, Dtype::bf16, stream.get()), "kernel"); });
    if (boot.rank == 0) fmt::print("host time of one small kernel's launch, TP {}: {:.2f} us\n", boot.world, launch);
    const auto measured = [&](const char* what, std::int64_t count, const auto& call) {
        const auto run = [&] {
            const Status status =
                call(TailInput{.routed = {routed.get()}, .shared = {shared.get()}, .tokens = count}, Rows{out.get()});
            if (!status.ok()) throw Error(status.code(), status.message());
        };
#ifdef LATENT_MOE_STUB_RUNTIME
        run();  // what a first call sets up is not counted
        const test::Counts before = test::counts();
        run();
        const test::Counts after = test::counts();
        const std::string asked =
            fmt::format(", {} launches, {} other calls of the runtime, {} allocations", after.launches - before.launches,
                        after.others - before.others, after.allocations - before.allocations);
        if (after.allocations != before.allocations)
            throw Error(StatusCode::internal, fmt::format("a call of {} allocates{}", what, asked));
#else
        const std::string asked;
#endif
        const double in_turn = median_us(boot, stream.get(), true, run);
        const double at_once = boot.world == 1 ? in_turn : median_us(boot, stream.get(), false, run);
        if (boot.rank != 0) return;
        fmt::print("host time of Layer::run, TP {}, {} tokens, {:<16} {:5.2f} us a call in turn, {:5.2f} at once{}\n",
                   boot.world, count, what, in_turn, at_once, asked);
        std::fflush(stdout);
    };
    for (const std::int64_t count : tokens) {
        const Plan plan = context.plan(count);
        for (const Candidate& candidate : plan.candidates) {
            measured(name(candidate.tail), count,
                     [&](const TailInput& input, Rows to) { return layer.run(candidate.tail, input, to, stream.get()); });
        }
        measured(plan.from_table ? "chosen by table" : "chosen by model", count,
                 [&](const TailInput& input, Rows to) { return layer.run(input, to, stream.get()); });
    }
}

}  // namespace

int main(int argc, char** argv) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // streams of ranks that share a GPU must not queue behind each other
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        fmt::print(stderr, "host_time: no GPU here: {}\n", cudaGetErrorString(error));
        return 3;
    }
    std::vector<std::int64_t> worlds = {1, 2};
    std::vector<std::int64_t> tokens = {1, 8, 64};
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.starts_with("ranks=")) worlds = numbers(argument.substr(6));
        if (argument.starts_with("tokens=")) tokens = numbers(argument.substr(7));
    }
    for (const std::int64_t world : worlds) {
        try {
            run_thread_ranks(
                static_cast<int>(world), [&](const Bootstrap& boot) { measure(boot, tokens); }, 20'000);
        } catch (const std::exception& error) {
            fmt::print(stderr, "host_time: {}\n", error.what());
            return 1;
        }
    }
    return 0;
}
