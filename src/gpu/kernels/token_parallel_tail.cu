// The whole token-parallel tail in one kernel a rank: each rank finishes the tokens that it owns.
//
//     rank a                                       rank b, the owner of block k of its own rows                  every rank
//     carriers ── partial rows, plain stores ──▶ latent box ─▶ normalisers: Σ in rank order, norm ─▶ ring of bf16 rows
//                                                                                                       │ tensor copies
//                                                shared box ─┐                                          ▼
//                                                            └▶ epilogue ◀── wgmma, pairs of CTAs, 256 rows × a column tile
//                                                               Σ shared in rank order, + product, + prefix
//                                                               ├──▶ out of b
//                                                               └── plain stores ──▶ output box of each rank ─▶ its carriers ─▶ out
//
// A CTA is a carrier, a normaliser or one of the many that multiply. Of the first blocks the latents are sent and normalised
// by all that multiply too, since these have nothing to do yet; of the last blocks the outputs are copied by all. In a CTA
// that multiplies, warp 0 feeds the product (tile_product.cuh), warp 1 waits ahead for what the epilogue will read and
// overwrite, warps 2 and 3 tell others what a warpgroup has stored, so that none of these waits is on the product's path.
//
// BLOCKS. Block k of an owner uses place k mod `depth` of every ring. A word in memory says for one sender, place and sharer of
// the work how far it has come: {epoch + 1, k + 1}; so no word of another call satisfies a wait, and none is ever reset.
//     arrived    at the owner: its latents, or shared rows, of one sender's CTA are there
//     consumed   at the sender: the owner has finished the block; the place may be filled again
//     finished   at every rank: 64 rows of a column tile of the output are there
//     copied     at the owner: a warp of that rank has copied its part
// The first `depth` blocks of a call need no word: the header of the peer's call n says that its call n - 1 has ended
// (header.h), so whoever sends waits for it once.
//
// MEMORY ORDER. Stores of many threads → barrier → one thread's (or warp's) fence.acq_rel.sys → relaxed store of the word;
// relaxed loads that see it, by a warp → fence.acq_rel.sys → barrier → loads past L1 (boxes change during the kernel). The ring
// of normalised rows and its counters stay inside the GPU: fences at its scope, and proxy fences since it is read by tensor
// copies. Counters count the rows, or parts of tiles, of all blocks of the call that used a place; they lie twice, by the
// parity of the epoch, and a call clears the next call's.
//
// PROGRESS. Nothing of block k waits for anything but blocks up to k, sent, multiplied and copied in this order everywhere; and
// all CTAs are resident. After a fault nobody waits any more: carriers and normalisers leave, products run through on whatever
// is there and store nothing.
#include "gpu/kernels/token_parallel_tail.h"

#include <algorithm>

#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/rows.h"
#include "gpu/kernels/tile_product.cuh"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/numeric.h"
#include "gpu/primitives/tensor_map.h"

namespace latent_moe::gpu {
namespace {

using U = Unit<Dtype::bf16>;
constexpr int unit_bytes = 16, ring_rows = 256, parts = 4;  // of a tile: 64 rows each

// Warps of a carrier.
constexpr int pushing_warps = 5, copying_warps = 6, pushers = 32 * pushing_warps;
constexpr int pushed_at_once = 16, copied_at_once = 16;
constexpr int most_carriers = 32;

enum Barrier : int { group_barrier = 1, multipliers_barrier = 3, pushers_barrier = 4 };  // 1 and 2: a warpgroup

enum Partial : int { latents, shared_rows };

/// Where things lie in a region.
struct Region {
    std::int64_t arrived, consumed, finished, copied, latent_boxes, shared_boxes, out_boxes, bytes;
    std::uint32_t column_parts;

    explicit Region(const TokenParallelShape& s) {
        column_parts = static_cast<std::uint32_t>((s.hidden + 127) / 128 * parts);
        std::int64_t at = 0;
        const auto take = [&](std::int64_t size) {
            const std::int64_t from = at;
            at += (size + 127) / 128 * 128;
            return from;
        };
        const std::int64_t places = s.depth, boxes = places * (s.world - 1) * s.block_rows;
        arrived = take(2 * places * max_ranks * max_grid * 8);
        consumed = take(places * max_ranks * 8);
        finished = take(places * max_ranks * column_parts * 8);
        copied = take(places * max_ranks * most_carriers * copying_warps * 8);
        latent_boxes = take(boxes * s.latent * 2);
        shared_boxes = take(boxes * s.hidden * 2);
        out_boxes = take(boxes * s.hidden * 2);
        bytes = at;
    }
};

struct Params {
    Exchange exchange;
    Exchange patient;  ///< the same, for waits on this rank's own CTAs: whoever these wait for is named first
    std::int64_t region_offset;
    Region region;
    std::uint32_t depth, block_rows;
    std::uint32_t carriers, normalisers, everybody;
    std::uint32_t first[max_ranks], count[max_ranks];
    UnitRows routed, shared, addend, prefix, out;
    std::uint32_t latent_units, hidden_units;
    char* ring;
    std::uint32_t* counters;  ///< [2][ready, done][depth]
    const char* packed;
    const uint4* gamma;  ///< null: no norm
    float epsilon, inverse_width, scale;
    std::uint32_t tokens;
    bool gather;
};

/// What every role needs of a call.
struct Tail {
    const Params& p;
    const Call& call;

    LATENT_MOE_DEVICE int rank() const { return p.exchange.window.rank; }
    LATENT_MOE_DEVICE int world() const { return p.exchange.window.world; }
    LATENT_MOE_DEVICE int peers() const { return world() - 1; }
    LATENT_MOE_DEVICE int peer(int index) const { return index < rank() ? index : index + 1; }
    LATENT_MOE_DEVICE std::uint32_t multipliers() const { return gridDim.x - p.carriers - p.normalisers; }
    LATENT_MOE_DEVICE std::uint32_t multiplier() const { return blockIdx.x - p.carriers - p.normalisers; }

