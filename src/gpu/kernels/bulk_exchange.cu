// Large messages over the peer window.
//
//     rank a, CTA c                                             rank b (every other), CTA c
//     pushers    part c of a's rows ── chunk by chunk, plain stores ──▶ box a of b
//     announcer  ── "chunk k is there" ──▶ counter (a, c) of b ───────▶ receivers wait, then Σ in rank order or copy ──▶ y
//
// CTA 0 exchanges the headers. CTA c > 0 waits only for CTAs c of the peers, whose pushers wait for nobody.
//
// MEMORY ORDER. Pushers' stores → barrier of the CTA → announcer's fence.acq_rel.sys → relaxed store of the counter;
// receiver's relaxed load that sees it → fence.acq_rel.sys → barrier of the receivers → their loads, which skip L1. The
// counter holds the call's epoch and lies in one of three slots, so no older one satisfies it, and a sender comes back to a
// slot only three calls later, when the headers have ordered the receiver's reads before (epoch.h). While the announcer
// waits for its fence, the pushers send the next chunk.
#include <algorithm>

#include "gpu/kernels/bulk_exchange.h"
#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace {

// Enough loads in flight that neither the latency of memory nor that of a fence is seen: 32 KB of each group.
constexpr int pushers = cta_threads(256), pushed_at_once = 8;
constexpr int receivers = cta_threads(512), received_at_once = 4;
constexpr int threads = pushers + receivers + 32;
constexpr std::uint32_t chunk_units = 2 * pushers * pushed_at_once;  ///< 64 KB

enum Barrier : int { all_pushed = 1, chunk_came = 2 };

enum class Kind {
    all_reduce,      ///< everything goes to every rank; the receiver sums
    reduce_scatter,  ///< rows own[p] go to p; the receiver sums
    all_gather,      ///< own rows go to every rank; the receiver copies
};

struct Params {
    Exchange exchange;
    Bulk bulk;
    UnitRows x, y, prefix;
    std::uint32_t first[max_ranks];  ///< row of the whole at which the rows that a rank owns begin
    std::uint32_t units[max_ranks];  ///< of those rows
    std::uint32_t row_units;
    bool flat;             ///< rows of x, y and prefix follow one another: no division is needed to find a unit
    std::uint32_t stride;  ///< units of a box
    std::uint32_t tokens;
};

/// A CTA's units of a message of `count`.
struct Part {
    std::uint32_t begin, end;
    LATENT_MOE_DEVICE explicit Part(std::uint32_t count) {
        const std::uint64_t part = blockIdx.x - 1, parts = gridDim.x - 1;
        begin = static_cast<std::uint32_t>(count * part / parts);
        end = static_cast<std::uint32_t>(count * (part + 1) / parts);
    }
    LATENT_MOE_DEVICE std::uint32_t chunks() const { return (end - begin + chunk_units - 1) / chunk_units; }
};

template <Dtype dtype, Kind kind>
struct BulkCta {
    using U = Unit<dtype>;
    /// What the CTA's groups tell each other.
    struct Shared {
        SharedWord pushed;  ///< chunks of x that were read: an all-reduce in place may overwrite them
        bool gave_up[2];    ///< by the parity of the chunk, so that no receiver leaves before all know
    };

    const Params& p;
    const Exchange& x = p.exchange;
    const Call& call;
    Shared& shared;
    const int rank = x.window.rank, world = x.window.world;

    LATENT_MOE_DEVICE std::uint64_t* counter(int source, int receiver) const {
        auto* counters = reinterpret_cast<std::uint64_t*>(static_cast<char*>(x.window.base[receiver]) + p.bulk.offset);
        return counters + (call.slot() * max_ranks + source) * max_grid + blockIdx.x;
    }
    LATENT_MOE_DEVICE uint4* box(int source, int receiver) const {
        char* slot = static_cast<char*>(x.window.base[receiver]) + p.bulk.offset + bulk_counter_bytes +
                     call.slot() * p.bulk.slot_bytes;
        return reinterpret_cast<uint4*>(slot) + std::int64_t{mailbox_index(source, receiver)} * p.stride;
    }
    /// Epoch 0 is told from an empty counter by its 1.
    LATENT_MOE_DEVICE std::uint64_t told(std::uint32_t chunks) const { return std::uint64_t{call.epoch + 1} << 32 | chunks; }

