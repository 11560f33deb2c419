#include "gpu/kernels/producer.h"

#include <cstdint>

namespace latent_moe::gpu {
namespace {

constexpr int threads = 1024;
constexpr int ctas_per_multiprocessor = 2;

struct Pieces {
    Produced piece[most_produced];
    int count;
};

__global__ void __launch_bounds__(threads) write_all(const __grid_constant__ Pieces p) {
    const std::size_t first = std::size_t{blockIdx.x} * threads + threadIdx.x, step = std::size_t{gridDim.x} * threads;
    for (int i = 0; i < p.count; ++i) {
        const Produced& piece = p.piece[i];
        const std::size_t units = piece.bytes / 16;
        for (std::size_t at = first; at < units; at += step)
            static_cast<uint4*>(piece.to)[at] = static_cast<const uint4*>(piece.from)[at];
        const std::size_t rest = units * 16 + first;
        if (rest < piece.bytes) static_cast<char*>(piece.to)[rest] = static_cast<const char*>(piece.from)[rest];
    }
}

}  // namespace

cudaError_t produce(const Produced* pieces, int count, int multiprocessors, cudaStream_t stream) {
    if (count < 0 || count > most_produced || multiprocessors < 1) return cudaErrorInvalidValue;
    Pieces p{.piece = {}, .count = count};
    for (int i = 0; i < count; ++i) {
        p.piece[i] = pieces[i];
        if ((reinterpret_cast<std::uintptr_t>(pieces[i].to) | reinterpret_cast<std::uintptr_t>(pieces[i].from)) % 16 != 0) {
            return cudaErrorInvalidValue;
        }
    }
    write_all<<<multiprocessors * ctas_per_multiprocessor, threads, 0, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace latent_moe::gpu
