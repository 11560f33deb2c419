// The whole token-parallel tail in one kernel a rank: each rank finishes the tokens that it owns.
//
//     rank a                                     rank b, the owner of block k of its own rows
//     carriers ── partial rows, bulk stores ──▶ latent box ──▶ Σ in rank order, norm ──▶ ring of bf16 rows
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
// MEMORY ORDER. A warp that posts bulk stores waits until they are complete, which makes them visible to it, before its
// fence and word. Otherwise: stores of many threads → barrier → one thread's (or warp's) fence.acq_rel.sys → relaxed store
// of the word; relaxed loads that see it, by a warp → fence.acq_rel.sys → barrier → loads past L1 (boxes change during the
// kernel). The ring of normalised rows and its counters stay inside the GPU: fences at its scope, and proxy fences since it
// is read by tensor copies. Counters count the rows, or parts of tiles, of all blocks of the call that used a place; they
// lie twice, by the parity of the epoch, and a call clears the next call's.
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
constexpr int ring_rows = 256;
constexpr int parts = 4, part_rows = 64;    // of a tile: what a warpgroup finishes
constexpr int shares = 2, share_rows = 32;  // of a part: what a warp copies at a time

constexpr int multiplying_warps = 8, multiplying = 32 * multiplying_warps, group_threads = 128;
constexpr int carriers_barrier = 4, multiplying_barrier = 1, group_barrier = 2;  // the latter and the next: of a warpgroup
constexpr int piece_units = 1024, carried_pieces = 12;  // of rows, on their way through a carrier's shared memory
constexpr int staged_units = 28;                        ///< a lane's, of the helper that normalises: 14 KB
/// Where a warp turns its sums over, 8 rows and 64 columns at a time. Eight floats more a row, or lanes meet in a bank.
constexpr int turned_columns = 64, turned_stride = turned_columns + 8, turned_bytes = 8 * turned_stride * 4;
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
        arrived = take(2 * places * max_ranks * max_grid * 8);
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
    std::uint32_t carriers, ahead, posting, settle;
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
    /// Among how many the sending of a block's partials is shared: carriers, or their warps; of the first latents the CTAs
    /// that multiply.
    LATENT_MOE_DEVICE std::uint32_t senders(Partial kind, std::uint32_t block) const {
        return kind == latents && block < p.ahead ? multipliers() : p.carriers * max(p.posting, 1U);
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
        return words(at, p.region.arrived) +
               ((kind * p.depth + block % p.depth) * max_ranks + mailbox_index(source, at)) * max_grid + worker;
    }
    LATENT_MOE_DEVICE std::uint64_t* consumed(int at, std::uint32_t block, int owner) const {
        return words(at, p.region.consumed) + block % p.depth * max_ranks + mailbox_index(owner, at);
    }
    LATENT_MOE_DEVICE std::uint64_t* finished(int at, std::uint32_t block, int owner, std::uint32_t part) const {
        return words(at, p.region.finished) +
               (block % p.depth * max_ranks + mailbox_index(owner, at)) * p.region.column_parts + part;
    }
    LATENT_MOE_DEVICE std::uint64_t* copied(int at, std::uint32_t block, int receiver, std::uint32_t worker) const {
        return words(at, p.region.copied) + (block % p.depth * max_ranks + mailbox_index(receiver, at)) * max_grid + worker;
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

    /// Part `worker` of `workers` of a block of this rank's latents for `owner`, by `threads` threads.
    template <int threads>
    LATENT_MOE_DEVICE void push_latents(int owner, std::uint32_t block, std::uint32_t worker, std::uint32_t workers,
                                        int thread) const {
        const std::uint32_t row_units = p.latent_units, units = rows(owner, block) * row_units;
        const std::uint32_t begin = units / workers * worker + min(units % workers, worker);
        const std::uint32_t end = begin + units / workers + (worker < units % workers ? 1 : 0);
        const UnitRows& from = p.routed;
        const std::uint32_t first = first_row(owner, block);
        uint4* const to = latent_box(owner, rank(), block);
        // Where a thread's next unit lies: rows and columns are stepped, since a division takes longer than a load's turn.
        std::uint32_t row = (begin + thread) / row_units, column = (begin + thread) % row_units;
        const std::uint32_t row_step = threads / row_units, column_step = threads % row_units;
#pragma unroll 4
        for (std::uint32_t i = begin + thread; i < end; i += threads) {
            store16(to + i, load16(from.at(first + row, column)));
            row += row_step, column += column_step;
            if (column >= row_units) column -= row_units, ++row;
        }
    }

    // ---- latents

    /// A row of the ring, by a warp: the same bits whoever does it. All of a row that fits is on its way at once, to shared
    /// memory, since few registers are left beside the product. A lane reads only what it copied itself.
    LATENT_MOE_DEVICE void normalise(std::uint32_t block, std::uint32_t row, int lane, std::uint32_t staging) const {
        uint4* const to = ring_row(block, row);
        const std::uint32_t from_row = first_row(rank(), block) + row, at_once = staged_units / max(2, world());
        const bool stays = at_once * wave_size >= p.latent_units;
        const auto place = [&](int r, std::uint32_t u) { return staging + ((r * at_once + u) * wave_size + lane) * 16; };
        float squares[4] = {};  // of every fourth of the lane's units, as four warps would have them
        std::uint32_t which = 0;
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
                const float before = which < 2    ? (which == 0 ? squares[0] : squares[1])
                                     : which == 2 ? squares[2]
                                                  : squares[3];
                const float after = add_squares(before, rounded);
#pragma unroll
                for (std::uint32_t k = 0; k < 4; ++k) squares[k] = k == which ? after : squares[k];
                which = (which + 1) % 4;
                if (stays && p.gamma) {
                    store_shared(place(0, u), rounded);
                    copy16_async(place(1, u), p.gamma + first + u * wave_size);  // far away too
                } else {
                    store16(to + first + u * wave_size, rounded);
                }
            }
        }
        if (!p.gamma) return;
