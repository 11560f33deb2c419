// The whole token-parallel tail in one kernel a rank: each rank finishes the tokens that it owns.
//
//     rank a                                     rank b, the owner of block k of its own rows
//     carriers ── partial rows, plain stores ──▶ latent box ──▶ Σ in rank order, norm ──▶ ring of bf16 rows
//                                                                                          │ tensor copies
//                                                shared box ──┐                            ▼
//                                                             └▶ epilogue ◀── wgmma: pairs of CTAs, 256 rows × a column tile
//                                                                Σ in rank order, + product, + prefix
//                                                                ├──▶ out of b
//                                                                └── plain stores ──▶ output box of each rank ──▶ its out
//
// The first CTAs are carriers and only push. The others multiply, in pairs: warps 0 to 7 do nothing else; warp 8 feeds them
// (tile_product.cuh); warp 9 waits ahead for what the epilogue reads and overwrites, and tells others what it stored, so
// that neither wait is on the product's path; warp 10 normalises its share of every block's rows; warp 11 copies its share
// of the other ranks' outputs. Of the first blocks, which everybody waits for, warps 10 and 11 of all these CTAs send and
// normalise.
//
// BLOCKS. Block k of an owner uses place k mod `depth` of every ring. A word in memory says for one sender, place and sharer
// of the work how far it has come: {epoch + 1, k + 1}; so no word of another call satisfies a wait, and none is ever reset.
//     arrived    at the owner: its latents, or shared rows, of one sender's CTA are there
//     consumed   at the sender: the owner has finished the block; the place may be filled again
//     finished   at every rank: 64 rows of a column tile of the output are there
//     copied     at the owner: a warp of that rank has copied its part
// The first `depth` blocks of a call need no word: the header of the peer's call n says that its call n - 1 has ended
// (header.h), so whoever sends waits for it once.
//
// MEMORY ORDER. Stores of many threads → barrier → one thread's (or warp's) fence.acq_rel.sys → relaxed store of the word;
// relaxed loads that see it, by a warp → fence.acq_rel.sys → barrier → loads past L1 (boxes change during the kernel). The
// ring of normalised rows and its counters stay inside the GPU: fences at its scope, and proxy fences since it is read by
// tensor copies. Counters count the rows, or parts of tiles, of all blocks of the call that used a place; they lie twice, by
// the parity of the epoch, and a call clears the next call's.
//
// PROGRESS. Nothing of block k waits for anything but blocks up to k, sent, multiplied and copied in this order everywhere;
// and all CTAs are resident. After a fault nobody waits any more: carriers and helpers leave, products run through on
// whatever is there and store nothing.
#define LATENT_MOE_NO_CALLS
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
constexpr int ring_rows = 256, parts = 4;  // of a tile: 64 rows each

constexpr int pushing_warps = 8, pushers = 32 * pushing_warps;  // of a carrier; its next warp announces
constexpr int pushed_at_once = 8;
constexpr int pushers_barrier = 1;
constexpr int most_senders = 2 * max_grid;
constexpr int staged_units = 32;                             ///< a lane's, of one helper: 16 KB a warp
constexpr std::int64_t most_stride = std::int64_t{1} << 23;  // bytes: a block's offsets fit 32 bits

