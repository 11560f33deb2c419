// What a column-parallel tail sends: the latents and the shared columns before the product, the finished columns after it.
//
// Before:
//     rank a                                              rank b (every other)
//     row m of routed ────────────────┐
//     row m of shared, b's columns ───┴─ push ──▶ mailbox a of b, row m ──▶ Σ in rank order, round;
//                                                     the latents' Σ x², normalise ──▶ latent; b's columns ──▶ own
// After:
//     row m of own ─── push ──▶ mailbox a of b, row m ──▶ a's columns of row m of y (+ prefix)
//
// CTA 0 exchanges the headers. CTA c > 0 carries rows c - 1, c - 1 + (grid - 1), …, and waits only for CTAs c of the peers,
// which push before they wait. Row after next is pushed before a row is awaited: the wire is busy while CTAs add. Memory
// order: data and signal are one word (mailbox.h); slots are reused under the headers' order (header.h, epoch.h).
//
// Sending only the columns that a rank owns is a reduce-scatter, and sending the finished ones is the all-gather: together
// the bytes of the all-reduce that the schedule would end with otherwise, but half of them travel with the latents.
#include <algorithm>

#include "gpu/kernels/column_exchange.h"
#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/row_norm.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

struct ReduceParams {
    Exchange exchange;
    UnitRows routed, latent, shared, own;
    const uint4* gamma;
    float epsilon;
    float inverse_width;
    std::uint32_t tokens;
    std::uint32_t latent_units;    ///< of a row
    std::uint32_t latent_threads;  ///< that hold a row of latents, as in `all_reduce_rms_norm`: its bits
    std::uint32_t own_units;       ///< of a row; 0 without shared partials
    bool release;
};

/// A CTA's threads are one or two teams; each carries rows of its own, in step with the other.
template <Dtype dtype, int batch, int per_thread, int teams>
__global__ void __launch_bounds__(norm_threads* teams) reduce_rows(const __grid_constant__ ReduceParams p) {
    using U = Unit<dtype>;
    LATENT_MOE_SHARED(SumParts[2][teams], parts);
    const Exchange& x = p.exchange;
    const std::uint32_t team_threads = blockDim.x / teams, team = teams == 1 ? 0 : threadIdx.x / team_threads;
    const std::uint32_t thread = threadIdx.x - team * team_threads;

    // γ is a weight: nobody writes it while the context lives, so it may be read before the predecessor has ended.
    uint4 gamma[per_thread] = {};
    const auto for_latent = [&](auto body) {
        if (thread >= p.latent_threads) return;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            if (const std::uint32_t unit = thread + i * p.latent_threads; unit < p.latent_units) body(i, unit);
        }
    };
    const auto for_own = [&](auto body) {
        for (std::uint32_t unit = thread; unit < p.own_units; unit += team_threads) body(unit);
    };
    if (p.gamma) for_latent([&](int i, std::uint32_t unit) { gamma[i] = load16(p.gamma + unit); });

    dependency_wait();
    if (p.release) release_dependents();
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);

    const int rank = x.window.rank, world = x.window.world;
    const std::uint32_t row_units = p.latent_units + p.own_units;
    const std::int64_t stride = std::int64_t{p.tokens} * row_units;
    const auto routed = [&](std::uint32_t row, std::uint32_t unit) { return U::canonical(load16(p.routed.at(row, unit))); };
    const auto shared = [&](std::uint32_t row, int owner, std::uint32_t unit) {
        return U::canonical(load16(p.shared.at(row, owner * p.own_units + unit)));
    };
    const auto push = [&](std::uint32_t row) {
        for_latent([&](int, std::uint32_t unit) {
            send_to_peers<dtype>(x, call, stride, row * row_units + unit, routed(row, unit));
        });
        for_own([&](std::uint32_t unit) {
            for (int step = 1, peer = rank; step < world; ++step) {  // the next rank first
                peer = peer + 1 == world ? 0 : peer + 1;
                uint4* to = boxes_at(x, call, peer, stride).from(rank, peer);
                Mailbox<dtype>::send(to + row * row_units + p.latent_units + unit, shared(row, peer, unit));
            }
        });
    };

    const Boxes boxes = boxes_at(x, call, rank, stride);
    const std::uint32_t step = (gridDim.x - 1) * teams;
    Wait wait(x, call.epoch);
    std::uint32_t digest = 0;
    int turn = 0;
    if (const std::uint32_t row = (blockIdx.x - 1) * teams + team; row < p.tokens) push(row);
    for (std::uint32_t first = (blockIdx.x - 1) * teams; first < p.tokens; first += step, ++turn) {
        const std::uint32_t row = first + team;
        const bool has_row = row < p.tokens;
        if (row + step < p.tokens) push(row + step);
        uint4 sum[per_thread];
        float squares = 0;
        for_latent([&](int i, std::uint32_t unit) {
            if (!has_row) return;
            const uint4 own = routed(row, unit);
            sum[i] = sum_over_ranks<dtype, batch>(x, boxes, row * row_units + unit, own, wait, Phase::gather);
            squares = sum_of_squares<dtype>(sum[i], squares);
        });
        for_own([&](std::uint32_t unit) {
            if (!has_row) return;
            const std::uint32_t at = row * row_units + p.latent_units + unit;
            const uint4 own = shared(row, rank, unit);
            const uint4 total = sum_over_ranks<dtype, batch>(x, boxes, at, own, wait, Phase::scatter);
            if (!wait.gave_up()) store16(p.own.at(row, unit), total);
        });
        // A thread that gave up comes along to the barrier; it only stores nothing.
        const float factor = p.gamma ? rms_factor(sum_over_team(squares, parts[turn % 2][team], thread, team_threads),
                                                  p.inverse_width, p.epsilon)
                                     : 1.0F;
        if (turn == 0) {
            if (!p.gamma) sync_cta();
            leave_call(x, call, threadIdx.x, blockDim.x);
        }
        if (!has_row || wait.gave_up()) continue;
        for_latent([&](int i, std::uint32_t unit) {
            const uint4 value = p.gamma ? normalised<dtype>(sum[i], gamma[i], factor) : sum[i];
            store16(p.latent.at(row, unit), value);
            digest += digest_of(value, row * p.latent_units + unit);
        });
    }
    sync_wave();
    add_to_digest(x, call, digest);
}