    /// What goes from `source` to `receiver`.
    LATENT_MOE_DEVICE Part message(int source, int receiver) const {
        return Part(p.units[kind == Kind::reduce_scatter ? receiver : kind == Kind::all_gather ? source : 0]);
    }
    LATENT_MOE_DEVICE std::uint32_t chunks_to_push() const {
        std::uint32_t most = 0;
        for (int r = 0; r < world; ++r) {
            if (r != rank) most = max(most, message(rank, r).chunks());
        }
        return most;
    }

    LATENT_MOE_DEVICE uint4* at(const UnitRows& rows, std::uint32_t first_row, std::uint32_t unit) const {
        if (p.flat) return rows.at(first_row, unit);
        return rows.at(first_row + unit / p.row_units, unit % p.row_units);
    }

    /// Calls `body(units, count)` for the units of chunk k of a part that are this thread's of `group`, `at_once` at a time.
    template <int group, int at_once, class Body>
    LATENT_MOE_DEVICE static void for_units(const Part& part, std::uint32_t k, int thread, Body body) {
        const std::uint32_t begin = part.begin + k * chunk_units, end = min(part.end, begin + chunk_units);
        for (std::uint32_t i = begin + thread; i < end; i += group * at_once) {
            std::uint32_t units[at_once];
            int count = 0;
#pragma unroll
            for (int u = 0; u < at_once; ++u) {
                units[u] = i + u * group;
                if (units[u] < end) count = u + 1;
            }
            body(units, count);
        }
    }

    LATENT_MOE_DEVICE void push(int thread) const {
        const std::uint32_t chunks = chunks_to_push();
        for (std::uint32_t k = 0; k < chunks; ++k) {
            for (int step = 1, peer = rank; step < world; ++step) {  // the next rank first
                peer = peer + 1 == world ? 0 : peer + 1;
                uint4* to = box(rank, peer);
                const std::uint32_t first_row = kind == Kind::reduce_scatter ? p.first[peer] : 0;
                for_units<pushers, pushed_at_once>(message(rank, peer), k, thread,
                                                   [&](const std::uint32_t(&units)[pushed_at_once], int count) {
                                                       uint4 v[pushed_at_once];
#pragma unroll
                                                       for (int u = 0; u < pushed_at_once; ++u) {
                                                           if (u < count) v[u] = load16(at(p.x, first_row, units[u]));
                                                       }
#pragma unroll
                                                       for (int u = 0; u < pushed_at_once; ++u) {
                                                           if (u < count) store16(to + units[u], v[u]);
                                                       }
                                                   });
            }
            sync_threads_of(all_pushed, pushers + 32);
        }
    }

    LATENT_MOE_DEVICE void announce(int lane) const {
        const std::uint32_t chunks = chunks_to_push();
        for (std::uint32_t k = 0; k < chunks; ++k) {
            sync_threads_of(all_pushed, pushers + 32);
            if (lane == rank) shared.pushed.set(k + 1);
            if (lane < world && lane != rank) {
                fence<Scope::system>();
                store_relaxed(counter(rank, lane), told(k + 1));
            }
            sync_wave();  // a barrier of the CTA takes whole warps
        }
    }

    /// True once chunk k of every peer's message came; false if it never will.
    LATENT_MOE_DEVICE bool wait_for(std::uint32_t k, int thread, Wait& wait) const {
        if (kind == Kind::all_reduce && thread == rank) {
            while (shared.pushed.get() <= k) let_others_run();  // this CTA's pushers, who wait for nobody
        }
        if (thread < world && thread != rank && k < message(thread, rank).chunks()) {
            const std::uint64_t* from = counter(thread, rank);
            for (;;) {
                const std::uint64_t found = load_relaxed(from);
                if (found >> 32 == call.epoch + 1 && static_cast<std::uint32_t>(found) > k) break;
                if (wait.over(thread, kind == Kind::reduce_scatter ? Phase::scatter : Phase::gather)) {
                    shared.gave_up[k % 2] = true;
                    break;
                }
            }
            fence<Scope::system>();
        }
        sync_wave();
        sync_threads_of(chunk_came, receivers);
        return !shared.gave_up[k % 2];
    }

