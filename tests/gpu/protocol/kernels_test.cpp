// Kernels whose order of sums is documented, or that have a twin on the CPU, one at a time on an emulated GPU: inputs are
// random, sums are rounded, and the bits must be those of the order that is written down.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/deferred.h"
#include "core/float8_packing.h"
#include "core/numeric.h"
#include "gpu/kernels/column_exchange.h"
#include "gpu/kernels/combine_rows.h"
#include "gpu/kernels/convert.h"
#include "gpu/kernels/finish_product.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/packed_float8.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/row_norm.h"
#include "gpu/kernels/sum_rows.h"
#include "gpu/packed_layer.h"
#include "gpu/protocol/emulated_gpu.h"
#include "support/problem.h"

namespace latent_moe::gpu {
namespace {

using test::Tensor;

constexpr std::uint64_t minutes = 60'000'000'000;
constexpr emulated::Grid small_gpu{2, 2 * wave_size};

class Draw {
public:
    explicit Draw(unsigned seed) : random_(seed) {}
    float normal() { return random_() % 50 == 0 ? -0.0F : normal_(random_); }
    std::uint32_t below(std::uint32_t end) { return static_cast<std::uint32_t>(random_()) % end; }
    Tensor tensor(std::int64_t rows, std::int64_t columns, Dtype dtype, std::int64_t padding = 0) {
        Tensor t(rows, columns, dtype, padding);
        for (std::int64_t m = 0; m < rows; ++m) {
            for (std::int64_t n = 0; n < columns; ++n) t.set(m, n, normal());
        }
        return t;
    }

private:
    std::mt19937 random_;
    std::normal_distribution<float> normal_;
};

Tensor poisoned(std::int64_t rows, std::int64_t columns, Dtype dtype, std::int64_t padding = 8) {
    Tensor t(rows, columns, dtype, padding);
    t.poison();
    return t;
}

/// Enqueues on one emulated GPU.
void on_one_gpu(const std::function<cudaError_t(cudaStream_t)>& enqueue) {
    emulated::run(1, small_gpu, [&](int, emulated::Stream& stream) {
        if (const cudaError_t error = enqueue(&stream); error != cudaSuccess) ADD_FAILURE() << cudaGetErrorString(error);
    });
}

void expect_same(const Tensor& found, const Tensor& expected, const std::string& what) {
    EXPECT_TRUE(found.content() == expected.content()) << what;
    EXPECT_TRUE(found.padding_intact()) << what;
}

/// row_norm.h: thread t has units t, t + threads, …; groups of 32 threads by exchange with lane XOR 16, 8, …; then groups in
/// order.
Tensor normalised_row_by_row(const Tensor& x, const Tensor& gamma, std::int64_t tokens, std::int64_t width, Dtype dtype,
                             float epsilon) {
    const std::int64_t per_unit = 16 / static_cast<std::int64_t>(bytes_of(dtype)), units = width / per_unit;
    const RowShape shape = row_shape(units);
    Tensor y(tokens, width, dtype);
    for (std::int64_t m = 0; m < tokens; ++m) {
        float total = 0;
        for (int group = 0; group < shape.threads / norm_group; ++group) {
            std::vector<float> lane(norm_group, 0.0F);
            for (int t = 0; t < norm_group; ++t) {
                for (std::int64_t unit = group * norm_group + t; unit < units; unit += shape.threads) {
                    for (std::int64_t e = 0; e < per_unit; ++e) {
                        const float v = x.at(m, unit * per_unit + e);
                        float& sum = lane[static_cast<std::size_t>(t)];
                        sum = std::fma(v, v, sum);
                    }
                }
            }
            for (std::size_t mask = norm_group / 2; mask > 0; mask /= 2) {
                const std::vector<float> before = lane;
                for (std::size_t t = 0; t < lane.size(); ++t) lane[t] = before[t] + before[t ^ mask];
            }
            total += lane[0];
        }
        const float factor = 1.0F / std::sqrt(std::fma(total, 1.0F / static_cast<float>(width), epsilon));
        for (std::int64_t n = 0; n < width; ++n) y.set(m, n, x.at(m, n) * factor * gamma.at(0, n));
    }
    return y;
}

TEST(Kernels, NormAddsSquaresInTheOrderThatItSays) {
    Draw draw(1);
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        const std::int64_t widest = max_norm_width(dtype);  // a thread has 8 units then
        for (const std::int64_t width :
             {std::int64_t{8}, std::int64_t{136}, widest / 8, widest / 4 - 8, widest / 2 - 24, widest}) {
            const std::int64_t tokens = width == widest ? 2 : 5;
            const Tensor x = draw.tensor(tokens, width, dtype, 8), gamma = draw.tensor(1, width, dtype);
            Tensor y = poisoned(tokens, width, dtype);
            on_one_gpu([&](cudaStream_t stream) {
                return rms_norm({.x = x.rows(),
                                 .gamma = gamma.data(),
                                 .epsilon = 1e-3F,
                                 .y = y.writable_rows(),
                                 .tokens = tokens,
                                 .width = width,
                                 .dtype = dtype},
                                stream);
            });
            expect_same(y, normalised_row_by_row(x, gamma, tokens, width, dtype, 1e-3F),
                        std::to_string(width) + " columns of " + latent_moe::name(dtype));
        }
    }
}

/// mfma_tile.cuh: a wave adds its blocks, in each the units that a row's lanes have between them, half by half; then waves
/// in order.
float product_element(const Tensor& a, const Tensor& w, std::int64_t m, std::int64_t n, std::int64_t latent) {
    const int waves = cta_threads(8 * static_cast<int>(wave_size)) / static_cast<int>(wave_size);
    constexpr int at_once = static_cast<int>(wave_size) / 16;
    float total = 0;
    for (int wave = 0; wave < waves; ++wave) {
        float sum = 0;
        for (std::int64_t block = wave; block < (latent + 63) / 64; block += waves) {
            for (int first = 0; first < 8; first += at_once) {
                for (int half = 0; half < 2; ++half) {
                    for (int unit = first; unit < first + at_once; ++unit) {
                        for (int e = 0; e < 4; ++e) {
                            const std::int64_t k = block * 64 + unit * 8 + half * 4 + e;
                            if (k < latent) sum += w.at(n, k) * a.at(m, k);
                        }
                    }
                }
            }
        }
        total += sum;
    }
    return total;
}

TEST(Kernels, ProjectionAddsInTheOrderThatItSays) {
    Draw draw(2);
    constexpr std::int64_t latent = 584, rows = 40;  // ten blocks, the last not whole; three tiles, the last not whole
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
        const Tensor w = draw.tensor(rows, latent, dtype);
        std::vector<uint4> packed(static_cast<std::size_t>(PackedLayout{rows, latent}.bytes() / 16));
        ASSERT_EQ(pack_weights({.w = w.rows(), .rows = rows, .latent = latent, .packed = packed.data()}, nullptr),
                  cudaSuccess);
        std::vector<float> scales(rows);
        for (float& s : scales) s = draw.normal();
        for (const std::int64_t tokens : {1, 7, 16, 17, 33}) {
            const Tensor a = draw.tensor(tokens, latent, dtype, 8), addend = draw.tensor(tokens, rows, dtype),
                         prefix = draw.tensor(tokens, rows, dtype);
            for (const bool plain : {false, true}) {
                Tensor c = poisoned(tokens, rows, dtype), expected(tokens, rows, dtype);
                on_one_gpu([&](cudaStream_t stream) {
                    return skinny_projection({.a = a.rows(),
                                              .packed = packed.data(),
                                              .addend = plain ? ConstRows{} : addend.rows(),
                                              .prefix = plain ? ConstRows{} : prefix.rows(),
                                              .c = c.writable_rows(),
                                              .scale = 0.75F,
                                              .column_scales = plain ? nullptr : scales.data(),
                                              .tokens = tokens,
                                              .rows = rows,
                                              .latent = latent,
                                              .dtype = dtype},
                                             stream);
                });
                for (std::int64_t m = 0; m < tokens; ++m) {
                    for (std::int64_t n = 0; n < rows; ++n) {
                        const float scale = plain ? 0.75F : 0.75F * scales[static_cast<std::size_t>(n)];
                        const float sum =
                            std::fma(scale, product_element(a, w, m, n, latent), plain ? 0.0F : addend.at(m, n));
                        expected.set(m, n, plain ? sum : round_to(dtype, sum) + prefix.at(m, n));
                    }
                }
                expect_same(c, expected, std::to_string(tokens) + " tokens of " + latent_moe::name(dtype));
            }
        }
    }
}