struct GatherParams {
    Exchange exchange;
    UnitRows own, prefix, y;
    std::uint32_t tokens;
    std::uint32_t own_units;  ///< of a row
    std::uint32_t at_once;    ///< rows that the threads of a CTA take together
    bool release;
};

constexpr int gather_threads = cta_threads(1024);
constexpr int gathered_at_once = 4;  ///< peers polled together

template <Dtype dtype>
__global__ void __launch_bounds__(gather_threads) gather_rows(const __grid_constant__ GatherParams p) {
    using U = Unit<dtype>;
    dependency_wait();
    if (p.release) release_dependents();
    const Exchange& x = p.exchange;
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);

    const int rank = x.window.rank, world = x.window.world;
    const std::int64_t stride = std::int64_t{p.tokens} * p.own_units;
    const std::uint32_t mine = p.at_once > 1 ? threadIdx.x / p.own_units : 0;  // which of the rows taken together
    const std::uint32_t first_unit = p.at_once > 1 ? threadIdx.x % p.own_units : threadIdx.x;
    const auto for_units = [&](std::uint32_t group, auto body) {
        const std::uint32_t row = group * p.at_once + mine;
        if (row >= p.tokens || mine >= p.at_once) return;
        for (std::uint32_t unit = first_unit; unit < p.own_units; unit += blockDim.x) body(row, unit);
    };
    std::uint32_t digest = 0;
    const auto store = [&](std::uint32_t row, int owner, std::uint32_t unit, uint4 value) {
        const std::uint32_t at = owner * p.own_units + unit;
        if (p.prefix.data) value = U::canonical(U::add(value, load16(p.prefix.at(row, at))));
        store16(p.y.at(row, at), value);
        digest += digest_of(value, row * world * p.own_units + at);
    };
    // Own columns are stored too, even in place: peers get them with +0.0 for -0.0, and all ranks must hold the same bits.
    const auto push = [&](std::uint32_t group) {
        for_units(group, [&](std::uint32_t row, std::uint32_t unit) {
            const uint4 value = U::canonical(load16(p.own.at(row, unit)));
            send_to_peers<dtype>(x, call, stride, row * p.own_units + unit, value);
            store(row, rank, unit, value);
        });
    };

    const Boxes boxes = boxes_at(x, call, rank, stride);
    const std::uint32_t step = gridDim.x - 1, groups = (p.tokens + p.at_once - 1) / p.at_once;
    Wait wait(x, call.epoch);
    push(blockIdx.x - 1);
    for (std::uint32_t group = blockIdx.x - 1; group < groups; group += step) {
        if (group + step < groups) push(group + step);
        for_units(group, [&](std::uint32_t row, std::uint32_t unit) {
            for (int first = 1; first < world; first += gathered_at_once) {
                uint4* from[gathered_at_once];
                int peers[gathered_at_once];
                uint4 values[gathered_at_once];
#pragma unroll
                for (int i = 0; i < gathered_at_once; ++i) {
                    const int peer = (rank + first + i) % world;
                    peers[i] = peer;
                    from[i] = first + i < world ? boxes.from(peer, rank) + row * p.own_units + unit : nullptr;
                }
                if (wait.gave_up()) return;
                Mailbox<dtype>::take(from, peers, values, wait, Phase::gather);
                if (wait.gave_up()) return;
#pragma unroll
                for (int i = 0; i < gathered_at_once; ++i) {
                    if (from[i]) store(row, peers[i], unit, values[i]);
                }
            }
        });
    }
    sync_cta();
    leave_call(x, call, threadIdx.x, blockDim.x);
    add_to_digest(x, call, digest);
}

