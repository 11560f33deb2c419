// Batch-invariant contexts on emulated GPUs (docs/decisions/0013): a row's bits are the same whatever else is in the batch,
// and wherever in it the row is. Inputs are random with long tails, and the large terms of a product cancel, so that a sum
// in another order shows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gpu/kernels/ordered_projection.h"
#include "gpu/protocol/emulated_backend.h"
#include "support/harness.h"
#include "support/problem.h"

namespace latent_moe::gpu {
namespace {

using test::Tensor;

constexpr std::int64_t latent = 136;  // three blocks of 64, the last not whole
constexpr std::int64_t half = latent / 2;
constexpr float small = 0x1p-12F;
constexpr std::int64_t block_tokens = 96;  // so the largest batch takes two
constexpr std::int64_t all_rows = 130;

class Draw {
public:
    explicit Draw(unsigned seed) : random_(seed) {}
    /// Most are near 1, some a thousand times as large or small, some zeros of either sign.
    float long_tailed() {
        const float size = std::exp2(std::clamp(3 * normal_(random_), -12.0F, 10.0F));
        return random_() % 16 == 0 ? -0.0F : normal_(random_) * size;
    }
    float power_of_two() { return std::exp2(static_cast<float>(static_cast<int>(random_() % 3) - 1)); }
    std::vector<std::int64_t> shuffled(std::int64_t count) {
        std::vector<std::int64_t> order(static_cast<std::size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random_);
        return order;
    }
    Tensor tensor(std::int64_t rows, std::int64_t columns, Dtype dtype, float scale = 1) {
        Tensor t(rows, columns, dtype);
        for (std::int64_t m = 0; m < rows; ++m) {
            for (std::int64_t n = 0; n < columns; ++n) t.set(m, n, scale * long_tailed());
        }
        return t;
    }

private:
    std::mt19937 random_;
    std::normal_distribution<float> normal_;
};

struct Config {
    int world;
    const char* name;
    std::int64_t own_columns = 24;  // two tiles of 16, the last not whole
    Norm norm = Norm::rms;
    Dtype dtype = Dtype::bf16;
    Dtype weights = Dtype::bf16;
    bool row_scales = false;
    bool few_sizes = false;
};
void PrintTo(const Config& c, std::ostream* out) {
    *out << c.name;
}

/// What every batch is taken from.
struct Source {
    Shape shape;
    Tensor weights, gamma, prefix;
    std::vector<float> row_scales;
    std::vector<Tensor> routed, shared;  // by rank

    explicit Source(const Config& c)
        : shape{.hidden = c.own_columns * c.world,
                .latent = latent,
                .norm = c.norm,
                .routed_scale = 1.75F,
                .activations = c.dtype} {
        Draw draw(static_cast<unsigned>(c.world));
        weights = draw.tensor(shape.hidden, latent, c.weights);
        gamma = {1, latent, c.dtype};
        for (std::int64_t k = 0; k < half; ++k) gamma.set(0, k, draw.power_of_two());
        prefix = draw.tensor(all_rows, shape.hidden, c.dtype, small);
        for (int r = 0; r < c.world; ++r) {
            routed.push_back(draw.tensor(all_rows, latent, c.dtype));
            shared.push_back(draw.tensor(all_rows, shape.hidden, c.dtype, small));
        }
        cancel(draw);
        for (std::int64_t n = 0; n < shape.hidden && c.row_scales; ++n)
            row_scales.push_back(0.5F + static_cast<float>(n % 13) * 0.1F);
    }
    /// The second half of a latent is the first one again, and most of its weights are the first half's with the other sign.
    void cancel(Draw& draw) {
        for (std::int64_t k = 0; k < half; ++k) {
            gamma.set(0, half + k, gamma.at(0, k));
            for (Tensor& of_rank : routed) {
                for (std::int64_t m = 0; m < all_rows; ++m) of_rank.set(m, half + k, of_rank.at(m, k));
            }
            for (std::int64_t n = 0; n < shape.hidden; ++n)
                weights.set(n, half + k, k % 17 == n % 17 ? small * draw.long_tailed() : -weights.at(n, k));
            for (std::int64_t n = k % 17; n < shape.hidden; n += 17) weights.set(n, k, 0);
        }
    }
    WeightView view() const {
        return {.data = weights.data(),
                .rows = shape.hidden,
                .dtype = weights.matrix().dtype,
                .row_scales = row_scales.empty() ? nullptr : row_scales.data()};
    }
};

Tensor picked(const Tensor& from, const std::vector<std::int64_t>& rows) {
    const ConstMatrix all = from.matrix();
    Tensor some(static_cast<std::int64_t>(rows.size()), all.columns, all.dtype, 8);
    for (std::size_t m = 0; m < rows.size(); ++m) {
        std::memcpy(some.matrix().row(static_cast<std::int64_t>(m)), all.row(rows[m]),
                    static_cast<std::size_t>(all.row_bytes()));
    }
    return some;
}

/// One call: these rows of the source, in this order.
struct Batch {
    std::vector<std::int64_t> rows;
    std::vector<Tensor> routed, shared, out;  // by rank
    Tensor prefix;

