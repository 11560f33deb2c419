// What the soak's judge lets pass and what it does not.
#include "cli/row_judge.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/numeric.h"
#include "support/problem.h"

namespace latent_moe::cli {
namespace {

using test::Problem;
using test::Tensor;

/// The chain's own output, as a tail would return it.
Tensor chain_of(const Problem& problem) {
    Tensor out = problem.output();
    for (std::int64_t row = 0; row < problem.tokens; ++row) {
        for (std::int64_t column = 0; column < problem.shape.hidden; ++column)
            out.set(row, column, problem.chain()[static_cast<std::size_t>(row * problem.shape.hidden + column)]);
    }
    return out;
}

TEST(RowJudge, LetsTheChainPass) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        const Problem problem(2, 9, {.dtype = dtype});
        Tensor out = chain_of(problem);
        EXPECT_EQ(find_wrong_row(out.matrix(), problem.reference_input(), Tail::replicated), std::nullopt);
    }
}

TEST(RowJudge, SeesOneWrongElementAmongManyRows) {
    const Problem problem(2, 64);
    Tensor out = chain_of(problem);
    out.set(41, 1000, out.at(41, 1000) + 1);
    const auto wrong = find_wrong_row(out.matrix(), problem.reference_input(), Tail::replicated);
    ASSERT_TRUE(wrong.has_value());
    EXPECT_EQ(wrong->find("row 41 of 64 has the relative error "), 0U) << *wrong;
}

TEST(RowJudge, SeesAnElementThatIsNotFinite) {
    const Problem problem(1, 3);
    Tensor out = chain_of(problem);
    out.set(2, 7, NAN);
    EXPECT_TRUE(find_wrong_row(out.matrix(), problem.reference_input(), Tail::replicated).has_value());
}

TEST(RowJudge, SeesARowThatBelongsElsewhere) {
    const Problem problem(2, 4);
    Tensor out = chain_of(problem);
    for (std::int64_t column = 0; column < problem.shape.hidden; ++column) out.set(1, column, out.at(2, column));
    EXPECT_TRUE(find_wrong_row(out.matrix(), problem.reference_input(), Tail::late_reduce).has_value());
}

}  // namespace
}  // namespace latent_moe::cli