    LATENT_MOE_DEVICE std::uint32_t blocks(int owner) const {
        return (p.count[owner] + p.block_rows - 1) / p.block_rows;
    }
    LATENT_MOE_DEVICE std::uint32_t most_blocks() const {
        std::uint32_t most = 0;
        for (int r = 0; r < world(); ++r) most = max(most, blocks(r));
        return most;
    }
    LATENT_MOE_DEVICE std::uint32_t rows(int owner, std::uint32_t block) const {
        return min(p.block_rows, p.count[owner] - block * p.block_rows);
    }
    LATENT_MOE_DEVICE std::uint32_t first_row(int owner, std::uint32_t block) const {
        return p.first[owner] + block * p.block_rows;
    }
    /// CTAs among which the sending of a block's partials is shared.
    LATENT_MOE_DEVICE std::uint32_t senders(Partial kind, std::uint32_t block) const {
        return kind == latents && block < p.everybody ? p.carriers + multipliers() : p.carriers;
    }
    /// From this block on an owner's outputs are copied by those that multiply.
    LATENT_MOE_DEVICE std::uint32_t last_blocks(int owner) const {
        const std::uint32_t all = blocks(owner);
        return all - min(all, p.everybody);
    }

    // ---- words

    LATENT_MOE_DEVICE char* region(int at) const { return static_cast<char*>(p.exchange.window.base[at]) + p.region_offset; }
    LATENT_MOE_DEVICE std::uint64_t* words(int at, std::int64_t offset) const {
        return reinterpret_cast<std::uint64_t*>(region(at) + offset);
    }
    LATENT_MOE_DEVICE std::uint64_t told(std::uint32_t block) const {
        return std::uint64_t{call.epoch + 1} << 32 | (block + 1);
    }
    LATENT_MOE_DEVICE std::uint64_t* arrived(int at, Partial kind, std::uint32_t block, int source, std::uint32_t worker) const {
        return words(at, p.region.arrived) + ((kind * p.depth + block % p.depth) * max_ranks + source) * max_grid + worker;
    }
    LATENT_MOE_DEVICE std::uint64_t* consumed(int at, std::uint32_t block, int owner) const {
        return words(at, p.region.consumed) + block % p.depth * max_ranks + owner;
    }
    LATENT_MOE_DEVICE std::uint64_t* finished(int at, std::uint32_t block, int owner, std::uint32_t part) const {
        return words(at, p.region.finished) + (block % p.depth * max_ranks + owner) * p.region.column_parts + part;
    }
    LATENT_MOE_DEVICE std::uint64_t* copied(int at, std::uint32_t block, int receiver, std::uint32_t worker) const {
        return words(at, p.region.copied) +
               (block % p.depth * max_ranks + receiver) * (most_carriers * copying_warps) + worker;
    }
    LATENT_MOE_DEVICE std::uint32_t* ready(std::uint32_t block) const { return counter(0, block % p.depth); }
    LATENT_MOE_DEVICE std::uint32_t* done(std::uint32_t block) const { return counter(1, block % p.depth); }
    LATENT_MOE_DEVICE std::uint32_t* counter(std::uint32_t kind, std::uint32_t place) const {
        return p.counters + ((call.epoch & 1) * 2 + kind) * p.depth + place;
    }

    // ---- boxes

    LATENT_MOE_DEVICE uint4* box(std::int64_t offset, std::uint32_t row_units, int at, int source, std::uint32_t block) const {
        const std::int64_t index = std::int64_t{block % p.depth} * peers() + mailbox_index(source, at);
        return reinterpret_cast<uint4*>(region(at) + offset) + index * p.block_rows * row_units;
    }
    LATENT_MOE_DEVICE uint4* latent_box(int at, int source, std::uint32_t block) const {
        return box(p.region.latent_boxes, p.latent_units, at, source, block);
    }
    LATENT_MOE_DEVICE uint4* shared_box(int at, int source, std::uint32_t block) const {
        return box(p.region.shared_boxes, p.hidden_units, at, source, block);
    }
    LATENT_MOE_DEVICE uint4* out_box(int at, int owner, std::uint32_t block) const {
        return box(p.region.out_boxes, p.hidden_units, at, owner, block);
    }
    LATENT_MOE_DEVICE uint4* ring_row(std::uint32_t block, std::uint32_t row) const {
        return reinterpret_cast<uint4*>(p.ring) + std::int64_t{block % p.depth * ring_rows + row} * p.latent_units;
    }

    // ---- waits; by a whole warp, in step, false where it gave up

    template <class Word, class Whom>
    LATENT_MOE_DEVICE bool wait_for(std::uint32_t count, std::uint64_t wanted, Phase phase, Word word, Whom whom) const {
        Wait wait(p.exchange, call.epoch);
        for (std::uint32_t i = threadIdx.x % wave_size; i < count; i += wave_size) {
            const std::uint64_t* const at = word(i);
            for (;;) {
                const std::uint64_t found = load_relaxed(at);
                if (found >> 32 == wanted >> 32 && static_cast<std::uint32_t>(found) >= static_cast<std::uint32_t>(wanted))
                    break;
                if (wait.over(whom(i), phase)) break;
            }
        }
        fence<Scope::system>();
        return !__any_sync(0xffffffff, wait.gave_up());
    }
    LATENT_MOE_DEVICE bool wait_for_partials(Partial kind, std::uint32_t block) const {
        const std::uint32_t workers = senders(kind, block);
        return wait_for(
            peers() * workers, told(block), Phase::scatter,
            [&](std::uint32_t i) { return arrived(rank(), kind, block, peer(i / workers), i % workers); },
            [&](std::uint32_t i) { return peer(i / workers); });
    }
    /// That peers have begun this call, so that they have ended the one before.
    LATENT_MOE_DEVICE bool wait_for_peers() const {
        Wait wait(p.exchange, call.epoch);
        const int lane = threadIdx.x % wave_size;
        if (lane < world() && lane != rank()) {
            const auto* from = reinterpret_cast<const uint4*>(
                &control(p.exchange).headers[call.slot()][mailbox_index(lane, rank())]);
            while (load_whole16(from).x != call.epoch + 1 && !wait.over(lane, Phase::header)) {}
        }
        fence<Scope::system>();
        return !__any_sync(0xffffffff, wait.gave_up());
    }
    /// One thread: a counter of this rank's own.
    LATENT_MOE_DEVICE bool wait_for_own(const std::uint32_t* counter, std::uint32_t wanted) const {
        Wait wait(p.patient, call.epoch);
        while (load_relaxed<Scope::device>(counter) < wanted) {
            if (wait.over(rank(), Phase::combine)) return false;
        }
        fence<Scope::device>();
        return true;
    }

