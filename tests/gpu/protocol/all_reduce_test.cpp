// The row all-reduce, its own source, with threads as ranks × CTAs × waves. Bits are compared with a plain sum.
#include <bit>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/kernels/all_reduce.cuh"
#include "gpu/protocol/emulated_gpu.h"

namespace latent_moe::gpu {
namespace {

constexpr unsigned threads = 64;  // of a CTA: two waves of 32, or one of 64
constexpr unsigned most_ctas = 3;
constexpr std::uint32_t capacity = 12, row_units = 5;
constexpr std::uint64_t minutes = 60'000'000'000;
using U = Unit<Dtype::bf16>;

struct Config {
    int world;
    int stages;
};
std::string name_of(const testing::TestParamInfo<Config>& info) {
    return "tp" + std::to_string(info.param.world) + (info.param.stages == 1 ? "_in_one_stage" : "_in_two_stages");
}

std::uint32_t units_of_slot(const Config& c) {
    const auto peers = static_cast<std::uint32_t>(c.world - 1), world = peers + 1, units = capacity * row_units;
    return c.stages == 1 ? peers * units : 2 * peers * ((units + world - 1) / world);
}

void all_reduce(const Config& c, const reduction::Params& p) {
    switch (c.world) {
        case 2: return c.stages == 1 ? reduction::one_stage<Dtype::bf16, 2, threads>(p)
                                     : reduction::two_stage<Dtype::bf16, 2, threads>(p);
        case 3:
        case 4: return c.stages == 1 ? reduction::one_stage<Dtype::bf16, 4, threads>(p)
                                     : reduction::two_stage<Dtype::bf16, 4, threads>(p);
        default: return c.stages == 1 ? reduction::one_stage<Dtype::bf16, 8, threads>(p)
                                      : reduction::two_stage<Dtype::bf16, 8, threads>(p);
    }
}

/// What rank r adds in a call: any bits, -0.0 and subnormals among them, but no NaN, whose bits may differ.
std::uint32_t summand(int rank, std::uint32_t call, std::uint32_t word) {
    std::uint32_t bits = (call * 7919 + static_cast<std::uint32_t>(rank) * 104729 + word * 15485863) * 0x9e3779b1u;
    bits ^= bits >> 15;
    if (bits % 11 == 0) return 0x80008000;  // the sentinel itself
    return bits & 0xbfffbfff;               // finite, below 2
}
uint4 summand_unit(int rank, std::uint32_t call, std::uint32_t unit) {
    return {summand(rank, call, 4 * unit), summand(rank, call, 4 * unit + 1), summand(rank, call, 4 * unit + 2),
            summand(rank, call, 4 * unit + 3)};
}
uint4 plain_sum(int world, std::uint32_t call, std::uint32_t unit) {
    float sum[U::size] = {};
    for (int r = 0; r < world; ++r) {
        float term[U::size];
        U::unpack(summand_unit(r, call, unit), term);
        for (int e = 0; e < U::size; ++e) sum[e] += term[e];
    }
    for (float& e : sum) e += 0.0F;  // +0.0 for -0.0
    return U::pack(sum);
}

/// Rows of each call: none, all, and anything between, in jumps.
std::vector<std::uint32_t> rows_of_calls(std::size_t calls) {
    std::mt19937 random(17);
    std::vector<std::uint32_t> rows(calls);
    for (std::uint32_t& r : rows) r = random() % 4 == 0 ? capacity : random() % (capacity + 1);
    return rows;
}

/// A rank's tensors, and how many units of y were not the plain sum.
struct Tensors {
    std::vector<uint4> x = std::vector<uint4>(capacity * row_units), y = x;
    std::atomic<int> wrong{0};
};

reduction::Params params(const Exchange& x, Tensors& t, std::uint32_t rows) {
    return {.exchange = x,
            .x = {reinterpret_cast<char*>(t.x.data()), row_units * 16},
            .y = {reinterpret_cast<char*>(t.y.data()), row_units * 16},
            .prefix = {},
            .tokens = rows,
            .row_units = row_units,
            .units = rows * row_units,
            .release = true};
}

unsigned ctas_for(std::uint32_t rows) {
    return std::min(most_ctas, 1 + (rows * row_units + threads - 1) / threads);
}

template <class Body>
void for_own_units(std::uint32_t units, Body body) {
    for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < units; i += gridDim.x * blockDim.x) body(i);
}

class AllReduceOnHostThreads : public testing::TestWithParam<Config> {};

TEST_P(AllReduceOnHostThreads, GivesThePlainSumWhileTheRowsShrinkAndGrow) {
    const Config c = GetParam();
    const std::vector<std::uint32_t> rows = rows_of_calls(300);
    emulated::Windows windows(c.world, units_of_slot(c) * 16 + 112, window_bytes(units_of_slot(c) * 16 + 112), 0x80008000);
    std::vector<Tensors> tensors(static_cast<std::size_t>(c.world));
    emulated::run(c.world, {most_ctas, threads}, [&](int rank, emulated::Stream& stream) {
        Tensors& t = tensors[static_cast<std::size_t>(rank)];
        const Exchange x = windows.exchange(rank, 10 * minutes);
        for (std::uint32_t call = 0; call < rows.size(); ++call) {
            const std::uint32_t units = rows[call] * row_units;
            stream.launch_in_order({2, threads}, [&] {  // a producer, which also looks at what the call before left
                const std::uint32_t before = call == 0 ? 0 : rows[call - 1] * row_units;
                for_own_units(before, [&](std::uint32_t i) {
                    if (std::bit_cast<std::array<char, 16>>(t.y[i]) !=
                        std::bit_cast<std::array<char, 16>>(plain_sum(c.world, call - 1, i))) {
                        ++t.wrong;
                    }
                });
                for_own_units(units, [&](std::uint32_t i) { t.x[i] = summand_unit(rank, call, i); });
            });
            stream.launch({ctas_for(rows[call]), threads}, [&] { all_reduce(c, params(x, t, rows[call])); });
        }
    });
    for (int r = 0; r < c.world; ++r) {
        EXPECT_EQ(tensors[static_cast<std::size_t>(r)].wrong, 0) << "rank " << r;
        EXPECT_EQ(windows.record(r).code, 0U) << "rank " << r << ": expected no fault";
    }
}

INSTANTIATE_TEST_SUITE_P(, AllReduceOnHostThreads,
                         testing::Values(Config{2, 1}, Config{2, 2}, Config{3, 1}, Config{3, 2}, Config{4, 1}, Config{4, 2}),
                         name_of);

}  // namespace
}  // namespace latent_moe::gpu
