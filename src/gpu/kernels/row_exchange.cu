// Reduce-scatter and all-gather by rows over the peer window: one hop each.
//
//     reduce-scatter: rank a ── its summand of p's rows ──▶ mailbox a of p: Σ ranks 0 … R-1 in order, round ──▶ y of p
//     all-gather:     rank a ── its own rows ──▶ mailbox a of every p ──▶ rows of a in y of p
//
// CTA 0 exchanges the headers; CTA c > 0 carries the c-th part of every rank's rows and waits only for CTAs c of the peers,
// which send before they wait. Memory order: data and signal are one word (mailbox.h); slots are reused under the headers'
// order (header.h, epoch.h). Ranks end a reduce-scatter with different rows, so it adds nothing to the digest.
#include <algorithm>

#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/row_exchange.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

constexpr int threads = cta_threads(256);

struct Params {
    Exchange exchange;
    UnitRows x, y;
    std::uint32_t first[max_ranks];  ///< row of the whole
    std::uint32_t units[max_ranks];  ///< of the rows that a rank owns
    std::uint32_t row_units;
    std::uint32_t stride;  ///< units of a mailbox
    std::uint32_t tokens;  ///< of all ranks
};

/// A CTA's units of `count`.
struct Part {
    std::uint32_t begin, end;
};
LATENT_MOE_DEVICE Part own_part(std::uint32_t count) {
    const std::uint64_t part = blockIdx.x - 1, parts = gridDim.x - 1;
    return {static_cast<std::uint32_t>(count * part / parts), static_cast<std::uint32_t>(count * (part + 1) / parts)};
}

/// Calls `body(unit)` for this thread's units of the rows that `rank` owns.
template <class Body>
LATENT_MOE_DEVICE void for_units(const Params& p, int rank, Body body) {
    const Part part = own_part(p.units[rank]);
    for (std::uint32_t i = part.begin + threadIdx.x; i < part.end; i += threads) body(i);
}

template <Dtype dtype>
LATENT_MOE_DEVICE uint4 load_canonical(const Params& p, const UnitRows& from, std::uint32_t first_row, std::uint32_t i) {
    return Unit<dtype>::canonical(load16(from.at(first_row + i / p.row_units, i % p.row_units)));
}

template <Dtype dtype, int batch>
__global__ void __launch_bounds__(threads) scatter_rows(const __grid_constant__ Params p) {
    const Exchange& x = p.exchange;
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);

    const int rank = x.window.rank, world = x.window.world;
    for (int k = 1, peer = rank; k < world; ++k) {  // the next rank first
        peer = peer + 1 == world ? 0 : peer + 1;
        uint4* to = boxes_at(x, call, peer, p.stride).from(rank, peer);
        for_units(p, peer,
                  [&](std::uint32_t i) { Mailbox<dtype>::send(to + i, load_canonical<dtype>(p, p.x, p.first[peer], i)); });
    }
    sync_cta();
    leave_call(x, call, threadIdx.x, threads);

    const Boxes boxes = boxes_at(x, call, rank, p.stride);
    Wait wait(x, call.epoch);
    for_units(p, rank, [&](std::uint32_t i) {
        if (wait.gave_up()) return;
        const uint4 own = load_canonical<dtype>(p, p.x, p.first[rank], i);
        const uint4 sum = sum_over_ranks<dtype, batch>(x, boxes, i, own, wait, Phase::scatter);
        if (wait.gave_up()) return;
        store16(p.y.at(i / p.row_units, i % p.row_units), Unit<dtype>::canonical(sum));
    });
}

template <Dtype dtype>
__global__ void __launch_bounds__(threads) gather_rows(const __grid_constant__ Params p) {
    const Exchange& x = p.exchange;
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);

    const int rank = x.window.rank, world = x.window.world;
    std::uint32_t digest = 0;
    const auto store = [&](int owner, std::uint32_t i, uint4 value) {
        const std::uint32_t row = p.first[owner] + i / p.row_units, unit = i % p.row_units;
        store16(p.y.at(row, unit), value);
        digest += digest_of(value, row * p.row_units + unit);
    };
    for_units(p, rank, [&](std::uint32_t i) {
        // Own rows are stored too, even in place: peers get them with +0.0 for -0.0, and all ranks must hold the same bits.
        const uint4 value = load_canonical<dtype>(p, p.x, 0, i);
        send_to_peers<dtype>(x, call, p.stride, i, value);
        store(rank, i, value);
    });
    sync_cta();
    leave_call(x, call, threadIdx.x, threads);

    const Boxes boxes = boxes_at(x, call, rank, p.stride);
    Wait wait(x, call.epoch);
    for (int k = 1, peer = rank; k < world; ++k) {
        peer = peer + 1 == world ? 0 : peer + 1;
        for_units(p, peer, [&](std::uint32_t i) {
            if (wait.gave_up()) return;
            uint4* const from[1] = {boxes.from(peer, rank) + i};
            const int peers[1] = {peer};
            uint4 value[1];
            Mailbox<dtype>::take(from, peers, value, wait, Phase::gather);
            if (!wait.gave_up()) store(peer, i, value[0]);
        });
    }
    sync_wave();
    add_to_digest(x, call, digest);
}