/// The warps of a CTA that multiplies, behind those.
enum Helper : int { feeds = 8, keeps_in_touch, normalises, copies };

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
        arrived = take(2 * places * max_ranks * most_senders * 8);
        consumed = take(places * max_ranks * 8);
        finished = take(places * max_ranks * column_parts * 8);
        copied = take(places * max_ranks * max_grid * 8);
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
    std::uint32_t carriers, ahead;
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
    LATENT_MOE_DEVICE std::uint32_t multipliers() const { return gridDim.x - p.carriers; }
    LATENT_MOE_DEVICE std::uint32_t multiplier() const { return blockIdx.x - p.carriers; }

    LATENT_MOE_DEVICE std::uint32_t blocks(int owner) const { return (p.count[owner] + p.block_rows - 1) / p.block_rows; }
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
    /// Among how many the sending of a block's partials is shared: carriers, and of the first latents all helpers.
    LATENT_MOE_DEVICE std::uint32_t senders(Partial kind, std::uint32_t block) const {
        return kind == latents && block < p.ahead ? p.carriers + 2 * multipliers() : p.carriers;
    }

    // ---- words

    LATENT_MOE_DEVICE char* region(int at) const { return static_cast<char*>(p.exchange.window.base[at]) + p.region_offset; }
    LATENT_MOE_DEVICE std::uint64_t* words(int at, std::int64_t offset) const {
        return reinterpret_cast<std::uint64_t*>(region(at) + offset);
    }
    LATENT_MOE_DEVICE std::uint64_t told(std::uint32_t block) const {
        return std::uint64_t{call.epoch + 1} << 32 | (block + 1);
    }
    LATENT_MOE_DEVICE std::uint64_t* arrived(int at, Partial kind, std::uint32_t block, int source,
                                             std::uint32_t worker) const {
        return words(at, p.region.arrived) + ((kind * p.depth + block % p.depth) * max_ranks + source) * most_senders +
               worker;
    }
    LATENT_MOE_DEVICE std::uint64_t* consumed(int at, std::uint32_t block, int owner) const {
        return words(at, p.region.consumed) + block % p.depth * max_ranks + owner;
    }
    LATENT_MOE_DEVICE std::uint64_t* finished(int at, std::uint32_t block, int owner, std::uint32_t part) const {
        return words(at, p.region.finished) + (block % p.depth * max_ranks + owner) * p.region.column_parts + part;
    }
    LATENT_MOE_DEVICE std::uint64_t* copied(int at, std::uint32_t block, int receiver, std::uint32_t worker) const {
        return words(at, p.region.copied) + (block % p.depth * max_ranks + receiver) * max_grid + worker;
    }
    LATENT_MOE_DEVICE std::uint32_t* ready(std::uint32_t block) const { return counter(0, block % p.depth); }
    LATENT_MOE_DEVICE std::uint32_t* done(std::uint32_t block) const { return counter(1, block % p.depth); }
    LATENT_MOE_DEVICE std::uint32_t* counter(std::uint32_t kind, std::uint32_t place) const {
        return p.counters + ((call.epoch & 1) * 2 + kind) * p.depth + place;
    }

    // ---- boxes

    LATENT_MOE_DEVICE uint4* box(std::int64_t offset, std::uint32_t row_units, int at, int source,
                                 std::uint32_t block) const {
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

    // ---- waits; by a whole warp, in step, false where it gave up. No word: nothing to wait for.

    template <class Word, class Whom>
    LATENT_MOE_DEVICE bool wait_for(std::uint32_t count, std::uint64_t wanted, Phase phase, Word word, Whom whom) const {
        constexpr int at_once = 4;
        Wait wait(p.exchange, call.epoch);
        const auto reached = [&](std::uint64_t found) {
            return found >> 32 == wanted >> 32 && static_cast<std::uint32_t>(found) >= static_cast<std::uint32_t>(wanted);
        };
        for (std::uint32_t i = threadIdx.x % wave_size; i < count; i += at_once * wave_size) {
            const std::uint64_t* at[at_once];
            std::uint64_t found[at_once];
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                at[k] = i + k * wave_size < count ? word(i + k * wave_size) : nullptr;
                found[k] = at[k] != nullptr ? load_relaxed(at[k]) : wanted;
            }
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                while (!reached(found[k])) {
                    if (wait.over(whom(i + k * wave_size), phase)) break;
                    found[k] = load_relaxed(at[k]);
                }
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
            const auto* from =
                reinterpret_cast<const uint4*>(&control(p.exchange).headers[call.slot()][mailbox_index(lane, rank())]);
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

    /// A row of the ring, by a warp: the same bits whoever does it. All of a row that fits is on its way at once, to shared
    /// memory, since few registers are left beside the product. A lane reads only what it copied itself.
    LATENT_MOE_DEVICE void normalise(std::uint32_t block, std::uint32_t row, int lane, std::uint32_t staging) const {
        uint4* const to = ring_row(block, row);
        const std::uint32_t from_row = first_row(rank(), block) + row, at_once = staged_units / world();
        const bool stays = at_once * wave_size >= p.latent_units;
        const auto place = [&](int r, std::uint32_t u) { return staging + ((r * at_once + u) * wave_size + lane) * 16; };
        float squares = 0;
        for (std::uint32_t first = lane; first < p.latent_units; first += at_once * wave_size) {
            const std::uint32_t count =
                min(at_once, (p.latent_units - first + wave_size - 1) / static_cast<std::uint32_t>(wave_size));
            for (int r = 0; r < world(); ++r) {
                const uint4* const from =
                    (r == rank() ? p.routed.at(from_row, 0) : latent_box(rank(), r, block) + row * p.latent_units) + first;
#pragma unroll 4
                for (std::uint32_t u = 0; u < count; ++u) copy16_async(place(r, u), from + u * wave_size);
            }
            copies_commit();
            copies_wait<0>();
#pragma unroll 2
            for (std::uint32_t u = 0; u < count; ++u) {
                float sum[U::size] = {}, term[U::size];
                for (int r = 0; r < world(); ++r) {
                    U::unpack(load_shared<uint4>(place(r, u)), term);
#pragma unroll
                    for (int e = 0; e < U::size; ++e) sum[e] += term[e];
                }
                const uint4 rounded = U::pack(sum);
                U::unpack(rounded, term);
#pragma unroll
                for (int e = 0; e < U::size; ++e) squares = fmaf(term[e], term[e], squares);
                if (stays && p.gamma) {
                    store_shared(place(0, u), rounded);
                } else {
                    store16(to + first + u * wave_size, rounded);
                }
            }
        }
        if (!p.gamma) return;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) squares += shuffle_xor(squares, static_cast<unsigned>(step));
        const float factor = rms_factor(squares, p.inverse_width, p.epsilon);
#pragma unroll 4
        for (std::uint32_t unit = lane, u = 0; unit < p.latent_units; unit += wave_size, ++u) {
            const uint4 sum = stays ? load_shared<uint4>(place(0, u)) : load16(to + unit);
            store16(to + unit, scaled(sum, load16(p.gamma + unit), factor));
        }
    }
    LATENT_MOE_DEVICE static uint4 scaled(uint4 v, uint4 gamma, float factor) {
        float x[U::size], g[U::size];
        U::unpack(v, x), U::unpack(gamma, g);
#pragma unroll
        for (int i = 0; i < U::size; ++i) x[i] = x[i] * factor * g[i];
        return U::pack(x);
    }
    /// Rows worker, worker + workers, … of a block; then says so.
    LATENT_MOE_DEVICE void normalise_rows(std::uint32_t block, std::uint32_t worker, std::uint32_t workers, int lane,
                                          std::uint32_t staging) const {
        std::uint32_t made = 0;
        for (std::uint32_t row = worker; row < rows(rank(), block); row += workers, ++made) {
            normalise(block, row, lane, staging);
        }
        if (made == 0) return;
        fence_proxy_async_global();
        fence<Scope::device>();
        sync_wave();
        if (lane == 0) add_relaxed<Scope::device>(ready(block), made);
    }

    // ---- outputs

    /// Copies 64 rows of a column tile that `owner` finished; by a warp, through its part of shared memory, so that much is
    /// on its way at once. False: it gave up.
    template <int tile_columns>
    LATENT_MOE_DEVICE bool copy_part(int owner, std::uint32_t block, std::uint32_t part, int lane, std::uint32_t staging,
                                     std::uint32_t& digest) const {
        constexpr std::uint32_t width = tile_columns / U::size, rows_at_once = wave_size / width;  // 16 or 32 units
        constexpr std::uint32_t turns = staged_units;  // of a warp, each 32 units: whole rows, or one
        const std::uint32_t before = part % parts * 64, there = rows(owner, block);
        if (before >= there) return true;
        const std::uint32_t count = min(64u, there - before), unit = part / parts * width + lane % width;
        if (!wait_for(
                1, told(block), Phase::gather, [&](std::uint32_t) { return finished(rank(), block, owner, part); },
                [&](std::uint32_t) { return owner; })) {
            return false;
        }
        const bool inside = unit < p.hidden_units;
        const std::uint32_t to_row = first_row(owner, block) + before;
        const uint4* const from = out_box(rank(), owner, block) + before * p.hidden_units + unit;
        for (std::uint32_t first = lane / width; first < 64; first += turns * rows_at_once) {
#pragma unroll 4
            for (std::uint32_t u = 0; u < turns; ++u) {
                const std::uint32_t row = first + u * rows_at_once;
                if (inside && row < count) copy16_async(staging + (u * wave_size + lane) * 16, from + row * p.hidden_units);
            }
            copies_commit();
            copies_wait<0>();
#pragma unroll 4
            for (std::uint32_t u = 0; u < turns; ++u) {
                const std::uint32_t row = first + u * rows_at_once;
                if (!inside || row >= count) continue;
                const uint4 v = load_shared<uint4>(staging + (u * wave_size + lane) * 16);
                store16(p.out.at(to_row + row, unit), v);
                digest += digest_of(v, (to_row + row) * p.hidden_units + unit);
            }
        }
        return true;
    }
};

