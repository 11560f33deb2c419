// A second, small kernel that takes the peers' finished columns, so that the large one need not stay for them.
//
//     the tail's CTAs ── own columns ──▶ peers; leave: a multiprocessor's shared memory is free for the next kernel's
//     weights this kernel's CTAs, beside them ── the peers' columns, as they come ──▶ out
//
// IN WHAT ORDER. The tail's kernel releases its dependents when its predecessor has ended, so this kernel starts beside it;
// it needs no room in shared memory. What it reads at its start, its own entries of the state and mailboxes re-armed two
// calls ago, was written by kernels that had ended before the tail's kernel released it. Before it ends it waits for the
// tail's kernel to have ended: so whoever waits for this one may rely on both. It writes a peer's column of `out` only after
// the peer has finished it, hence after this rank's shared rows and prefix of that column, which may lie in the same place,
// have been read and sent, or are not read at all.
#pragma once

#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu::fused {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

/// Every lane: while nothing has come one lane looks, at the first word that the warp needs.
template <class Cta>
LATENT_MOE_DEVICE void await_columns(const Cta& cta, const Slot<Cta>& slot, PeerWait& wait, int thread) {
    const Params& p = cta.p;
    const std::uint32_t all = p.tokens * p.column_units, share = (all + gridDim.x - 1) / gridDim.x;
    const std::uint32_t i = blockIdx.x * share + thread;
    const int source = p.rank == 0 ? 1 : 0;
    if (thread % static_cast<int>(wave_size) == 0 && i < min((blockIdx.x + 1) * share, all) && cta.world() > 1) {
        const std::uint32_t* word = &slot.columns_from(source)[i].x;
        while (load_relaxed(word) == Element<Dtype::bf16>::sentinel) {
            if (wait.over(source, Phase::combine)) break;
        }
    }
    sync_wave();
}

template <class Cta>
LATENT_MOE_DEVICE void receive_columns(const Cta& cta, int thread, int threads) {
    const Params& p = cta.p;
    const State state = load_state(p, &Entry::receiver);
    sync_cta();  // all have read it
    if (p.release && thread == 0) release_dependents();
    const Slot<Cta> slot(cta, state.slot);
    PeerWait wait(p);
    await_columns(cta, slot, wait, thread);
    gather_columns(cta, slot, wait, thread, threads);
    if (thread < static_cast<int>(wave_size)) store_state(p, &Entry::receiver, state, thread);
    dependency_wait();
    wait.report_of_call_before(load_relaxed<Scope::device>(&control(p.exchange).epoch[blockIdx.x]));
}

#endif

}  // namespace latent_moe::gpu::fused
