// The self-check's two kernels. They share nothing with the tails but the headers of the exchange (header.h), so that what
// is wrong in a tail's mailboxes, sums or products is not repeated here.
//
//     keep (one CTA, before the call):   rows to check ──▶ this rank's window │ headers meet │ every rank's rows ──▶ sums
//     compare (many CTAs, after it):     W_up, sums ──▶ chain; the last CTA: chain ◀─?─▶ out, checksum ◀─?─▶ expected
//
// WHEN. A rank's kept rows lie in one of two buffers, in turn. They are read by peers after the header of that check came,
// and written again two checks later: by then the header of the check between has come, which a peer sends after it has read
// (header.h, guarantee 2). Only `keep` waits, with one CTA, and only in calls that are due.
#include "gpu/kernels/self_check.h"

#include <algorithm>

#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/row_norm.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/numeric.h"

namespace latent_moe::gpu {
namespace {

constexpr int keep_threads = norm_threads;
constexpr int compare_threads = 256;
constexpr int compare_ctas = 128;
constexpr int compare_waves = compare_threads / static_cast<int>(wave_size);

struct Params {
    CheckCall call;
    UnitRows routed, shared, prefix, out;
    std::uint32_t latent_units, hidden_units;
};

/// Like `even_part`.
LATENT_MOE_DEVICE std::int64_t first_of_part(std::int64_t count, int parts, int index) {
    return count * index / parts;
}

/// Which token the `index`-th checked row is; of larger calls others in every check. Like context/self_check.cpp.
LATENT_MOE_DEVICE std::int64_t checked_token(const CheckCall& c, std::uint32_t check, int index, int* rows) {
    const std::uint64_t start = (std::uint64_t{check} + 1) * 0x9E3779B97F4A7C15u >> 33;
    const int world = c.exchange.window.world;
    const int ranges = c.own_rows_only ? world : 1;
    const int most = max(1, most_checked_rows / ranges);
    int before = 0;
    std::int64_t token = 0;
    for (int range = 0; range < ranges; ++range) {
        const std::int64_t first = first_of_part(c.tokens, ranges, range);
        const std::int64_t size = first_of_part(c.tokens, ranges, range + 1) - first;
        const int taken = static_cast<int>(min(size, std::int64_t{most}));
        if (index >= before && index < before + taken) {
            token = first + (static_cast<std::int64_t>(start) + (index - before) * size / taken) % size;
        }
        before += taken;
    }
    *rows = before;
    return token;
}

LATENT_MOE_DEVICE char* kept_at(const Params& p, int rank, std::uint32_t buffer) {
    const std::int64_t bytes = std::int64_t{most_checked_rows} * (p.latent_units + p.hidden_units) * 16;
    return static_cast<char*>(p.call.exchange.window.base[rank]) + control_bytes + buffer * bytes;
}
LATENT_MOE_DEVICE UnitRows kept_routed(const Params& p, int rank, std::uint32_t buffer) {
    return {kept_at(p, rank, buffer), std::int64_t{p.latent_units} * 16};
}
LATENT_MOE_DEVICE UnitRows kept_shared(const Params& p, int rank, std::uint32_t buffer) {
    return {kept_at(p, rank, buffer) + std::int64_t{most_checked_rows} * p.latent_units * 16,
            std::int64_t{p.hidden_units} * 16};
}

/// Row `row` of the chain's latent: Σ over ranks, in rank order, rounded; then the norm, rounded.
template <Dtype dtype>
LATENT_MOE_DEVICE void chain_latent(const Params& p, std::uint32_t buffer, int row,
                                    float (&parts)[2][norm_threads / norm_group]) {
    using U = Unit<dtype>;
    const CheckCall& c = p.call;
    const UnitRows latent{static_cast<char*>(c.scratch.latent), std::int64_t{p.latent_units} * 16};
    float of_parts = 0, of_sum = 0;
    for (std::uint32_t unit = threadIdx.x; unit < p.latent_units; unit += keep_threads) {
        float sum[U::size] = {};
        for (int rank = 0; rank < c.exchange.window.world; ++rank) {
            float term[U::size];
            U::unpack(load_relaxed(kept_routed(p, rank, buffer).at(row, unit)), term);
            for (int i = 0; i < U::size; ++i) sum[i] += term[i], of_parts = fmaf(term[i], term[i], of_parts);
        }
        const uint4 rounded = U::pack(sum);
        of_sum = sum_of_squares<dtype>(rounded, of_sum);
        store16(latent.at(row, unit), rounded);
    }
    of_parts = sum_over_cta(of_parts, parts[0]);
    of_sum = sum_over_cta(of_sum, parts[1]);
    if (threadIdx.x == 0) {
        const auto world = static_cast<float>(c.exchange.window.world);
        c.state->cancellation[row] = sqrtf(world * of_parts / fmaxf(of_sum, 1e-30F));
    }
    if (c.gamma == nullptr) return;
    const float factor = rms_factor(of_sum, 1.0F / static_cast<float>(c.latent), c.epsilon);
    for (std::uint32_t unit = threadIdx.x; unit < p.latent_units; unit += keep_threads) {
        const uint4 gamma = load16(static_cast<const uint4*>(c.gamma) + unit);
        store16(latent.at(row, unit), normalised<dtype>(load16(latent.at(row, unit)), gamma, factor));
    }
}

/// What the chain adds to row `row` of the projection, in the columns that this rank checks (and their units' neighbours).
template <Dtype dtype>
LATENT_MOE_DEVICE void chain_addends(const Params& p, std::uint32_t buffer, int row) {
    using U = Unit<dtype>;
    const CheckCall& c = p.call;
    const auto first = static_cast<std::uint32_t>(c.first_column / U::size);
    const auto end = static_cast<std::uint32_t>((c.first_column + c.columns + U::size - 1) / U::size);
    const UnitRows sums{static_cast<char*>(c.scratch.shared), std::int64_t{p.hidden_units} * 16};
    const UnitRows prefix{static_cast<char*>(c.scratch.prefix), std::int64_t{p.hidden_units} * 16};
    for (std::uint32_t unit = first + threadIdx.x; unit < end; unit += keep_threads) {
        float sum[U::size] = {}, size[U::size] = {}, term[U::size];
        const int ranks = p.shared.data == nullptr ? 0 : c.shared_is_sum ? 1 : c.exchange.window.world;
        for (int rank = 0; rank < ranks; ++rank) {
            U::unpack(load_relaxed(kept_shared(p, rank, buffer).at(row, unit)), term);
            for (int i = 0; i < U::size; ++i) sum[i] += term[i], size[i] += fabsf(term[i]);
        }
        store16(sums.at(row, unit), U::pack(sum));
        if (p.prefix.data != nullptr) {
            U::unpack(load16(prefix.at(row, unit)), term);
            for (int i = 0; i < U::size; ++i) size[i] += fabsf(term[i]);
        }
        for (int i = 0; i < U::size; ++i) c.scratch.addends[row * c.hidden + unit * U::size + i] = size[i];
    }
}

LATENT_MOE_DEVICE bool is_own(const CheckCall& c, std::int64_t token) {
    return token >= c.own_first && token < c.own_first + c.own_count;
}

template <Dtype dtype>
__global__ void __launch_bounds__(keep_threads) keep(const __grid_constant__ Params p) {
    __shared__ float parts[2][norm_threads / norm_group];
    __shared__ std::int64_t tokens[most_checked_rows];
    const CheckCall& c = p.call;
    dependency_wait();
    const Call call = enter_call(c.exchange);
    const std::uint32_t calls = load_relaxed<Scope::device>(&c.layer->calls);
    sync_cta();  // all have read both
    const bool due =
        !call.leave && (calls + static_cast<std::uint64_t>(c.layer_index)) % static_cast<std::uint64_t>(c.period) == 0;
    const std::uint32_t buffer = call.epoch % 2;
    int rows = 0;
    const std::int64_t token = checked_token(c, call.epoch, static_cast<int>(threadIdx.x), &rows);
    if (threadIdx.x < most_checked_rows) tokens[threadIdx.x] = c.state->tokens[threadIdx.x] = token;
    if (threadIdx.x == 0) {
        store_relaxed<Scope::device>(&c.layer->calls, calls + 1);
        c.state->due = due ? 1 : 0;
        c.state->buffer = buffer;
        c.state->rows = static_cast<std::uint32_t>(rows);
        c.state->ticket = 0;
        c.state->found = {};
    }
    if (!due) return;
    sync_cta();

    const int own = c.exchange.window.rank;
    const UnitRows prefix{static_cast<char*>(c.scratch.prefix), std::int64_t{p.hidden_units} * 16};
    for (int row = 0; row < rows; ++row) {
        const auto from = static_cast<std::uint32_t>(tokens[row]);
        for (std::uint32_t unit = threadIdx.x; unit < p.latent_units; unit += keep_threads)
            store16(kept_routed(p, own, buffer).at(row, unit), load16(p.routed.at(from, unit)));
        for (std::uint32_t unit = threadIdx.x; p.shared.data != nullptr && unit < p.hidden_units; unit += keep_threads)
            store16(kept_shared(p, own, buffer).at(row, unit), load16(p.shared.at(from, unit)));
        if (p.prefix.data == nullptr || !is_own(c, tokens[row])) continue;
        for (std::uint32_t unit = threadIdx.x; unit < p.hidden_units; unit += keep_threads)
            store16(prefix.at(row, unit), load16(p.prefix.at(from - static_cast<std::uint32_t>(c.own_first), unit)));
    }
    keep_protocol(c.exchange, call, static_cast<std::uint32_t>(c.tokens));
    sync_cta();
    if (load_relaxed(&control(c.exchange).fault) != 0) {  // a peer that did not come
        if (threadIdx.x == 0) c.state->due = 0;
        return;
    }
    for (int row = 0; row < rows; ++row) {
        if (!is_own(c, tokens[row])) continue;
        chain_latent<dtype>(p, buffer, row, parts);
        chain_addends<dtype>(p, buffer, row);
        sync_cta();  // `parts` are used again
    }
}

LATENT_MOE_DEVICE void add_checksum(const WeightParts& parts, WeightChecksum* sum) {
    std::uint32_t low = 0, high = 0;
    for (int part = 0; part < most_weight_parts; ++part) {
        const std::int64_t units = parts.bytes[part] / 16, step = std::int64_t{gridDim.x} * blockDim.x;
        for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < units; i += step) {
            const uint4 v = load16(static_cast<const uint4*>(parts.data[part]) + i);
            const std::uint32_t at = static_cast<std::uint32_t>(i) * most_weight_parts + static_cast<std::uint32_t>(part);
            low += digest_of(v, at);
            high += digest_of(make_uint4(v.y, v.w, v.x, v.z), at ^ 0x5bd1e995u);
        }
        // The last bytes, if they make no unit.
        const std::int64_t rest = parts.bytes[part] % 16;
        if (blockIdx.x == 0 && threadIdx.x < rest) {
            const std::uint32_t byte = static_cast<const std::uint8_t*>(parts.data[part])[units * 16 + threadIdx.x];
            low += (byte + 1) * (threadIdx.x + 0x9e3779b1u), high += (byte + 1) * (2 * threadIdx.x + 0x85ebca77u);
        }
    }
    low = sum_over_wave(low), high = sum_over_wave(high);
    if (threadIdx.x % wave_size != 0) return;
    add_relaxed<Scope::device>(&sum->words[0], low);
    add_relaxed<Scope::device>(&sum->words[1], high);
}

__global__ void __launch_bounds__(compare_threads) checksum(const WeightParts parts, WeightChecksum* sum) {
    add_checksum(parts, sum);
}

template <Dtype dtype>
LATENT_MOE_DEVICE float rounded(float value) {
    const float pair[2] = {value, 0};
    float back[2];
    Element<dtype>::unpack(Element<dtype>::pack(pair), back);
    return back[0];
}

/// Eight elements of W_up.
LATENT_MOE_DEVICE void load_weights(const CheckCall& c, std::int64_t n, std::int64_t k, float (&to)[8]) {
    if (c.plain == nullptr) {
        const PackedLayout layout{c.packed_rows, c.latent};
        const uint4 v = load16(static_cast<const char*>(c.packed) + layout.element(n, k));
        return c.weight_dtype == Dtype::bf16 ? Unit<Dtype::bf16>::unpack(v, to) : Unit<Dtype::f16>::unpack(v, to);
    }
    const std::int64_t at = n * c.latent + k;
    if (c.weight_dtype == Dtype::f32) {
        const auto* from = static_cast<const float*>(c.plain) + at;
        for (int i = 0; i < 8; ++i) to[i] = from[i];
        return;
    }
    const uint4 v = load16(static_cast<const char*>(c.plain) + at * 2);
    return c.weight_dtype == Dtype::bf16 ? Unit<Dtype::bf16>::unpack(v, to) : Unit<Dtype::f16>::unpack(v, to);
}

/// Eight elements of a row of the chain's latent.
template <Dtype dtype>
LATENT_MOE_DEVICE void load_latent(const Params& p, int row, std::int64_t k, float (&to)[8]) {
    const UnitRows latent{static_cast<char*>(p.call.scratch.latent), std::int64_t{p.latent_units} * 16};
    constexpr int size = Unit<dtype>::size;
    float unit[size];
    for (int part = 0; part < 8 / size; ++part) {
        Unit<dtype>::unpack(load16(latent.at(row, static_cast<std::uint32_t>(k / size + part))), unit);
        for (int i = 0; i < size; ++i) to[part * size + i] = unit[i];
    }
}

template <Dtype dtype>
LATENT_MOE_DEVICE float element_of(UnitRows rows, std::int64_t row, std::int64_t column) {
    const char* at = rows.data + row * rows.stride + column * Element<dtype>::bytes;
    if constexpr (dtype == Dtype::f32) return *reinterpret_cast<const float*>(at);
    const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(at);
    float back[2];
    Element<dtype>::unpack(bits, back);
    return back[0];
}

/// A wave makes one column of every checked row.
template <Dtype dtype>
LATENT_MOE_DEVICE void chain_column(const Params& p, std::int64_t column, int rows) {
    const CheckCall& c = p.call;
    const unsigned lane = threadIdx.x % wave_size;
    float sums[most_checked_rows] = {};
    for (std::int64_t k = lane * 8; k < c.latent; k += wave_size * 8) {
        float w[8], x[8];
        load_weights(c, column, k, w);
#pragma unroll
        for (int row = 0; row < most_checked_rows; ++row) {
            if (row >= rows) continue;
            load_latent<dtype>(p, row, k, x);
            for (int i = 0; i < 8; ++i) sums[row] = fmaf(w[i], x[i], sums[row]);
        }
    }
    const float scale = c.scale * (c.row_scales == nullptr ? 1.0F : c.row_scales[column]);
    const std::int64_t at = c.first_column + column;
    const UnitRows shared{static_cast<char*>(c.scratch.shared), std::int64_t{p.hidden_units} * 16};
    const UnitRows prefix{static_cast<char*>(c.scratch.prefix), std::int64_t{p.hidden_units} * 16};
#pragma unroll
    for (int row = 0; row < most_checked_rows; ++row) {
        for (unsigned other = wave_size / 2; other > 0; other /= 2) sums[row] += shuffle_xor(sums[row], other);
        if (row >= rows || lane != 0 || !is_own(c, c.state->tokens[row])) continue;
        float value = rounded<dtype>(sums[row] * scale);
        if (p.shared.data != nullptr) value = rounded<dtype>(element_of<dtype>(shared, row, at) + value);
        if (p.prefix.data != nullptr) value = rounded<dtype>(value + element_of<dtype>(prefix, row, at));
        c.scratch.chain[row * c.hidden + at] = value;
    }
}

LATENT_MOE_DEVICE bool finite(float value) {
    return (as_bits(value) & 0x7f800000u) != 0x7f800000u;
}

/// Half a unit in the last place of 1; of float32 the order of sums is free, so more than that. Like self_check.cpp.
template <Dtype dtype>
constexpr float rounding = dtype == Dtype::f32   ? 0x1p-20F
                           : dtype == Dtype::f16 ? 0x1p-11F
                                                 : 0x1p-8F;

/// Tells the host and stops every rank: by one thread.
LATENT_MOE_DEVICE_CALL void tell(const CheckCall& c, const CheckReport& what) {
    CheckReport& report = *c.report;
    const std::uint32_t checks = report.checks;
    report = what;
    report.checks = checks;
    report.tail = c.exchange.tail;
    report.layer = c.exchange.layer;
    report.buffer = c.state->buffer;
    report.rows = c.state->rows;
    const Phase phase = what.found == Found::weights ? Phase::self_check_weights : Phase::self_check_output;
    // The record is written behind a fence of system scope (bounded_wait.h), so a host that sees it sees the report.
    raise_fault(c.exchange, c.state->buffer, FaultCode::mismatch, c.exchange.window.rank, phase, 0, 0);
    const std::uint32_t word = fault_word(FaultCode::mismatch, c.exchange.window.rank, phase);
    for (int window = 0; window < c.windows; ++window) {
        for (int rank = 0; rank < c.exchange.window.world; ++rank)
            store_relaxed(&static_cast<Control*>(c.other_controls[window][rank])->fault, word);
    }
}

/// By the CTA that was last: every row against the chain.
template <Dtype dtype>
LATENT_MOE_DEVICE void judge(const Params& p, int rows, float (&parts)[norm_threads / norm_group]) {
    const CheckCall& c = p.call;
    const WeightChecksum found{
        {load_relaxed<Scope::device>(&c.state->found.words[0]), load_relaxed<Scope::device>(&c.state->found.words[1])}};
    if (threadIdx.x == 0) {
        ++c.report->checks;
        const WeightChecksum& expected = c.layer->expected;
        if (found.words[0] != expected.words[0] || found.words[1] != expected.words[1]) {
            store_relaxed<Scope::device>(&c.state->ticket, 0);
            CheckReport report{};
            report.found = Found::weights;
            report.checksum = found;
            report.expected = expected;
            tell(c, report);
        }
    }
    for (int row = 0; row < rows; ++row) {
        const std::int64_t token = c.state->tokens[row];
        if (!is_own(c, token)) continue;
        const float* chain = c.scratch.chain + row * c.hidden + c.first_column;
        const float* addends = c.scratch.addends + row * c.hidden + c.first_column;
        float squares = 0;
        for (std::int64_t i = threadIdx.x; i < c.columns; i += compare_threads)
            squares += chain[i] * chain[i] + addends[i] * addends[i];
        sync_cta();  // `parts` were read
        squares = sum_over_cta(squares, parts);
        float typical = 2 * sqrtf(squares / static_cast<float>(max(c.columns, std::int64_t{1})));
        if (c.late_reduce) typical *= 1 + c.state->cancellation[row];
        for (std::int64_t i = threadIdx.x; i < c.columns; i += compare_threads) {
            if (!finite(chain[i]) || !finite(typical)) continue;  // what overflows in the chain may overflow elsewhere too
            const float value = element_of<dtype>(p.out, token - c.own_first, c.first_column + i);
            const float tolerance = 4 * rounding<dtype> * (fabsf(chain[i]) + addends[i] + typical);
            if (fabsf(value - chain[i]) <= tolerance) continue;
            if (exchange_relaxed<Scope::device>(&c.state->ticket, 0) == 0) continue;  // another thread told already
            CheckReport report{};
            report.found = Found::output;
            report.row = token;
            report.column = c.first_column + i;
            report.value = value;
            report.chain = chain[i];
            report.tolerance = tolerance;
            tell(c, report);
        }
    }
}

template <Dtype dtype>
__global__ void __launch_bounds__(compare_threads) compare(const __grid_constant__ Params p) {
    __shared__ float parts[norm_threads / norm_group];
    __shared__ bool last;
    const CheckCall& c = p.call;
    dependency_wait();
    if (c.state->due == 0) return;
    const int rows = static_cast<int>(c.state->rows);
    add_checksum(c.parts, &c.state->found);
    const int wave = static_cast<int>(blockIdx.x) * compare_waves + static_cast<int>(threadIdx.x / wave_size);
    for (std::int64_t column = wave; column < c.columns; column += gridDim.x * compare_waves)
        chain_column<dtype>(p, column, rows);
    fence<Scope::device>();
    sync_cta();
    if (threadIdx.x == 0) last = add_relaxed<Scope::device>(&c.state->ticket, 1) + 1 == gridDim.x;
    sync_cta();
    if (!last) return;
    fence<Scope::device>();
    judge<dtype>(p, rows, parts);
}

Params params_of(const CheckCall& call) {
    const auto units = [&](std::int64_t width) {
        return static_cast<std::uint32_t>(width * static_cast<std::int64_t>(bytes_of(call.dtype)) / 16);
    };
    return {.call = call,
            .routed = unit_rows(call.routed, call.latent, call.dtype),
            .shared = unit_rows(call.shared, call.hidden, call.dtype),
            .prefix = unit_rows(call.prefix, call.hidden, call.dtype),
            .out = unit_rows(call.out, call.hidden, call.dtype),
            .latent_units = units(call.latent),
            .hidden_units = units(call.hidden)};
}

bool valid(const CheckCall& call) {
    return gpu::valid(call.exchange) && call.period > 0 && call.layer && call.state && call.report && call.tokens >= 0 &&
           call.windows <= most_windows;
}

}  // namespace