// ---- carriers

/// Latents go a block ahead of shared rows: the product waits for them first.
template <bool announces>
LATENT_MOE_DEVICE void carry_partials(const Tail& t, int thread, volatile bool& gave_up) {
    const int warp = thread / 32, lane = thread % 32;
    if (warp == 0 && !t.wait_for_peers()) gave_up = true;
    sync_threads_of(pushers_barrier, pushers + 32);
    const std::uint32_t most = t.most_blocks();
    const auto step = [&](Partial kind, std::uint32_t block) {
        if (warp == 0 && kind == latents && block >= t.p.depth) {
            const bool taken = t.wait_for(
                t.world(), t.told(block - t.p.depth), Phase::scatter,
                [&](std::uint32_t i) {
                    const int owner = static_cast<int>(i);
                    return owner != t.rank() && block < t.blocks(owner) ? t.consumed(t.rank(), block, owner) : nullptr;
                },
                [](std::uint32_t i) { return static_cast<int>(i); });
            if (!taken) gave_up = true;
        }
        sync_threads_of(pushers_barrier, pushers + 32);
        const bool stop = gave_up;  // the same for all: it is set between steps only
        const std::uint32_t workers = t.senders(kind, block);
        if constexpr (!announces) {
            for (int k = 1, owner = t.rank(); k < t.world() && !stop; ++k) {  // the next rank first
                owner = owner + 1 == t.world() ? 0 : owner + 1;
                if (block < t.blocks(owner)) t.push<pushers>(kind, owner, block, blockIdx.x, workers, thread);
            }
        }
        sync_threads_of(pushers_barrier, pushers + 32);
        if (announces && !stop && lane < t.world() && lane != t.rank() && block < t.blocks(lane)) {
            fence<Scope::system>();
            store_relaxed(t.arrived(lane, kind, block, t.rank(), blockIdx.x), t.told(block));
        }
        sync_wave();
        return stop;
    };
    for (std::uint32_t i = 0; i <= most; ++i) {
        if (i < most && step(latents, i)) return;
        if (i > 0 && t.p.shared.data && step(shared_rows, i - 1)) return;
    }
}

