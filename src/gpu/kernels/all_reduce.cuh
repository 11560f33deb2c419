// All-reduce over the peer window, for messages too small for NCCL to be quick: what a CTA does.
//
// One stage: one hop, (R - 1) × the bytes out of every rank.
//
//     rank a                          rank b (every other)
//     x ── all units ──▶ mailbox a of b ──▶ b sums ranks 0 … R-1 in order, rounds, adds the prefix ──▶ y
//
// Two stages: two hops, about 2 × the bytes. The units are cut into R pieces; rank p owns piece p.
//
//     scatter: rank a ── its units of piece p ──▶ mailbox a of p          (to every p)
//     combine: rank p sums ranks 0 … R-1 in order, rounds, adds the prefix ──▶ its y, and mailbox p of every rank
//     gather:  every rank takes the finished pieces ──▶ y
//
// CTA 0 exchanges the headers. CTA c > 0 carries the c-th part of everything, and waits only for CTAs c of the peers, which
// send before they wait: nothing here needs more of a grid to be resident than one CTA at a time, in order. Memory order:
// data and signal are one word (mailbox.h); slots are reused under the headers' order (header.h, epoch.h).
#pragma once

#include <algorithm>

#include "gpu/kernels/rank_sum.h"
#include "gpu/kernels/rows.h"
#include "gpu/primitives/copy.h"

namespace latent_moe::gpu::reduction {

struct Params {
    Exchange exchange;
    UnitRows x, y, prefix;
    std::uint32_t tokens;
    std::uint32_t row_units;
    std::uint32_t units;  ///< of all rows
    bool release;
};

/// Units [begin, end) of a CTA's part of `first` … `first + count`.
struct Range {
    std::uint32_t begin, end;
};
LATENT_MOE_DEVICE Range part_of(std::uint32_t first, std::uint32_t count, std::uint32_t part, std::uint32_t parts) {
    const auto cut = [&](std::uint32_t i) { return first + static_cast<std::uint32_t>(std::uint64_t{count} * i / parts); };
    return {cut(part), cut(part + 1)};
}

template <Dtype dtype>
struct Tensors {
    using U = Unit<dtype>;
    const Params& p;

    LATENT_MOE_DEVICE uint4 own(std::uint32_t i) const {
        return U::canonical(load16(p.x.at(i / p.row_units, i % p.row_units)));
    }
    LATENT_MOE_DEVICE uint4 finished(std::uint32_t i, uint4 sum) const {
        if (p.prefix.data) sum = U::add(sum, load16(p.prefix.at(i / p.row_units, i % p.row_units)));
        return U::canonical(sum);
    }
    LATENT_MOE_DEVICE std::uint32_t store(std::uint32_t i, uint4 value) const {
        store16(p.y.at(i / p.row_units, i % p.row_units), value);
        return digest_of(value, i);
    }
};

template <Dtype dtype, int batch, int threads>
LATENT_MOE_DEVICE void one_stage(const Params& p) {
    dependency_wait();
    if (p.release) release_dependents();
    const Exchange& x = p.exchange;
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);

    const Tensors<dtype> t{p};
    const Range mine = part_of(0, p.units, blockIdx.x - 1, gridDim.x - 1);
    for (std::uint32_t i = mine.begin + threadIdx.x; i < mine.end; i += threads) {
        send_to_peers<dtype>(x, call, p.units, i, t.own(i));
    }
    sync_cta();
    leave_call(x, call, threadIdx.x, threads);

    const Boxes boxes = boxes_at(x, call, x.window.rank, p.units);
    Wait wait(x, call.epoch);
    std::uint32_t digest = 0;
    for (std::uint32_t i = mine.begin + threadIdx.x; i < mine.end; i += threads) {
        const uint4 sum = sum_over_ranks<dtype, batch>(x, boxes, i, t.own(i), wait, Phase::gather);
        if (wait.gave_up()) break;
        digest += t.store(i, t.finished(i, sum));
    }
    add_to_digest(x, call, digest);
}

template <Dtype dtype, int batch, int threads>
LATENT_MOE_DEVICE void two_stage(const Params& p) {
    dependency_wait();
    if (p.release) release_dependents();
    const Exchange& x = p.exchange;
    const Call call = enter_call(x);
    if (call.leave) return;
    if (blockIdx.x == 0) return keep_protocol(x, call, p.tokens);

    const Tensors<dtype> t{p};
    const int rank = x.window.rank, world = x.window.world;
    const std::uint32_t stride = (p.units + world - 1) / world;  // of a mailbox
    const auto first = [&](int piece) { return std::min(p.units, piece * stride); };
    const auto mine = [&](int piece) {
        return part_of(first(piece), first(piece + 1) - first(piece), blockIdx.x - 1, gridDim.x - 1);
    };

    for (int k = 1; k < world; ++k) {  // scatter, the next rank first
        const int piece = (rank + k) % world;
        uint4* to = boxes_at(x, call, piece, stride).from(rank, piece);
        const Range range = mine(piece);
        for (std::uint32_t i = range.begin + threadIdx.x; i < range.end; i += threads) {
            Mailbox<dtype>::send(to + (i - first(piece)), t.own(i));
        }
    }
    sync_cta();
    leave_call(x, call, threadIdx.x, threads);

    Wait wait(x, call.epoch);
    std::uint32_t digest = 0;
    const Boxes boxes = boxes_at(x, call, rank, stride);
    const Range own = mine(rank);
    for (std::uint32_t i = own.begin + threadIdx.x; i < own.end && !wait.gave_up(); i += threads) {  // combine
        const std::uint32_t in_piece = i - first(rank);
        const uint4 sum = sum_over_ranks<dtype, batch>(x, boxes, in_piece, t.own(i), wait, Phase::combine);
        const uint4 value = t.finished(i, sum);
        if (wait.gave_up()) break;
        send_to_peers<dtype>(x, call, stride, in_piece, value, world - 1);
        digest += t.store(i, value);
    }
    const Boxes finished = boxes_at(x, call, rank, stride, world - 1);
    for (int k = 1; k < world; ++k) {  // gather
        const int piece = (rank + k) % world;
        const Range range = mine(piece);
        for (std::uint32_t i = range.begin + threadIdx.x; i < range.end && !wait.gave_up(); i += threads) {
            uint4* const from[1] = {finished.from(piece, rank) + (i - first(piece))};
            const int peers[1] = {piece};
            uint4 value[1];
            Mailbox<dtype>::take(from, peers, value, wait, Phase::gather);
            if (wait.gave_up()) break;
            digest += t.store(i, value[0]);
        }
    }
    sync_wave();
    add_to_digest(x, call, digest);
}

}  // namespace latent_moe::gpu::reduction
