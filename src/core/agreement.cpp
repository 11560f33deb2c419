#include "core/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "latent_moe/status.h"

namespace latent_moe {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

// A message is `name \x1f value \x1e` for each field; neither character occurs in a name or a value.
std::string serialise(const Fields& fields) {
    std::string message;
    for (const auto& [name, value] : fields) message.append(name).append(1, '\x1f').append(value).append(1, '\x1e');
    return message;
}

Fields parse(std::string_view message) {
    Fields fields;
    while (!message.empty()) {
        const std::size_t end = message.find('\x1e');
        const std::string_view field = message.substr(0, end);
        const std::size_t middle = field.find('\x1f');
        fields.emplace_back(field.substr(0, middle),
                            middle == std::string_view::npos ? std::string_view{} : field.substr(middle + 1));
        message.remove_prefix(end == std::string_view::npos ? message.size() : end + 1);
    }
    return fields;
}

/// A bootstrap that is a caller's own may be wrong; what it hands back for this rank is known.
void require_own(const Bootstrap& bootstrap, bool same) {
    if (same) return;
    throw Error(
        StatusCode::invalid_argument,
        fmt::format("the bootstrap's all_gather_bytes gave rank {} of {} other bytes for itself than it sent, expected "
                    "the bytes of all ranks in rank order",
                    bootstrap.rank, bootstrap.world));
}

/// What a rank says of itself before it says more.
struct Announcement {
    std::uint64_t length;  ///< of its message
    std::int32_t rank, world;
    bool operator==(const Announcement&) const = default;
};

/// Two ranks with one number, or ranks in another order than the all-gather's, would each sum what is not theirs.
void require_in_order(const Bootstrap& bootstrap, const std::vector<Announcement>& all) {
    for (int place = 0; place < bootstrap.world; ++place) {
        const Announcement& found = all[static_cast<std::size_t>(place)];
        if (found.rank == place && found.world == bootstrap.world) continue;
        throw Error(
            StatusCode::mismatch,
            fmt::format("place {} of what the bootstrap's all_gather_bytes gave rank {} of {} is from rank {} of {}, "
                        "expected rank {} of {}",
                        place, bootstrap.rank, bootstrap.world, found.rank, found.world, place, bootstrap.world));
    }
}

std::vector<std::string> gather(const Bootstrap& bootstrap, const std::string& message) {
    const auto ranks = static_cast<std::size_t>(bootstrap.world);
    const Announcement mine{message.size(), bootstrap.rank, bootstrap.world};
    std::vector<Announcement> all(ranks);
    bootstrap.all_gather_bytes(&mine, all.data(), sizeof mine);
    require_in_order(bootstrap, all);
    require_own(bootstrap, all[static_cast<std::size_t>(bootstrap.rank)] == mine);
    std::uint64_t longest = 0;
    for (const Announcement& each : all) longest = std::max(longest, each.length);
    if (longest == 0) return std::vector<std::string>(ranks);  // no caller's all-gather need bear one of no bytes
    std::string padded = message;
    padded.resize(longest);
    std::vector<char> received(longest * ranks);
    bootstrap.all_gather_bytes(padded.data(), received.data(), longest);
    require_own(bootstrap, std::equal(padded.begin(), padded.end(),
                                      received.begin() + static_cast<std::ptrdiff_t>(longest) * bootstrap.rank));
    std::vector<std::string> messages;
    for (std::size_t rank = 0; rank < ranks; ++rank)
        messages.emplace_back(received.data() + rank * longest, all[rank].length);
    return messages;
}

}  // namespace

std::string text_of_rank_0(const Bootstrap& bootstrap, const std::string& own) {
    return gather(bootstrap, bootstrap.rank == 0 ? own : std::string()).front();
}

void Agreement::confirm(const Bootstrap& bootstrap, const std::string& failure) const {
    Fields mine = {{"failure", failure}};
    mine.insert(mine.end(), fields_.begin(), fields_.end());
    const std::vector<std::string> messages = gather(bootstrap, serialise(mine));

    std::vector<Fields> all;
    for (const std::string& message : messages) all.push_back(parse(message));
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (all[rank].empty() || all[rank].front().second.empty()) continue;
        throw Error(StatusCode::aborted, fmt::format("{} failed on rank {}: {}", what_, rank, all[rank].front().second));
    }
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
        for (std::size_t index = 0; index < std::max(all[0].size(), all[rank].size()); ++index) {
            const auto at = [index](const Fields& fields) {
                return index < fields.size() ? fields[index] : std::pair<std::string, std::string>{"(nothing)", ""};
            };
            const auto [left_name, left_value] = at(all[0]);
            const auto [right_name, right_value] = at(all[rank]);
            if (left_name != right_name) {
                throw Error(StatusCode::mismatch, fmt::format("{}: ranks differ: rank 0 has {} {}, rank {} has {} {}", what_,
                                                              left_name, left_value, rank, right_name, right_value));
            }
            if (left_value != right_value) {
                throw Error(StatusCode::mismatch, fmt::format("{}: ranks differ in {}: rank 0 has {}, rank {} has {}", what_,
                                                              left_name, left_value, rank, right_value));
            }
        }
    }
}

}  // namespace latent_moe
