#include "context/self_check.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "context/mismatch_file.h"
#include "core/digest.h"
#include "core/log.h"
#include "core/numeric.h"
#include "core/partition.h"
#include "core/reference.h"
#include "latent_moe/status.h"

namespace latent_moe {
namespace {

constexpr std::int64_t most_rows = 16;
constexpr std::size_t verdict_bytes = 512;

std::uint64_t checksum_of(const HostLayer& layer, const Shape& shape) {
    const std::uint64_t rows = digest_of(layer.rows);
    std::uint64_t rest = 0;
    if (layer.row_scales != nullptr) {
        rest += digest_of(
            {reinterpret_cast<const std::byte*>(layer.row_scales), 1, layer.rows.rows, layer.rows.rows, Dtype::f32});
    }
    if (layer.gamma != nullptr)
        rest ^= digest_of({static_cast<const std::byte*>(layer.gamma), 1, shape.latent, shape.latent, shape.activations});
    return rows * 31 + rest;
}

ConstMatrix matrix_of(const std::vector<std::byte>& bytes, std::int64_t columns, Dtype dtype) {
    const auto rows = static_cast<std::int64_t>(bytes.size() / (static_cast<std::size_t>(columns) * bytes_of(dtype)));
    return {bytes.data(), rows, columns, columns, dtype};
}

double norm_of(const float* values, std::int64_t count) {
    double squares = 0;
    for (std::int64_t i = 0; i < count; ++i) squares += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    return std::sqrt(squares);
}

/// Half a unit in the last place of 1.
double rounding_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::f32: return 0x1p-20;  // the order of float32 sums is free: more than one rounding
        case Dtype::f16: return 0x1p-11;
        default: return 0x1p-8;
    }
}

/// How far an element may be from the chain's: a few roundings of what was added up for it. `addends[i]` is Σ|…| of the
/// shared partials and the prefix.
class Tolerance {
public:
    Tolerance(const TailCall& call, Tail tail, const std::vector<float>& chain, const std::vector<double>& addends,
              const std::vector<ConstMatrix>& routed, std::int64_t row)
        : chain_(chain), addends_(addends), unit_(4 * rounding_of(call.shape.activations)) {
        double squares = 0;
        for (std::size_t i = 0; i < chain.size(); ++i)
            squares += std::pow(static_cast<double>(chain[i]), 2) + std::pow(addends[i], 2);
        typical_ = 2 * std::sqrt(squares / static_cast<double>(std::max<std::size_t>(chain.size(), 1)));
        if (tail == Tail::late_reduce) typical_ *= 1 + cancellation(call.shape, routed, row);
    }

    double of(std::size_t i) const { return unit_ * (std::abs(static_cast<double>(chain_[i])) + addends_[i] + typical_); }

private:
    /// Σ‖partial‖ / ‖Σ partial‖: how much larger than its sum the projected partials are that `late_reduce` rounds.
    static double cancellation(const Shape& shape, const std::vector<ConstMatrix>& routed, std::int64_t row) {
        std::vector<float> values(static_cast<std::size_t>(shape.latent));
        std::vector<float> sum(values.size());
        double parts = 0;
        for (const ConstMatrix& each : routed) {
            widen(each.row(row), each.dtype, values.data(), shape.latent);
            parts += norm_of(values.data(), shape.latent);
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
        }
        return parts / std::max(norm_of(sum.data(), shape.latent), 1e-30);
    }

    const std::vector<float>& chain_;
    const std::vector<double>& addends_;
    double unit_;
    double typical_ = 0;
};

}  // namespace

SelfCheck::SelfCheck(Backend& backend, const Shape& shape, std::int64_t period, std::string folder)
    : backend_(backend), shape_(shape), period_(period), folder_(std::move(folder)) {
    if (period > 0 && !backend.can_self_check() && backend.device_check() == nullptr) {
        throw Error(StatusCode::unsupported,
                    fmt::format("self_check_period is {}, but the {} backend has no self-check without a window that all "
                                "ranks' devices address",
                                period, backend.name()));
    }
}

