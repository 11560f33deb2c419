#include "comm/transport.h"

#include <fmt/format.h>

#include <cstring>

#include "latent_moe/status.h"

namespace latent_moe {
namespace {

std::string what(const ExchangeHeader& header) {
    if (header.step == Step::none) return "set-up";
    if (!header.is_tail) return fmt::format("all_reduce_rms_norm with {} tokens", header.tokens);
    return fmt::format("tail {} of layer {} with {} tokens{}", name(header.tail), header.layer, header.tokens,
                       header.prefix ? " and a prefix" : "");
}

}  // namespace

const char* name(Step step) noexcept {
    switch (step) {
        case Step::none: return "set-up";
        case Step::reduce_latent: return "reduction of the latent";
        case Step::reduce_shared: return "reduction of the shared partial";
        case Step::reduce_output: return "reduction of the output";
        case Step::gather_latent: return "gather of the latent";
        case Step::gather_output: return "gather of the output";
        case Step::gather_weights: return "gather of the weights";
        case Step::self_check: return "self-check";
    }
    return "unknown step";
}

std::byte* pack(const Region& region, std::byte* destination) noexcept {
    for (std::int64_t row = 0; row < region.rows; ++row) {
        if (region.row_bytes != 0) std::memcpy(destination, region.row(row), static_cast<std::size_t>(region.row_bytes));
        destination += region.row_bytes;
    }
    return destination;
}

void store_gathered(std::span<const Region> incoming, int rank, void* received, std::size_t bytes) {
    for (std::size_t peer = 0; peer < incoming.size(); ++peer) {
        if (static_cast<std::size_t>(incoming[peer].row_bytes) != bytes) {
            throw ExchangeError(StatusCode::mismatch,
                                fmt::format("ranks gather different things: rank {} sent {} bytes, rank {} {}", peer,
                                            incoming[peer].row_bytes, rank, bytes),
                                static_cast<int>(peer), Step::none);
        }
        if (bytes != 0) std::memcpy(static_cast<std::byte*>(received) + peer * bytes, incoming[peer].data, bytes);
    }
}

void require_same(const ExchangeHeader& left, int left_rank, const ExchangeHeader& right, int right_rank) {
    if (left == right) return;
    const auto fail = [&](const std::string& message) {
        throw ExchangeError(StatusCode::mismatch, message, right_rank, left.step);
    };
    if (left.context != right.context && left.context != 0 && right.context != 0) {
        fail(
            fmt::format("contexts that share their ranks were called in different orders: rank {} is in context {}, rank {} "
                        "in context {}",
                        left_rank, left.context, right_rank, right.context));
    }
    if (what(left) != what(right)) {
        fail(fmt::format("ranks make different calls: rank {} is in {}, rank {} in {}", left_rank, what(left), right_rank,
                         what(right)));
    }
    if (left.call != right.call) {
        fail(fmt::format("ranks make different calls: rank {} is in call {} of the context, rank {} in call {} ({})",
                         left_rank, left.call, right_rank, right.call, what(left)));
    }
    if (left.step != right.step || left.block != right.block) {
        fail(fmt::format("ranks differ within {}: rank {} is in the {} of block {}, rank {} in the {} of block {}",
                         what(left), left_rank, name(left.step), left.block, right_rank, name(right.step), right.block));
    }
    fail(fmt::format("outputs diverged before call {}: rank {} had digest {:016x}, rank {} {:016x}", left.call, left_rank,
                     left.digest, right_rank, right.digest));
}

}  // namespace latent_moe