    /// round(Σ_ranks), in rank order.
    LATENT_MOE_DEVICE void sum_over_boxes(std::uint32_t first_row, const std::uint32_t (&units)[received_at_once], int count,
                                          uint4 (&result)[received_at_once]) const {
        float sum[received_at_once][U::size] = {};
        for (int r = 0; r < world; ++r) {
            const uint4* const from = r == rank ? nullptr : box(r, rank);
            uint4 v[received_at_once];
#pragma unroll
            for (int u = 0; u < received_at_once; ++u) {
                if (u < count) v[u] = from ? load_past_l1(from + units[u]) : load16(at(p.x, first_row, units[u]));
            }
#pragma unroll
            for (int u = 0; u < received_at_once; ++u) {
                if (u >= count) continue;
                float term[U::size];
                U::unpack(v[u], term);
#pragma unroll
                for (int e = 0; e < U::size; ++e) sum[u][e] += term[e];
            }
        }
#pragma unroll
        for (int u = 0; u < received_at_once; ++u) result[u] = U::pack(sum[u]);
    }

    /// Sums this rank's rows (all rows, for an all-reduce); adds to the digest where all ranks hold the result.
    LATENT_MOE_DEVICE void receive_sum(int thread) const {
        const std::uint32_t first_row = kind == Kind::reduce_scatter ? p.first[rank] : 0;
        const Part part = message((rank + 1) % world, rank);
        Wait wait(x, call.epoch);
        std::uint32_t digest = 0;
        for (std::uint32_t k = 0; k < part.chunks(); ++k) {
            if (!wait_for(k, thread, wait)) return;
            for_units<receivers, received_at_once>(
                part, k, thread, [&](const std::uint32_t(&units)[received_at_once], int count) {
                    uint4 sum[received_at_once];
                    if (world == 2) {
                        const uint4* from = box(1 - rank, rank);
                        uint4 theirs[received_at_once];
#pragma unroll
                        for (int u = 0; u < received_at_once; ++u) {
                            if (u < count)
                                sum[u] = load16(at(p.x, first_row, units[u])), theirs[u] = load_past_l1(from + units[u]);
                        }
#pragma unroll
                        for (int u = 0; u < received_at_once; ++u) {
                            if (u < count) sum[u] = U::add(sum[u], theirs[u]);  // two summands have one order
                        }
                    } else {
                        sum_over_boxes(first_row, units, count, sum);
                    }
#pragma unroll
                    for (int u = 0; u < received_at_once; ++u) {
                        if (u >= count) continue;
                        uint4 value = sum[u];
                        if (p.prefix.data) value = U::add(value, load16(at(p.prefix, 0, units[u])));
                        value = U::canonical(value);
                        store16(at(p.y, 0, units[u]), value);
                        if constexpr (kind == Kind::all_reduce) digest += digest_of(value, units[u]);
                    }
                });
        }
        sync_wave();
        if constexpr (kind == Kind::all_reduce) add_to_digest(x, call, digest);
    }