// ---- those that multiply

/// Barriers of a phase a tile. No phase can be missed: `ready` of a tile comes after `stored` of the one before.
struct alignas(8) Signals {
    std::uint64_t ready;      ///< what the epilogue reads and overwrites
    std::uint64_t stored[2];  ///< a warpgroup's part of the tile
};

struct SharedState {
    Signals signals;
    std::uint32_t leave[2];  ///< of either CTA of the pair: a fault was set before this call
    bool gave_up;
};

/// Asks the L2 cache for this rank's own rows under a CTA's part of a tile: they are far away, and read once.
template <int tile_columns>
LATENT_MOE_DEVICE void prefetch_addends(const Tail& t, std::uint32_t block, std::uint32_t column_tile, int cta, int lane) {
    const Params& p = t.p;
    const UnitRows& from = p.addend.data ? p.addend : p.shared;
    if (!from.data) return;
    const std::uint32_t first = p.addend.data ? block * p.block_rows : t.first_row(t.rank(), block);
    const std::uint32_t unit = column_tile * (tile_columns / U::size),
                        width = min(tile_columns / U::size, p.hidden_units - unit);
    const std::uint32_t end = min(128u * (cta + 1), t.rows(t.rank(), block));
    for (std::uint32_t row = 128 * cta + lane; row < end; row += wave_size) {
        for (std::uint32_t u = 0; u < width; u += 8) prefetch_l2(from.at(first + row, unit + u));
    }
}

