// The judge is judged by hand-made cases.
#include "core/reference.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/numeric.h"
#include "support/problem.h"

namespace latent_moe {
namespace {

using test::Tensor;

Tensor tensor(const std::vector<std::vector<float>>& rows, Dtype dtype) {
    Tensor made(static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(rows.front().size()), dtype);
    for (std::size_t row = 0; row < rows.size(); ++row) {
        for (std::size_t column = 0; column < rows[row].size(); ++column) {
            made.set(static_cast<std::int64_t>(row), static_cast<std::int64_t>(column), rows[row][column]);
        }
    }
    return made;
}

TEST(Reference, IsTheFormula) {
    // Two ranks, latent 2, hidden 3: x = (3, 4), rms = sqrt(12.5 + 0.5).
    const Tensor routed0 = tensor({{1, 4}}, Dtype::f32);
    const Tensor routed1 = tensor({{2, 0}}, Dtype::f32);
    const Tensor shared0 = tensor({{1, 2, 3}}, Dtype::f32);
    const Tensor shared1 = tensor({{10, 20, 30}}, Dtype::f32);
    const Tensor prefix = tensor({{100, 200, 300}}, Dtype::f32);
    const Tensor weights = tensor({{1, 0}, {0, 1}, {1, 1}}, Dtype::f32);
    const Tensor gamma = tensor({{2, 1}}, Dtype::f32);
    ReferenceInput input{.shape = {.hidden = 3, .latent = 2, .epsilon = 0.5F, .routed_scale = 3, .activations = Dtype::f32},
                         .routed = {routed0.matrix(), routed1.matrix()},
                         .shared = {shared0.matrix(), shared1.matrix()},
                         .prefix = prefix.matrix(),
                         .weights = weights.matrix(),
                         .gamma = gamma.data()};
    const double rms = std::sqrt(13.0);
    const std::vector<double> out = reference_tail(input);
    EXPECT_NEAR(out[0], 111 + 3 * 6 / rms, 1e-12);
    EXPECT_NEAR(out[1], 222 + 3 * 4 / rms, 1e-12);
    EXPECT_NEAR(out[2], 333 + 3 * 10 / rms, 1e-12);

    input.shape.norm = Norm::none;
    input.gamma = nullptr;
    EXPECT_NEAR(reference_tail(input)[2], 333 + 3 * 7, 1e-12);
}

TEST(Chain, RoundsAtEveryStep) {
    // In bf16 256 + 1 rounds to 256: the shared sum loses its 1, and adding the product afterwards cannot bring it back.
    const Tensor routed = tensor({{1, 0}}, Dtype::bf16);
    const Tensor zero = tensor({{0, 0}}, Dtype::bf16);
    const Tensor shared0 = tensor({{256}}, Dtype::bf16);
    const Tensor shared1 = tensor({{1}}, Dtype::bf16);
    const Tensor weights = tensor({{1, 0}}, Dtype::bf16);
    const ReferenceInput input{.shape = {.hidden = 1, .latent = 2, .norm = Norm::none},
                               .routed = {routed.matrix(), zero.matrix()},
                               .shared = {shared0.matrix(), shared1.matrix()},
                               .weights = weights.matrix()};
    EXPECT_EQ(reference_tail(input)[0], 258.0);
    EXPECT_EQ(chain_tail(input)[0], 256.0F);
}

TEST(Chain, GivesZerosForARowWhoseSquaresOverflow) {
    const Tensor routed = tensor({{1e30F, 1e30F}}, Dtype::bf16);
    const Tensor weights = tensor({{1, 1}}, Dtype::bf16);
    const Tensor gamma = tensor({{1, 1}}, Dtype::bf16);
    const ReferenceInput input{.shape = {.hidden = 1, .latent = 2},
                               .routed = {routed.matrix()},
                               .weights = weights.matrix(),
                               .gamma = gamma.data()};
    EXPECT_EQ(chain_tail(input)[0], 0.0F);
}

TEST(RelativeL2, IsInfiniteWhereAValueShouldHaveBeenFinite) {
    EXPECT_EQ(relative_l2(std::vector<float>{3, 4}, {3, 4}), 0);
    EXPECT_NEAR(relative_l2(std::vector<float>{3, 5}, {3, 4}), 0.2, 1e-12);
    EXPECT_TRUE(std::isinf(relative_l2(std::vector<float>{std::nanf("")}, {1})));
    EXPECT_EQ(relative_l2(std::vector<float>{std::nanf(""), 1}, {std::nan(""), 1}), 0);
    EXPECT_EQ(relative_l2(std::vector<float>{}, {}), 0);
}

}  // namespace
}  // namespace latent_moe