    LATENT_MOE_DEVICE void receive_rows(int thread) const {
        std::uint32_t digest = 0, chunks = 0;
        // Own rows in place are where they belong: the pushers are reading them.
        const bool in_place = at(p.y, p.first[rank], 0) == at(p.x, 0, 0);
        const auto store = [&](int source, const std::uint32_t(&units)[received_at_once], const uint4(&v)[received_at_once],
                               int count) {
#pragma unroll
            for (int u = 0; u < received_at_once; ++u) {
                if (u >= count) continue;
                if (!(in_place && source == rank)) store16(at(p.y, p.first[source], units[u]), v[u]);
                digest += digest_of(v[u], p.first[source] * p.row_units + units[u]);
            }
        };
        for (int source = 0; source < world; ++source) {
            if (source != rank) chunks = max(chunks, message(source, rank).chunks());
        }
        Wait wait(x, call.epoch);
        const Part own = message(rank, rank);
        for (std::uint32_t k = 0; k < max(chunks, own.chunks()); ++k) {
            for_units<receivers, received_at_once>(own, k, thread,
                                                   [&](const std::uint32_t(&units)[received_at_once], int count) {
                                                       uint4 v[received_at_once];
#pragma unroll
                                                       for (int u = 0; u < received_at_once; ++u) {
                                                           if (u < count) v[u] = load16(at(p.x, 0, units[u]));
                                                       }
                                                       store(rank, units, v, count);
                                                   });
            if (!wait_for(k, thread, wait)) return;
            for (int source = 0; source < world; ++source) {
                if (source == rank) continue;
                const uint4* from = box(source, rank);
                for_units<receivers, received_at_once>(message(source, rank), k, thread,
                                                       [&](const std::uint32_t(&units)[received_at_once], int count) {
                                                           uint4 v[received_at_once];
#pragma unroll
                                                           for (int u = 0; u < received_at_once; ++u) {
                                                               if (u < count) v[u] = load_past_l1(from + units[u]);
                                                           }
                                                           store(source, units, v, count);
                                                       });
            }
        }
        sync_wave();
        add_to_digest(x, call, digest);
    }
};

template <Dtype dtype, Kind kind>
__global__ void __launch_bounds__(threads) exchange_bulk(const __grid_constant__ Params p) {
    using Cta = BulkCta<dtype, kind>;
    LATENT_MOE_SHARED(typename Cta::Shared, shared);
    const Exchange& x = p.exchange;
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);
    const int thread = threadIdx.x;
    if (thread == 0) shared.pushed.set(0), shared.gave_up[0] = shared.gave_up[1] = false;
    prepare_thread_barriers();
    sync_cta();
    leave_call(x, call, thread, threads);

    const Cta cta{.p = p, .call = call, .shared = shared};
    if (thread < pushers) {
        cta.push(thread);
    } else if (thread >= pushers + receivers) {
        cta.announce(thread - pushers - receivers);
    } else if constexpr (kind == Kind::all_gather) {
        cta.receive_rows(thread - pushers);
    } else {
        cta.receive_sum(thread - pushers);
    }
}

/// Launches one kernel for rows [done, done + most) of every rank's own rows.
template <Kind kind>
cudaError_t launch_chunk(Params p, const OwnRows& own, std::int64_t done, std::int64_t most, int max_ctas, Dtype dtype,
                         cudaStream_t stream) {
    const int world = p.exchange.window.world, rank = p.exchange.window.rank;
    std::uint32_t widest = 0;
    p.tokens = 0;
    for (int r = 0; r < world; ++r) {
        const std::int64_t count = std::clamp<std::int64_t>(own.count[r] - done, 0, most);
        p.first[r] = static_cast<std::uint32_t>(own.first[r] + std::min(done, own.count[r]));
        p.units[r] = static_cast<std::uint32_t>(count * p.row_units);
        p.tokens += static_cast<std::uint32_t>(count);
        widest = std::max(widest, p.units[r]);
    }
    p.stride = widest;
    // Rows that belong to this rank alone are addressed from their beginning.
    const std::int64_t skipped = std::min(done, own.count[rank]);
    UnitRows& own_rows = kind == Kind::all_gather ? p.x : p.y;
    if (own_rows.data) own_rows.data += skipped * own_rows.stride;
    if (p.prefix.data) p.prefix.data += skipped * p.prefix.stride;
    if (kind == Kind::all_reduce && p.x.data) p.x.data += skipped * p.x.stride;
    const std::int64_t wanted = (widest + chunk_units / 8 - 1) / (chunk_units / 8);
    const int grid = static_cast<int>(std::min<std::int64_t>(wanted, max_ctas - 1)) + 1;
    const Launch how{.grid = grid, .block = threads, .stream = stream};
    return for_dtype(dtype, [&]<Dtype type>() { return launch(how, exchange_bulk<type, kind>, p); });
}