/// What all-reduce gives: Σ in rank order, rounded once; +0.0 for -0.0.
Tensor sum_of(const std::vector<Tensor>& x, std::int64_t tokens, std::int64_t width, Dtype dtype) {
    Tensor y(tokens, width, dtype);
    for (std::int64_t m = 0; m < tokens; ++m) {
        for (std::int64_t n = 0; n < width; ++n) {
            float sum = 0;
            for (const Tensor& of_rank : x) sum += of_rank.at(m, n);
            y.set(m, n, round_to(dtype, sum) + 0.0F);
        }
    }
    return y;
}

class ExchangesWithTheNorm : public testing::TestWithParam<int> {};

TEST_P(ExchangesWithTheNorm, GiveTheBitsOfTheSumInRankOrderAndThenTheNorm) {
    const int world = GetParam();
    constexpr std::int64_t latent = 136, own = 24;
    constexpr Dtype dtype = Dtype::bf16;
    Draw draw(static_cast<unsigned>(world));
    const std::int64_t slot_bytes = column_exchange_slot_bytes(std::max(world, 2), 8, latent, own, dtype);
    emulated::Windows windows(world, slot_bytes, window_bytes(slot_bytes), Element<dtype>::sentinel);
    const Tensor gamma = draw.tensor(1, latent, dtype);

    struct Call {
        std::int64_t tokens;
        std::vector<Tensor> routed, shared, latents, latents_too, columns;
    };
    std::vector<Call> calls;
    for (const std::int64_t tokens : {3, 0, 8, 1, 5}) {
        Call& call = calls.emplace_back(Call{tokens, {}, {}, {}, {}, {}});
        for (int r = 0; r < world; ++r) {
            call.routed.push_back(draw.tensor(tokens, latent, dtype, 8));
            call.shared.push_back(draw.tensor(tokens, own * world, dtype));
            call.latents.push_back(poisoned(tokens, latent, dtype));
            call.latents_too.push_back(poisoned(tokens, latent, dtype));
            call.columns.push_back(poisoned(tokens, own, dtype));
        }
    }
    const emulated::Grid grid{world <= 4 ? 3U : 2U, 2 * wave_size};
    emulated::run(world, grid, [&](int rank, emulated::Stream& stream) {
        const auto r = static_cast<std::size_t>(rank);
        const Exchange exchange = windows.exchange(rank, 10 * minutes);
        for (Call& call : calls) {
            const cudaError_t reduced = all_reduce_rms_norm({.exchange = exchange,
                                                             .x = call.routed[r].rows(),
                                                             .gamma = gamma.data(),
                                                             .epsilon = 1e-3F,
                                                             .y = call.latents[r].writable_rows(),
                                                             .tokens = call.tokens,
                                                             .width = latent,
                                                             .dtype = dtype,
                                                             .max_ctas = static_cast<int>(grid.ctas),
                                                             .dependent_launch = true},
                                                            &stream);
            const cudaError_t cut = reduce_for_columns({.exchange = exchange,
                                                        .routed = call.routed[r].rows(),
                                                        .gamma = gamma.data(),
                                                        .epsilon = 1e-3F,
                                                        .latent = call.latents_too[r].writable_rows(),
                                                        .shared = call.shared[r].rows(),
                                                        .own = call.columns[r].writable_rows(),
                                                        .tokens = call.tokens,
                                                        .latent_width = latent,
                                                        .own_width = own,
                                                        .dtype = dtype,
                                                        .max_ctas = static_cast<int>(grid.ctas),
                                                        .starts_early = true},
                                                       &stream);
            if (reduced != cudaSuccess || cut != cudaSuccess) ADD_FAILURE() << "a launch was refused";
        }
    });
    for (const Call& call : calls) {
        const std::string what = std::to_string(call.tokens) + " tokens";
        const Tensor latents =
            normalised_row_by_row(sum_of(call.routed, call.tokens, latent, dtype), gamma, call.tokens, latent, dtype, 1e-3F);
        const Tensor columns = sum_of(call.shared, call.tokens, own * world, dtype);
        for (int rank = 0; rank < world; ++rank) {
            const auto r = static_cast<std::size_t>(rank);
            expect_same(call.latents[r], latents, what);
            expect_same(call.latents_too[r], latents, what);
            Tensor mine(call.tokens, own, dtype);
            for (std::int64_t m = 0; m < call.tokens; ++m) {
                for (std::int64_t n = 0; n < own; ++n) mine.set(m, n, columns.at(m, rank * own + n));
            }
            expect_same(call.columns[r], mine, what);
        }
    }
    for (int r = 0; r < world; ++r) EXPECT_EQ(windows.record(r).code, 0U) << "rank " << r << ": expected no fault";
}

