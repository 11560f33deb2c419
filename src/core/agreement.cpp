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

std::vector<std::string> gather(const Bootstrap& bootstrap, const std::string& message) {
    const auto ranks = static_cast<std::size_t>(bootstrap.world);
    const std::uint64_t length = message.size();
    std::vector<std::uint64_t> lengths(ranks);
    bootstrap.all_gather_bytes(&length, lengths.data(), sizeof length);
    require_own(bootstrap, lengths[static_cast<std::size_t>(bootstrap.rank)] == length);
    std::uint64_t longest = 0;
    for (const std::uint64_t each : lengths) longest = std::max(longest, each);
    if (longest == 0) return std::vector<std::string>(ranks);  // no caller's all-gather need bear one of no bytes
    std::string padded = message;
    padded.resize(longest);
    std::vector<char> received(longest * ranks);
    bootstrap.all_gather_bytes(padded.data(), received.data(), longest);
    require_own(bootstrap, std::equal(padded.begin(), padded.end(),
                                      received.begin() + static_cast<std::ptrdiff_t>(longest) * bootstrap.rank));
    std::vector<std::string> messages;
    for (std::size_t rank = 0; rank < ranks; ++rank) messages.emplace_back(received.data() + rank * longest, lengths[rank]);
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