#pragma unroll
        for (float& each : squares) each = sum_over_lanes(each);
        const float factor = factor_of(squares);
        copies_commit();
        copies_wait<0>();
#pragma unroll 4
        for (std::uint32_t unit = lane, u = 0; unit < p.latent_units; unit += wave_size, ++u) {
            const uint4 sum = stays ? load_shared<uint4>(place(0, u)) : load16(to + unit);
            const uint4 gamma = stays ? load_shared<uint4>(place(1, u)) : load16(p.gamma + unit);
            store16(to + unit, scaled(sum, gamma, factor));
        }
    }
    /// The same by a warpgroup. `shared`: eight numbers of its own, of which `turn` says which four.
    /// `wait` is called once what needs no peer is on its way.
    template <class Wait>
    LATENT_MOE_DEVICE void normalise_together(std::uint32_t block, std::uint32_t row, int thread, volatile float* shared,
                                              int turn, int barrier, Wait wait) const {
        constexpr int group = group_threads, held = 4;
        const uint4* const own = p.routed.at(first_row(rank(), block) + row, 0);
        uint4* const to = ring_row(block, row);
        const auto theirs = [&](int r) { return latent_box(rank(), r, block) + row * p.latent_units; };
        const bool stays = p.latent_units <= held * group;
        float squares = 0;
        uint4 sum[held], gamma[held];
        if (stays && p.gamma) {
#pragma unroll
            for (int u = 0; u < held; ++u) {
                if (thread + u * group < p.latent_units) gamma[u] = load16(p.gamma + thread + u * group);
            }
        }
        const auto load_own = [&](std::uint32_t first) {
#pragma unroll
            for (int u = 0; u < held; ++u) {
                sum[u] = first + u * group < p.latent_units ? load16(own + first + u * group) : uint4{};
            }
        };
        load_own(thread);
        wait();
#pragma unroll 1
        for (std::uint32_t first = thread; first < p.latent_units; first += held * group) {
            const auto valid = [&](int u) { return first + u * group < p.latent_units; };
            uint4 term[held];
            if (first >= held * group) load_own(first);
            if (world() == 2) {
#pragma unroll
                for (int u = 0; u < held; ++u) {
                    term[u] = valid(u) ? load_past_l1(theirs(1 - rank()) + first + u * group) : uint4{};
                }
#pragma unroll
                for (int u = 0; u < held; ++u) sum[u] = U::add(sum[u], term[u]);
            } else if (world() > 2) {
#pragma unroll
                for (int u = 0; u < held; ++u) {
                    float whole[U::size] = {}, part[U::size];
#pragma unroll 1
                    for (int r = 0; r < world(); ++r) {
                        U::unpack(r == rank() || !valid(u) ? sum[u] : load_past_l1(theirs(r) + first + u * group), part);
#pragma unroll
                        for (int e = 0; e < U::size; ++e) whole[e] += part[e];
                    }
                    sum[u] = U::pack(whole);
                }
            }
#pragma unroll
            for (int u = 0; u < held; ++u) {
                squares = add_squares(squares, sum[u]);
                if ((!stays || !p.gamma) && valid(u)) store16(to + first + u * group, sum[u]);
            }
        }
        if (!p.gamma) return;
        volatile float* const of_warps = shared + 4 * turn;
        squares = sum_over_lanes(squares);
        if (thread % wave_size == 0) of_warps[thread / wave_size] = squares;
        sync_threads_of(barrier, group);
        const float all[4] = {of_warps[0], of_warps[1], of_warps[2], of_warps[3]};
        const float factor = factor_of(all);
        if (stays) {
#pragma unroll
            for (int u = 0; u < held; ++u) {
                const std::uint32_t unit = thread + u * group;
                if (unit < p.latent_units) store16(to + unit, scaled(sum[u], gamma[u], factor));
            }
        } else {
            for (std::uint32_t unit = thread; unit < p.latent_units; unit += group) {
                store16(to + unit, scaled(load16(to + unit), load16(p.gamma + unit), factor));
            }
        }
    }
    LATENT_MOE_DEVICE static float add_squares(float sum, uint4 v) {
        float x[U::size];
        U::unpack(v, x);
#pragma unroll
        for (const float each : x) sum = fmaf(each, each, sum);
        return sum;
    }
    LATENT_MOE_DEVICE static float sum_over_lanes(float v) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) v += shuffle_xor(v, static_cast<unsigned>(step));
        return v;
    }
    LATENT_MOE_DEVICE float factor_of(const float (&squares)[4]) const {
        return rms_factor((squares[0] + squares[1]) + (squares[2] + squares[3]), p.inverse_width, p.epsilon);
    }
    LATENT_MOE_DEVICE static uint4 scaled(uint4 v, uint4 gamma, float factor) {
        float x[U::size], g[U::size];
        U::unpack(v, x), U::unpack(gamma, g);
#pragma unroll
        for (int i = 0; i < U::size; ++i) x[i] = x[i] * factor * g[i];
        return U::pack(x);
    }
    /// A warp's rows of a block, of which all have been dealt out in one round; then says so.
    LATENT_MOE_DEVICE void normalise_rows(std::uint32_t block, std::uint32_t worker, std::uint32_t workers, int lane,
                                          std::uint32_t staging) const {
        std::uint32_t made = 0;
        for (std::uint32_t row = (worker + block * (workers - 1) * p.block_rows) % workers; row < rows(rank(), block);
             row += workers, ++made) {
            normalise(block, row, lane, staging);
        }
        tell_ready(block, made, lane);
    }
    LATENT_MOE_DEVICE void tell_ready(std::uint32_t block, std::uint32_t made, int lane) const {
        if (made == 0) return;
        fence_proxy_async_global();
        fence<Scope::device>();
        sync_wave();
        if (lane == 0) add_relaxed<Scope::device>(ready(block), made);
    }

    // ---- outputs

    /// Copies a piece of a part of a tile that `owner` finished, by a warp. False: it gave up.
    template <int tile_columns>
    LATENT_MOE_DEVICE bool copy_share(int owner, std::uint32_t block, std::uint32_t job, int lane,
                                      std::uint32_t& digest) const {
        constexpr std::uint32_t width = tile_columns / U::size, rows_at_once = wave_size / width;
        constexpr int turns = share_rows / rows_at_once, at_once = 4;
        const std::uint32_t part = job / shares, there = rows(owner, block);
        const std::uint32_t before = part % parts * part_rows + job % shares * share_rows;
        if (before >= there) return true;
        const std::uint32_t count = min(std::uint32_t{share_rows}, there - before),
                            unit = part / parts * width + lane % width;
        if (!wait_for(
                1, told(block), Phase::gather, [&](std::uint32_t) { return finished(rank(), block, owner, part); },
                [&](std::uint32_t) { return owner; })) {
            return false;
        }
        const bool inside = unit < p.hidden_units;
        const std::uint32_t to_row = first_row(owner, block) + before;
        const uint4* const from = out_box(rank(), owner, block) + before * p.hidden_units + unit;
        for (int first = 0; first < turns; first += at_once) {
            uint4 v[at_once];
#pragma unroll
            for (int u = 0; u < at_once; ++u) {
                const std::uint32_t row = lane / width + (first + u) * rows_at_once;
                if (inside && row < count) v[u] = load_past_l1(from + row * p.hidden_units);
            }
#pragma unroll
            for (int u = 0; u < at_once; ++u) {
                const std::uint32_t row = lane / width + (first + u) * rows_at_once;
                if (!inside || row >= count) continue;
                store16(p.out.at(to_row + row, unit), v[u]);
                digest += digest_of(v[u], (to_row + row) * p.hidden_units + unit);
            }
        }
        return true;
    }
};

