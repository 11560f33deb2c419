#include "cli/tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>

#include "core/numeric.h"
#include "core/synthetic.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {
namespace {

/// e4m3 has too little range for weights as small as these: they are stored larger, and the scale makes up for it.
constexpr float e4m3_gain = 16;

float weight_deviation(std::int64_t latent) {
    return 1 / std::sqrt(static_cast<float>(latent));
}

/// `name` of /proc/meminfo in bytes, or infinity.
double meminfo(const std::string& name) {
    std::ifstream file("/proc/meminfo");
    std::string key;
    double kilobytes = 0;
    std::string rest;
    while (file >> key >> kilobytes && std::getline(file, rest)) {
        if (key == name + ":") return kilobytes * 1024;
    }
    return INFINITY;
}

double number_in(const char* path) {
    std::ifstream file(path);
    double value = 0;
    return file >> value ? value : INFINITY;
}

}  // namespace

Tensor::Tensor(std::int64_t rows, std::int64_t columns, Dtype dtype) : rows_(rows), columns_(columns), dtype_(dtype) {
    // Never empty: a tensor of no rows is still a tensor, with an address.
    data_ = std::make_unique_for_overwrite<std::byte[]>(std::max<std::size_t>(bytes(), 64));
}

Tensor Tensor::copy_of(const io::Matrix& matrix) {
    Tensor copy(matrix.rows, matrix.columns, matrix.dtype);
    if (!matrix.bytes.empty()) std::memcpy(copy.data_.get(), matrix.bytes.data(), matrix.bytes.size());
    return copy;
}

void Tensor::fill_bytes(int value) noexcept {
    std::memset(data_.get(), value, bytes());
}

double available_memory() {
    const double machine = meminfo("MemAvailable");
    const double group_limit = number_in("/sys/fs/cgroup/memory.max");
    const double group_used = number_in("/sys/fs/cgroup/memory.current");
    return std::isfinite(group_limit) && std::isfinite(group_used)
               ? std::min(machine, std::max(0.0, group_limit - group_used))
               : machine;
}

void require_memory(double bytes, const std::string& what) {
    const double available = available_memory();
    if (bytes <= available) return;
    throw Error(StatusCode::out_of_memory,
                fmt::format("{}: needs about {:.1f} GB of memory, this machine has {:.1f} GB available", what, bytes / 1e9,
                            available / 1e9));
}

WeightView LayerWeights::view() const noexcept {
    return {.data = rows.data,
            .rows = rows.rows,
            .stride = rows.stride,
            .dtype = rows.dtype,
            .scale = scale,
            .row_scales = row_scales.empty() ? nullptr : row_scales.data()};
}

void draw_gamma(const Matrix& gamma, std::uint64_t seed, std::int64_t layer) {
    fill_normal(gamma, draw_key(seed, Draw::gamma, static_cast<std::uint64_t>(layer)), 0.1F, 1.0F);
}

float draw_weights(const Matrix& rows, std::uint64_t seed, std::int64_t layer, std::int64_t first_row) {
    const std::uint64_t key = draw_key(seed, Draw::weights, static_cast<std::uint64_t>(layer));
    const float deviation = weight_deviation(rows.columns);
    if (rows.dtype != Dtype::e4m3) {
        fill_normal(rows, key, deviation, 0, first_row);
        return 1;
    }
    Tensor drawn(1, rows.columns, Dtype::f32);
    for (std::int64_t row = 0; row < rows.rows; ++row) {
        fill_normal(drawn.view(), key, e4m3_gain, 0, first_row + row);
        const auto* values = reinterpret_cast<const float*>(drawn.view().data);
        std::transform(values, values + rows.columns, reinterpret_cast<std::uint8_t*>(rows.row(row)), e4m3_from_float);
    }
    return deviation / e4m3_gain;
}

WeightSource::WeightSource(const Shape& shape, std::filesystem::path path, io::Checkpoint checkpoint)
    : shape_(shape), path_(std::move(path)), checkpoint_(std::move(checkpoint)) {}

LayerWeights WeightSource::load(std::int64_t layer, TokenRange rows) {
    return checkpoint_ ? read(layer, rows) : draw(layer, rows);
}