    Batch(const Source& source, std::vector<std::int64_t> rows_) : rows(std::move(rows_)) {
        for (std::size_t r = 0; r < source.routed.size(); ++r) {
            routed.push_back(picked(source.routed[r], rows));
            shared.push_back(picked(source.shared[r], rows));
            out.emplace_back(tokens(), source.shape.hidden, source.shape.activations, 8).poison();
        }
        prefix = picked(source.prefix, rows);
    }
    std::int64_t tokens() const { return static_cast<std::int64_t>(rows.size()); }
};

/// All rows; then batches of every size from both ends; then all rows in another order.
std::vector<std::vector<std::int64_t>> orders(bool few_sizes) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    few_sizes = true;  // a call costs ten times as much
#endif
    std::vector<std::int64_t> sizes = {1, 2, 3, 7, 8, 16, 17, 33, 64, 65};
    if (few_sizes) sizes = {1, 17, 65};
    std::vector<std::int64_t> all(all_rows);
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::vector<std::int64_t>> orders = {all};
    for (const std::int64_t size : sizes) {
        orders.emplace_back(all.begin(), all.begin() + size);
        orders.emplace_back(all.end() - size, all.end());
    }
    orders.push_back(Draw(7).shuffled(all_rows));
    return orders;
}

/// What went otherwise than in the first batch, which has every row.
struct Differences {
    int rows = 0;
    std::string first;
};

Differences differences_between(const Config& c, const Source& source, Tail tail, bool batch_invariant) {
    std::vector<Batch> batches;
    for (auto& order : orders(c.few_sizes)) batches.emplace_back(source, order);
    const emulated::Grid grid{3, (c.dtype == Dtype::f32 ? 4 : 2) * wave_size};
    emulated::Gpus gpus(c.world, source.shape, {}, grid, block_tokens, source.view(),
                        c.norm == Norm::rms ? source.gamma.data() : nullptr, batch_invariant);
    emulated::run(c.world, grid, [&](int rank, emulated::Stream& stream) {
        const auto r = static_cast<std::size_t>(rank);
        emulated::EmulatedBackend backend(gpus, rank, stream, true);
        for (Batch& batch : batches) {
            backend.run(tail, batch.tokens(), batch.routed[r].matrix(), batch.shared[r].matrix(), batch.prefix.matrix(),
                        batch.out[r].matrix());
        }
    });
    Differences differences;
    const Tensor& whole = batches.front().out.front();
    for (const Batch& batch : batches) {
        for (std::size_t r = 0; r < batch.out.size(); ++r) {
            for (std::size_t m = 0; m < batch.rows.size(); ++m) {
                const ConstMatrix found = batch.out[r].matrix(), expected = whole.matrix();
                if (std::memcmp(found.row(static_cast<std::int64_t>(m)), expected.row(batch.rows[m]),
                                static_cast<std::size_t>(expected.row_bytes())) == 0)
                    continue;
                if (differences.rows++ > 0) continue;
                differences.first = std::string(name(tail)) + ": row " + std::to_string(batch.rows[m]) + " as row " +
                                    std::to_string(m) + " of " + std::to_string(batch.rows.size()) + ", rank " +
                                    std::to_string(r);
            }
        }
    }
    for (int r = 0; r < c.world; ++r) {
        for (const bool side : {false, true})
            EXPECT_EQ(gpus.fault(r, side).code, 0U) << "rank " << r << ": expected no fault";
    }
    for (std::int64_t n = 0; n < source.shape.hidden; ++n)
        EXPECT_TRUE(std::isfinite(whole.at(0, n))) << "no number to compare: column " << n;
    return differences;
}

std::vector<Tail> tails_of(const Config& c) {
    if (c.world == 1) return {Tail::replicated};
    if (c.norm == Norm::none) return {Tail::late_reduce, Tail::column_parallel};
    return {Tail::replicated, Tail::overlap, Tail::column_parallel, Tail::token_parallel};
}

class BatchInvariance : public testing::TestWithParam<Config> {};

TEST_P(BatchInvariance, GivesARowTheSameBitsInEveryBatchAndOnEveryRank) {
    const Config c = GetParam();
    const Source source(c);
    for (const Tail tail : tails_of(c)) {
        const Differences found = differences_between(c, source, tail, true);
        EXPECT_EQ(found.rows, 0) << found.first;
    }
}

std::vector<Config> configs() {
    std::vector<Config> all = {{1, "tp1"}, {2, "tp2"}, {3, "tp3"}};
    for (const Config& other : {Config{.world = 3, .name = "without_norm", .norm = Norm::none},
                                Config{.world = 3, .name = "f16", .dtype = Dtype::f16, .weights = Dtype::f16},
                                Config{.world = 2, .name = "f32", .dtype = Dtype::f32, .weights = Dtype::f32},
                                Config{.world = 2, .name = "f32_weights", .weights = Dtype::f32},
                                Config{.world = 2, .name = "row_scales", .row_scales = true},
                                Config{.world = 2, .name = "columns_that_units_do_not_cut", .own_columns = 12}}) {
        all.push_back(other);
        all.back().few_sizes = true;
    }
    return all;
}

INSTANTIATE_TEST_SUITE_P(, BatchInvariance, testing::ValuesIn(configs()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(WithoutBatchInvariance, ARowsBitsDependOnTheBatch) {
    const Config c{2, "tp2"};
    const Source source(c);
    for (const Tail tail : tails_of(c)) EXPECT_GT(differences_between(c, source, tail, false).rows, 0) << name(tail);
}

TEST(OrderedProjection, AddsInTheOrderOfK) {
    Draw draw(9);
    constexpr std::int64_t width = 67, depth = 77;  // a second tile of columns and a third of k, none whole
    const auto check = [&](std::int64_t tokens, Dtype dtype, Dtype weights, bool plain) {
        const Tensor x = draw.tensor(tokens, depth, dtype), w = draw.tensor(width, depth, weights),
                     scales = draw.tensor(1, width, Dtype::f32), addend = draw.tensor(tokens, width, dtype),
                     prefix = draw.tensor(tokens, width, dtype);
        Tensor out(tokens, width, dtype, 5), expected(tokens, width, dtype);
        out.poison();
        emulated::run(1, {2, 2 * wave_size}, [&](int, emulated::Stream& stream) {
            EXPECT_EQ(
                ordered_projection({.x = x.rows(),
                                    .w = w.data(),
                                    .weight_dtype = weights,
                                    .latent = depth,
                                    .finish = {.scale = 1.25F,
                                               .column_scales = plain ? nullptr : static_cast<const float*>(scales.data()),
                                               .addend = plain ? ConstRows{} : addend.rows(),
                                               .prefix = plain ? ConstRows{} : prefix.rows(),
                                               .out = out.writable_rows(),
                                               .tokens = tokens,
                                               .width = width,
                                               .dtype = dtype}},
                                   &stream),
                cudaSuccess);
        });
        for (std::int64_t m = 0; m < tokens; ++m) {
            for (std::int64_t n = 0; n < width; ++n) {
                float sum = 0;
                for (std::int64_t k = 0; k < depth; ++k) sum = std::fma(x.at(m, k), w.at(n, k), sum);
                const float scale = plain ? 1.25F : 1.25F * scales.at(0, n);
                const float value = std::fma(scale, sum, plain ? 0.0F : addend.at(m, n));
                expected.set(m, n, plain ? value : round_to(dtype, value) + prefix.at(m, n));
            }
        }
        EXPECT_TRUE(out.content() == expected.content()) << tokens << " tokens of " << latent_moe::name(dtype);
        EXPECT_TRUE(out.padding_intact());
    };
    for (const std::int64_t tokens : {1, 16, 35}) {
        for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
            check(tokens, dtype, dtype, tokens == 16);
            check(tokens, dtype, Dtype::f32, tokens == 1);
        }
    }
    EXPECT_EQ(ordered_projection({.x = {&draw},
                                  .w = &draw,
                                  .weight_dtype = Dtype::f16,
                                  .latent = 8,
                                  .finish = {.out = {&draw}, .tokens = 1, .width = 8}},
                                 nullptr),
              cudaErrorInvalidValue)
        << "f16 weights hold no bf16 rows";
}

}  // namespace
}  // namespace latent_moe::gpu