// ---- those that multiply

/// Barriers of a phase a tile. No phase can be missed: `ready` of a tile comes after `stored` of the one before.
struct alignas(8) Signals {
    std::uint64_t ready;                                              ///< what the epilogue reads and overwrites
    std::uint64_t stored[2];                                          ///< a warpgroup's part of the tile
    std::uint64_t loaded[carried_pieces], stored_on[carried_pieces];  ///< of a carrier
};

struct SharedState {
    Signals signals;
    std::uint32_t leave[2];  ///< of either CTA of the pair: a fault was set before this call
    bool gave_up;
    float squares[16];
};

// ---- carriers

/// The pieces that one of `workers` sends, in their order. Of each step (a block's latents, or shared rows) the owners take
/// turns; all pieces of all steps are dealt out in one round. Latents go a block ahead of shared rows, since the product
/// waits for them first. A piece is some whole rows, which lie together in the box, or a part of a long one.
struct Deal {
    const Tail& t;
    std::uint32_t worker, workers;
    std::uint32_t steps = 2 * (t.most_blocks() + 1), step = 0;
    int k = 0;  ///< owner: so many ranks further
    std::uint32_t dealt = 0, piece = 0, pieces = 0;

    LATENT_MOE_DEVICE bool over() const { return step >= steps; }
    LATENT_MOE_DEVICE Partial kind() const { return step % 2 == 0 ? latents : shared_rows; }
    LATENT_MOE_DEVICE std::uint32_t block() const { return step / 2 - step % 2; }
    LATENT_MOE_DEVICE int owner() const { return t.rank() + k < t.world() ? t.rank() + k : t.rank() + k - t.world(); }
    LATENT_MOE_DEVICE std::uint32_t row_units() const { return kind() == latents ? t.p.latent_units : t.p.hidden_units; }
    LATENT_MOE_DEVICE std::uint32_t rows_of_piece() const { return max(1U, std::uint32_t{piece_units} / row_units()); }
    LATENT_MOE_DEVICE std::uint32_t pieces_of_row() const { return (row_units() + piece_units - 1) / piece_units; }

    /// Whether the carriers have a part in a step.
    LATENT_MOE_DEVICE bool has_rows() const {
        return step % 2 == 0 ? step / 2 + 1 < steps / 2 && step / 2 >= t.p.ahead : step >= 2 && t.p.shared.data != nullptr;
    }
    /// On the step's first piece of this worker. False: it has none.
    LATENT_MOE_DEVICE bool begin() {
        k = 0, piece = pieces = 0;
        return settle();
    }
    LATENT_MOE_DEVICE bool next() {
        piece += workers;
        return settle();
    }
    LATENT_MOE_DEVICE void next_step() { ++step; }