INSTANTIATE_TEST_SUITE_P(, ExchangesWithTheNorm, testing::Range(1, 9),
                         [](const auto& test) { return "tp" + std::to_string(test.param); });

TEST(Kernels, SumOverRanksGoesInRankOrder) {
    Draw draw(3);
    constexpr std::int64_t tokens = 7, width = 40;
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        std::vector<Tensor> x;
        SumRows op{.world = 5, .tokens = tokens, .width = width, .dtype = dtype};
        for (int r = 0; r < op.world; ++r) x.push_back(draw.tensor(tokens, width, dtype, 8 * r));
        Tensor y = poisoned(tokens, width, dtype);
        for (int r = 0; r < op.world; ++r) op.x[r] = x[static_cast<std::size_t>(r)].rows();
        op.y = y.writable_rows();
        on_one_gpu([&](cudaStream_t stream) { return sum_rows(op, stream); });
        expect_same(y, sum_of(x, tokens, width, dtype), latent_moe::name(dtype));
    }
}

TEST(Kernels, UncombinedRowsAreCombinedAsOnTheCpu) {
    Draw draw(4);
    constexpr std::int64_t tokens = 9, width = 40, count = 20;
    constexpr int slots = 5;
    for (const Dtype weight_dtype : {Dtype::f32, Dtype::bf16}) {
        const Tensor x = draw.tensor(count, width, Dtype::bf16, 8), weights = draw.tensor(tokens, slots, weight_dtype);
        std::vector<std::int32_t> map(tokens * slots);
        for (std::int32_t& row : map) row = static_cast<std::int32_t>(draw.below(count + 3)) - 3;
        Tensor y = poisoned(tokens, width, Dtype::bf16), expected(tokens, width, Dtype::bf16);
        on_one_gpu([&](cudaStream_t stream) {
            return combine_rows({.x = x.rows(),
                                 .count = count,
                                 .weights = weights.data(),
                                 .weight_dtype = weight_dtype,
                                 .map = map.data(),
                                 .slots = slots,
                                 .y = y.writable_rows(),
                                 .tokens = tokens,
                                 .width = width},
                                stream);
        });
        const DeferredMatrix deferred{.rows = x.matrix(),
                                      .weights = static_cast<const std::byte*>(weights.data()),
                                      .weight_dtype = weight_dtype,
                                      .map = map.data(),
                                      .slots = slots};
        std::vector<float> sum(width), scratch(width);
        for (std::int64_t m = 0; m < tokens; ++m) {
            combine_row(deferred, m, sum.data(), scratch.data());
            for (std::int64_t n = 0; n < width; ++n) expected.set(m, n, sum[static_cast<std::size_t>(n)]);
        }
        expect_same(y, expected, latent_moe::name(weight_dtype));
    }
}