    // ---- partials

    /// Part `worker` of `workers` of a block of this rank's partials for `owner`, by `threads` threads.
    template <int threads>
    LATENT_MOE_DEVICE void push(Partial kind, int owner, std::uint32_t block, std::uint32_t worker, std::uint32_t workers,
                                int thread) const {
        const std::uint32_t row_units = kind == latents ? p.latent_units : p.hidden_units;
        const std::uint64_t units = std::uint64_t{rows(owner, block)} * row_units;
        const auto begin = static_cast<std::uint32_t>(units * worker / workers);
        const auto end = static_cast<std::uint32_t>(units * (worker + 1) / workers);
        const UnitRows& from = kind == latents ? p.routed : p.shared;
        const std::uint32_t first = first_row(owner, block);
        uint4* const to = kind == latents ? latent_box(owner, rank(), block) : shared_box(owner, rank(), block);
        for (std::uint32_t i = begin + thread; i < end; i += threads * pushed_at_once) {
            uint4 v[pushed_at_once];
#pragma unroll
            for (int u = 0; u < pushed_at_once; ++u) {
                const std::uint32_t unit = i + u * threads;
                if (unit < end) v[u] = load16(from.at(first + unit / row_units, unit % row_units));
            }
#pragma unroll
            for (int u = 0; u < pushed_at_once; ++u) {
                const std::uint32_t unit = i + u * threads;
                if (unit < end) store16(to + unit, v[u]);
            }
        }
    }

    // ---- latents

    /// A row of the ring, by a warp: the same bits whoever does it.
    LATENT_MOE_DEVICE void normalise(std::uint32_t block, std::uint32_t row, int lane) const {
        constexpr int at_once = 4;
        uint4* const to = ring_row(block, row);
        const std::uint32_t from_row = first_row(rank(), block) + row;
        float squares = 0;
        for (std::uint32_t i = lane; i < p.latent_units; i += wave_size * at_once) {
            float sum[at_once][U::size] = {};
            for (int r = 0; r < world(); ++r) {
                uint4 v[at_once];
#pragma unroll
                for (int u = 0; u < at_once; ++u) {
                    const std::uint32_t unit = i + u * wave_size;
                    if (unit >= p.latent_units) continue;
                    v[u] = r == rank() ? load16(p.routed.at(from_row, unit))
                                       : load_past_l1(latent_box(rank(), r, block) + row * p.latent_units + unit);
                }
#pragma unroll
                for (int u = 0; u < at_once; ++u) {
                    if (i + u * wave_size >= p.latent_units) continue;
                    float term[U::size];
                    U::unpack(v[u], term);
#pragma unroll
                    for (int e = 0; e < U::size; ++e) sum[u][e] += term[e];
                }
            }
#pragma unroll
            for (int u = 0; u < at_once; ++u) {
                if (i + u * wave_size >= p.latent_units) continue;
                const uint4 rounded = U::pack(sum[u]);
                float term[U::size];
                U::unpack(rounded, term);
#pragma unroll
                for (int e = 0; e < U::size; ++e) squares = fmaf(term[e], term[e], squares);
                store16(to + i + u * wave_size, rounded);
            }
        }
        if (!p.gamma) return;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) squares += shuffle_xor(squares, static_cast<unsigned>(step));
        scale(to, squares, lane);
    }
    /// Two ranks, or one, and latents of up to 4,096: a lane keeps its units.
    LATENT_MOE_DEVICE void normalise_of_few(std::uint32_t block, std::uint32_t row, int lane) const {
        constexpr int units = 16;
        uint4* const to = ring_row(block, row);
        const std::uint32_t from_row = first_row(rank(), block) + row;
        const uint4* const theirs =
            world() == 2 ? latent_box(rank(), 1 - rank(), block) + row * p.latent_units : nullptr;
        uint4 sum[units], other[units];
#pragma unroll
        for (int u = 0; u < units; ++u) {
            const std::uint32_t unit = lane + u * wave_size;
            if (unit >= p.latent_units) continue;
            sum[u] = load16(p.routed.at(from_row, unit));
            if (theirs) other[u] = load_past_l1(theirs + unit);
        }
        float squares = 0;
#pragma unroll
        for (int u = 0; u < units; ++u) {
            if (lane + u * wave_size >= p.latent_units) continue;
            if (theirs) sum[u] = U::add(sum[u], other[u]);  // two summands have one order
            float term[U::size];
            U::unpack(sum[u], term);
#pragma unroll
            for (int e = 0; e < U::size; ++e) squares = fmaf(term[e], term[e], squares);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) squares += shuffle_xor(squares, static_cast<unsigned>(step));
        const float factor = rms_factor(squares, p.inverse_width, p.epsilon);
#pragma unroll
        for (int u = 0; u < units; ++u) {
            const std::uint32_t unit = lane + u * wave_size;
            if (unit >= p.latent_units) continue;
            store16(to + unit, p.gamma ? scaled(sum[u], load16(p.gamma + unit), factor) : sum[u]);
        }
    }
    LATENT_MOE_DEVICE static uint4 scaled(uint4 v, uint4 gamma, float factor) {
        float x[U::size], g[U::size];
        U::unpack(v, x), U::unpack(gamma, g);
#pragma unroll
        for (int i = 0; i < U::size; ++i) x[i] = x[i] * factor * g[i];
        return U::pack(x);
    }
    LATENT_MOE_DEVICE void scale(uint4* row, float squares, int lane) const {
        const float factor = rms_factor(squares, p.inverse_width, p.epsilon);
        for (std::uint32_t unit = lane; unit < p.latent_units; unit += wave_size) {
            store16(row + unit, scaled(load16(row + unit), load16(p.gamma + unit), factor));
        }
    }
    /// Rows worker, worker + workers, … of a block; then says so.
    LATENT_MOE_DEVICE void normalise_rows(std::uint32_t block, std::uint32_t worker, std::uint32_t workers, int lane) const {
        std::uint32_t made = 0;
        const bool few = world() <= 2 && p.latent_units <= 16 * wave_size;
        for (std::uint32_t row = worker; row < rows(rank(), block); row += workers, ++made) {
            few ? normalise_of_few(block, row, lane) : normalise(block, row, lane);
        }
        if (made == 0) return;
        fence_proxy_async_global();
        fence<Scope::device>();
        sync_wave();
        if (lane == 0) add_relaxed<Scope::device>(ready(block), made);
    }

