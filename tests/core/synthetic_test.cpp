#include "core/synthetic.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/digest.h"
#include "core/partition.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::Tensor;

TEST(StandardDraw, IsNormalEnough) {
    double sum = 0;
    double squares = 0;
    constexpr int count = 100'000;
    for (int i = 0; i < count; ++i) {
        const double value = static_cast<double>(standard_draw(1, static_cast<std::uint64_t>(i)));
        sum += value;
        squares += value * value;
    }
    EXPECT_NEAR(sum / count, 0, 0.02);
    EXPECT_NEAR(squares / count, 1, 0.02);
}

TEST(Partials, SumToTheSameTensorAtEveryWorldSize) {
    Tensor total(3, 64, Dtype::f32);
    fill_partial(total.matrix(), 9, 0, 1);
    for (const int world : {2, 3, 8}) {
        std::vector<Tensor> partials;
        for (int rank = 0; rank < world; ++rank) {
            partials.emplace_back(3, 64, Dtype::f32);
            fill_partial(partials.back().matrix(), 9, rank, world);
        }
        for (std::int64_t row = 0; row < 3; ++row) {
            for (std::int64_t column = 0; column < 64; ++column) {
                float sum = 0;
                for (const Tensor& partial : partials) sum += partial.at(row, column);
                EXPECT_NEAR(sum, total.at(row, column), 1e-5);
            }
        }
    }
}

TEST(FillNormal, DrawsAnyPartAsInTheWhole) {
    Tensor whole(8, 40, Dtype::bf16);
    Tensor part(3, 40, Dtype::bf16);
    fill_normal(whole.matrix(), 4, 1);
    fill_normal(part.matrix(), 4, 1, 0, 5);
    for (std::int64_t row = 0; row < 3; ++row) {
        for (std::int64_t column = 0; column < 40; ++column) EXPECT_EQ(part.at(row, column), whole.at(row + 5, column));
    }
}

TEST(Digest, ChangesWithAnySingleElementAndIgnoresPadding) {
    Tensor tensor(3, 52, Dtype::bf16, 12);
    fill_normal(tensor.matrix(), 4, 1);
    const std::uint64_t before = digest_of(tensor.matrix());
    for (std::int64_t row = 0; row < 3; ++row) {
        for (std::int64_t column = 0; column < 52; ++column) {
            Tensor changed = tensor;
            changed.set(row, column, changed.at(row, column) + 1);
            EXPECT_NE(digest_of(changed.matrix()), before) << row << ", " << column;
        }
    }
    Tensor tight(3, 52, Dtype::bf16);
    fill_normal(tight.matrix(), 4, 1);
    EXPECT_EQ(digest_of(tight.matrix()), before);
}

TEST(EvenPart, CoversEverythingOnceInOrder) {
    for (const std::int64_t total : {0, 1, 7, 8, 100, 7168}) {
        for (const int parts : {1, 2, 3, 7, 16}) {
            for (const std::int64_t grain : {1, 8}) {
                std::int64_t next = 0;
                for (int part = 0; part < parts; ++part) {
                    const TokenRange range = even_part(total, parts, part, grain);
                    EXPECT_EQ(range.first, next);
                    EXPECT_GE(range.count, 0);
                    EXPECT_LE(range.count, (total / parts / grain + 1) * grain);
                    next += range.count;
                }
                EXPECT_EQ(next, total);
            }
        }
    }
}

}  // namespace
}  // namespace latent_moe