TEST(Kernels, RowsAreWidenedExactly) {
    Draw draw(5);
    constexpr std::int64_t tokens = 5, width = 256;
    Tensor bytes(tokens, width, Dtype::e4m3, 8);
    for (std::int64_t m = 0; m < tokens; ++m) {
        for (int b = 0; b < width; ++b) bytes.matrix().row(m)[b] = static_cast<std::byte>(b);
    }
    const auto check = [&](const Tensor& from, Dtype dtype, Dtype to) {
        std::vector<std::byte> y(static_cast<std::size_t>(tokens * width) * bytes_of(to));
        on_one_gpu([&](cudaStream_t stream) { return widen_rows(from.rows(), dtype, y.data(), to, tokens, width, stream); });
        for (std::int64_t m = 0; m < tokens; ++m) {
            for (std::int64_t n = 0; n < width; ++n) {
                const float found = load_element(y.data(), to, m * width + n), expected = from.at(m, n);
                if (std::isnan(expected) ? !std::isnan(found)
                                         : std::bit_cast<std::uint32_t>(found) != std::bit_cast<std::uint32_t>(expected))
                    ADD_FAILURE() << latent_moe::name(dtype) << " to " << latent_moe::name(to) << ", element " << n << ": "
                                  << found << ", expected " << expected;
            }
        }
    };
    for (const Dtype to : {Dtype::bf16, Dtype::f16, Dtype::f32}) check(bytes, Dtype::e4m3, to);
    for (const Dtype from : {Dtype::bf16, Dtype::f16}) check(draw.tensor(tokens, width, from), from, Dtype::f32);
}