    // ---- outputs

    /// Copies 64 rows of a column tile that `owner` finished; by a warp. False: it gave up.
    template <int tile_columns>
    LATENT_MOE_DEVICE bool copy_part(int owner, std::uint32_t block, std::uint32_t part, int lane, std::uint32_t& digest) const {
        const std::uint32_t before = part % parts * 64, there = rows(owner, block);
        const std::uint32_t column = part / parts * (tile_columns / U::size);
        if (before >= there) return true;
        const std::uint32_t count = min(64u, there - before), width = min(tile_columns / U::size, p.hidden_units - column);
        if (!wait_for(
                1, told(block), Phase::gather, [&](std::uint32_t) { return finished(rank(), block, owner, part); },
                [&](std::uint32_t) { return owner; })) {
            return false;
        }
        const uint4* const from = out_box(rank(), owner, block) + before * p.hidden_units + column;
        const std::uint32_t to_row = first_row(owner, block) + before;
        for (std::uint32_t i = lane; i < count * width; i += wave_size * copied_at_once) {
            uint4 v[copied_at_once];
#pragma unroll
            for (int u = 0; u < copied_at_once; ++u) {
                const std::uint32_t unit = i + u * wave_size;
                if (unit < count * width) v[u] = load_past_l1(from + unit / width * p.hidden_units + unit % width);
            }
#pragma unroll
            for (int u = 0; u < copied_at_once; ++u) {
                const std::uint32_t unit = i + u * wave_size;
                if (unit >= count * width) continue;
                const std::uint32_t row = to_row + unit / width, at = column + unit % width;
                store16(p.out.at(row, at), v[u]);
                digest += digest_of(v[u], row * p.hidden_units + at);
            }
        }
        return true;
    }
};

// ---- carriers

/// Latents go a block ahead of shared rows: the product waits for them first.
LATENT_MOE_DEVICE void carry_partials(const Tail& t, int thread, volatile bool& gave_up) {
    const int warp = thread / 32, lane = thread % 32;
    const bool announces = warp == pushing_warps;
    if (warp == 0 && !t.wait_for_peers()) gave_up = true;
    sync_threads_of(pushers_barrier, pushers + 32);
    const std::uint32_t most = t.most_blocks();
    const auto step = [&](Partial kind, std::uint32_t block) {
        if (warp == 0 && kind == latents && block >= t.p.depth) {
            const bool taken = t.wait_for(
                t.world(), t.told(block - t.p.depth), Phase::scatter,
                [&](std::uint32_t r) { return t.consumed(t.rank(), block, static_cast<int>(r)); },
                [&](std::uint32_t r) { return static_cast<int>(r); });
            if (!taken) gave_up = true;
        }
        sync_threads_of(pushers_barrier, pushers + 32);
        const std::uint32_t workers = t.senders(kind, block);
        if (!announces && !gave_up) {
            for (int k = 1, owner = t.rank(); k < t.world(); ++k) {  // the next rank first
                owner = owner + 1 == t.world() ? 0 : owner + 1;
                if (block < t.blocks(owner)) t.push<pushers>(kind, owner, block, blockIdx.x, workers, thread);
            }
        }
        sync_threads_of(pushers_barrier, pushers + 32);
        if (announces && !gave_up && lane < t.world() && lane != t.rank() && block < t.blocks(lane)) {
            fence<Scope::system>();
            store_relaxed(t.arrived(lane, kind, block, t.rank(), blockIdx.x), t.told(block));
        }
        sync_wave();
    };
    for (std::uint32_t i = 0; i <= most; ++i) {
        if (i < most) step(latents, i);
        if (i > 0 && t.p.shared.data) step(shared_rows, i - 1);
        if (gave_up) break;
    }
}

template <int tile_columns>
LATENT_MOE_DEVICE void carry_outputs(const Tail& t, int warp, int lane) {
    const std::uint32_t worker = blockIdx.x * copying_warps + warp, workers = t.p.carriers * copying_warps;
    const std::uint32_t jobs = (t.p.hidden_units * U::size + tile_columns - 1) / tile_columns * parts;
    std::uint32_t digest = 0;
    for (std::uint32_t block = 0; block < t.most_blocks(); ++block) {
        for (int k = 1, owner = t.rank(); k < t.world(); ++k) {
            owner = owner + 1 == t.world() ? 0 : owner + 1;
            if (block >= t.last_blocks(owner)) continue;
            for (std::uint32_t job = worker; job < jobs; job += workers) {
                if (!t.copy_part<tile_columns>(owner, block, job, lane, digest)) return;
            }
            sync_wave();
            if (lane == 0) {
                fence<Scope::system>();
                store_relaxed(t.copied(owner, block, t.rank(), worker), t.told(block));
            }
            sync_wave();
        }
    }
    add_to_digest(t.p.exchange, t.call, digest);
}

// ---- normalisers

LATENT_MOE_DEVICE void normalise_blocks(const Tail& t, std::uint32_t parts_of_block, int thread, volatile bool& gave_up) {
    const std::uint32_t own = blockIdx.x - t.p.carriers;
    const int warp = thread / 32, lane = thread % 32;
    for (std::uint32_t block = t.p.everybody; block < t.blocks(t.rank()); ++block) {
        if (warp == 0) {
            bool there = t.wait_for_partials(latents, block);
            if (block >= t.p.depth && lane == 0)
                there = t.wait_for_own(t.done(block), block / t.p.depth * parts_of_block) && there;
            if (!__all_sync(0xffffffff, there)) gave_up = true;
        }
        sync_cta();
        if (gave_up) return;
        t.normalise_rows(block, own + t.p.normalisers * warp, t.p.normalisers * (tile_threads / 32), lane);
    }
}

// ---- those that multiply

struct alignas(8) Signals {
    std::uint64_t ready;         ///< what the epilogue reads and overwrites
    std::uint64_t taken;         ///< the warpgroups have seen `ready`
    std::uint64_t stored[2];     ///< a warpgroup's part of the tile
    std::uint64_t announced[2];  ///< that was told
};

struct SharedState {
    Signals signals;
    std::uint32_t leave[2];  ///< of either CTA of the pair: a fault was set before this call
    bool gave_up;
};

/// Warp 1: waits, a tile ahead of the epilogues.
template <int tile_columns>
LATENT_MOE_DEVICE void look_ahead(const Tail& t, std::uint32_t pair, std::uint32_t pairs, std::uint32_t tiles,
                                  std::uint32_t column_tiles, SharedState& shared, int lane) {
    volatile bool& gave_up = shared.gave_up;
    const std::uint32_t workers = t.p.carriers * copying_warps;
    int i = 0;
    for (std::uint32_t tile = pair; tile < tiles; tile += pairs, ++i) {
        const std::uint32_t block = tile / column_tiles;
        bool there = !gave_up;
        if (there && t.p.shared.data) there = t.wait_for_partials(shared_rows, block);
        if (there && t.p.gather && block >= t.p.depth) {
            there = t.wait_for(
                t.peers() * workers, t.told(block - t.p.depth), Phase::gather,
                [&](std::uint32_t w) { return t.copied(t.rank(), block, t.peer(w / workers), w % workers); },
                [&](std::uint32_t w) { return t.peer(w / workers); });
        }
        if (!there) gave_up = true;
        sync_wave();
        if (lane == 0) {
            if (i > 0) mbarrier::wait(shared_address(&shared.signals.taken), (i - 1) & 1);
            mbarrier::arrive(shared_address(&shared.signals.ready));
        }
        sync_wave();
    }
}

/// Warps 2 and 3: tell the ranks of a warpgroup's part, and the senders of the last part of a block.
LATENT_MOE_DEVICE void announce(const Tail& t, int group, int cta, std::uint32_t pair, std::uint32_t pairs,
                                std::uint32_t tiles, std::uint32_t column_tiles, SharedState& shared, int lane) {
    int i = 0;
    for (std::uint32_t tile = pair; tile < tiles; tile += pairs, ++i) {
        const std::uint32_t block = tile / column_tiles, part = tile % column_tiles * parts + cta * 2 + group;
        mbarrier::wait(shared_address(&shared.signals.stored[group]), i & 1);
        const bool peer = lane < t.world() && lane != t.rank(), quiet = shared.gave_up;
        fence<Scope::system>();
        if (peer && t.p.gather && !quiet) store_relaxed(t.finished(lane, block, t.rank(), part), t.told(block));
        bool last = false;
        if (lane == t.rank())
            last = atomicAdd(t.done(block), 1U) + 1 == (block / t.p.depth + 1) * column_tiles * parts;
        if (__any_sync(0xffffffff, last)) {
            fence<Scope::system>();
            if (peer && !quiet) store_relaxed(t.consumed(lane, block, t.rank()), t.told(block));
        }
        sync_wave();
        if (lane == 0) mbarrier::arrive(shared_address(&shared.signals.announced[group]));
    }
}

/// Before its first tile: the first blocks' latents, together with everybody.
LATENT_MOE_DEVICE void help_at_the_start(const Tail& t, int thread, volatile bool& gave_up) {
    constexpr int threads = 2 * 128;
    const int warp = thread / 32, lane = thread % 32;
    const std::uint32_t first_blocks = min(t.p.everybody, t.most_blocks()), worker = t.p.carriers + t.multiplier();
    if (t.peers() > 0) {
        if (warp == 0 && !t.wait_for_peers()) gave_up = true;
        sync_threads_of(multipliers_barrier, threads);
        for (std::uint32_t block = 0; block < first_blocks && !gave_up; ++block) {
            for (int k = 1, owner = t.rank(); k < t.world(); ++k) {
                owner = owner + 1 == t.world() ? 0 : owner + 1;
                if (block < t.blocks(owner))
                    t.push<threads>(latents, owner, block, worker, t.senders(latents, block), thread);
            }
            sync_threads_of(multipliers_barrier, threads);
            if (thread < t.world() && thread != t.rank() && block < t.blocks(thread)) {
                fence<Scope::system>();
                store_relaxed(t.arrived(thread, latents, block, t.rank(), worker), t.told(block));
            }
            sync_wave();
        }
    }
    for (std::uint32_t block = 0; block < min(first_blocks, t.blocks(t.rank())); ++block) {
        if (warp == 0 && t.peers() > 0 && !gave_up && !t.wait_for_partials(latents, block)) gave_up = true;
        sync_threads_of(multipliers_barrier, threads);
        if (gave_up) break;
        t.normalise_rows(block, t.multiplier() + t.multipliers() * warp, t.multipliers() * (threads / 32), lane);
    }
}

/// After its last tile.
template <int tile_columns>
LATENT_MOE_DEVICE void help_at_the_end(const Tail& t, std::uint32_t column_tiles, int thread) {
    const std::uint32_t worker = t.multiplier() + t.multipliers() * (thread / 32), workers = t.multipliers() * 8;
    std::uint32_t digest = 0, job = worker;
    const std::uint32_t jobs = column_tiles * parts;
    for (std::uint32_t back = t.p.everybody; back > 0; --back) {
        for (int k = 1, owner = t.rank(); k < t.world(); ++k) {
            owner = owner + 1 == t.world() ? 0 : owner + 1;
            if (t.blocks(owner) < back) continue;
            for (; job < jobs; job += workers) {
                if (!t.copy_part<tile_columns>(owner, t.blocks(owner) - back, job, thread % 32, digest)) return;
            }
            job -= jobs;  // so that the parts of all blocks are dealt out in one round
        }
    }
    add_to_digest(t.p.exchange, t.call, digest);
}

/// A warpgroup's part of a tile: what is added, and where it goes. `row` and `column` are of the part.
template <int tile_columns, class Sums>
LATENT_MOE_DEVICE void finish_tile(const Tail& t, std::uint32_t block, std::uint32_t first_row, std::uint32_t first_column,
                                   const Sums& sums, int warp, int lane, std::uint32_t& digest) {
    const Params& p = t.p;
    const int rank = t.rank(), world = t.world();
    const std::uint32_t rows = t.rows(rank, block);
    const std::uint32_t own_row = block * p.block_rows, row_of_all = t.first_row(rank, block);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int pass = 0; pass < tile_columns / 128; ++pass) {
            std::uint32_t row[2], unit[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) row[e] = first_row + row_of_unit(h, e, warp, lane);
#pragma unroll
            for (int g = 0; g < 2; ++g) unit[g] = (first_column + column_of_unit(2 * pass + g, lane)) / U::size;
            const auto valid = [&](int g, int e) { return row[e] < rows && unit[g] < p.hidden_units; };
            const auto each = [&](auto body) {
#pragma unroll
                for (int g = 0; g < 2; ++g) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (valid(g, e)) body(g, e);
                    }
                }
            };
            uint4 addend[2][2] = {}, prefix[2][2];
            if (p.prefix.data) {
                each([&](int g, int e) { prefix[g][e] = load16(p.prefix.at(own_row + row[e], unit[g])); });
            }
            if (p.addend.data) {
                each([&](int g, int e) { addend[g][e] = load16(p.addend.at(own_row + row[e], unit[g])); });
            } else if (p.shared.data && world <= 2) {
                uint4 other[2][2];
                const uint4* const theirs = world == 2 ? t.shared_box(rank, 1 - rank, block) : nullptr;
                each([&](int g, int e) {
                    addend[g][e] = load16(p.shared.at(row_of_all + row[e], unit[g]));
                    if (theirs) other[g][e] = load_past_l1(theirs + row[e] * p.hidden_units + unit[g]);
                });
                if (theirs) {
                    each([&](int g, int e) { addend[g][e] = U::add(addend[g][e], other[g][e]); });
                }
            } else if (p.shared.data) {
                float sum[2][2][U::size] = {};
                for (int r = 0; r < world; ++r) {
                    uint4 v[2][2];
                    const uint4* const from = r == rank ? nullptr : t.shared_box(rank, r, block);
                    each([&](int g, int e) {
                        v[g][e] = from ? load_past_l1(from + row[e] * p.hidden_units + unit[g])
                                       : load16(p.shared.at(row_of_all + row[e], unit[g]));
                    });
                    each([&](int g, int e) {
                        float term[U::size];
                        U::unpack(v[g][e], term);
#pragma unroll
                        for (int i = 0; i < U::size; ++i) sum[g][e][i] += term[i];
                    });
                }
                each([&](int g, int e) { addend[g][e] = U::pack(sum[g][e]); });
            }
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                float units[2][U::size];
                units_of(sums, 2 * pass + g, h, lane, units);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (!valid(g, e)) continue;
                    float value[U::size];
                    U::unpack(addend[g][e], value);
