// The seam between the protocol and what it runs on. The protocol (scoped.h, bounded_wait.h, epoch.h, header.h, mailbox.h,
// numeric.h and the kernels' bodies that use them) is written once, over the names below.
//
//     target_cuda.h    NVIDIA GPUs: PTX
//     target_hip.h     AMD GPUs: clang's atomics and fences
//     target_host.h    threads of this machine as the threads of a grid: tests, the thread sanitizer
//     any other        named by LATENT_MOE_TARGET, a header's name in quotes (the model checker of tests/gpu/protocol)
//
// A TARGET GIVES, in namespace latent_moe::gpu (or outside of it, where the language has it):
//
//     LATENT_MOE_DEVICE         before a function of the device that is always inlined
//     LATENT_MOE_DEVICE_ANY     … that the compiler may inline
//     LATENT_MOE_DEVICE_CALL    … that stays a call: its code and its registers are kept off the hot path
//     uint2, uint4, float2, float4, make_uint2, …    vectors, aligned to their size (but to 16 bytes at most)
//     blockIdx.x, gridDim.x, threadIdx.x, blockDim.x    which CTA of how many, which thread of how many; grids have one
//     dimension
//     wave_size                 unsigned; threads of a CTA are dealt to waves in order
//     cta_threads(wanted)       how many threads a CTA has where the kernel is free to choose; a target may have fewer
//     LATENT_MOE_SHARED(type, name)    in a kernel, once: memory of the CTA, not initialised; of a type without constructors
//     SharedWord                a word there that some set() while others wait for what they get()
//     load_relaxed, store_relaxed    u32, u64, uint2, uint4; template argument: Scope, `system` unless given
//     load_acquire, store_release    u32
//     load_whole16, store_whole16    uint4, system scope, relaxed, never torn
//     load_past_l1              uint4: plain data that the fence before it made visible, maybe to another thread of the CTA
//     exchange_relaxed, add_relaxed  u32: one atomic access; the value before it
//     load_shared, store_shared      a word of the CTA's shared memory, by its address there
//     fence<Scope>()            acquire and release
//     sync_cta()                by all threads of a CTA;  sync_wave(): by all of a wave. Both order memory among them
//     prepare_thread_barriers()  by all of a CTA, before its sync_cta, where what follows uses
//     sync_threads_of(barrier, threads)    a barrier (1 to 15) of some of a CTA's threads
//     sum_over_wave(u32)        by all of a wave: the sum, to every one
//     shuffle_xor(u32 | float, mask)    by all of a wave: the value of lane (own XOR mask)
//     dependency_wait()         returns once the kernel before in the stream has ended; orders everything after it
//     release_dependents()      lets the next kernel start before this one ends (its dependency_wait still waits)
//     clock_ns()                a clock of this GPU
//     let_others_run()          between two looks of one wait
//     as_float(bits), as_bits(float), pack_bf16x2(low, high), pack_f16x2, unpack_f16x2(word): rounding to nearest even
//     canonical_bf16x2, canonical_f16x2, canonical_f32(word): +0.0 for -0.0, all else stays (NaN a NaN)
//     reciprocal_root(float), fmaf, min, max
//
// What the order words mean is scoped.h's GUARANTEE.
#pragma once

namespace latent_moe::gpu {

enum class Scope {
    device,  ///< the threads of this GPU
    system,  ///< the threads of all GPUs and the host
};

}  // namespace latent_moe::gpu

#if defined(LATENT_MOE_TARGET)
#include LATENT_MOE_TARGET
#elif defined(__CUDACC__)
#include "target_cuda.h"
#elif defined(__HIP__)
#include "target_hip.h"
#else
#include "target_host.h"
#endif
