#include "core/tune_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "latent_moe/version.h"

namespace latent_moe {

TuneKey tune_key(const Shape& shape, int world, const Options& options, const std::string& device,
                 const std::string& links) {
    return {.version = library_version(),
            .device = device,
            .links = links,
            .world = world,
            .hidden = shape.hidden,
            .latent = shape.latent,
            .norm = shape.norm,
            .activations = shape.activations,
            .shared = options.shared,
            .sequence_parallel = options.sequence_parallel,
            .batch_invariant = options.batch_invariant,
            .float8_weights = options.float8_weights};
}

std::string difference(const TuneKey& of_table, const TuneKey& here) {
    std::string found;
    const auto compare = [&](const char* what, const auto& theirs, const auto& ours) {
        if (found.empty() && theirs != ours) found = fmt::format("its {} is {}, here it is {}", what, theirs, ours);
    };
    compare("version", of_table.version, here.version);
    compare("device", of_table.device, here.device);
    compare("links", of_table.links, here.links);
    compare("tp", of_table.world, here.world);
    compare("hidden", of_table.hidden, here.hidden);
    compare("latent", of_table.latent, here.latent);
    compare("norm", std::string(name(of_table.norm)), std::string(name(here.norm)));
    compare("dtype", std::string(name(of_table.activations)), std::string(name(here.activations)));
    compare("shared", std::string(name(of_table.shared)), std::string(name(here.shared)));
    compare("sequence_parallel", of_table.sequence_parallel, here.sequence_parallel);
    compare("batch_invariant", of_table.batch_invariant, here.batch_invariant);
    compare("float8_weights", of_table.float8_weights, here.float8_weights);
    return found;
}

std::vector<std::int64_t> untried_tokens(const std::vector<std::int64_t>& known, int count) {
    std::set<std::int64_t> found;
    if (known.empty()) return {};
    const auto [least, most] = std::minmax_element(known.begin(), known.end());
    const double first = static_cast<double>(std::max<std::int64_t>(*least, 1));
    const auto is_free = [&](std::int64_t tokens) {
        return !found.contains(tokens) && std::find(known.begin(), known.end(), tokens) == known.end();
    };
    for (int at = 0; at < count; ++at) {
        const double part = (at + 0.5) / count;
        auto tokens = static_cast<std::int64_t>(std::lround(first * std::pow(static_cast<double>(*most) / first, part)));
        while (tokens < *most && !is_free(tokens)) ++tokens;  // few tokens are close together
        if (tokens < *most && tokens > *least) found.insert(tokens);
    }
    return {found.begin(), found.end()};
}

std::vector<std::int64_t> TuneTable::tokens() const {
    std::vector<std::int64_t> all;
    for (const std::vector<TunePoint>& of_tail : points) {
        for (const TunePoint& point : of_tail) all.push_back(point.tokens);
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
}

std::optional<double> TuneTable::us(Tail tail, std::int64_t tokens) const noexcept {
    const std::vector<TunePoint>& known = points[static_cast<std::size_t>(tail)];
    if (known.empty()) return std::nullopt;
    if (known.size() == 1 && tokens != known.front().tokens) return std::nullopt;
    if (tokens <= known.front().tokens) return known.front().us;
    auto right = std::lower_bound(known.begin(), known.end(), tokens,
                                  [](const TunePoint& point, std::int64_t wanted) { return point.tokens < wanted; });
    const bool beyond = right == known.end();
    if (beyond) --right;
    const TunePoint& left = *std::prev(right);
    double slope = (right->us - left.us) / static_cast<double>(right->tokens - left.tokens);
    if (beyond) slope = std::max(slope, 0.0);  // noise must not make many tokens cheap
    return right->us + slope * static_cast<double>(tokens - right->tokens);
}

}  // namespace latent_moe