std::int64_t kept_bytes(std::int64_t latent, std::int64_t hidden, Dtype dtype) {
    return 2 * most_checked_rows * (latent + hidden) * static_cast<std::int64_t>(bytes_of(dtype));
}

CheckScratchBytes check_scratch_bytes(std::int64_t latent, std::int64_t hidden, Dtype dtype) {
    const auto element = static_cast<std::int64_t>(bytes_of(dtype));
    const auto up = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
    const std::int64_t rows = up(most_checked_rows * hidden * element), floats = up(most_checked_rows * hidden * 4);
    return {{up(most_checked_rows * latent * element), rows, rows, floats, floats}};
}

cudaError_t keep_for_check(const CheckCall& call, cudaStream_t stream) {
    if (!valid(call)) return cudaErrorInvalidValue;
    const Launch how{.grid = 1, .block = keep_threads, .stream = stream};
    return for_dtype(call.dtype, [&]<Dtype dtype>() { return launch(how, keep<dtype>, params_of(call)); });
}

cudaError_t compare_with_chain(const CheckCall& call, cudaStream_t stream) {
    if (!valid(call)) return cudaErrorInvalidValue;
    const Launch how{.grid = compare_ctas, .block = compare_threads, .stream = stream};
    return for_dtype(call.dtype, [&]<Dtype dtype>() { return launch(how, compare<dtype>, params_of(call)); });
}

cudaError_t checksum_of_weights(const WeightParts& parts, WeightChecksum* sum, cudaStream_t stream) {
    return launch({.grid = compare_ctas, .block = compare_threads, .stream = stream}, checksum, parts, sum);
}

}  // namespace latent_moe::gpu