/// Warp 9: before each tile's epilogue what it waits for, after it what others wait for.
template <int tile_columns>
LATENT_MOE_DEVICE void keep_in_touch(const Tail& t, int cta, std::uint32_t pair, std::uint32_t pairs, std::uint32_t tiles,
                                     std::uint32_t column_tiles, SharedState& shared, int lane) {
    volatile bool& gave_up = shared.gave_up;
    const std::uint32_t workers = t.multipliers();
    const bool peer = lane < t.world() && lane != t.rank();
    int i = 0;
    for (std::uint32_t tile = pair; tile < tiles; tile += pairs, ++i) {
        const std::uint32_t block = tile / column_tiles;
        prefetch_addends<tile_columns>(t, block, tile % column_tiles, cta, lane);
        bool there = !gave_up;
        if (there && t.p.shared.data && t.peers() > 0) there = t.wait_for_partials(shared_rows, block);
        if (there && t.p.gather && t.peers() > 0 && block >= t.p.depth) {
            there = t.wait_for(
                t.peers() * workers, t.told(block - t.p.depth), Phase::gather,
                [&](std::uint32_t w) { return t.copied(t.rank(), block, t.peer(w / workers), w % workers); },
                [&](std::uint32_t w) { return t.peer(w / workers); });
        }
        if (!there) gave_up = true;
        sync_wave();
        if (lane == 0) mbarrier::arrive(shared_address(&shared.signals.ready));

        for (int group = 0; group < 2; ++group) {
            const std::uint32_t part = tile % column_tiles * parts + cta * 2 + group;
            mbarrier::wait_patiently(shared_address(&shared.signals.stored[group]), i & 1);
            const bool quiet = gave_up;
            fence<Scope::system>();
            if (peer && t.p.gather && !quiet) store_relaxed(t.finished(lane, block, t.rank(), part), t.told(block));
            bool last = false;
            if (lane == t.rank()) last = atomicAdd(t.done(block), 1U) + 1 == (block / t.p.depth + 1) * column_tiles * parts;
            if (__any_sync(0xffffffff, last)) {
                fence<Scope::system>();
                if (peer && !quiet) store_relaxed(t.consumed(lane, block, t.rank()), t.told(block));
            }
            sync_wave();
        }
    }
}

/// Warps 10 and 11: the first blocks' latents.
LATENT_MOE_DEVICE bool send_first_latents(const Tail& t, int helper, int lane) {
    const std::uint32_t worker = t.p.carriers + 2 * t.multiplier() + helper;
    if (!t.wait_for_peers()) return false;
    for (std::uint32_t block = 0; block < min(t.p.ahead, t.most_blocks()); ++block) {
        for (int k = 1, owner = t.rank(); k < t.world(); ++k) {
            owner = owner + 1 == t.world() ? 0 : owner + 1;
            if (block < t.blocks(owner)) t.push<32>(latents, owner, block, worker, t.senders(latents, block), lane);
        }
        sync_wave();
        if (lane < t.world() && lane != t.rank() && block < t.blocks(lane)) {
            fence<Scope::system>();
            store_relaxed(t.arrived(lane, latents, block, t.rank(), worker), t.told(block));
        }
        sync_wave();
    }
    return true;
}

/// Of blocks [from, to), the rows of this worker.
LATENT_MOE_DEVICE bool normalise_blocks(const Tail& t, std::uint32_t from, std::uint32_t to, std::uint32_t worker,
                                        std::uint32_t workers, std::uint32_t parts_of_block, int lane,
                                        std::uint32_t staging) {
    for (std::uint32_t block = from; block < to; ++block) {
        bool there = t.peers() == 0 || t.wait_for_partials(latents, block);
        if (there && block >= t.p.depth && lane == 0)
            there = t.wait_for_own(t.done(block), block / t.p.depth * parts_of_block);
        if (!__all_sync(0xffffffff, there)) return false;
        t.normalise_rows(block, worker, workers, lane, staging);
    }
    return true;
}

