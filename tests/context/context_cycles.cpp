// Contexts come and go; what the process holds stays. In every cycle all ranks, which are threads, create a context, add a
// layer, seal, call every tail, record and replay one call, suspend, resume, call again and destroy the context.
//
//     context_cycles [cycles=1000] [ranks=2] [backend=cpu|cuda|hip]
//
// Prints a line every tenth of the way. Exit status 1: a call failed, results differ between cycles, or the process holds
// more memory, on a GPU too, files or threads at the end than after the first tenth.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "context/backends.h"
#include "core/digest.h"
#include "support/device_rows.h"
#include "support/problem.h"

using namespace latent_moe;

namespace {

/// More than an allocator's caches come and go by; a leak of one small block a cycle is more.
constexpr std::size_t spread_bytes = std::size_t{4} << 20;

struct Holdings {
    std::size_t bytes = 0;
    std::size_t on_gpus = 0;
    std::size_t files = 0;
    std::size_t threads = 0;
};

Holdings holdings(std::size_t on_gpus) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    const auto entries = [](const char* folder) {
        return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
    };
    return {pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), on_gpus, entries("/proc/self/fd"),
            entries("/proc/self/task")};
}

void require(const Status& status) {
    if (!status.ok()) throw Error(status.code(), status.message());
}

/// One rank's cycle; the digest of all that came out. `on_gpu`: bytes in use before it.
std::uint64_t cycle(const test::Problem& problem, const std::string& backend, const Bootstrap& boot, std::size_t& on_gpu) {
    Options options = problem.context_options();
    options.backend = backend;
    const std::unique_ptr<Device> device = find_backend(backend).make_device(boot, options);
    on_gpu = device->used_bytes();
    Context context = Context::create(problem.shape, boot, options);
    const Layer layer = context.add_layer(7, problem.weight_view(), problem.gamma_data());
    context.seal();
    const auto rank = static_cast<std::size_t>(boot.rank);
    const test::DeviceRows routed(*device, problem.routed[rank]);
    const test::DeviceRows shared(*device, problem.shared[rank]);
    test::DeviceRows out(*device, problem.output());
    const TailInput input{.routed = {routed.data()}, .shared = {shared.data()}, .tokens = problem.tokens};
    // Taking memory and making a graph may wait for the device, where a peer that is ahead would wait for this rank.
    const auto meet = [&] {
        char one = 0;
        std::vector<char> all(static_cast<std::size_t>(boot.world));
        boot.all_gather_bytes(&one, all.data(), 1);
    };
    meet();
    std::uint64_t digest = 0;
    const auto add_output = [&] {
        device->synchronize();
        const auto bytes = static_cast<std::int64_t>(out.download().size());
        digest = digest * 31 + digest_of({out.download().data(), 1, bytes / 2, bytes / 2, Dtype::bf16});
    };
    for (const Candidate& candidate : context.plan(problem.tokens).candidates) {
        require(layer.run(candidate.tail, input, {out.data()}, device->stream()));
        add_output();
    }
    {
        const std::unique_ptr<Recording> recording =
            device->record([&] { require(layer.run(input, {out.data()}, device->stream())); });
        meet();
        recording->replay();
        add_output();
        meet();
    }
    context.suspend();
    context.resume();
    require(layer.run(input, {out.data()}, device->stream()));
    add_output();
    return digest;
}

}  // namespace

int main(int argc, char** argv) {
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    int cycles = 1000;
    int ranks = 2;
    std::string backend = "cpu";
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.starts_with("cycles=")) cycles = std::max(10, std::atoi(argument.c_str() + 7));
        if (argument.starts_with("ranks=")) ranks = std::atoi(argument.c_str() + 6);
        if (argument.starts_with("backend=")) backend = argument.substr(8);
    }
    const test::Problem problem(ranks, 6, {.hidden = 960, .latent = 128, .prefix = false});
    Holdings first;
    std::uint64_t expected = 0;
    try {
        for (int each = 1; each <= cycles; ++each) {
            std::mutex mutex;
            std::uint64_t found = 0;
            std::size_t on_gpus = 0;
            run_thread_ranks(ranks, [&](const Bootstrap& boot) {
                std::size_t on_gpu = 0;
                const std::uint64_t digest = cycle(problem, backend, boot, on_gpu);
                const std::lock_guard lock(mutex);
                found += digest;
                on_gpus = std::max(on_gpus, on_gpu);
            });
            if (each == 1) expected = found;
            if (found != expected)
                throw Error(StatusCode::internal, fmt::format("cycle {}: other results than in the first", each));
            if (each % (cycles / 10) != 0) continue;
            const Holdings now = holdings(on_gpus);
            fmt::print("{} cycles: {:.1f} MB resident, {:.1f} MB on a GPU, {} files, {} threads\n", each,
                       static_cast<double>(now.bytes) / 1e6, static_cast<double>(now.on_gpus) / 1e6, now.files, now.threads);
            std::fflush(stdout);
            if (each == cycles / 10) first = now;
            if (now.bytes > first.bytes + spread_bytes || now.on_gpus > first.on_gpus + spread_bytes ||
                now.files > first.files || now.threads > first.threads)
                throw Error(StatusCode::internal, "the process holds more than after the first tenth");
        }
    } catch (const std::exception& error) {
        fmt::print(stderr, "context_cycles: {}\n", error.what());
        return 1;
    }
    fmt::print("{} context cycles of {} ranks on {}: flat\n", cycles, ranks, backend);
    return 0;
}