    /// Of the block, then of the box: where the piece begins, in units; and how long it is.
    LATENT_MOE_DEVICE std::uint32_t row() const { return piece / pieces_of_row() * rows_of_piece(); }
    LATENT_MOE_DEVICE std::uint32_t column() const { return piece % pieces_of_row() * piece_units; }
    LATENT_MOE_DEVICE std::uint32_t rows() const { return min(rows_of_piece(), t.rows(owner(), block()) - row()); }
    LATENT_MOE_DEVICE std::uint32_t units_of_row() const { return min(row_units() - column(), std::uint32_t{piece_units}); }
    LATENT_MOE_DEVICE std::uint32_t units() const { return rows() * units_of_row(); }

    LATENT_MOE_DEVICE uint4* to() const {
        return (kind() == latents ? t.latent_box(owner(), t.rank(), block()) : t.shared_box(owner(), t.rank(), block())) +
               std::int64_t{row()} * row_units() + column();
    }
    /// One thread: into shared memory.
    LATENT_MOE_DEVICE void load(std::uint32_t room, std::uint32_t loaded) const {
        const UnitRows& from = kind() == latents ? t.p.routed : t.p.shared;
        const int bytes = static_cast<int>(units_of_row()) * 16;
        const std::uint32_t count = rows(), first = t.first_row(owner(), block()) + row();
        mbarrier::expect(loaded, static_cast<int>(count) * bytes);
        for (std::uint32_t r = 0; r < count; ++r)
            bulk_copy(room + r * bytes, from.at(first + r, column()), bytes, loaded, evict_first);
    }

private:
    LATENT_MOE_DEVICE bool settle() {
        while (piece >= pieces) {
            dealt = (dealt + pieces) % workers, pieces = 0;
            if (++k >= t.world()) return false;
            if (block() < t.blocks(owner())) {
                const std::uint32_t n = t.rows(owner(), block());
                pieces = pieces_of_row() > 1 ? n * pieces_of_row() : (n + rows_of_piece() - 1) / rows_of_piece();
            }
            piece = worker >= dealt ? worker - dealt : worker + workers - dealt;
        }
        return true;
    }
};

/// Whether the owners have taken what lay in a block's places before: `wait`, or only a look.
LATENT_MOE_DEVICE bool places_are_free(const Tail& t, std::uint32_t block, bool wait) {
    if (block < t.p.depth) return true;
    const std::uint64_t wanted = t.told(block - t.p.depth);
    const auto word = [&](std::uint32_t i) -> const std::uint64_t* {
        const int owner = static_cast<int>(i);
        return owner != t.rank() && block < t.blocks(owner) ? t.consumed(t.rank(), block, owner) : nullptr;
    };
    if (wait)
        return t.wait_for(t.world(), wanted, Phase::scatter, word, [](std::uint32_t i) { return static_cast<int>(i); });
    const std::uint32_t lane = threadIdx.x % wave_size;
    const std::uint64_t* const at = lane < static_cast<std::uint32_t>(t.world()) ? word(lane) : nullptr;
    const std::uint64_t found = at != nullptr ? load_relaxed(at) : wanted;
    const bool there = __all_sync(
        0xffffffff, found >> 32 == wanted >> 32 && static_cast<std::uint32_t>(found) >= static_cast<std::uint32_t>(wanted));
    fence<Scope::system>();
    return there;
}

