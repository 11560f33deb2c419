#include "cli/row_judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/numeric.h"

namespace latent_moe::cli {
namespace {

/// ‖values − reference‖ / ‖reference‖ of some elements; infinite where a value is not finite though the reference is.
template <typename Value>
double relative_error(const Value* values, const double* reference, std::int64_t count) {
    double error = 0;
    double norm = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        error += std::pow(static_cast<double>(values[i]) - reference[i], 2);
        norm += reference[i] * reference[i];
    }
    if (!std::isfinite(error)) return INFINITY;
    return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

/// A few roundings of the dtype: what two orders of one sum may differ by where the chain happens to be exact.
double few_roundings(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: return 0x1p-20;
        case Dtype::f16: return 0x1p-12;
        default: return 0x1p-9;
    }
}

}  // namespace

std::optional<std::string> find_wrong_row(const ConstMatrix& out, const ReferenceInput& input, Tail tail) {
    const std::vector<double> reference = reference_tail(input);
    const std::vector<float> chain = chain_tail(input);
    const std::int64_t columns = input.shape.hidden;
    const double of_all = relative_error(chain.data(), reference.data(), static_cast<std::int64_t>(chain.size()));
    const double factor = tail == Tail::late_reduce ? 3 : 2;
    std::vector<float> values(static_cast<std::size_t>(columns));
    for (std::int64_t row = 0; row < out.rows; ++row) {
        widen(out.row(row), out.dtype, values.data(), columns);
        const double of_chain = relative_error(chain.data() + row * columns, reference.data() + row * columns, columns);
        const double found = relative_error(values.data(), reference.data() + row * columns, columns);
        const double allowed = factor * std::max({of_chain, of_all, few_roundings(out.dtype)});
        if (found <= allowed) continue;
        return fmt::format("row {} of {} has the relative error {:.2e}, expected at most {:.2e}", row, out.rows, found,
                           allowed);
    }
    return std::nullopt;
}

}  // namespace latent_moe::cli