void SelfCheck::seal_layer(const PackedLayer& layer) {
    if (!on()) return;
    if (DeviceCheck* device = backend_.device_check()) return device->seal_layer(layer);
    checksums_.push_back(checksum_of(backend_.host_layer(layer), shape_));
    calls_.push_back(0);
}

void SelfCheck::verify_weights(std::size_t index, std::int64_t id, const PackedLayer& layer) const {
    if (!on()) return;
    DeviceCheck* const device = backend_.device_check();
    const auto [found, expected] =
        device != nullptr ? device->checksums(index, layer)
                          : DeviceCheck::Checksums{checksum_of(backend_.host_layer(layer), shape_), checksums_[index]};
    if (found == expected) return;
    throw Error(StatusCode::mismatch,
                fmt::format("self-check: the packed weights of layer {} have changed: checksum {:016x}, "
                            "expected {:016x}",
                            id, found, expected));
}

bool SelfCheck::due(std::size_t index) noexcept {
    // Layers take turns, so that the checks do not all fall on one step of a model.
    if (on() && backend_.device_check() != nullptr) return true;  // it counts there
    return on() && (calls_[index]++ + static_cast<std::int64_t>(index)) % period_ == 0;
}

std::vector<std::int64_t> SelfCheck::rows_to_check(const TailCall& call) const {
    std::vector<std::int64_t> rows;
    const auto take = [&](TokenRange range, std::int64_t most) {
        const std::int64_t count = std::min(range.count, most);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t start = static_cast<std::int64_t>(checks_ * 0x9E3779B97F4A7C15U >> 33U);
            rows.push_back(range.first + (start + i * range.count / count) % range.count);
        }
    };
    if (call.stop_before_gather) {  // every rank has other rows: some of each
        const std::int64_t each = std::max<std::int64_t>(1, most_rows / call.world);
        for (int rank = 0; rank < call.world; ++rank) take(even_part(call.tokens, call.world, rank), each);
    } else {
        take({0, call.tokens}, most_rows);
    }
    return rows;
}

SelfCheck::Kept SelfCheck::copy_rows(const ConstMatrix& matrix, std::int64_t first_token) const {
    Kept kept{.bytes = {}, .columns = matrix.columns};
    for (const std::int64_t token : rows_) {
        const std::int64_t row = token - first_token;
        if (row < 0 || row >= matrix.rows) continue;
        kept.bytes.insert(kept.bytes.end(), matrix.row(row), matrix.row(row) + matrix.row_bytes());
    }
    return kept;
}

void SelfCheck::keep(const TailCall& call, const CallIdentity& identity, std::size_t index) {
    if (DeviceCheck* device = backend_.device_check()) return device->before(call, identity, index);
    ++checks_;
    rows_ = rows_to_check(call);
    const std::int64_t first = call.stop_before_gather ? even_part(call.tokens, call.world, call.rank).first : 0;
    routed_ = copy_rows(call.routed, 0);
    shared_ = call.shared.present() ? copy_rows(call.shared, 0) : Kept{};
    prefix_ = call.prefix.present() ? copy_rows(call.prefix, first) : Kept{};
}

std::vector<SelfCheck::Kept> SelfCheck::gather(const Kept& mine, int world) {
    std::vector<Kept> all(static_cast<std::size_t>(world), Kept{.bytes = {}, .columns = mine.columns});
    const auto bytes = static_cast<std::int64_t>(mine.bytes.size());
    backend_.share(Step::self_check, {mine.bytes.data(), 1, bytes, bytes}, [&](int peer, const Region& from) {
        all[static_cast<std::size_t>(peer)].bytes.assign(from.data, from.data + from.bytes());
    });
    return all;
}