#pragma unroll
                    for (int i = 0; i < U::size; ++i) value[i] = fmaf(p.scale, units[e][i], value[i]);
                    uint4 result = U::pack(value);
                    if (p.prefix.data) result = U::add(result, prefix[g][e]);
                    if (!p.gather) {
                        store16(p.out.at(own_row + row[e], unit[g]), result);
                        continue;
                    }
                    store16(p.out.at(row_of_all + row[e], unit[g]), result);
                    digest += digest_of(result, (row_of_all + row[e]) * p.hidden_units + unit[g]);
                    for (int k = 1, to = rank; k < world; ++k) {
                        to = to + 1 == world ? 0 : to + 1;
                        store16(t.out_box(to, rank, block) + row[e] * p.hidden_units + unit[g], result);
                    }
                }
            }
        }
    }
}

template <int tile_columns>
__global__ void __launch_bounds__(tile_threads, 1)
    finish_own_tokens(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Tile = TileProduct<tile_columns>;
    extern __shared__ char raw[];
    __shared__ SharedState shared;
    const Tile tile{.base = (shared_address(raw) + 1023) & ~1023u};
    const int thread = threadIdx.x, cta = static_cast<int>(cluster::rank());
    dependency_wait();
    const Call call = enter_call(p.exchange);
    if (thread == 0) {
        tile.init();
        Signals& s = shared.signals;
        mbarrier::init(shared_address(&s.ready), 1);
        mbarrier::init(shared_address(&s.taken), 2);
        mbarrier::init(shared_address(&s.stored[0]), 128), mbarrier::init(shared_address(&s.stored[1]), 128);
        mbarrier::init(shared_address(&s.announced[0]), 1), mbarrier::init(shared_address(&s.announced[1]), 1);
        mbarrier::publish_init();
        shared.gave_up = false;
        // Both CTAs of a pair leave, or none: each uses the other's shared memory.
        for (int c = 0; c < 2; ++c) {
            asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cluster::address_at(shared_address(&shared.leave[cta]), c)),
                         "r"(static_cast<std::uint32_t>(call.leave))
                         : "memory");
        }
        prefetch_tensor_map(&map);
    }
    sync_cta();
    cluster::arrive();
    cluster::wait();
    if ((shared.leave[0] | shared.leave[1]) != 0) return;
    leave_call(p.exchange, call, thread, tile_threads);
    const Tail t{p, call};
    if (blockIdx.x == gridDim.x - 1 && thread < 2 * p.depth) {
        p.counters[((call.epoch + 1) & 1) * 2 * p.depth + thread] = 0;
    }

    const std::uint32_t column_tiles = (p.hidden_units * U::size + tile_columns - 1) / tile_columns;
    const int warpgroup = __shfl_sync(0xffffffff, thread / 128, 0), warp = thread / 32, lane = thread % 32;
    if (blockIdx.x < p.carriers) {
        if (warp <= pushing_warps) {
            carry_partials(t, thread, shared.gave_up);
        } else {
            const int copier = warp - pushing_warps - 1;
            if (blockIdx.x == 0 && copier == 0) exchange_headers(p.exchange, call, p.tokens, lane);
            if (p.gather) carry_outputs<tile_columns>(t, copier, lane);
        }
    } else if (blockIdx.x < p.carriers + p.normalisers) {
        normalise_blocks(t, column_tiles * parts, thread, shared.gave_up);
    } else {
        const PackedLayout layout{std::int64_t{p.hidden_units} * U::size, std::int64_t{p.latent_units} * U::size};
        const typename Tile::Weights weights{p.packed, static_cast<std::uint32_t>(layout.tiles()),
                                             static_cast<std::uint32_t>(layout.blocks())};
        const std::uint32_t tiles = t.blocks(t.rank()) * column_tiles;
        const std::uint32_t pair = t.multiplier() / 2, pairs = t.multipliers() / 2;
        typename Tile::Place at;
        if (warpgroup == 0) {
            keep_few_registers();
            if (warp == 0) {
                if (lane == 0) {
                    for (std::uint32_t i = pair; i < tiles; i += pairs) {
                        tile.load(at, i == pair, weights, i % column_tiles, cta, &map, [&] {
                            const std::uint32_t block = i / column_tiles;
                            const std::uint32_t wanted = block / p.depth * p.block_rows + t.rows(t.rank(), block);
                            volatile bool& gave_up = shared.gave_up;
                            if (!gave_up && !t.wait_for_own(t.ready(block), wanted)) gave_up = true;
                            fence_proxy_async_global();
                            return static_cast<int>(block % p.depth * ring_rows) + cta * Tile::cta_rows;
                        });
                    }
                }
            } else if (warp == 1) {
                look_ahead<tile_columns>(t, pair, pairs, tiles, column_tiles, shared, lane);
            } else {
                announce(t, warp - 2, cta, pair, pairs, tiles, column_tiles, shared, lane);
            }
        } else {
            take_many_registers();
            const int group = warpgroup - 1, of_group = thread % 128;
            help_at_the_start(t, thread - 128, shared.gave_up);
            typename Tile::Sums sums;
            std::uint32_t digest = 0;
            int i = 0;
            for (std::uint32_t n = pair; n < tiles; n += pairs, ++i) {
                tile.multiply(at, weights.blocks, group, of_group, sums);
                mbarrier::wait(shared_address(&shared.signals.ready), i & 1);
                if (of_group == 0) mbarrier::arrive(shared_address(&shared.signals.taken));
                if (!static_cast<volatile bool&>(shared.gave_up)) {
                    finish_tile<tile_columns>(t, n / column_tiles, cta * Tile::cta_rows + group * Tile::group_rows,
                                              n % column_tiles * tile_columns, sums, of_group / 32, lane, digest);
                }
                if (i > 0) mbarrier::wait(shared_address(&shared.signals.announced[group]), (i - 1) & 1);
                mbarrier::arrive(shared_address(&shared.signals.stored[group]));
            }
            sync_wave();
            if (p.gather) {
                add_to_digest(p.exchange, call, digest);
                help_at_the_end<tile_columns>(t, column_tiles, thread - 128);
            }
        }
    }
    __syncwarp();
    cluster::arrive();  // nobody leaves while its neighbour may still arrive at its barriers
    cluster::wait();