/// One of a carrier's warps that post: loads pieces as far ahead as its part of the room allows, and hands each to the copy
/// engine, which stores it into the owner's box. What it reads it gives back long before it is known to be there, so the
/// engine never runs dry; an owner is told of a step `settle` pieces later, when the wait for it is short.
LATENT_MOE_DEVICE void post_partials(const Tail& t, std::uint32_t room, std::uint32_t loaded, std::uint32_t worker,
                                     volatile bool& gave_up, int lane) {
    if (!t.wait_for_peers()) {
        gave_up = true;
        return;
    }
    fence_proxy_async_all();  // the rows were written by ordinary stores
    const std::uint32_t stages = carried_pieces / t.p.posting;
    std::uint32_t asked = 0, stored = 0;
    Deal ahead{t, worker, t.p.carriers * t.p.posting};
    bool inside = ahead.has_rows() && ahead.begin();
    const auto ask = [&] {
        while (asked < stored + stages - 1 && !ahead.over()) {
            if (!inside) {
                ahead.next_step();
                inside = !ahead.over() && ahead.has_rows() && ahead.begin();
                continue;
            }
            const std::uint32_t stage = asked % stages;
            if (lane == 0) ahead.load(room + stage * piece_units * 16, loaded + stage * 8);
            inside = ahead.next(), ++asked;
        }
        sync_wave();
    };
    const auto tell = [&](std::uint32_t step) {  // lane 0, which has waited for its stores
        const Partial kind = step % 2 == 0 ? latents : shared_rows;
        const std::uint32_t block = step / 2 - step % 2;
        fence<Scope::system>();
        for (int r = 0; r < t.world(); ++r) {
            if (r != t.rank() && block < t.blocks(r))
                store_relaxed(t.arrived(r, kind, block, t.rank(), worker), t.told(block));
        }
    };
    constexpr std::uint32_t none = ~0U;
    std::uint32_t untold = none, since = 0;  // a step, all of whose pieces have been posted; pieces since
    const auto tell_now = [&] {
        if (untold == none) return;
        if (lane == 0) bulk_stores_wait<0>(), tell(untold);
        sync_wave();
        untold = none;
    };
    ask();
    for (Deal now{t, worker, t.p.carriers * t.p.posting}; !now.over(); now.next_step()) {
        if (!now.has_rows()) continue;
        if (now.kind() == latents && !places_are_free(t, now.block(), false)) {
            tell_now();  // who is waited for may wait for it
            if (!places_are_free(t, now.block(), true)) {
                gave_up = true;
                break;
            }
        }
        if (!now.begin()) {
            if (lane == 0) tell(now.step);
            sync_wave();
            continue;
        }
        do {
            const std::uint32_t stage = stored % stages;
            mbarrier::wait_patiently(loaded + stage * 8, stored / stages & 1);
            if (lane == 0) {
                bulk_store(now.to(), room + stage * piece_units * 16, static_cast<int>(now.units()) * 16);
                bulk_stores_commit();
                bulk_stores_read<1>();  // so the room of all but the last one is free
            }
            ++stored;
            sync_wave();
            ask();
            if (untold != none && ++since >= t.p.settle) {
                if (lane == 0) {
                    switch (t.p.settle) {
                        case 1: bulk_stores_wait<1>(); break;
                        case 2: bulk_stores_wait<2>(); break;
                        case 3: bulk_stores_wait<3>(); break;
                        default: bulk_stores_wait<4>(); break;
                    }
                    tell(untold);
                }
                sync_wave();
                untold = none;
            }
        } while (now.next());
        tell_now();  // of the step before, where this one had few pieces
        untold = now.step, since = 0;
    }
    if (!gave_up) tell_now();
    // Nothing may still be on its way into or out of the memory of a CTA that ends.
    for (; stored < asked; ++stored) mbarrier::wait_patiently(loaded + stored % stages * 8, stored / stages & 1);
    if (lane == 0) bulk_stores_wait<0>();
    sync_wave();
}

/// Warp 8, where the threads of a carrier store: asks for the pieces, as many as there is room for, and tells owners of a
/// step once its pieces are stored.
LATENT_MOE_DEVICE void load_partials(const Tail& t, std::uint32_t room, Signals& signals, volatile bool& gave_up, int lane) {
    if (!t.wait_for_peers()) gave_up = true;
    sync_threads_of(carriers_barrier, multiplying + wave_size);
    if (gave_up) return;
    fence_proxy_async_all();  // the rows were written by ordinary stores
    std::uint32_t asked = 0;
    Deal ahead{t, blockIdx.x, t.p.carriers};
    bool inside = ahead.has_rows() && ahead.begin();
    const auto ask = [&](std::uint32_t until) {  // for pieces before `until`
        while (asked < until && !ahead.over()) {
            if (!inside) {
                ahead.next_step();
                inside = !ahead.over() && ahead.has_rows() && ahead.begin();
                continue;
            }
            const int stage = static_cast<int>(asked % carried_pieces);
            if (asked >= carried_pieces) {
                mbarrier::wait_patiently(shared_address(&signals.stored_on[stage]), (asked / carried_pieces & 1) ^ 1);
            }
            if (lane == 0) ahead.load(room + stage * piece_units * 16, shared_address(&signals.loaded[stage]));
            sync_wave();
            inside = ahead.next(), ++asked;
        }
    };
    std::uint32_t pieces = 0;  // of the steps so far
    for (Deal now{t, blockIdx.x, t.p.carriers}; !now.over(); now.next_step()) {
        if (!now.has_rows()) continue;
        const bool quiet = now.kind() == latents && !places_are_free(t, now.block(), true);
        if (quiet) gave_up = true;
        sync_threads_of(carriers_barrier, multiplying + wave_size);  // the step may be stored
        if (now.begin()) {
            do {
                ask(++pieces);
            } while (now.next());
        }
        ask(pieces + carried_pieces / 2);                            // of the next step
        sync_threads_of(carriers_barrier, multiplying + wave_size);  // it has been
        if (quiet) {  // nothing may still be on its way into the memory of a CTA that ends
            for (; pieces < asked; ++pieces) {
                mbarrier::wait_patiently(shared_address(&signals.loaded[pieces % carried_pieces]),
                                         pieces / carried_pieces & 1);
            }
            return;
        }
        if (lane < t.world() && lane != t.rank() && now.block() < t.blocks(lane)) {
            fence<Scope::system>();
            store_relaxed(t.arrived(lane, now.kind(), now.block(), t.rank(), blockIdx.x), t.told(now.block()));
        }
        sync_wave();
    }
}