std::int64_t units_of(std::int64_t width, Dtype dtype) {
    return width * static_cast<std::int64_t>(bytes_of(dtype)) / 16;
}

/// As many rows as a slot holds of `row_units` a row, in pieces of nearly equal size; 0: not even one.
std::int64_t rows_of_a_kernel(const Exchange& x, std::int64_t tokens, std::int64_t row_units) {
    const std::int64_t fits =
        std::min(x.slot_bytes / 16 / std::max(1, x.window.world - 1), std::int64_t{1} << 30) / row_units;
    if (fits < 1) return tokens == 0 ? 1 : 0;
    const std::int64_t pieces = std::max<std::int64_t>(1, (tokens + fits - 1) / fits);
    return std::max<std::int64_t>(1, (tokens + pieces - 1) / pieces);
}

template <Dtype dtype, int batch>
cudaError_t launch_reduce(int per_thread, int teams, const Launch& how, const ReduceParams& p) {
    switch (per_thread) {
        case 1: return launch(how, teams == 2 ? reduce_rows<dtype, batch, 1, 2> : reduce_rows<dtype, batch, 1, 1>, p);
        case 2: return launch(how, reduce_rows<dtype, batch, 2, 1>, p);
        case 4: return launch(how, reduce_rows<dtype, batch, 4, 1>, p);
        default: return launch(how, reduce_rows<dtype, batch, 8, 1>, p);
    }
}

void advance(UnitRows& rows, std::int64_t count) {
    if (rows.data) rows.data += count * rows.stride;
}

}  // namespace

std::int64_t column_exchange_slot_bytes(int world, std::int64_t rows, std::int64_t latent_width, std::int64_t own_width,
                                        Dtype dtype) {
    const std::int64_t row_units = units_of(latent_width, dtype) + units_of(own_width, dtype);
    return ((world - 1) * rows * row_units * 16 + 127) / 128 * 128;
}

