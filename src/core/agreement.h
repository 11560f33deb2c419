// What ranks compare before they run: named fields, so that an error can say which one differs.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "latent_moe/bootstrap.h"

namespace latent_moe {

class Agreement {
public:
    /// `what` opens the error: "context creation", say.
    explicit Agreement(std::string what) : what_(std::move(what)) {}

    void field(std::string_view name, std::string value) { fields_.emplace_back(name, std::move(value)); }

    /// Collective. If any rank failed before (`failure` is its error, empty if it has none), every rank throws: the failing
    /// rank its own error, the others one that names it. Then throws `mismatch` on every rank if a field differs.
    void confirm(const Bootstrap& bootstrap, const std::string& failure = {}) const;

private:
    std::string what_;
    std::vector<std::pair<std::string, std::string>> fields_;
};

/// Collective: rank 0's text, on every rank.
std::string text_of_rank_0(const Bootstrap& bootstrap, const std::string& own);

}  // namespace latent_moe