#endif
}

}  // namespace

TokenParallelShape shape_token_parallel_tail(std::int64_t hidden, std::int64_t latent, int world, std::int64_t budget) {
    constexpr int most_depth = 8;
    TokenParallelShape shape{hidden, latent, world, ring_rows, 0};
    const auto bytes = [&](int depth) {
        shape.depth = depth;
        return token_parallel_region_bytes(shape) + token_parallel_workspace_bytes(shape);
    };
    for (; shape.block_rows >= 8; shape.block_rows /= 2) {
        int depth = most_depth;
        while (depth > 0 && bytes(depth) > budget) --depth;
        if (depth < 2) continue;
        shape.depth = depth;
        return shape;
    }
    shape.depth = 0;
    return shape;
}

std::int64_t token_parallel_region_bytes(const TokenParallelShape& shape) {
    return Region(shape).bytes;
}

std::int64_t token_parallel_workspace_bytes(const TokenParallelShape& shape) {
    return std::int64_t{shape.depth} * ring_rows * shape.latent * 2 + 4 * shape.depth * 4;
}

cudaError_t reset_token_parallel_tail(void* region, void* workspace, const TokenParallelShape& shape, cudaStream_t stream) {
    const Region layout(shape);
    if (const cudaError_t error = cudaMemsetAsync(region, 0, static_cast<std::size_t>(layout.latent_boxes), stream);
        error != cudaSuccess)
        return error;
    return cudaMemsetAsync(workspace, 0, static_cast<std::size_t>(token_parallel_workspace_bytes(shape)), stream);
}