bool SelfCheck::verify(const TailCall& call, const CallIdentity& identity, std::size_t index) {
    if (DeviceCheck* device = backend_.device_check()) {
        device->after(call, identity, index);
        return false;
    }
    std::string found;
    try {
        verify_weights(index, identity.layer, call.layer);
    } catch (const Error& error) {
        found = error.what();
    }
    Gathered gathered{.routed = gather(routed_, call.world), .shared = {}};
    if (shared_.columns != 0) gathered.shared = gather(shared_, call.world);
    if (found.empty()) found = compare(call, identity, backend_.host_layer(call.layer), gathered);
    if (!found.empty()) found += save(call, identity, gathered, found);

    Kept verdict{.bytes = std::vector<std::byte>(verdict_bytes), .columns = 1};
    std::memcpy(verdict.bytes.data(), found.data(), std::min(found.size(), verdict_bytes - 1));
    const std::vector<Kept> verdicts = gather(verdict, call.world);
    for (int rank = 0; rank < call.world; ++rank) {
        const std::string text(reinterpret_cast<const char*>(verdicts[static_cast<std::size_t>(rank)].bytes.data()));
        if (!text.empty())
            throw ExchangeError(StatusCode::mismatch, fmt::format("rank {}: {}", rank, text), rank, Step::self_check);
    }
    return true;
}

std::string SelfCheck::compare(const TailCall& call, const CallIdentity& identity, const HostLayer& layer,
                               const Gathered& gathered) {
    const Dtype dtype = call.shape.activations;
    const TokenRange own_rows =
        call.stop_before_gather ? even_part(call.tokens, call.world, call.rank) : TokenRange{0, call.tokens};
    // Every rank holds all columns; together they check each one once. A rank with rows of its own checks them whole.
    const TokenRange columns =
        call.stop_before_gather ? TokenRange{0, call.shape.hidden} : even_part(call.shape.hidden, call.world, call.rank);
    if (columns.count == 0) return {};
    ReferenceInput input{
        .shape = call.shape,
        .routed = {},
        .shared = {},
        .prefix = {},
        .weights = layer.rows.row_range(columns.first - layer.first_row, columns.count),
        .weight_scale = layer.scale,
        .row_scales = layer.row_scales == nullptr ? nullptr : layer.row_scales + (columns.first - layer.first_row),
        .gamma = layer.gamma};
    input.shape.hidden = columns.count;
    input.shape.routed_scale = 1;  // part of the packed scale
    std::vector<float> widened(static_cast<std::size_t>(columns.count));
    std::vector<double> addends(widened.size());
    std::int64_t prefix_row = 0;
    for (std::size_t at = 0; at < rows_.size(); ++at) {
        const std::int64_t row = rows_[at] - own_rows.first;
        if (row < 0 || row >= own_rows.count) continue;
        const auto kept_row = static_cast<std::int64_t>(at);
        std::fill(addends.begin(), addends.end(), 0.0);
        const auto add = [&](const ConstMatrix& rows) {
            widen(rows.data, rows.dtype, widened.data(), columns.count);
            for (std::size_t i = 0; i < widened.size(); ++i) addends[i] += std::abs(static_cast<double>(widened[i]));
        };
        input.routed.clear();
        input.shared.clear();
        std::vector<ConstMatrix> whole_routed;
        for (const Kept& each : gathered.routed) {
            whole_routed.push_back(matrix_of(each.bytes, each.columns, dtype));
            input.routed.push_back(whole_routed.back().row_range(kept_row, 1));
        }
        for (const Kept& each : gathered.shared) {
            input.shared.push_back(matrix_of(each.bytes, each.columns, dtype)
                                       .row_range(kept_row, 1)
                                       .column_range(columns.first, columns.count));
            add(input.shared.back());
            if (call.shared_state == SharedState::reduced) break;
        }
        if (prefix_.columns != 0) {
            input.prefix = matrix_of(prefix_.bytes, prefix_.columns, dtype)
                               .row_range(prefix_row++, 1)
                               .column_range(columns.first, columns.count);
            add(input.prefix);
        }
        const std::vector<float> chain = chain_tail(input);
        const Tolerance tolerance(call, identity.tail, chain, addends, whole_routed, kept_row);
        const ConstMatrix out = ConstMatrix(call.out).row_range(row, 1).column_range(columns.first, columns.count);
        widen(out.data, dtype, widened.data(), columns.count);
        for (std::size_t i = 0; i < widened.size(); ++i) {
            if (!std::isfinite(chain[i])) continue;  // what overflows in the chain may overflow elsewhere too
            const double difference = std::abs(static_cast<double>(widened[i]) - static_cast<double>(chain[i]));
            if (difference <= tolerance.of(i)) continue;
            return fmt::format(
                "self-check: the output of tail {} of layer {} is {} at row {}, column {}, expected {} within {:.2g}",
                name(identity.tail), identity.layer, widened[i], rows_[at], columns.first + static_cast<std::int64_t>(i),
                chain[i], tolerance.of(i));
        }
    }
    return {};
}