template <Kind kind>
cudaError_t exchange(const Exchange& x, const Bulk& bulk, UnitRows from, UnitRows to, UnitRows prefix, const OwnRows& own,
                     std::int64_t width, Dtype dtype, int max_ctas, cudaStream_t stream) {
    const std::int64_t row_units = width * static_cast<std::int64_t>(bytes_of(dtype)) / 16;
    if (!valid(x) || width <= 0 || width % 8 != 0 || max_ctas < 2 || max_ctas > max_grid || !aligned(from) || !aligned(to) ||
        !aligned(prefix) || bulk.offset % 128 != 0 || bulk.slot_bytes % 128 != 0) {
        return cudaErrorInvalidValue;
    }
    const auto is_flat = [&](const UnitRows& rows) { return !rows.data || rows.stride == row_units * 16; };
    const Params p{.exchange = x,
                   .bulk = bulk,
                   .x = from,
                   .y = to,
                   .prefix = prefix,
                   .row_units = static_cast<std::uint32_t>(row_units),
                   .flat = is_flat(from) && is_flat(to) && is_flat(prefix)};
    std::int64_t rows = 0;
    for (int r = 0; r < x.window.world; ++r) rows = std::max(rows, own.count[r]);
    const std::int64_t fits = bulk.slot_bytes / 16 / std::max(1, x.window.world - 1) / row_units;
    if (rows > 0 && fits < 1) return cudaErrorInvalidValue;  // not even one row fits
    std::int64_t done = 0;
    do {
        // Pieces of nearly equal size: a small last one would cost as much time as it saves bytes.
        const std::int64_t left = rows - done, pieces = fits > 0 ? (left + fits - 1) / fits : 1;
        const std::int64_t most = pieces > 0 ? (left + pieces - 1) / pieces : 0;
        if (const cudaError_t error = launch_chunk<kind>(p, own, done, most, max_ctas, dtype, stream); error != cudaSuccess)
            return error;
        done += most;
    } while (done < rows);
    return cudaSuccess;
}

}  // namespace

cudaError_t reset_bulk(void* base, const Bulk& bulk, cudaStream_t stream) {
    return cudaMemsetAsync(static_cast<char*>(base) + bulk.offset, 0, bulk_counter_bytes, stream);
}

cudaError_t bulk_all_reduce(const BulkAllReduce& op, cudaStream_t stream) {
    const UnitRows x = unit_rows(op.x, op.width, op.dtype), prefix = unit_rows(op.prefix, op.width, op.dtype);
    UnitRows y = unit_rows(op.y, op.width, op.dtype);
    if (op.own == nullptr) {
        OwnRows all{};
        std::fill_n(all.count, op.exchange.window.world, op.tokens);
        return exchange<Kind::all_reduce>(op.exchange, op.bulk, x, y, prefix, all, op.width, op.dtype, op.max_ctas, stream);
    }
    const std::int64_t first = op.own->first[op.exchange.window.rank];
    const auto own_rows = [&](UnitRows rows) {
        if (rows.data) rows.data += first * rows.stride;
        return rows;
    };
    if (const cudaError_t error = exchange<Kind::reduce_scatter>(op.exchange, op.bulk, x, own_rows(y), own_rows(prefix),
                                                                 *op.own, op.width, op.dtype, op.max_ctas, stream);
        error != cudaSuccess) {
        return error;
    }
    return exchange<Kind::all_gather>(op.exchange, op.bulk, own_rows(y), y, {}, *op.own, op.width, op.dtype, op.max_ctas,
                                      stream);
}

cudaError_t bulk_reduce_scatter(const ReduceScatter& op, const Bulk& bulk, cudaStream_t stream) {
    return exchange<Kind::reduce_scatter>(op.exchange, bulk, unit_rows(op.x, op.width, op.dtype),
                                          unit_rows(op.y, op.width, op.dtype), {}, op.own, op.width, op.dtype, op.max_ctas,
                                          stream);
}

cudaError_t bulk_all_gather(const AllGather& op, const Bulk& bulk, cudaStream_t stream) {
    return exchange<Kind::all_gather>(op.exchange, bulk, unit_rows(op.x, op.width, op.dtype),
                                      unit_rows(op.y, op.width, op.dtype), {}, op.own, op.width, op.dtype, op.max_ctas,
                                      stream);
}

}  // namespace latent_moe::gpu
