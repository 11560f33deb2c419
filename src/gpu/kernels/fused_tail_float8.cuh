// The fused tail's product with e4m3 weights: half the bytes from memory, widened on their way into the tensor cores.
//
//     ring of weights ── a warp's 16 rows of a block, 32 bytes a lane ──▶ registers ── widened to bf16, exactly ──▶
//     mma.sync × the tokens in shared memory ──▶ sums in float32, in the order of K
//
// A warp works for itself: with weights in registers wgmma's waits between writing and multiplying them cost more than they
// gave (a block took 500 clocks). The first block is in registers before the tokens are there; a place of the ring is free
// as soon as it has been read.
#pragma once

#include "gpu/kernels/fused_tail_params.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/fused_tail_weights.cuh"
#include "gpu/kernels/packed_float8.h"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/mma.h"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// A word of four e4m3 (packed_float8.h) as two pairs of bf16: row n's, and row n + 8's. Exact but for NaN.
LATENT_MOE_DEVICE void widen_float8(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    // With their exponent's bits in place they are 2^-120 of what they should be; so are subnormal numbers.
    constexpr std::uint32_t two_to_120 = 0x7b807b80;
    const std::uint32_t a = word & 0x87f087f0;
    const std::uint32_t b = (word << 4 & 0x80f080f0) | (word >> 4 & 0x07000700);
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(low) : "r"(a), "r"(two_to_120));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(high) : "r"(b), "r"(two_to_120));
}

/// Four matrices of 8 rows × 16 bytes: lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix 4
/// bytes of row l / 4.
LATENT_MOE_DEVICE void load_matrices(std::uint32_t (&v)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
}

/// See `Math::multiply`.
template <class Math>
LATENT_MOE_DEVICE void multiply_float8(const Math& math, bool first_time, typename Math::Progress& at,
                                       float (&sum)[Math::Tile::tokens / 2]) {
    using Tile = typename Math::Tile;
    static_assert(!Tile::pooled, "with more tokens there is nothing to gain: weights are not what they wait for");
    constexpr int steps = 4, groups = Tile::tokens / 8;  // of a block: 16 columns each; of tokens
    const auto& cta = math.cta;
    const Params& p = math.p;
    const int lane = math.thread % 32;
    const int total = cta.turns() * cta.blocks;
    const std::uint32_t weights = cta.ring(0) + math.warp * PackedFloat8Layout::fragment_bytes + lane * 16;
    const std::uint32_t tokens = cta.memory + p.at.tokens + lane % 8 * PackedLayout::row_bytes;
    const int blocks_of_pass = static_cast<int>(static_cast<unsigned>(p.gather_columns) / 8);
    int next_pass = 0, barrier = tokens_ready;
    float acc[Tile::chains][groups][4] = {};

    std::uint32_t words[8];  // of the next block
    const auto load = [&] {
        wait_locally(cta.bar(Barriers::full, at.place), at.round & 1);
        stamp<Tile>(p, last_weights, math.thread == 0);
        const std::uint32_t from = weights + at.place * Tile::weight_bytes;
        const auto a = load_shared<uint4>(from), b = load_shared<uint4>(from + PackedFloat8Layout::half_bytes);
        words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
        words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
        if (at.index < total - p.ring) {  // somebody waits for its place
            __syncwarp();
            if (lane == 0) mbarrier::arrive(cta.bar(Barriers::empty, at.place));
        }
        ++at.index;
        if (++at.place == p.ring) at.place = 0, ++at.round;
    };

    load();
#pragma unroll 1
    for (int block = 0; block < cta.blocks; ++block) {
        if (first_time && block == next_pass) {
            sync_threads_of(barrier++, Math::threads + Tile::gather_threads);
            next_pass += blocks_of_pass;
        }
        std::uint32_t b[groups][2][4];  // [two steps][their 16-byte units]
#pragma unroll
        for (int g = 0; g < groups; ++g) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int unit = (4 * half + lane / 8) ^ lane % 8;
                load_matrices(b[g][half], tokens + block * Tile::token_bytes + g * 8 * PackedLayout::row_bytes + unit * 16);
            }
        }
        std::uint32_t a[2 * 8];
#pragma unroll
        for (int i = 0; i < 8; ++i) widen_float8(words[i], a[2 * i], a[2 * i + 1]);
#pragma unroll
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int g = 0; g < groups; ++g) {
                const auto& of_half = b[g][step / 2];
                mma_16x8x16<Dtype::bf16>(acc[step % Tile::chains][g], a[4 * step], a[4 * step + 1], a[4 * step + 2],
                                         a[4 * step + 3], of_half[step % 2 * 2], of_half[step % 2 * 2 + 1]);
            }
        }
        if (block + 1 < cta.blocks) load();
    }
#pragma unroll
    for (int i = 0; i < Tile::tokens / 2; ++i) {
        const auto chain = [&](int c) { return acc[c][i / 4][i % 4]; };
        sum[i] = chain(0);
        if constexpr (Tile::chains == 2) sum[i] += chain(1);
        if constexpr (Tile::chains == 4) sum[i] = (chain(0) + chain(1)) + (chain(2) + chain(3));
    }
}

#endif

}  // namespace latent_moe::gpu::fused