/// The other warps, there: store them into the owners' boxes.
LATENT_MOE_DEVICE void store_partials(const Tail& t, std::uint32_t room, Signals& signals, volatile bool& gave_up,
                                      int thread) {
    sync_threads_of(carriers_barrier, multiplying + wave_size);
    if (gave_up) return;
    std::uint32_t done = 0;
    for (Deal now{t, blockIdx.x, t.p.carriers}; !now.over(); now.next_step()) {
        if (!now.has_rows()) continue;
        sync_threads_of(carriers_barrier, multiplying + wave_size);
        const bool quiet = gave_up;
        if (now.begin()) {
            do {
                const int stage = static_cast<int>(done % carried_pieces);
                mbarrier::wait_patiently(shared_address(&signals.loaded[stage]), done / carried_pieces & 1);
                uint4* const to = now.to();
                const std::uint32_t units = now.units();
                constexpr int at_once = piece_units / multiplying;
                uint4 v[at_once];
#pragma unroll
                for (int u = 0; u < at_once; ++u) {
                    v[u] = load_shared<uint4>(room + (stage * piece_units + u * multiplying + thread) * 16);
                }
                sync_wave();
                if (thread % wave_size == 0) mbarrier::arrive(shared_address(&signals.stored_on[stage]));
#pragma unroll
                for (int u = 0; u < at_once; ++u) {
                    const std::uint32_t unit = u * multiplying + thread;
                    if (unit < units && !quiet) store16(to + unit, v[u]);
                }
                ++done;
            } while (now.next());
        }
        sync_threads_of(carriers_barrier, multiplying + wave_size);
        if (quiet) return;
    }
}

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

