// The row all-reduce at a size that threads of this machine can play: its kernels, what ranks add, and what must come out.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/kernels/all_reduce.cuh"
#include "gpu/protocol/emulated_gpu.h"

namespace latent_moe::gpu::small {

inline constexpr unsigned threads = 64;  // of a CTA: two waves of 32, or one of 64
inline constexpr unsigned most_ctas = 3;
inline constexpr std::uint32_t capacity = 12, row_units = 5;
inline constexpr std::uint64_t minutes = 60'000'000'000;
using U = Unit<Dtype::bf16>;

struct Config {
    int world;
    int stages;
};
inline std::string name_of(const testing::TestParamInfo<Config>& info) {
    return "tp" + std::to_string(info.param.world) + (info.param.stages == 1 ? "_in_one_stage" : "_in_two_stages");
}
inline void PrintTo(const Config& c, std::ostream* out) {
    *out << c.world << " ranks, " << c.stages << (c.stages == 1 ? " stage" : " stages");
}

inline std::uint32_t units_of_slot(const Config& c) {
    const auto peers = static_cast<std::uint32_t>(c.world - 1), world = peers + 1, units = capacity * row_units;
    return c.stages == 1 ? peers * units : 2 * peers * ((units + world - 1) / world);
}

inline void all_reduce(const Config& c, const reduction::Params& p) {
    switch (c.world) {
        case 2:
            return c.stages == 1 ? reduction::one_stage<Dtype::bf16, 2, threads>(p)
                                 : reduction::two_stage<Dtype::bf16, 2, threads>(p);
        case 3:
        case 4:
            return c.stages == 1 ? reduction::one_stage<Dtype::bf16, 4, threads>(p)
                                 : reduction::two_stage<Dtype::bf16, 4, threads>(p);
        default:
            return c.stages == 1 ? reduction::one_stage<Dtype::bf16, 8, threads>(p)
                                 : reduction::two_stage<Dtype::bf16, 8, threads>(p);
    }
}

/// What rank r adds in a call: any bits, -0.0 and subnormals among them, but no NaN, whose bits may differ.
inline std::uint32_t summand(int rank, std::uint32_t call, std::uint32_t word) {
    std::uint32_t bits = (call * 7919 + static_cast<std::uint32_t>(rank) * 104729 + word * 15485863) * 0x9e3779b1u;
    bits ^= bits >> 15;
    if (bits % 11 == 0) return 0x80008000;  // the sentinel itself
    return bits & 0xbfffbfff;               // finite, below 2
}
inline uint4 summand_unit(int rank, std::uint32_t call, std::uint32_t unit) {
    return {summand(rank, call, 4 * unit), summand(rank, call, 4 * unit + 1), summand(rank, call, 4 * unit + 2),
            summand(rank, call, 4 * unit + 3)};
}
inline uint4 plain_sum(int world, std::uint32_t call, std::uint32_t unit) {
    float sum[U::size] = {};
    for (int r = 0; r < world; ++r) {
        float term[U::size];
        U::unpack(summand_unit(r, call, unit), term);
        for (int e = 0; e < U::size; ++e) sum[e] += term[e];
    }
    for (float& e : sum) e += 0.0F;  // +0.0 for -0.0
    return U::pack(sum);
}

/// A rank's tensors, and how many units of y were not the plain sum.
struct Tensors {
    std::vector<uint4> x = std::vector<uint4>(capacity * row_units), y = x;
    std::atomic<int> wrong{0};
};

inline reduction::Params params(const Exchange& x, Tensors& t, std::uint32_t rows) {
    return {.exchange = x,
            .x = {reinterpret_cast<char*>(t.x.data()), row_units * 16},
            .y = {reinterpret_cast<char*>(t.y.data()), row_units * 16},
            .prefix = {},
            .tokens = rows,
            .row_units = row_units,
            .units = rows * row_units,
            .release = true};
}

inline unsigned ctas_for(std::uint32_t rows) {
    return std::min(most_ctas, 1 + (rows * row_units + threads - 1) / threads);
}

template <class Body>
inline void for_own_units(std::uint32_t units, Body body) {
    for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) body(i);
}

inline emulated::Windows windows_for(const Config& c) {
    const std::int64_t slot_bytes = (units_of_slot(c) * 16 + 127) / 128 * 128;
    return {c.world, slot_bytes, window_bytes(slot_bytes), U::sentinel().x};
}
inline bool same_bits(uint4 a, uint4 b) {
    return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w;
}

}  // namespace latent_moe::gpu::small