TEST(Kernels, RowsAreRoundedToFloat8AsTheHostRoundsThem) {
    Draw draw(7);
    constexpr std::int64_t rows = 11, width = 64;
    for (const Dtype from : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        Tensor x = draw.tensor(rows, width, from, 8);
        x.set(3, 5, std::numeric_limits<float>::infinity());
        x.set(4, 6, std::nanf(""));
        for (std::int64_t n = 0; n < width; ++n) x.set(5, n, 0), x.set(6, n, draw.normal() * 0x1p-13F);
        std::vector<float> given(rows), scales(rows);
        for (float& scale : given) scale = 1 + std::abs(draw.normal());
        const Float8Rows expected = pack_float8(
            {.data = x.matrix().data, .rows = rows, .stride = x.matrix().stride, .dtype = from, .row_scales = given.data()},
            width);
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * width));
        on_one_gpu([&](cudaStream_t stream) {
            return round_rows_to_float8(x.rows(), from, given.data(), codes.data(), scales.data(), rows, width, stream);
        });
        EXPECT_EQ(codes, expected.bits) << latent_moe::name(from);
        EXPECT_EQ(scales, expected.scales) << latent_moe::name(from);
    }
}

/// The element of a word as fused_tail_float8.cuh takes it out and multiplies it.
float widened(std::uint32_t word, bool second_row, bool second_column) {
    const std::uint32_t pair = second_row ? (word << 4 & 0x80f080f0U) | (word >> 4 & 0x07000700U) : word & 0x87f087f0U;
    return std::bit_cast<float>(second_column ? pair & 0xffff0000U : pair << 16) * 0x1p120F;
}

