#include "cpu/product.h"

#include <gtest/gtest.h>

#include <omp.h>

#include <cmath>

#include "core/synthetic.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::Tensor;

Tensor drawn(std::int64_t rows, std::int64_t columns, Dtype dtype, std::uint64_t key, std::int64_t padding = 0) {
    Tensor tensor(rows, columns, dtype, padding);
    fill_normal(tensor.matrix(), key, 1);
    return tensor;
}

/// Largest |out − (addend + x·Wᵀ)| over the size of the sum's terms.
double error_of(const Tensor& x, const Tensor& w, const Tensor& addend, const Tensor& out, std::int64_t tokens,
                std::int64_t columns, std::int64_t depth) {
    double worst = 0;
    for (std::int64_t row = 0; row < tokens; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
            double expected = static_cast<double>(addend.at(row, column));
            double size = 1;
            for (std::int64_t k = 0; k < depth; ++k) {
                const double term = static_cast<double>(x.at(row, k)) * static_cast<double>(w.at(column, k));
                expected += term;
                size += term * term;
            }
            worst = std::max(worst, std::abs(static_cast<double>(out.at(row, column)) - expected) / std::sqrt(size));
        }
    }
    return worst;
}

TEST(Product, IsRightAtOddSizesInEveryType) {
    Workers workers(2);
    for (const auto arithmetic : {Product::Arithmetic::automatic, Product::Arithmetic::widened}) {
        for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
            for (const std::int64_t tokens : {1, 3, 17}) {
                for (const std::int64_t columns : {8, 120, 128, 264}) {
                    Product product(workers, 32, 72, arithmetic);
                    const Tensor x = drawn(tokens, 72, dtype, 1, 5);
                    const Tensor w = drawn(columns, 72, dtype, 2);
                    const Tensor addend = drawn(tokens, columns, dtype, 3, 3);
                    Tensor out(tokens, columns, dtype, 7);
                    product.run(x.matrix(), {.rows = w.matrix()}, {.addend = addend.matrix()}, out.matrix());
                    const double rounding = dtype == Dtype::bf16 ? 0x1p-6 : dtype == Dtype::f16 ? 0x1p-9 : 0x1p-18;
                    EXPECT_LT(error_of(x, w, addend, out, tokens, columns, 72), rounding)
                        << name(dtype) << " " << tokens << " " << columns;
                    EXPECT_TRUE(out.padding_intact());
                }
            }
        }
    }
}

TEST(Product, GivesTheSameBitsWhateverRanBefore) {
    // oneDNN's cache of primitives ignores strides of size-1 dimensions: what ran before must not matter.
    Workers workers(1);
    const Tensor w = drawn(256, 64, Dtype::bf16, 2);
    const Tensor x = drawn(1, 64, Dtype::bf16, 1);
    const auto run_one = [&](std::int64_t padding) {
        Product product(workers, 8, 64);
        Tensor out(1, 256, Dtype::bf16, padding);
        product.run(x.matrix(), {.rows = w.matrix()}, {}, out.matrix());
        return out.content();
    };
    const std::vector<std::byte> contiguous_first = run_one(0);
    EXPECT_EQ(run_one(1000), contiguous_first);
    EXPECT_EQ(run_one(0), contiguous_first);
}

TEST(Product, LeavesTheCallersOpenMpSettingAlone) {
    Workers workers(1);
    const int before = omp_get_max_threads();
    Product product(workers, 8, 64);
    const Tensor w = drawn(64, 64, Dtype::bf16, 2);
    const Tensor x = drawn(5, 64, Dtype::bf16, 1);
    Tensor out(5, 64, Dtype::bf16);
    product.run(x.matrix(), {.rows = w.matrix()}, {}, out.matrix());
    EXPECT_EQ(omp_get_max_threads(), before);
}

TEST(Workers, RunEveryItemOnceAndPassOnAnException) {
    for (const int count : {1, 2, 4}) {
        Workers workers(count);
        EXPECT_EQ(workers.count(), count);
        for (int repeat = 0; repeat < 200; ++repeat) {
            std::vector<int> seen(37);
            workers.for_each(37, [&](int, std::int64_t item) { ++seen[static_cast<std::size_t>(item)]; });
            EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 37);
        }
        EXPECT_THROW(workers.for_each(5,
                                      [](int, std::int64_t item) {
                                          if (item == 3) throw std::runtime_error("three");
                                      }),
                     std::runtime_error);
        workers.for_each(3, [](int, std::int64_t) {});
    }
}

}  // namespace
}  // namespace latent_moe