/// Cuts every rank's rows in chunks that fit a slot, the same on every rank, and launches one kernel a chunk.
template <class Op, class LaunchChunk>
cudaError_t for_chunks(const Op& op, UnitRows x, UnitRows y, bool x_is_whole, LaunchChunk launch_chunk) {
    const int world = op.exchange.window.world, rank = op.exchange.window.rank;
    const std::int64_t row_units = op.width * static_cast<std::int64_t>(bytes_of(op.dtype)) / 16;
    if (!valid(op.exchange) || op.width <= 0 || op.width % 8 != 0 || op.max_ctas < 2 || op.max_ctas > max_grid ||
        !aligned(x) || !aligned(y)) {
        return cudaErrorInvalidValue;
    }
    std::int64_t most = 0;
    for (int r = 0; r < world; ++r) most = std::max(most, op.own.count[r]);
    const std::int64_t fits = op.exchange.slot_bytes / 16 / std::max(1, world - 1) / row_units;
    const std::int64_t chunk = std::min({most, fits, (std::int64_t{1} << 30) / row_units});
    if (most > 0 && chunk <= 0) return cudaErrorInvalidValue;  // not even one row fits
    std::int64_t done = 0;
    do {
        Params p{.exchange = op.exchange, .x = x, .y = y, .row_units = static_cast<std::uint32_t>(row_units)};
        std::int64_t widest = 0;
        for (int r = 0; r < world; ++r) {
            const std::int64_t count = std::clamp<std::int64_t>(op.own.count[r] - done, 0, chunk);
            p.first[r] = static_cast<std::uint32_t>(op.own.first[r] + std::min(done, op.own.count[r]));
            p.units[r] = static_cast<std::uint32_t>(count * row_units);
            p.tokens += static_cast<std::uint32_t>(count);
            widest = std::max(widest, count);
        }
        p.stride = static_cast<std::uint32_t>(widest * row_units);
        UnitRows& own = x_is_whole ? p.y : p.x;
        if (own.data) own.data += std::min(done, op.own.count[rank]) * own.stride;
        const std::int64_t wanted = (p.stride + threads - 1) / threads;
        const int grid = static_cast<int>(std::min<std::int64_t>(wanted, op.max_ctas - 1)) + 1;
        if (const cudaError_t error = launch_chunk(p, grid); error != cudaSuccess) return error;
        done += chunk;
    } while (done < most);
    return cudaSuccess;
}

}  // namespace

cudaError_t reduce_scatter(const ReduceScatter& op, cudaStream_t stream) {
    const UnitRows x = unit_rows(op.x, op.width, op.dtype), y = unit_rows(op.y, op.width, op.dtype);
    return for_chunks(op, x, y, true, [&](const Params& p, int grid) {
        const Launch how{.grid = grid, .block = threads, .stream = stream};
        return for_dtype(op.dtype, [&]<Dtype dtype>() {
            switch (batch_for(op.exchange.window.world)) {
                case 2: return launch(how, scatter_rows<dtype, 2>, p);
                case 4: return launch(how, scatter_rows<dtype, 4>, p);
                default: return launch(how, scatter_rows<dtype, 8>, p);
            }
        });
    });
}

cudaError_t all_gather(const AllGather& op, cudaStream_t stream) {
    const UnitRows x = unit_rows(op.x, op.width, op.dtype), y = unit_rows(op.y, op.width, op.dtype);
    return for_chunks(op, x, y, false, [&](const Params& p, int grid) {
        const Launch how{.grid = grid, .block = threads, .stream = stream};
        return for_dtype(op.dtype, [&]<Dtype dtype>() { return launch(how, gather_rows<dtype>, p); });
    });
}

}  // namespace latent_moe::gpu