/// The blocks whose places are waited for by their owners, by the helper that does nothing else; the last ones by both.
template <int tile_columns>
LATENT_MOE_DEVICE void copy_outputs(const Tail& t, int helper, std::uint32_t column_tiles, int lane, std::uint32_t staging) {
    const std::uint32_t jobs = column_tiles * parts;
    std::uint32_t digest = 0;
    for (int last = helper == 1 ? 0 : 1; last < 2; ++last) {
        const std::uint32_t worker = t.multiplier() + (last ? helper * t.multipliers() : 0);
        const std::uint32_t workers = t.multipliers() * (last ? 2 : 1);
        std::uint32_t job = worker;  // the parts of all blocks are dealt out in one round
        for (std::uint32_t block = 0; block < t.most_blocks(); ++block) {
            for (int k = 1, owner = t.rank(); k < t.world(); ++k) {
                owner = owner + 1 == t.world() ? 0 : owner + 1;
                if (block >= t.blocks(owner) || (block + t.p.depth >= t.blocks(owner)) != (last == 1)) continue;
                for (; job < jobs; job += workers) {
                    if (!t.copy_part<tile_columns>(owner, block, job, lane, staging, digest)) return;
                }
                job -= jobs;
                if (last) continue;
                sync_wave();
                if (lane == 0) {
                    fence<Scope::system>();
                    store_relaxed(t.copied(owner, block, t.rank(), worker), t.told(block));
                }
                sync_wave();
            }
        }
    }
    add_to_digest(t.p.exchange, t.call, digest);
}

/// Warps 10 and 11. `staging`: shared memory of either's own.
template <int tile_columns>
LATENT_MOE_DEVICE void help(const Tail& t, int helper, std::uint32_t column_tiles, volatile bool& gave_up, int lane,
                            std::uint32_t staging) {
    const std::uint32_t own_blocks = t.blocks(t.rank()), first = min(t.p.ahead, own_blocks);
    const std::uint32_t workers = t.multipliers(), parts_of_block = column_tiles * parts;
    for (std::uint32_t u = lane * 8; t.p.gamma && u < t.p.latent_units; u += 8 * wave_size) prefetch_l1(t.p.gamma + u);
    bool well = t.peers() == 0 || send_first_latents(t, helper, lane);
    std::uint32_t from = 0, to = first, worker = t.multiplier() + helper * workers, of = 2 * workers;
    for (int turn = 0; turn < 2 - helper && well; ++turn) {  // the first blocks both, the others one
        well = normalise_blocks(t, from, to, worker, of, parts_of_block, lane, staging);
        from = first, to = own_blocks, worker = t.multiplier(), of = workers;
    }
    if (!well) gave_up = true;
    if (well && t.p.gather && t.peers() > 0) copy_outputs<tile_columns>(t, helper, column_tiles, lane, staging);
}

/// Rows of a block as one thread of an epilogue sees them: from its first column in the tile. Offsets fit 32 bits.
struct BlockRows {
    char* data = nullptr;
    std::uint32_t stride = 0;

    BlockRows() = default;
    LATENT_MOE_DEVICE BlockRows(const UnitRows& rows, std::uint32_t first, std::uint32_t unit)
        : data(rows.data ? rows.data + first * rows.stride + unit * 16 : nullptr),
          stride(static_cast<std::uint32_t>(rows.stride)) {}
    LATENT_MOE_DEVICE BlockRows(uint4* box, std::uint32_t row_units, std::uint32_t unit)
        : data(reinterpret_cast<char*>(box + unit)), stride(row_units * 16) {}
    /// 64 columns g further.
    LATENT_MOE_DEVICE uint4* at(std::uint32_t row, int g) const {
        return reinterpret_cast<uint4*>(data + row * stride + g * 128);
    }
};