/// The warps that will multiply: the first blocks' latents, sent and then normalised.
LATENT_MOE_DEVICE void begin_together(const Tail& t, int thread, volatile float* squares, volatile bool& gave_up) {
    const std::uint32_t first = min(t.p.ahead, t.most_blocks());
    if (t.peers() > 0) {
        if (!t.wait_for_peers()) gave_up = true;
        sync_threads_of(multiplying_barrier, multiplying);
        const bool quiet = gave_up;
        for (std::uint32_t block = 0; block < first; ++block) {
            for (int k = 1, owner = t.rank(); k < t.world() && !quiet; ++k) {
                owner = owner + 1 == t.world() ? 0 : owner + 1;
                if (block < t.blocks(owner)) {
                    t.push_latents<multiplying>(owner, block, t.multiplier(), t.multipliers(), thread);
                }
            }
            sync_threads_of(multiplying_barrier, multiplying);
            if (thread < t.world() && thread != t.rank() && block < t.blocks(thread) && !quiet) {
                fence<Scope::system>();
                store_relaxed(t.arrived(thread, latents, block, t.rank(), t.multiplier()), t.told(block));
            }
            sync_wave();
        }
    }
    const int group = thread / group_threads, of_group = thread % group_threads;
    const std::uint32_t workers = 2 * t.multipliers(), own = min(t.p.ahead, t.blocks(t.rank()));
    std::uint32_t waited = ~0u;
    int turn = 0;
    for (std::uint32_t at = 2 * t.multiplier() + group; at < own * t.p.block_rows; at += workers) {
        const std::uint32_t block = at / t.p.block_rows, row = at % t.p.block_rows;
        if (row >= t.rows(t.rank(), block)) continue;
        t.normalise_together(block, row, of_group, squares + 8 * group, turn, group_barrier + group, [&] {
            if (t.peers() > 0 && block != waited && !t.wait_for_partials(latents, block)) gave_up = true;
            waited = block;
        });
        turn ^= 1;
        fence_proxy_async_global();
        sync_threads_of(group_barrier + group, group_threads);
        if (of_group == 0) {
            fence<Scope::device>();
            add_relaxed<Scope::device>(t.ready(block), 1U);
        }
    }
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

/// Blocks whose places their owners wait for, by one helper a CTA; or, `last`, the others, by all of its warps.
template <int tile_columns>
LATENT_MOE_DEVICE void copy_outputs(const Tail& t, bool last, std::uint32_t worker, std::uint32_t workers,
                                    std::uint32_t column_tiles, int lane, std::uint32_t& digest) {
    const std::uint32_t jobs = column_tiles * parts * shares;
    std::uint32_t job = worker;  // the shares of all blocks are dealt out in one round
    for (std::uint32_t block = 0; block < t.most_blocks(); ++block) {
        for (int k = 1, owner = t.rank(); k < t.world(); ++k) {
            owner = owner + 1 == t.world() ? 0 : owner + 1;
            if (block >= t.blocks(owner) || (block + t.p.depth >= t.blocks(owner)) != last) continue;
            for (; job < jobs; job += workers) {
                if (!t.copy_share<tile_columns>(owner, block, job, lane, digest)) return;
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

/// The last blocks' outputs: by all warps that have nothing else to do any more.
template <int tile_columns>
LATENT_MOE_DEVICE void copy_last_outputs(const Tail& t, int warp, std::uint32_t column_tiles, int lane,
                                         std::uint32_t& digest) {
    constexpr std::uint32_t warps = tile_threads / wave_size - 2;
    const std::uint32_t slot = warp < feeds ? warp : warp - 2;
    if (t.peers() > 0) {
        copy_outputs<tile_columns>(t, true, t.multiplier() + slot * t.multipliers(), warps * t.multipliers(), column_tiles,
                                   lane, digest);
    }
    add_to_digest(t.p.exchange, t.call, digest);
}

/// Warps 10 and 11. `staging`: shared memory of the former.
template <int tile_columns>
LATENT_MOE_DEVICE void help(const Tail& t, int helper, std::uint32_t column_tiles, volatile bool& gave_up, int lane,
                            std::uint32_t staging) {
    const std::uint32_t own_blocks = t.blocks(t.rank()), first = min(t.p.ahead, own_blocks);
    for (std::uint32_t u = lane * 8; t.p.gamma && u < t.p.latent_units; u += 8 * wave_size) prefetch_l1(t.p.gamma + u);
    if (helper == 0 &&
        !normalise_blocks(t, first, own_blocks, t.multiplier(), t.multipliers(), column_tiles * parts, lane, staging)) {
        gave_up = true;
    }
    std::uint32_t digest = 0;
    if (helper == 1 && t.p.gather && t.peers() > 0) {
        copy_outputs<tile_columns>(t, false, t.multiplier(), t.multipliers(), column_tiles, lane, digest);
    }
    if (t.p.gather) copy_last_outputs<tile_columns>(t, normalises + helper, column_tiles, lane, digest);
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

/// A warp's 16 rows of a tile, from `first_row` of the block on, of which `rows` count. Turned over in shared memory, in a
/// loop: straight code for all sums would be read from far away, slower than it runs. `few`: two shared summands at most.
template <int tile_columns, bool few, class Sums>
LATENT_MOE_DEVICE void finish_tile(const Tail& t, std::uint32_t block, std::uint32_t rows, std::uint32_t first_row,
                                   std::uint32_t column_tile, const Sums& sums, std::uint32_t turned, int lane,
                                   std::uint32_t& digest) {
    const Params& p = t.p;
    const int rank = t.rank(), world = t.world();
    const std::uint32_t of_own = block * p.block_rows, of_all = t.first_row(rank, block);
    const std::uint32_t unit = column_tile * (tile_columns / U::size) + lane % 8;
    const BlockRows own = p.addend.data ? BlockRows(p.addend, of_own, unit) : BlockRows(p.shared, of_all, unit);
    const BlockRows out(p.out, p.gather ? of_all : of_own, unit);
    const auto shared_of = [&](int source) { return BlockRows(t.shared_box(rank, source, block), p.hidden_units, unit); };
    const BlockRows theirs = world == 2 && p.shared.data ? shared_of(1 - rank) : BlockRows();
    const BlockRows prefix(p.prefix, of_own, unit);
    const BlockRows to_peer =
        world == 2 && p.gather ? BlockRows(t.out_box(1 - rank, rank, block), p.hidden_units, unit) : BlockRows();
    const std::uint32_t put = turned + lane / 4 * turned_stride * 4 + lane % 4 * 8;
    const std::uint32_t get = turned + lane / 8 * turned_stride * 4 + lane % 8 * 32;
    constexpr int turns = 2, rows_a_turn = 4, rounds = tile_columns / 32;
    const auto row_of = [&](int round, int turn) {
        return first_row + round % 2 * 8 + lane / 8 + static_cast<std::uint32_t>(turn * rows_a_turn);
    };
    const auto valid = [&](int round, int turn) {
        return row_of(round, turn) < rows && unit + round / 2 * 8 < p.hidden_units;
    };
    struct Loaded {
        uint4 own[turns], theirs[turns];
    };
    const auto load = [&](int round, Loaded& loaded) {
#pragma unroll
        for (int turn = 0; turn < turns; ++turn) {
            loaded.own[turn] = loaded.theirs[turn] = uint4{};
            if (!valid(round, turn)) continue;
            if (own.data) loaded.own[turn] = load16(own.at(row_of(round, turn), round / 2));
            if (theirs.data) loaded.theirs[turn] = load_past_l1(theirs.at(row_of(round, turn), round / 2));
        }
    };
    Loaded now, then;
    load(0, now);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        if (round + 1 < rounds) load(round + 1, then);
        sync_wave();
#pragma unroll
        for (int each = 0; each < rounds; ++each) {
            if (each != round) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int at = (each / 2 * 8 + j) * 4 + each % 2 * 2;
                store_shared8(put + j * 32, sums[at], sums[at + 1]);
            }
        }
        sync_wave();
        const int g = round / 2;
#pragma unroll
        for (int turn = 0; turn < turns; ++turn) {
            if (!valid(round, turn)) continue;
            const std::uint32_t row = row_of(round, turn);
            float value[U::size];
            if constexpr (few) {
                U::unpack(U::add(now.own[turn], now.theirs[turn]), value);  // two summands have one order
            } else {
#pragma unroll
                for (float& v : value) v = 0;
                for (int source = 0; source < world; ++source) {
                    float term[U::size];
                    U::unpack(source == rank ? now.own[turn] : load_past_l1(shared_of(source).at(row, g)), term);
#pragma unroll
                    for (int i = 0; i < U::size; ++i) value[i] += term[i];
                }
                U::unpack(U::pack(value), value);
            }
            const std::uint32_t at = get + turn * rows_a_turn * turned_stride * 4;
            const float4 low = load_shared<float4>(at), high = load_shared<float4>(at + 16);
            const float product[U::size] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < U::size; ++i) value[i] = fmaf(p.scale, product[i], value[i]);
            uint4 result = U::pack(value);
            if (p.prefix.data) result = U::add(result, load16(prefix.at(row, g)));
            store16(out.at(row, g), result);
            if (to_peer.data) {
                store16(to_peer.at(row, g), result);
            } else if (p.gather) {
#pragma unroll 1
                for (int to = 0; to < world; ++to) {
                    if (to != rank) store16(BlockRows(t.out_box(to, rank, block), p.hidden_units, unit).at(row, g), result);
                }
            }
            if (p.gather) digest += digest_of(result, (of_all + row) * p.hidden_units + unit + 8 * g);
        }
        now = then;
    }
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
        if (blockIdx.x < p.carriers) {
            for (int stage = 0; stage < carried_pieces; ++stage) {
                mbarrier::init(shared_address(&s.loaded[stage]), 1);
                mbarrier::init(shared_address(&s.stored_on[stage]), multiplying_warps);
            }
        }
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
            if (warp == feeds && p.posting == 0) {
                load_partials(t, tile.base, shared.signals, shared.gave_up, lane);
            } else if (blockIdx.x == 0 && warp == keeps_in_touch) {
                exchange_headers(p.exchange, call, p.tokens, lane);
            }
        } else if (warp >= normalises) {
            help<tile_columns>(t, warp - normalises, column_tiles, shared.gave_up, lane, tile.base + Tile::shared_bytes);
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
        if (carries && p.posting > 0) {
            if (warp < static_cast<int>(p.posting)) {
                const std::uint32_t stages = carried_pieces / p.posting;
                post_partials(t, tile.base + warp * stages * piece_units * 16,
                              shared_address(&shared.signals.loaded[warp * stages]), warp * p.carriers + blockIdx.x,
                              shared.gave_up, lane);
            }
        } else if (carries) {
            store_partials(t, tile.base, shared.signals, shared.gave_up, thread);
        } else {
            begin_together(t, thread, shared.squares, shared.gave_up);
            const int of_group = thread % group_threads;
            const std::uint32_t turned = tile.base + Tile::shared_bytes + staged_units * 512 + warp * turned_bytes;
            typename Tile::Sums sums;
            std::uint32_t digest = 0;
            int i = 0;
            for (std::uint32_t n = pair; n < tiles; n += pairs, ++i) {
                tile.multiply(at, weights.blocks, warpgroup, of_group, sums);
                mbarrier::wait_patiently(shared_address(&shared.signals.ready), i & 1);
                const std::uint32_t block = n / column_tiles;
                const std::uint32_t rows = static_cast<volatile bool&>(shared.gave_up) ? 0 : t.rows(t.rank(), block);
                finish_tile<tile_columns, few>(t, block, rows, cta * Tile::cta_rows + warp * 16, n % column_tiles, sums,
                                               turned, lane, digest);
                mbarrier::arrive(shared_address(&shared.signals.stored[warpgroup]));
            }
            sync_wave();
            if (p.gather) copy_last_outputs<tile_columns>(t, warp, column_tiles, lane, digest);
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

namespace {

template <int tile_columns>
constexpr int shared_bytes =
    TileProduct<tile_columns>::shared_bytes + 1024 + staged_units * 512 + multiplying_warps* turned_bytes;

}  // namespace

cudaError_t prepare_token_parallel_tail() {
    int device = 0, major = 0;
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
    if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device); e != cudaSuccess)
        return e;
    if (major != 9) return cudaErrorNotSupported;
    const auto prepare = [](auto kernel, int shared) {
        cudaFuncAttributes attributes{};
        if (const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel); e != cudaSuccess) return e;
        if (attributes.ptxVersion != 90) return cudaErrorNotSupported;
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    };
    for (const cudaError_t e : {prepare(finish_own_tokens<128, true>, shared_bytes<128>),
                                prepare(finish_own_tokens<128, false>, shared_bytes<128>),
                                prepare(finish_own_tokens<256, true>, shared_bytes<256>),
                                prepare(finish_own_tokens<256, false>, shared_bytes<256>)}) {
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

TokenParallelPlan plan_token_parallel_tail(const TokenParallelShape& shape, std::int64_t tokens, int max_ctas,
                                           int carriers) {
    const std::int64_t own = (tokens + shape.world - 1) / shape.world;
    const auto blocks = static_cast<int>((own + shape.block_rows - 1) / shape.block_rows);
    const auto even = [](int n) { return std::max(2, n / 2 * 2); };
    TokenParallelPlan plan{.grid = std::min(max_ctas, max_grid) / 2 * 2};
    if (shape.world > 1) plan.carriers = even(carriers > 0 ? carriers : plan.grid / 10);
    const auto pairs = [&] { return (plan.grid - plan.carriers) / 2; };
    const auto waves = [&](int columns) {
        const std::int64_t tiles = blocks * ((shape.hidden + columns - 1) / columns);
        return (tiles + std::max(pairs(), 1) - 1) / std::max(pairs(), 1);
    };
    plan.tile_columns = waves(128) < 2 * waves(256) ? 128 : 256;
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
             .posting = static_cast<std::uint32_t>(plan.posting),
             .settle = static_cast<std::uint32_t>(plan.settle),
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
        plan.posting < 0 || plan.posting > 4 || plan.posting == 3 || plan.settle < 1 || plan.settle > 4 ||
        plan.carriers * plan.posting > max_grid || plan.ahead < 0 || plan.ahead > s.depth || plan.grid - plan.carriers < 2 ||
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
        return launch({.grid = plan.grid, .block = tile_threads, .cluster = 2, .shared_bytes = shared, .stream = stream},
                      kernel, p, map);
    };
    const bool few = s.world <= 2 || !p.shared.data;
    if (plan.tile_columns == 256)
        return few ? go(finish_own_tokens<256, true>, shared_bytes<256>)
                   : go(finish_own_tokens<256, false>, shared_bytes<256>);
    return few ? go(finish_own_tokens<128, true>, shared_bytes<128>) : go(finish_own_tokens<128, false>, shared_bytes<128>);
}

}  // namespace latent_moe::gpu