LayerWeights WeightSource::draw(std::int64_t layer, TokenRange rows) const {
    LayerWeights drawn;
    drawn.storage = Tensor(rows.count, shape_.latent, dtype_);
    drawn.scale = draw_weights(drawn.storage.view(), seed_, layer, rows.first);
    drawn.rows = std::as_const(drawn.storage).view();
    if (shape_.norm == Norm::rms) {
        drawn.gamma = Tensor(1, shape_.latent, shape_.activations);
        draw_gamma(drawn.gamma.view(), seed_, layer);
    }
    return drawn;
}

LayerWeights WeightSource::read(std::int64_t number, TokenRange rows) {
    const std::lock_guard lock(*mutex_);
    io::CheckpointLayer layer = checkpoint_->layer(number);
    if (layer.hidden() != shape_.hidden || layer.latent() != shape_.latent) {
        throw Error(StatusCode::invalid_argument,
                    fmt::format("{}: layer {} is [{}, {}], expected [{}, {}]", path_.string(), number, layer.hidden(),
                                layer.latent(), shape_.hidden, shape_.latent));
    }
    LayerWeights loaded;
    loaded.scale = layer.scale;
    if (!layer.row_scales.empty()) {
        const auto first = layer.row_scales.begin() + rows.first;
        loaded.row_scales.assign(first, first + rows.count);
    }
    io::Matrix part = layer.up_projection;
    const auto row_bytes = static_cast<std::size_t>(part.columns) * bytes_of(part.dtype);
    part.rows = rows.count;
    part.bytes = part.bytes.subspan(static_cast<std::size_t>(rows.first) * row_bytes,
                                    static_cast<std::size_t>(rows.count) * row_bytes);
    if (reinterpret_cast<std::uintptr_t>(part.bytes.data()) % bytes_of(part.dtype) == 0) {
        loaded.rows = {part.bytes.data(), part.rows, part.columns, part.columns, part.dtype};
    } else {
        loaded.storage = Tensor::copy_of(part);
        loaded.rows = std::as_const(loaded.storage).view();
    }
    if (shape_.norm == Norm::rms) {
        if (!layer.gamma) {
            throw Error(StatusCode::invalid_argument,
                        fmt::format("{}: layer {} has no norm weight, expected one for --norm rms", path_.string(), number));
        }
        // The norm's weight is used in the activations' dtype, whatever the file has.
        const Tensor stored = Tensor::copy_of(*layer.gamma);
        std::vector<float> values(static_cast<std::size_t>(shape_.latent));
        widen(stored.view().data, stored.view().dtype, values.data(), shape_.latent);
        loaded.gamma = Tensor(1, shape_.latent, shape_.activations);
        narrow(values.data(), shape_.activations, loaded.gamma.view().data, shape_.latent);
    }
    return loaded;
}

std::vector<std::int64_t> WeightSource::layers(std::int64_t first, int most) {
    std::vector<std::int64_t> numbers;
    if (!checkpoint_) {
        for (int i = 0; i < most; ++i) numbers.push_back(first + i);
        return numbers;
    }
    const std::lock_guard lock(*mutex_);
    for (const io::LatentLayerNames& names : checkpoint_->layers()) {
        if (names.number < first || static_cast<int>(numbers.size()) == most) continue;
        const io::CheckpointLayer layer = checkpoint_->layer(names.number);
        if (layer.hidden() == shape_.hidden && layer.latent() == shape_.latent) numbers.push_back(names.number);
    }
    return numbers;
}

DeferredMatrix UncombinedRows::view(std::int64_t latent) const noexcept {
    ConstMatrix matrix = rows.view();
    matrix.columns = latent;
    return {.rows = matrix,
            .weights = weights.view().data,
            .weight_dtype = weights.view().dtype,
            .map = map.data(),
            .slots = slots};
}

