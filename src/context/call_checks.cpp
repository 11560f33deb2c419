#include "context/call_checks.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <system_error>

#include "latent_moe/status.h"

namespace latent_moe {
namespace {

[[noreturn]] void refuse(const std::string& message) {
    throw Error(StatusCode::invalid_argument, message);
}

/// No address of a row overflows below this: rows are fewer than 2^31, elements at most 4 bytes.
constexpr std::int64_t most_stride = std::int64_t{1} << 30;

void require_stride(const char* what, std::int64_t stride, std::int64_t columns) {
    if (stride < columns)
        refuse(fmt::format("{} has a row stride of {} elements, expected at least {}", what, stride, columns));
    if (stride > most_stride)
        refuse(fmt::format("{} has a row stride of {} elements, expected at most {}", what, stride, most_stride));
}

void check_rows(const char* what, const void* data, std::int64_t stride, std::int64_t count, std::int64_t columns,
                Dtype dtype) {
    if (count > 0 && data == nullptr) refuse(fmt::format("{} is null, expected [{}, {}]", what, count, columns));
    require_stride(what, stride, columns);
    if (reinterpret_cast<std::uintptr_t>(data) % bytes_of(dtype) != 0) {
        refuse(fmt::format("{} is not aligned to its {} elements", what, name(dtype)));
    }
}

}  // namespace

ConstMatrix const_matrix(const char* what, const ConstRows& rows, std::int64_t count, std::int64_t columns, Dtype dtype) {
    const std::int64_t stride = rows.stride == 0 ? columns : rows.stride;
    check_rows(what, rows.data, stride, count, columns, dtype);
    return {static_cast<const std::byte*>(rows.data), count, columns, stride, dtype};
}

Matrix matrix(const char* what, const Rows& rows, std::int64_t count, std::int64_t columns, Dtype dtype) {
    const std::int64_t stride = rows.stride == 0 ? columns : rows.stride;
    check_rows(what, rows.data, stride, count, columns, dtype);
    return {static_cast<std::byte*>(rows.data), count, columns, stride, dtype};
}

void require_alignment(const char* what, const ConstMatrix& matrix, std::int64_t bytes) {
    const bool first = reinterpret_cast<std::uintptr_t>(matrix.data) % static_cast<std::uintptr_t>(bytes) == 0;
    if (first && (matrix.rows < 2 || matrix.stride_bytes() % bytes == 0)) return;
    refuse(fmt::format("{} begins at {} with a row stride of {} bytes, expected multiples of {} bytes", what,
                       static_cast<const void*>(matrix.data), matrix.stride_bytes(), bytes));
}

void require_no_overlap(const char* input_name, const ConstMatrix& input, const Matrix& out, bool may_be_same) {
    if (!input.present() || input.rows == 0 || out.rows == 0) return;
    if (may_be_same && input.data == out.data && input.stride == out.stride) return;
    const std::byte* input_end = input.row(input.rows - 1) + input.row_bytes();
    const std::byte* out_end = out.row(out.rows - 1) + out.row_bytes();
    if (input.data < out_end && out.data < input_end) {
        refuse(fmt::format("out overlaps {}, expected separate memory{}", input_name,
                           may_be_same ? " or exactly the same rows" : ""));
    }
}

DeferredMatrix deferred_matrix(const DeferredRows& deferred, std::int64_t tokens, const Shape& shape) {
    if (deferred.slots < 1 || deferred.slots > max_slots)
        refuse(fmt::format("deferred slots is {}, expected 1 to {}", deferred.slots, max_slots));
    if (deferred.count < 0) refuse(fmt::format("the count of the deferred rows is {}, expected at least 0", deferred.count));
    if (deferred.count > INT32_MAX)  // the map's entries are of 32 bits
        refuse(fmt::format("the count of the deferred rows is {}, expected at most {}", deferred.count, INT32_MAX));
    if (deferred.weight_dtype != Dtype::bf16 && deferred.weight_dtype != Dtype::f32)
        refuse(fmt::format("the deferred weights are {}, expected bf16 or f32", name(deferred.weight_dtype)));
    if (tokens > 0 && deferred.weights == nullptr) refuse("the deferred weights are null");
    if (tokens > 0 && deferred.map == nullptr) refuse("the deferred row map is null");
    if (reinterpret_cast<std::uintptr_t>(deferred.weights) % bytes_of(deferred.weight_dtype) != 0)
        refuse(fmt::format("the deferred weights are not aligned to their {} elements", name(deferred.weight_dtype)));
    if (reinterpret_cast<std::uintptr_t>(deferred.map) % sizeof(std::int32_t) != 0)
        refuse("the deferred row map is not aligned to its int32 elements");
    return {.rows = const_matrix("deferred rows", deferred.rows, deferred.count, shape.latent, shape.activations),
            .weights = static_cast<const std::byte*>(deferred.weights),
            .weight_dtype = deferred.weight_dtype,
            .map = deferred.map,
            .slots = deferred.slots};
}

void require_map(const DeferredMatrix& deferred, std::int64_t tokens) {
    for (std::int64_t at = 0; at < tokens * deferred.slots; ++at) {
        if (deferred.map[at] < deferred.rows.rows) continue;
        refuse(fmt::format("the deferred row map says {} for slot {} of token {}, expected below {}", deferred.map[at],
                           at % deferred.slots, at / deferred.slots, deferred.rows.rows));
    }
}

void validate(const Options& options, const Shape& shape, int world) {
    if (world < 1 || world > max_world) refuse(fmt::format("world is {}, expected 1 to {}", world, max_world));
    if (options.max_tokens < 1 || options.max_tokens > max_tokens_limit) {
        refuse(fmt::format("max_tokens is {}, expected 1 to {}", options.max_tokens, max_tokens_limit));
    }
    if (options.capacity_tokens < 0 || options.capacity_tokens > max_tokens_limit) {
        refuse(fmt::format("capacity_tokens is {}, expected 0 to {}", options.capacity_tokens, max_tokens_limit));
    }
    if (options.tail && static_cast<int>(*options.tail) >= tail_count) {
        refuse(fmt::format("tail is number {}, expected 0 to {}", static_cast<int>(*options.tail), tail_count - 1));
    }
    if (options.shared != SharedState::partial && options.shared != SharedState::reduced &&
        options.shared != SharedState::absent) {
        refuse(fmt::format("shared is number {}, expected partial, reduced or absent", static_cast<int>(options.shared)));
    }
    if (options.tune_table.empty()) refuse("tune_table is empty, expected a file, auto or none");
    if (options.other_reducer_from_bytes < 0)
        refuse(fmt::format("other_reducer_from_bytes is {}, expected at least 0", options.other_reducer_from_bytes));
    if (options.timeout_ms < 1) refuse(fmt::format("timeout_ms is {}, expected at least 1", options.timeout_ms));
    if (options.cpu_threads < 0 || options.cpu_threads > 1024) {
        refuse(fmt::format("cpu_threads is {}, expected 0 to 1024", options.cpu_threads));
    }
    if (options.reserved_sms < 0) refuse(fmt::format("reserved_sms is {}, expected at least 0", options.reserved_sms));
    if (options.self_check_period < 0)
        refuse(fmt::format("self_check_period is {}, expected at least 0", options.self_check_period));
    std::error_code unknown;
    if (options.self_check_period > 0 && !options.self_check_folder.empty() &&
        !std::filesystem::is_directory(options.self_check_folder, unknown)) {
        refuse(fmt::format("self_check_folder is '{}', expected a folder that is there", options.self_check_folder));
    }
    if (shape.hidden % world != 0 && !options.keep_whole_weights) {
        refuse(fmt::format(
            "hidden {} is not divisible by {} ranks: no rank can own an equal shard of W_up, expected keep_whole_weights or "
            "a number of ranks that divides it",
            shape.hidden, world));
    }
}

void validate(const WeightView& view, const Shape& shape, int world, const void* gamma) {
    if (view.data == nullptr) refuse("W_up is null");
    const bool divisible = shape.hidden % world == 0;
    if (view.rows != shape.hidden && !(divisible && view.rows == shape.hidden / world)) {
        const std::string shard = divisible ? fmt::format(" or this rank's {}", shape.hidden / world) : std::string();
        refuse(fmt::format("W_up has {} rows, expected all {}{}", view.rows, shape.hidden, shard));
    }
    if (bytes_of(view.dtype) == 0)
        refuse(fmt::format("W_up has dtype number {}, expected bf16, f16, f32 or e4m3", static_cast<int>(view.dtype)));
    if (view.stride != 0) require_stride("W_up", view.stride, shape.latent);
    if (!std::isfinite(view.scale)) refuse(fmt::format("W_up has the scale {}, expected a finite number", view.scale));
    if ((shape.norm == Norm::rms) != (gamma != nullptr)) {
        refuse(shape.norm == Norm::rms ? "gamma is null, expected the norm's weights"
                                       : "gamma is given, but the shape has no norm");
    }
}

}  // namespace latent_moe