TokenParallelPlan plan_token_parallel_tail(const TokenParallelShape& shape, std::int64_t tokens, int max_ctas) {
    const std::int64_t own = (tokens + shape.world - 1) / shape.world;
    const auto blocks = static_cast<int>((own + shape.block_rows - 1) / shape.block_rows);
    const auto even = [](int n) { return std::max(2, n / 2 * 2); };
    TokenParallelPlan plan{.grid = std::min(max_ctas, max_grid) / 2 * 2};
    if (shape.world > 1) plan.carriers = std::min(even(plan.grid / 10), most_carriers);
    const auto pairs = [&] { return (plan.grid - plan.carriers - plan.normalisers) / 2; };
    const auto waves = [&](int columns) {
        const std::int64_t tiles = blocks * ((shape.hidden + columns - 1) / columns);
        return (tiles + std::max(pairs(), 1) - 1) / std::max(pairs(), 1);
    };
    plan.tile_columns = waves(128) < 2 * waves(256) ? 128 : 256;
    const int column_tiles = static_cast<int>((shape.hidden + plan.tile_columns - 1) / plan.tile_columns);
    plan.everybody = std::min({shape.depth, (pairs() + column_tiles - 1) / column_tiles, blocks});
    if (blocks > plan.everybody) plan.normalisers = even(plan.grid / 16);
    return plan;
}

