// Whether an output is as right as it must be: float64, and the unfused chain beside it.
#pragma once

#include <map>
#include <vector>

#include "core/matrix.h"
#include "core/reference.h"
#include "latent_moe/plan.h"

namespace latent_moe::cli {

struct Verdict {
    double rel_l2 = 0;
    double chain_rel_l2 = 0;
    double allowed = 0;  ///< for `rel_l2`
    double max_abs = 0;
    bool same_finite = true;  ///< finite exactly where the chain is

    bool accurate() const noexcept { return same_finite && rel_l2 <= allowed; }
};

/// What `rel_l2` may be where the chain's error is `chain_rel_l2`: 1.05 times it, 1.25 times for `late_reduce`, which rounds
/// once more. In float32 two orders of one sum differ by as much as either is wrong, so there also a few of its roundings,
/// 2^-22.
double allowed_error(const Shape& shape, double chain_rel_l2, Tail tail, std::int64_t elements);

class Judge {
public:
    /// Takes seconds at the size of today's models.
    explicit Judge(const ReferenceInput& input) : Judge(input, input) {}
    /// Where the chain starts from rounded inputs, and the reference need not.
    Judge(const ReferenceInput& exact, const ReferenceInput& of_chain);

    /// How far `other`, the reference of another problem, is from this one's.
    double distance_to(const ReferenceInput& other) const;

    /// `out` holds the first rows. `tail` decides how much more than the chain's error is let pass.
    Verdict judge(const ConstMatrix& out, Tail tail);

private:
    /// The first rows of both, and the chain's own error.
    struct Rows {
        std::vector<double> reference;  ///< NaN where the chain is not finite: there its pattern is what counts
        double chain_rel_l2 = 0;
    };
    const Rows& first_rows(std::int64_t tokens);

    Shape shape_;
    std::vector<double> reference_;
    std::vector<float> chain_;
    std::map<std::int64_t, Rows> rows_;  // of the last number of tokens
};

}  // namespace latent_moe::cli