/// A warpgroup's part of a tile, from `first_row` of the block on, of which `rows` count. `few`: two summands at most; the
/// other form spills registers, where the wire is what takes the time.
template <int tile_columns, bool few, class Sums>
LATENT_MOE_DEVICE void finish_tile(const Tail& t, std::uint32_t block, std::uint32_t rows, std::uint32_t first_row,
                                   std::uint32_t column_tile, const Sums& sums, int warp, int lane, std::uint32_t& digest) {
    const Params& p = t.p;
    const int rank = t.rank(), world = t.world();
    const std::uint32_t of_own = block * p.block_rows, of_all = t.first_row(rank, block);
    const std::uint32_t unit = column_tile * (tile_columns / U::size) + column_of_unit(0, lane) / U::size;
    const BlockRows own = p.addend.data ? BlockRows(p.addend, of_own, unit) : BlockRows(p.shared, of_all, unit);
    const BlockRows out(p.out, p.gather ? of_all : of_own, unit);
    const auto shared_of = [&](int source) { return BlockRows(t.shared_box(rank, source, block), p.hidden_units, unit); };
    const std::uint32_t first = first_row + row_of_unit(0, 0, warp, lane);
    const auto valid = [&](int h, int g, int e) { return first + 8 * h + e < rows && unit + 8 * g < p.hidden_units; };
    const BlockRows theirs = world == 2 ? shared_of(1 - rank) : BlockRows();
    struct Loaded {
        uint4 own[2], theirs[2];
    };
    finish_in_passes<tile_columns, tile_columns == 256 ? 1 : 2, Loaded>(
        sums, lane,
        [&](int h, int g, Loaded& loaded) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                loaded.own[e] = loaded.theirs[e] = uint4{};
                if (!valid(h, g, e)) continue;
                if (own.data) loaded.own[e] = load16(own.at(first + 8 * h + e, g));
                if (world == 2 && p.shared.data) loaded.theirs[e] = load_past_l1(theirs.at(first + 8 * h + e, g));
            }
        },
        [&](int h, int g, const Loaded& loaded, const float(&units)[2][U::size]) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const std::uint32_t row = first + 8 * h + e;
                if (!valid(h, g, e)) continue;
                float value[U::size];
                if constexpr (few) {
                    U::unpack(U::add(loaded.own[e], loaded.theirs[e]), value);  // two summands have one order
                } else {
#pragma unroll
                    for (float& v : value) v = 0;
                    if (p.shared.data) {
                        for (int r = 0; r < world; ++r) {
                            float term[U::size];
                            U::unpack(r == rank ? loaded.own[e] : load_past_l1(shared_of(r).at(row, g)), term);
#pragma unroll
                            for (int i = 0; i < U::size; ++i) value[i] += term[i];
                        }
                        U::unpack(U::pack(value), value);
                    }
                }
#pragma unroll
                for (int i = 0; i < U::size; ++i) value[i] = fmaf(p.scale, units[e][i], value[i]);
                uint4 result = U::pack(value);
                if (p.prefix.data) result = U::add(result, load16(BlockRows(p.prefix, of_own, unit).at(row, g)));
                store16(out.at(row, g), result);
                if (!p.gather) continue;
                digest += digest_of(result, (of_all + row) * p.hidden_units + unit + 8 * g);
                for (int to = 0; to < world; ++to) {
                    if (to != rank) store16(BlockRows(t.out_box(to, rank, block), p.hidden_units, unit).at(row, g), result);
                }
            }
        });
}

