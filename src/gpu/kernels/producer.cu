// The kernel before a tail, as `bench` needs it: busy everywhere, then writes the tail's inputs. It talks to nobody.
//
//     every multiprocessor:  ├ trigger (if early) ├ busy for so many clocks ├ copy its part of every piece ┤
//
// It is an ordinary launch: it begins when what is in front of it has ended, so it may overwrite what that has read.
#include <cstdint>

#include "gpu/kernels/producer.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

constexpr int full_threads = 1024;
constexpr int full_ctas = 2;  ///< a multiprocessor: all the threads it has
constexpr int small_threads = 128;

template <int threads, int least_ctas>
__global__ void __launch_bounds__(threads, least_ctas) write_all(const __grid_constant__ Produce p) {
    const long long begin = clock64();
    if (p.triggers_early) release_dependents();
    while (clock64() - begin < p.least_clocks) {}
    const std::size_t first = std::size_t{blockIdx.x} * threads + threadIdx.x, step = std::size_t{gridDim.x} * threads;
    for (int i = 0; i < p.count; ++i) {
        const Produced& piece = p.pieces[i];
        const std::size_t units = piece.bytes / 16;
        for (std::size_t at = first; at < units; at += step)
            static_cast<uint4*>(piece.to)[at] = static_cast<const uint4*>(piece.from)[at];
        const std::size_t rest = units * 16 + first;
        if (rest < piece.bytes) static_cast<char*>(piece.to)[rest] = static_cast<const char*>(piece.from)[rest];
    }
}

// The small one keeps to 32 registers a thread, so that a large kernel finds registers too.
constexpr auto fill_device = write_all<full_threads, full_ctas>;
constexpr auto leave_room = write_all<small_threads, 16>;

}  // namespace

cudaError_t prepare_producers() {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(leave_room), cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
}

cudaError_t produce(const Produce& op, cudaStream_t stream) {
    if (op.count < 0 || op.count > most_produced || op.multiprocessors < 1) return cudaErrorInvalidValue;
    for (int i = 0; i < op.count; ++i) {
        const Produced& piece = op.pieces[i];
        if ((reinterpret_cast<std::uintptr_t>(piece.to) | reinterpret_cast<std::uintptr_t>(piece.from)) % 16 != 0)
            return cudaErrorInvalidValue;
    }
    return op.leaves_room
               ? launch({.grid = op.multiprocessors, .block = small_threads, .stream = stream}, leave_room, op)
               : launch({.grid = op.multiprocessors * full_ctas, .block = full_threads, .stream = stream}, fill_device, op);
}

}  // namespace latent_moe::gpu