std::string SelfCheck::save_device_mismatch(const std::string& what, int rank, int context) const {
    DeviceCheck* const device = backend_.device_check();
    if (!on() || device == nullptr) return {};
    try {
        const std::optional<KeptRows> kept = device->wrong_call();
        if (!kept) return {};
        static std::atomic<int> mismatches = 0;  // a process may have many contexts of one number
        const std::string path =
            fmt::format("{}/latent-moe-mismatch-{}-{}-context-{}-layer-{}-rank-{}-inputs.safetensors",
                        folder_.empty() ? "." : folder_, ::getpid(), ++mismatches, context, kept->layer, rank);
        std::vector<MismatchTensor> inputs;
        for (std::size_t each = 0; each < kept->routed.size(); ++each) {
            inputs.push_back(
                {fmt::format("routed.{}", each), matrix_of(kept->routed[each], shape_.latent, shape_.activations)});
        }
        for (std::size_t each = 0; each < kept->shared.size(); ++each) {
            inputs.push_back(
                {fmt::format("shared.{}", each), matrix_of(kept->shared[each], shape_.hidden, shape_.activations)});
        }
        write_mismatch(path, what, inputs);
        return fmt::format("; inputs saved to {}", path);
    } catch (const std::exception& error) {
        return fmt::format("; inputs not saved: {}", error.what());
    }
}

std::string SelfCheck::save(const TailCall& call, const CallIdentity& identity, const Gathered& gathered,
                            const std::string& what) const {
    try {
        const Dtype dtype = call.shape.activations;
        const std::string stem =
            fmt::format("{}/latent-moe-mismatch-{}-context-{}-call-{}-rank-{}", folder_.empty() ? "." : folder_, ::getpid(),
                        identity.context, identity.call, call.rank);
        // What `latent-moe run --inputs` takes, and what came out beside it.
        std::vector<MismatchTensor> inputs;
        const auto add = [&](const std::string& kind, const std::vector<Kept>& of_ranks) {
            for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
                inputs.push_back(
                    {fmt::format("{}.{}", kind, rank), matrix_of(of_ranks[rank].bytes, of_ranks[rank].columns, dtype)});
            }
        };
        add("routed", gathered.routed);
        add("shared", gathered.shared);
        if (prefix_.columns != 0 && !call.stop_before_gather)
            inputs.push_back({"prefix", matrix_of(prefix_.bytes, prefix_.columns, dtype)});
        write_mismatch(stem + "-inputs.safetensors", what, inputs);
        const Kept out = copy_rows(ConstMatrix(call.out),
                                   call.stop_before_gather ? even_part(call.tokens, call.world, call.rank).first : 0);
        write_mismatch(stem + "-out.safetensors", what, {{"out", matrix_of(out.bytes, out.columns, dtype)}});
        return fmt::format("; inputs saved to {}-inputs.safetensors", stem);
    } catch (const std::exception& error) {
        return fmt::format("; inputs not saved: {}", error.what());
    }
}

}  // namespace latent_moe