cudaError_t token_parallel_tail(const TokenParallelTail& tail, cudaStream_t stream) {
    const Exchange& x = tail.exchange;
    const TokenParallelShape& s = tail.shape;
    const TokenParallelPlan& plan = tail.plan;
    Params p{.exchange = x,
             .patient = x,
             .region_offset = tail.region_offset,
             .region = Region(s),
             .depth = static_cast<std::uint32_t>(s.depth),
             .block_rows = static_cast<std::uint32_t>(s.block_rows),
             .carriers = static_cast<std::uint32_t>(plan.carriers),
             .normalisers = static_cast<std::uint32_t>(plan.normalisers),
             .everybody = static_cast<std::uint32_t>(plan.everybody),
             .first = {},
             .count = {},
             .routed = unit_rows(tail.routed, s.latent, Dtype::bf16),
             .shared = unit_rows(tail.shared, s.hidden, Dtype::bf16),
             .addend = unit_rows(tail.addend, s.hidden, Dtype::bf16),
             .prefix = unit_rows(tail.prefix, s.hidden, Dtype::bf16),
             .out = unit_rows(tail.out, s.hidden, Dtype::bf16),
             .latent_units = static_cast<std::uint32_t>(s.latent / U::size),
             .hidden_units = static_cast<std::uint32_t>(s.hidden / U::size),
             .ring = static_cast<char*>(tail.workspace),
             .counters = nullptr,
             .packed = static_cast<const char*>(tail.packed),
             .gamma = tail.rms_norm ? static_cast<const uint4*>(tail.gamma) : nullptr,
             .epsilon = tail.epsilon,
             .inverse_width = 1.0F / static_cast<float>(s.latent),
             .scale = tail.scale,
             .tokens = 0,
             .gather = !tail.stop_before_gather};
    if (!valid(x) || s.world != x.window.world || s.depth < 2 || s.block_rows < 1 || s.block_rows > ring_rows ||
        s.hidden % 8 != 0 || s.latent % 8 != 0 || s.hidden <= 0 || s.latent <= 0 || tail.region_offset % 128 != 0 ||
        !tail.workspace || !tail.packed || (tail.rms_norm && !tail.gamma) || (tail.shared.data && tail.addend.data) ||
        plan.grid % 2 != 0 || plan.grid > max_grid || plan.carriers % 2 != 0 || plan.normalisers % 2 != 0 ||
        plan.carriers > most_carriers || (s.world > 1 && plan.carriers < 2) || plan.everybody > s.depth ||
        plan.grid - plan.carriers - plan.normalisers < 2 ||
        !aligned(p.routed) || !aligned(p.shared) || !aligned(p.addend) || !aligned(p.prefix) || !aligned(p.out)) {
        return cudaErrorInvalidValue;
    }
    p.patient.timeout_ns *= 2;
    std::int64_t tokens = 0, blocks = 0;
    for (int r = 0; r < s.world; ++r) {
        p.first[r] = static_cast<std::uint32_t>(tail.own.first[r]), p.count[r] = static_cast<std::uint32_t>(tail.own.count[r]);
        tokens += tail.own.count[r];
        blocks = std::max(blocks, (tail.own.count[r] + s.block_rows - 1) / s.block_rows);
    }
    if (tokens > 0 && (!p.routed.data || !p.out.data)) return cudaErrorInvalidValue;
    if (blocks > plan.everybody && plan.normalisers == 0) return cudaErrorInvalidValue;
    p.tokens = static_cast<std::uint32_t>(tokens);
    const std::int64_t ring_bytes = std::int64_t{s.depth} * ring_rows * s.latent * 2;
    p.counters = reinterpret_cast<std::uint32_t*>(p.ring + ring_bytes);
    CUtensorMap map;
    if (const cudaError_t error =
            describe_rows(map, p.ring, std::int64_t{s.depth} * ring_rows, s.latent, s.latent * 2, 128);
        error != cudaSuccess)
        return error;
    const auto go = [&](auto kernel, int shared) {
        shared += 1024;
        if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
            error != cudaSuccess)
            return error;
        return launch({.grid = plan.grid, .block = tile_threads, .cluster = 2, .shared_bytes = shared, .stream = stream},
                      kernel, p, map);
    };
    return plan.tile_columns == 256 ? go(finish_own_tokens<256>, TileProduct<256>::shared_bytes)
                                    : go(finish_own_tokens<128>, TileProduct<128>::shared_bytes);
}

}  // namespace latent_moe::gpu
