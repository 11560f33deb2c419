// A call past 2³¹ elements. Needs about 5 GB and half a minute: `scripts/test --full` runs it.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "core/numeric.h"
#include "core/synthetic.h"
#include "latent_moe/latent_moe.h"

namespace latent_moe {
namespace {

/// [rows, columns] of bf16 that are zero until they are written, page by page.
struct Zeros {
    Zeros(std::int64_t rows, std::int64_t columns)
        : data(static_cast<std::byte*>(std::calloc(static_cast<std::size_t>(rows * columns), 2)), &std::free),
          matrix{data.get(), rows, columns, columns, Dtype::bf16} {}

    std::unique_ptr<std::byte, void (*)(void*)> data;
    Matrix matrix;
};

TEST(ATail, PastTwoToThe31ElementsIsRightOnItsLastRows) {
    const Shape shape{.hidden = 32'776, .latent = 8, .norm = Norm::none};
    constexpr std::int64_t tokens = 65'536;
    ASSERT_GT(tokens * shape.hidden, std::int64_t{1} << 31);
    Zeros routed(tokens, shape.latent);
    Zeros shared(tokens, shape.hidden);
    ASSERT_NE(shared.data, nullptr);
    Zeros weights(shape.hidden, shape.latent);
    fill_normal(routed.matrix, draw_key(1, Draw::routed, 0), 1);
    fill_normal(weights.matrix, draw_key(1, Draw::weights, 0), 1);
    const std::vector<std::int64_t> looked_at = {0, 32'767, 65'522, 65'534, 65'535};  // rows on both sides of 2³¹ elements
    for (const std::int64_t row : looked_at)
        fill_normal(shared.matrix.row_range(row, 1), draw_key(static_cast<std::uint64_t>(row), Draw::shared, 0), 1);
    const auto before = [&](std::int64_t row) {
        std::vector<float> values(static_cast<std::size_t>(shape.hidden));
        widen(shared.matrix.row(row), Dtype::bf16, values.data(), shape.hidden);
        return values;
    };
    std::vector<std::vector<float>> addends;
    for (const std::int64_t row : looked_at) addends.push_back(before(row));

    Context context = Context::create(shape, single_rank(), {.backend = "cpu", .max_tokens = tokens});
    context.add_layer(1, {.data = weights.matrix.data, .rows = shape.hidden});
    context.seal();
    // In place: the output is written over the shared partial, which is the one large tensor.
    const Status status = context.layer(0).run(
        {.routed = routed.matrix.data, .shared = shared.matrix.data, .tokens = tokens}, Rows(shared.matrix.data));
    ASSERT_TRUE(status.ok()) << status.message();

    for (std::size_t at = 0; at < looked_at.size(); ++at) {
        const std::vector<float> out = before(looked_at[at]);
        for (std::int64_t column = 0; column < shape.hidden; ++column) {
            double expected = static_cast<double>(addends[at][static_cast<std::size_t>(column)]);
            for (std::int64_t k = 0; k < shape.latent; ++k) {
                expected += static_cast<double>(load_element(routed.matrix.row(looked_at[at]), Dtype::bf16, k)) *
                            static_cast<double>(load_element(weights.matrix.row(column), Dtype::bf16, k));
            }
            ASSERT_NEAR(out[static_cast<std::size_t>(column)], expected, 0.02 + 0.01 * std::abs(expected))
                << "row " << looked_at[at] << ", column " << column;
        }
    }
}

}  // namespace
}  // namespace latent_moe