TEST(Kernels, Float8WeightsLieWhereTheirProductWidensThem) {
    Draw draw(8);
    constexpr std::int64_t rows = 136, latent = 72;  // a second tile and a second block, neither whole
    std::vector<std::uint8_t> codes(rows * latent);
    for (std::uint8_t& code : codes) {
        do code = static_cast<std::uint8_t>(draw.below(256));
        while ((code & 0x7f) == 0x7f);
    }
    const PackedFloat8Layout layout{rows, latent};
    std::vector<int> seen(rows * latent);
    for (std::int64_t i = 0; i < layout.bytes() / 4; ++i) {
        // As mma.sync's A operand wants it: lane l has rows l / 4 and 8 more, pairs of columns l % 4 and 4 more.
        const auto [n, k] = layout.place(i);
        const std::int64_t lane = i / 4 % 32, word = i % 4, half = i / 128 % 2, fragment = i / 256 % 8, block = i / 2048;
        ASSERT_EQ(n, block / 2 * 128 + fragment * 16 + lane / 4);
        ASSERT_EQ(k, block % 2 * 64 + half * 32 + word / 2 * 16 + word % 2 * 8 + lane % 4 * 2);
        std::uint8_t of_word[2][2] = {};
        for (int e = 0; e < 4; ++e) {
            const std::int64_t row = n + e / 2 * 8, column = k + e % 2;
            if (row >= rows || column >= latent) continue;
            ++seen[static_cast<std::size_t>(row * latent + column)];
            of_word[e / 2][e % 2] = codes[static_cast<std::size_t>(row * latent + column)];
        }
        const std::uint32_t packed = pack_float8_word(of_word[0], of_word[1]);
        for (int e = 0; e < 4; ++e)
            ASSERT_EQ(widened(packed, e / 2 == 1, e % 2 == 1), float_from_e4m3(of_word[e / 2][e % 2])) << "word " << i;
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
}

TEST(Kernels, ALayerRoundsItsWeightsToFloat8WhereThatIsAskedFor) {
    Draw draw(9);
    constexpr std::int64_t hidden = 32, latent = 64;
    const Shape shape{.hidden = hidden, .latent = latent, .norm = Norm::none};
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
        const Tensor w = draw.tensor(hidden, latent, dtype);
        std::vector<float> given(hidden);
        for (float& scale : given) scale = 1 + std::abs(draw.normal());
        for (const float* row_scales : {static_cast<const float*>(nullptr), static_cast<const float*>(given.data())}) {
            const WeightView view{.data = w.matrix().data,
                                  .rows = hidden,
                                  .stride = w.matrix().stride,
                                  .dtype = dtype,
                                  .row_scales = row_scales};
            const GpuPackedLayer layer(shape, {.own = {16, 16}, .whole = true, .plain = true, .round_to_float8 = true}, view,
                                       nullptr, nullptr);
            const Float8Rows expected = pack_float8(view, latent);
            const ProductWeights whole = layer.weights(WeightPart::whole), shard = layer.weights(WeightPart::shard);
            ASSERT_EQ(whole.dtype, Dtype::bf16) << "e4m3 fits, whatever it was made of";
            for (std::int64_t i = 0; i < hidden * latent; ++i) {
                ASSERT_EQ(load_element(whole.plain, Dtype::bf16, i),
                          float_from_e4m3(expected.bits[static_cast<std::size_t>(i)]));
            }
            for (std::size_t n = 0; n < hidden; ++n) ASSERT_EQ(whole.row_scales[n], expected.scales[n]);
            EXPECT_EQ(shard.row_scales, whole.row_scales + 16);
        }
    }
}

TEST(Kernels, AProductIsFinishedWithOneRoundingAStep) {
    Draw draw(6);
    constexpr std::int64_t tokens = 7, width = 43;
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        const Tensor sums = draw.tensor(tokens, width, Dtype::f32), scales = draw.tensor(1, width, Dtype::f32),
                     addend = draw.tensor(tokens, width, dtype, 3), prefix = draw.tensor(tokens, width, dtype);
        Tensor out = poisoned(tokens, width, dtype, 5), expected(tokens, width, dtype);
        on_one_gpu([&](cudaStream_t stream) {
            return finish_product({.sums = static_cast<const float*>(sums.data()),
                                   .scale = 1.25F,
                                   .column_scales = static_cast<const float*>(scales.data()),
                                   .addend = addend.rows(),
                                   .prefix = prefix.rows(),
                                   .out = out.writable_rows(),
                                   .tokens = tokens,
                                   .width = width,
                                   .dtype = dtype},
                                  stream);
        });
        for (std::int64_t m = 0; m < tokens; ++m) {
            for (std::int64_t n = 0; n < width; ++n) {
                const float value = std::fma(1.25F * scales.at(0, n), sums.at(m, n), addend.at(m, n));
                expected.set(m, n, round_to(dtype, value) + prefix.at(m, n));
            }
        }
        expect_same(out, expected, latent_moe::name(dtype));
    }
}

}  // namespace
}  // namespace latent_moe::gpu