template <int tile_columns, bool few>
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
        mbarrier::init(shared_address(&s.stored[0]), 128), mbarrier::init(shared_address(&s.stored[1]), 128);
        mbarrier::publish_init();
        shared.gave_up = false;
        // Both CTAs of a pair leave, or none: each uses the other's shared memory.
        for (int c = 0; c < 2; ++c) {
            asm volatile(
                "st.shared::cluster.u32 [%0], %1;" ::"r"(cluster::address_at(shared_address(&shared.leave[cta]), c)),
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
    const PackedLayout layout{std::int64_t{p.hidden_units} * U::size, std::int64_t{p.latent_units} * U::size};
    const typename Tile::Weights weights{p.packed, static_cast<std::uint32_t>(layout.tiles()),
                                         static_cast<std::uint32_t>(layout.blocks())};
    const std::uint32_t tiles = t.blocks(t.rank()) * column_tiles;
    const std::uint32_t pair = t.multiplier() / 2, pairs = t.multipliers() / 2;
    typename Tile::Place at;
    const bool carries = blockIdx.x < p.carriers;
    if (warpgroup == Tile::groups) {
        keep_few_registers();
        if (carries) {
            if (warp == pushing_warps) {
                carry_partials<true>(t, thread, shared.gave_up);
            } else if (blockIdx.x == 0 && warp == pushing_warps + 1) {
                exchange_headers(p.exchange, call, p.tokens, lane);
            }
        } else if (warp >= normalises) {
            help<tile_columns>(t, warp - normalises, column_tiles, shared.gave_up, lane,
                               tile.base + Tile::shared_bytes + (warp - normalises) * staged_units * 512);
        } else if (warp == keeps_in_touch) {
            keep_in_touch<tile_columns>(t, cta, pair, pairs, tiles, column_tiles, shared, lane);
        } else if (lane == 0) {
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
    } else {
        take_many_registers();
        if (carries) {
            carry_partials<false>(t, thread, shared.gave_up);
        } else {
            const int of_group = thread % Tile::group_threads;
            typename Tile::Sums sums;
            std::uint32_t digest = 0;
            int i = 0;
            for (std::uint32_t n = pair; n < tiles; n += pairs, ++i) {
                tile.multiply(at, weights.blocks, warpgroup, of_group, sums);
                mbarrier::wait_patiently(shared_address(&shared.signals.ready), i & 1);
                // No branch around what reads the sums: after a fault no row is valid.
                const std::uint32_t block = n / column_tiles;
                const std::uint32_t rows = static_cast<volatile bool&>(shared.gave_up) ? 0 : t.rows(t.rank(), block);
                finish_tile<tile_columns, few>(t, block, rows, cta * Tile::cta_rows + warpgroup * Tile::group_rows,
                                               n % column_tiles, sums, of_group / 32, lane, digest);
                mbarrier::arrive(shared_address(&shared.signals.stored[warpgroup]));
            }
            sync_wave();
            if (p.gather) add_to_digest(p.exchange, call, digest);
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
    if (shape.world > 1) plan.carriers = even(plan.grid / 10);
    const auto pairs = [&] { return (plan.grid - plan.carriers) / 2; };
    const auto waves = [&](int columns) {
        const std::int64_t tiles = blocks * ((shape.hidden + columns - 1) / columns);
        return (tiles + std::max(pairs(), 1) - 1) / std::max(pairs(), 1);
    };
    plan.tile_columns = 57 * waves(128) < 100 * waves(256) ? 128 : 256;  // what a wave of either was measured to take
    const int column_tiles = static_cast<int>((shape.hidden + plan.tile_columns - 1) / plan.tile_columns);
    plan.ahead = std::min({shape.depth, (pairs() + column_tiles - 1) / column_tiles, blocks});
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
             .ahead = static_cast<std::uint32_t>(plan.ahead),
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
        plan.grid % 2 != 0 || plan.grid > max_grid || plan.carriers % 2 != 0 || (s.world > 1 && plan.carriers < 2) ||
        plan.ahead < 0 || plan.ahead > s.depth || plan.grid - plan.carriers < 2 ||
        std::max({p.shared.stride, p.addend.stride, p.prefix.stride, p.out.stride}) > most_stride || !aligned(p.routed) ||
        !aligned(p.shared) || !aligned(p.addend) || !aligned(p.prefix) || !aligned(p.out)) {
        return cudaErrorInvalidValue;
    }
    p.patient.timeout_ns *= 2;
    std::int64_t tokens = 0;
    for (int r = 0; r < s.world; ++r) {
        p.first[r] = static_cast<std::uint32_t>(tail.own.first[r]),
        p.count[r] = static_cast<std::uint32_t>(tail.own.count[r]);
        tokens += tail.own.count[r];
    }
    if (tokens > 0 && (!p.routed.data || !p.out.data)) return cudaErrorInvalidValue;
    p.tokens = static_cast<std::uint32_t>(tokens);
    const std::int64_t ring_bytes = std::int64_t{s.depth} * ring_rows * s.latent * 2;
    p.counters = reinterpret_cast<std::uint32_t*>(p.ring + ring_bytes);
    CUtensorMap map;
    if (const cudaError_t error = describe_rows(map, p.ring, std::int64_t{s.depth} * ring_rows, s.latent, s.latent * 2, 128);
        error != cudaSuccess)
        return error;
    const auto go = [&](auto kernel, int shared) {
        shared += 1024 + 2 * staged_units * 512;
        if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
            error != cudaSuccess)
            return error;
        return launch({.grid = plan.grid, .block = tile_threads, .cluster = 2, .shared_bytes = shared, .stream = stream},
                      kernel, p, map);
    };
    const bool few = s.world <= 2 || !p.shared.data;
    if (plan.tile_columns == 256) {
        constexpr int shared = TileProduct<256>::shared_bytes;
        return few ? go(finish_own_tokens<256, true>, shared) : go(finish_own_tokens<256, false>, shared);
    }
    constexpr int shared = TileProduct<128>::shared_bytes;
    return few ? go(finish_own_tokens<128, true>, shared) : go(finish_own_tokens<128, false>, shared);
}

}  // namespace latent_moe::gpu
