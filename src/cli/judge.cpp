#include "cli/judge.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "core/numeric.h"

namespace latent_moe::cli {
namespace {

constexpr std::int64_t few_elements = 4096;

}  // namespace

double allowed_error(const Shape& shape, double chain_rel_l2, Tail tail, std::int64_t elements) {
    // The errors of two roundings of a few elements differ by chance: a relative 1 / sqrt(elements), roughly.
    const double chance = elements > 0 && elements < few_elements ? 1 + 2.5 / std::sqrt(static_cast<double>(elements)) : 1;
    const double of_chain = (tail == Tail::late_reduce ? 1.25 : 1.05) * chance * chain_rel_l2;
    if (shape.activations != Dtype::f32 || chain_rel_l2 == 0) return of_chain;
    return std::max(of_chain, 0x1p-22);
}

Judge::Judge(const ReferenceInput& exact, const ReferenceInput& of_chain)
    : shape_(exact.shape), reference_(reference_tail(exact)), chain_(chain_tail(of_chain)) {
    for (std::size_t i = 0; i < chain_.size(); ++i) {
        if (!std::isfinite(chain_[i])) reference_[i] = std::numeric_limits<double>::quiet_NaN();
    }
}

double Judge::distance_to(const ReferenceInput& other) const {
    const std::vector<double> theirs = reference_tail(other);
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < theirs.size(); ++i) {
        if (!std::isfinite(reference_[i]) || !std::isfinite(theirs[i])) continue;
        error += (reference_[i] - theirs[i]) * (reference_[i] - theirs[i]);
        norm += theirs[i] * theirs[i];
    }
    return norm > 0 ? std::sqrt(error / norm) : 0;
}

const Judge::Rows& Judge::first_rows(std::int64_t tokens) {
    const auto found = rows_.find(tokens);
    if (found != rows_.end()) return found->second;
    rows_.clear();
    const auto count = static_cast<std::ptrdiff_t>(tokens * shape_.hidden);
    Rows rows{.reference = {reference_.begin(), reference_.begin() + count}};
    rows.chain_rel_l2 = relative_l2(std::vector<float>(chain_.begin(), chain_.begin() + count), rows.reference);
    return rows_.emplace(tokens, std::move(rows)).first->second;
}

Verdict Judge::judge(const ConstMatrix& out, Tail tail) {
    const Rows& rows = first_rows(out.rows);
    Verdict verdict{.rel_l2 = relative_l2(out, rows.reference),
                    .chain_rel_l2 = rows.chain_rel_l2,
                    .allowed = allowed_error(shape_, rows.chain_rel_l2, tail, out.rows * shape_.hidden),
                    .max_abs = max_abs_error(out, rows.reference)};
    std::vector<float> values(static_cast<std::size_t>(shape_.hidden));
    for (std::int64_t row = 0; row < out.rows && verdict.same_finite; ++row) {
        widen(out.row(row), out.dtype, values.data(), shape_.hidden);
        const float* chain = chain_.data() + row * shape_.hidden;
        for (std::int64_t i = 0; i < shape_.hidden; ++i) {
            if (std::isfinite(values[static_cast<std::size_t>(i)]) != std::isfinite(chain[i])) verdict.same_finite = false;
        }
    }
    return verdict;
}

}  // namespace latent_moe::cli