cudaError_t reduce_for_columns(const ReduceForColumns& op, cudaStream_t stream) {
    const int world = op.exchange.window.world;
    const bool has_latents = op.routed.data != nullptr;
    const std::int64_t latent_units = has_latents ? units_of(op.latent_width, op.dtype) : 0;
    const std::int64_t own_units = units_of(op.own_width, op.dtype);
    const RowShape shape = row_shape(latent_units);
    ReduceParams p{.exchange = op.exchange,
                   .routed = unit_rows(op.routed, op.latent_width, op.dtype),
                   .latent = unit_rows(op.latent, op.latent_width, op.dtype),
                   .shared = unit_rows(op.shared, op.own_width * world, op.dtype),
                   .own = unit_rows(op.own, op.own_width, op.dtype),
                   .gamma = static_cast<const uint4*>(op.gamma),
                   .epsilon = op.epsilon,
                   .inverse_width = has_latents ? 1.0F / static_cast<float>(op.latent_width) : 0,
                   .latent_units = static_cast<std::uint32_t>(latent_units),
                   .latent_threads = static_cast<std::uint32_t>(shape.threads),
                   .own_units = op.shared.data ? static_cast<std::uint32_t>(own_units) : 0,
                   .release = op.releases_early};
    if (!valid(op.exchange) || op.tokens < 0 ||
        (has_latents && (op.latent_width <= 0 || op.latent_width % 8 != 0 || op.latent_width > max_norm_width(op.dtype))) ||
        (!has_latents && !op.shared.data) || op.own_width <= 0 || op.own_width % 8 != 0 || op.max_ctas < 2 ||
        op.max_ctas > max_grid || !aligned(p.routed) || !aligned(p.latent) || !aligned(p.shared) || !aligned(p.own)) {
        return cudaErrorInvalidValue;
    }
    const std::int64_t most = rows_of_a_kernel(op.exchange, op.tokens, latent_units + p.own_units);
    if (most == 0) return cudaErrorInvalidValue;  // not even one row fits
    const int team_threads = std::max(shape.threads, std::min(norm_threads, whole_waves(p.own_units)));
    Launch how{.dependent = op.starts_early, .stream = stream};
    std::int64_t done = 0;
    do {
        const std::int64_t rows = std::min(most, op.tokens - done);
        p.tokens = static_cast<std::uint32_t>(rows);
        // Few rows are quicker one a CTA; of many, two teams have more in flight.
        const int teams = shape.per_thread == 1 && rows >= op.max_ctas ? 2 : 1;
        how.grid = static_cast<int>(std::min<std::int64_t>((rows + teams - 1) / teams, op.max_ctas - 1)) + 1;
        how.block = teams * team_threads;
        const cudaError_t error = for_dtype(op.dtype, [&]<Dtype dtype>() {
            switch (batch_for(world)) {
                case 2: return launch_reduce<dtype, 2>(shape.per_thread, teams, how, p);
                case 4: return launch_reduce<dtype, 4>(shape.per_thread, teams, how, p);
                default: return launch_reduce<dtype, 8>(shape.per_thread, teams, how, p);
            }
        });
        if (error != cudaSuccess) return error;
        for (UnitRows* each : {&p.routed, &p.latent, &p.shared, &p.own}) advance(*each, rows);
        done += rows;
    } while (done < op.tokens);
    return cudaSuccess;
}

cudaError_t gather_columns(const GatherColumns& op, cudaStream_t stream) {
    const int world = op.exchange.window.world;
    const std::int64_t own_units = units_of(op.own_width, op.dtype);
    GatherParams p{.exchange = op.exchange,
                   .own = unit_rows(op.own, op.own_width, op.dtype),
                   .prefix = unit_rows(op.prefix, op.own_width * world, op.dtype),
                   .y = unit_rows(op.y, op.own_width * world, op.dtype),
                   .own_units = static_cast<std::uint32_t>(own_units),
                   .release = op.releases_early};
    if (!valid(op.exchange) || op.tokens < 0 || op.own_width <= 0 || op.own_width % 8 != 0 || op.max_ctas < 2 ||
        op.max_ctas > max_grid || !aligned(p.own) || !aligned(p.prefix) || !aligned(p.y)) {
        return cudaErrorInvalidValue;
    }
    const std::int64_t most = rows_of_a_kernel(op.exchange, op.tokens, own_units);
    if (most == 0) return cudaErrorInvalidValue;  // not even one row fits
    std::int64_t done = 0;
    do {
        const std::int64_t rows = std::min(most, op.tokens - done);
        p.tokens = static_cast<std::uint32_t>(rows);
        // Short rows share a CTA, but first every CTA gets one.
        const std::int64_t ctas = op.max_ctas - 1, fit = std::max<std::int64_t>(1, gather_threads / own_units);
        p.at_once = static_cast<std::uint32_t>(std::clamp<std::int64_t>((rows + ctas - 1) / ctas, 1, fit));
        const std::int64_t groups = (rows + p.at_once - 1) / p.at_once;
        const std::int64_t threads = std::min(gather_threads, whole_waves(own_units * p.at_once));
        const Launch how{.grid = static_cast<int>(std::min(groups, ctas)) + 1,
                         .block = static_cast<int>(threads),
                         .dependent = op.starts_early,
                         .stream = stream};
        if (const cudaError_t error = for_dtype(op.dtype, [&]<Dtype dtype>() { return launch(how, gather_rows<dtype>, p); });
            error != cudaSuccess) {
            return error;
        }
        for (UnitRows* each : {&p.own, &p.prefix, &p.y}) advance(*each, rows);
        done += rows;
    } while (done < op.tokens);
    return cudaSuccess;
}

}  // namespace latent_moe::gpu