namespace {

/// Rows, weights and map such that the first tokens of a call are those of a smaller one.
UncombinedRows draw_uncombined(const DrawnCall& call, std::uint64_t key, int rank) {
    constexpr std::int64_t padding = 8;  // 16 bytes, as a GPU's rows must be
    const std::int64_t count = call.tokens * call.deferred_slots;
    UncombinedRows drawn{.rows = Tensor(count, call.shape.latent + padding, call.shape.activations),
                         .weights = Tensor(call.tokens, call.deferred_slots, rank % 2 == 0 ? Dtype::bf16 : Dtype::f32),
                         .map = {},
                         .slots = call.deferred_slots};
    const std::uint64_t own = key + static_cast<std::uint64_t>(rank) * 2;
    fill_normal(drawn.rows.view(), own, 1);
    const float about = 1 / std::sqrt(static_cast<float>(call.deferred_slots * call.world));
    fill_normal(drawn.weights.view(), own + 1, about / 4, about);
    for (std::int64_t at = 0; at < count; ++at) {
        // The last row first; every eleventh slot dropped, of tokens that have several.
        const bool dropped = call.deferred_slots > 1 && at % 11 == 5;
        drawn.map.push_back(dropped ? -1 : static_cast<std::int32_t>(count - 1 - at));
    }
    return drawn;
}

/// `to[t]` is the combination of token t's rows, rounded to its dtype.
Tensor combined(const UncombinedRows& from, std::int64_t tokens, std::int64_t latent, Dtype dtype) {
    Tensor to(tokens, latent, dtype);
    const DeferredMatrix rows = from.view(latent);
    std::vector<float> sum(static_cast<std::size_t>(latent));
    std::vector<float> scratch(sum.size());
    for (std::int64_t token = 0; token < tokens; ++token) {
        combine_row(rows, token, sum.data(), scratch.data());
        narrow(sum.data(), dtype, to.view().row(token), latent);
    }
    return to;
}

}  // namespace

CallInputs draw_inputs(const DrawnCall& call, const std::vector<bool>& needed) {
    const Shape& shape = call.shape;
    const auto key = [&](Draw draw) { return draw_key(call.seed, draw, call.instance); };
    CallInputs inputs;
    for (int rank = 0; rank < call.world; ++rank) {
        const bool wanted = needed[static_cast<std::size_t>(rank)];
        Tensor& routed = inputs.routed.emplace_back();
        if (call.deferred_slots > 0) {
            UncombinedRows& rows = inputs.uncombined.emplace_back();
            Tensor& exact = inputs.routed_exact.emplace_back();
            if (wanted) {
                rows = draw_uncombined(call, key(Draw::routed), rank);
                exact = combined(rows, call.tokens, shape.latent, Dtype::f32);
                routed = combined(rows, call.tokens, shape.latent, shape.activations);
            }
        } else if (wanted) {
            routed = Tensor(call.tokens, shape.latent, shape.activations);
            fill_partial(routed.view(), key(Draw::routed), rank, call.world);
        }
        if (call.shared == SharedState::absent) continue;
        Tensor& shared = inputs.shared.emplace_back();
        if (!wanted) continue;
        shared = Tensor(call.tokens, shape.hidden, shape.activations);
        if (call.shared == SharedState::partial) {
            fill_partial(shared.view(), key(Draw::shared), rank, call.world);
        } else {
            fill_normal(shared.view(), key(Draw::shared), 1);
        }
    }
    if (call.prefix) {
        inputs.prefix = Tensor(call.tokens, shape.hidden, shape.activations);
        fill_normal(inputs.prefix.view(), key(Draw::prefix), 1);
    }
    return inputs;
}

CallInputs read_inputs(const io::TensorFile& file, SharedState shared, bool prefix, const std::vector<bool>& needed) {
    CallInputs inputs;
    for (std::size_t rank = 0; rank < needed.size(); ++rank) {
        inputs.routed.push_back(needed[rank] ? Tensor::copy_of(file.routed()[rank]) : Tensor());
        if (shared != SharedState::absent)
            inputs.shared.push_back(needed[rank] ? Tensor::copy_of(file.shared()[rank]) : Tensor());
    }
    if (prefix && file.prefix()) inputs.prefix = Tensor::copy_of(*file.prefix());
    return inputs;
}

ReferenceInput reference_input(const Shape& shape, const CallInputs& inputs, SharedState shared, const LayerWeights& layer) {
    ReferenceInput input{.shape = shape,
                         .routed = {},
                         .shared = {},
                         .prefix = inputs.prefix.view(),
                         .weights = layer.rows,
                         .weight_scale = layer.scale,
                         .row_scales = layer.row_scales.empty() ? nullptr : layer.row_scales.data(),
                         .gamma = layer.gamma_data()};
    for (const Tensor& routed : inputs.routed) input.routed.push_back(routed.view());
    for (const Tensor& partial : inputs.shared) {
        input.shared.push_back(partial.view());
        if (shared == SharedState::reduced) break;
    }
    return input;
}

}  // namespace latent_moe::cli
