// Checks and times the fused tail alone. Ranks are streams of this process, on the GPUs there are (several on one GPU if
// need be).
//
//     nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -cudart static --expt-relaxed-constexpr -Isrc -Iinclude
//          -DLATENT_MOE_FUSED_STAMPS src/gpu/kernels/fused_tail.cu tests/gpu/fused_check.cu -o fused_check      (one line)
//     CUDA_DEVICE_MAX_CONNECTIONS=32 ./fused_check [option | mode]…     (options go before the modes that they are for)
//
// Modes: shapes variants pairs extremes faults loopback; stress stress128 stress8 stress3 million hundred-thousand; groups
// kimi damage fifty-million; bench quick quick-no-norm stages. Options: weights=bf16|e4m3 alone (times of one rank that
// talks to itself) replays=N layers=N early=N late=N ring=N prefetch=N digest=0|1 shape=H,L,R tokens=M,M,…
// receivers=N most-ctas=N plan=rows,split,clusters; of groups, kimi and damage: calls=N groups=N ctas=N.
//
// How: each row of the output depends on its own row of inputs alone, and its bits on the plan. So a pool of input rows is
// run once through every plan and compared with float64 (`golden`); from then on calls of any mix of rows are compared with
// it bit for bit, on the device, after every call.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "core/numeric.h"
#include "gpu/kernels/fused_tail.h"
#include "gpu/kernels/fused_tail_float8.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/packed_float8.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/primitives/launch.h"

using namespace latent_moe;
using namespace latent_moe::gpu;
using bf16 = __nv_bfloat16;

namespace {

#define CUDA(call)                                                                                      \
    do {                                                                                                \
        if (const cudaError_t error_ = (call); error_ != cudaSuccess) {                                 \
            std::printf("FATAL %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            std::exit(2);                                                                               \
        }                                                                                               \
    } while (0)

int failures = 0;
__attribute__((format(printf, 2, 3))) bool expect(bool ok, const char* format, ...) {
    if (ok) return true;
    if (++failures > 60) return false;
    std::va_list args;
    va_start(args, format);
    std::printf("FAIL ");
    std::vprintf(format, args);
    std::printf("\n");
    va_end(args);
    return false;
}
double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- data that both the device and its checks can make

__host__ __device__ inline unsigned hash(unsigned a, unsigned b, unsigned c = 0) {
    unsigned x = a * 2654435761u ^ b * 0x9e3779b9u ^ c * 0x85ebca6bu;
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return x;
}
__device__ inline bf16 random_value(unsigned seed, std::size_t i, float scale, float bias) {
    const unsigned x = hash(static_cast<unsigned>(i), seed, static_cast<unsigned>(i >> 32));
    if (x % 61 == 0 && bias == 0) return __float2bfloat16(-0.F);  // ordinary input, whatever the mailbox uses it for
    return __float2bfloat16((static_cast<float>(x >> 8) * (1.F / 8388608.F) - 1.F) * scale + bias);
}
__global__ void fill(bf16* to, std::size_t n, unsigned seed, float scale, float bias) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += std::size_t{gridDim.x} * blockDim.x)
        to[i] = random_value(seed, i, scale, bias);
}
/// Rows [first, first + N) of W, packed; the rest of the layout zeros.
__global__ void fill_packed(char* to, PackedLayout layout, std::int64_t first, unsigned seed) {
    const std::int64_t columns = layout.blocks() * 64, rows = layout.tiles() * 128;
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        const std::int64_t n = i / columns, k = i % columns;
        const bool inside = n < layout.rows && k < layout.latent;
        *reinterpret_cast<bf16*>(to + layout.element(n, k)) =
            inside ? random_value(seed, (first + n) * layout.latent + k, 0.03F, 0) : bf16{};
    }
}

/// W as e4m3: mostly what a quantiser makes of the same draw, now and then any code but NaN.
__device__ inline std::uint8_t random_code(unsigned seed, std::size_t i) {
    const unsigned x = hash(static_cast<unsigned>(i), seed + 77, static_cast<unsigned>(i >> 32));
    if (x % 8 == 0) return (x >> 8 & 0x7f) == 0x7f ? 0 : static_cast<std::uint8_t>(x >> 8);
    return __nv_cvt_float_to_fp8(__bfloat162float(random_value(seed, i, 448, 0)), __NV_SATFINITE, __NV_E4M3);
}
__host__ __device__ inline float scale_of_row(std::int64_t n, unsigned seed) {
    return (0.5F + static_cast<float>(hash(static_cast<unsigned>(n), seed + 5) % 1024) / 1024.F) * (0.03F / 448);
}
__global__ void fill_packed_float8(std::uint32_t* to, PackedFloat8Layout layout, std::int64_t first, unsigned seed) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < layout.bytes() / 4;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        const auto [n, k] = layout.place(i);
        std::uint8_t codes[2][2] = {};
        for (int row = 0; row < 2; ++row)
            for (int column = 0; column < 2; ++column)
                if (n + 8 * row < layout.rows && k + column < layout.latent)
                    codes[row][column] = random_code(seed, (first + n + 8 * row) * layout.latent + k + column);
        to[i] = pack_float8_word(codes[0], codes[1]);
    }
}
/// The same as bf16, which holds it exactly, for the float64 reference.
__global__ void fill_float8_values(bf16* to, std::size_t n, unsigned seed) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += std::size_t{gridDim.x} * blockDim.x)
        to[i] = __float2bfloat16(float_from_e4m3(random_code(seed, i)));
}
__global__ void fill_scales(float* to, std::int64_t n, unsigned seed) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n;
         i += std::int64_t{gridDim.x} * blockDim.x)
        to[i] = scale_of_row(i, seed);
}
/// Every code in every place of a word, beside every other one in the place before it.
__global__ void widen_codes(unsigned* wrong) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const auto code = static_cast<std::uint8_t>(threadIdx.x), other = static_cast<std::uint8_t>(blockIdx.x);
    if ((code & 0x7f) == 0x7f) return;
    const auto bits = [](std::uint8_t c) {
        return static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16(float_from_e4m3(c))));
    };
    for (int place = 0; place < 4; ++place) {
        std::uint8_t codes[2][2];
        for (int i = 0; i < 4; ++i) codes[i / 2][i % 2] = i == place ? code : other;
        std::uint32_t got[2];
        fused::widen_float8(pack_float8_word(codes[0], codes[1]), got[0], got[1]);
        if ((got[place / 2] >> 16 * (place % 2) & 0xffff) != bits(code)) atomicAdd(wrong, 1u);
    }
#endif
}

// ---- float64

struct Pointers {
    const bf16* at[max_ranks];
};
/// x = norm(Σ routed) of one row a block.
__global__ void reference_rows(Pointers routed, int world, const bf16* gamma, int norm, std::int64_t latent, double epsilon,
                               double* x) {
    __shared__ double parts[256];
    const std::int64_t row = blockIdx.x;
    double squares = 0;
    for (std::int64_t k = threadIdx.x; k < latent; k += 256) {
        double s = 0;
        for (int r = 0; r < world; ++r) s += static_cast<double>(__bfloat162float(routed.at[r][row * latent + k]));
        x[row * latent + k] = s, squares += s * s;
    }
    parts[threadIdx.x] = squares;
    __syncthreads();
    squares = 0;
    for (const double part : parts) squares += part;
    if (!norm) return;
    const double factor = 1 / sqrt(squares / static_cast<double>(latent) + epsilon);
    for (std::int64_t k = threadIdx.x; k < latent; k += 256) {
        x[row * latent + k] *= factor * static_cast<double>(gamma ? __bfloat162float(gamma[k]) : 1.F);
    }
}
/// Squared error and size of column n over `rows` rows; a warp a column. `got` has rows of `hidden`.
__global__ void reference_columns(const double* x, const bf16* w, Pointers shared, int world, const bf16* prefix,
                                  const float* column_scales, double scale, std::int64_t rows, std::int64_t hidden,
                                  std::int64_t latent, std::int64_t stride, const bf16* got, double* error_and_size) {
    const std::int64_t n = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (n >= hidden) return;
    double error = 0, size = 0;
    for (std::int64_t m0 = 0; m0 < rows; m0 += 8) {
        double sum[8] = {};
        for (std::int64_t k = lane; k < latent; k += 32) {
            const double v = static_cast<double>(__bfloat162float(w[n * latent + k]));
            for (int i = 0; i < 8; ++i)
                if (m0 + i < rows) sum[i] += v * x[(m0 + i) * latent + k];
        }
        for (int i = 0; i < 8; ++i) {
            for (int l = 16; l > 0; l /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], l);
            const std::int64_t m = m0 + i;
            if (m >= rows || lane != 0) continue;
            double v = sum[i] * scale * (column_scales ? static_cast<double>(column_scales[n]) : 1);
            for (int r = 0; r < world; ++r)
                if (shared.at[r]) v += static_cast<double>(__bfloat162float(shared.at[r][m * hidden + n]));
            if (prefix) v += static_cast<double>(__bfloat162float(prefix[m * hidden + n]));
            const double g = static_cast<double>(__bfloat162float(got[m * stride + n]));
            error += (g - v) * (g - v), size += v * v;
        }
    }
    if (lane == 0) atomicAdd(error_and_size, error), atomicAdd(error_and_size + 1, size);
}

constexpr int pool = 128;  ///< rows of inputs

// ---- a call's surroundings on the device

/// Which row of the pool a call's row is.
__device__ inline unsigned pool_row(unsigned step, unsigned layer, unsigned m, unsigned pool) {
    return hash(step, layer + 1000, m) % pool;
}
/// Writes a call's inputs, poisons its output; one rank is late by up to `most_late` clocks.
__global__ void __launch_bounds__(256)
    produce(const unsigned* step, unsigned layer, unsigned rank, unsigned pool, int tokens, int rows_of_out,
            const uint4* pool_routed, const uint4* pool_shared, uint4* routed, uint4* shared, uint4* out, int latent_units,
            int hidden_units, int most_late, bool early) {
    if (early) release_dependents();
    dependency_wait();
    const unsigned s = *step;
    const long long began = clock64();
    // Now and then a rank is late by up to a millisecond.
    const bool very = most_late && hash(s, layer + 31, rank + 5) % 256 == 0;
    const unsigned most = very ? 1'980'000 : static_cast<unsigned>(most_late);
    const int late = most ? static_cast<int>(hash(s, layer, rank + 77) % most) : 0;
    while (clock64() - began < late) {}
    const int of_row = latent_units + hidden_units;
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < tokens * of_row;
         i += static_cast<int>(gridDim.x * blockDim.x)) {
        const unsigned m = static_cast<unsigned>(i / of_row), u = static_cast<unsigned>(i % of_row);
        const std::size_t row = pool_row(s, layer, m, pool);
        if (u < static_cast<unsigned>(latent_units)) {
            routed[m * latent_units + u] = pool_routed[row * latent_units + u];
        } else {
            shared[m * hidden_units + u - latent_units] = pool_shared[row * hidden_units + u - latent_units];
        }
    }
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < rows_of_out * hidden_units;
         i += static_cast<int>(gridDim.x * blockDim.x)) {
        out[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
}
__global__ void __launch_bounds__(256)
    compare(const unsigned* step, unsigned layer, unsigned pool, int tokens, int rows_of_out, const uint4* golden,
            const uint4* out, int hidden_units, unsigned long long* wrong) {
    const unsigned s = *step;
    unsigned bad = 0;
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < rows_of_out * hidden_units;
         i += static_cast<int>(gridDim.x * blockDim.x)) {
        const unsigned m = static_cast<unsigned>(i / hidden_units), u = static_cast<unsigned>(i % hidden_units);
        uint4 want = make_uint4(~0u, ~0u, ~0u, ~0u);
        if (m < static_cast<unsigned>(tokens)) want = golden[std::size_t{pool_row(s, layer, m, pool)} * hidden_units + u];
        const uint4 got = out[i];
        bad += got.x != want.x || got.y != want.y || got.z != want.z || got.w != want.w;
    }
    if (bad) atomicAdd(wrong, static_cast<unsigned long long>(bad));
}
__global__ void advance(unsigned* step) {
    ++*step;
}

/// A call with rows of its own: what stands between two rounds of calls looks at those of the last and makes those of the
/// next.
struct OwnRows {
    int tokens, rows_of_out;  ///< of the output; what is behind `tokens` must stay as it was
    unsigned key;             ///< of the drawing of its rows
    const uint4* golden;
    uint4 *routed, *shared, *out;
};
constexpr int most_in_round = 8;
struct Round {
    int calls = 0;
    std::array<OwnRows, most_in_round> call{};
};
struct Turn {
    Round last, next;
    unsigned rank;
    const uint4 *pool_routed, *pool_shared;
    int latent_units, hidden_units, most_late;
    const unsigned* step;
    unsigned long long* wrong;
};
/// Compares the outputs of the last round, then writes the inputs of the next and poisons its outputs; a row of the grid a
/// call. A thread poisons what it has compared, and no other.
__global__ void __launch_bounds__(512) turn(const __grid_constant__ Turn t) {
    const unsigned s = *t.step;
    const long long began = clock64();
    const int index = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int stride = static_cast<int>(gridDim.x * blockDim.x);
    if (index < t.last.calls) {
        const OwnRows& c = t.last.call[static_cast<std::size_t>(index)];
        const uint4* __restrict__ golden = c.golden, * __restrict__ out = c.out;
        unsigned bad = 0;
#pragma unroll 4
        for (int i = first; i < c.rows_of_out * t.hidden_units; i += stride) {
            const unsigned m = static_cast<unsigned>(i / t.hidden_units), u = static_cast<unsigned>(i % t.hidden_units);
            uint4 want = golden[std::size_t{pool_row(s, c.key, m, pool)} * t.hidden_units + u];
            if (m >= static_cast<unsigned>(c.tokens)) want = make_uint4(~0u, ~0u, ~0u, ~0u);
            const uint4 got = out[i];
            bad += got.x != want.x || got.y != want.y || got.z != want.z || got.w != want.w;
        }
        if (bad) atomicAdd(t.wrong, static_cast<unsigned long long>(bad));
    }
    if (index >= t.next.calls) return;
    const OwnRows& c = t.next.call[static_cast<std::size_t>(index)];
    for (int i = first; i < c.rows_of_out * t.hidden_units; i += stride) c.out[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    const auto gather = [&](uint4* __restrict__ to, const uint4* __restrict__ from, int units) {
#pragma unroll 4
        for (int i = first; i < c.tokens * units; i += stride) {
            const std::size_t row = pool_row(s, c.key, static_cast<unsigned>(i / units), pool);
            to[i] = from[row * units + i % units];
        }
    };
    gather(c.routed, t.pool_routed, t.latent_units);
    gather(c.shared, t.pool_shared, t.hidden_units);
    // Now and then a rank is late by up to a millisecond.
    const unsigned key = t.next.call[0].key;
    const bool very = t.most_late && hash(s, key + 31, t.rank + 5) % 512 == 0;
    const unsigned most = very ? 1'980'000 : static_cast<unsigned>(t.most_late);
    const int late = most ? static_cast<int>(hash(s, key, t.rank + 77) % most) : 0;
    while (clock64() - began < late) {}
}
/// The damage that must be seen: the lowest bit of one element, in one replay.
__global__ void flip(const unsigned* step, unsigned when, unsigned short* element) {
    if (*step == when) *element ^= 1;
}
__global__ void __launch_bounds__(128) bench_producer(const uint4* from_p, const uint4* from_s, uint4* p, uint4* s,
                                                      int units_p, int units_s, int cycles, bool early) {
    const long long began = clock64();
    if (early) release_dependents();
    dependency_wait();
    while (clock64() - began < cycles) {}
    for (int i = static_cast<int>(blockIdx.x * 128 + threadIdx.x); i < units_p + units_s;
         i += static_cast<int>(gridDim.x) * 128) {
        if (i < units_p)
            p[i] = from_p[i];
        else
            s[i - units_p] = from_s[i - units_p];
    }
}

// ---- ranks

int devices = 0;
bool float8 = false;  ///< weights are e4m3

struct Knobs {
    int early = -1, late = -1, ring = -1, prefetch = -1, at_once = -1, pace = -1, digest = -1, rows = 0, split = 0,
        clusters = 0, receivers = -1, most_ctas = 132;
} knobs;

template <class T>
T* allocate(std::size_t n) {
    void* p = nullptr;
    CUDA(cudaMalloc(&p, std::max<std::size_t>(n * sizeof(T), 16)));
    return static_cast<T*>(p);
}

struct Rank {
    int device;
    cudaStream_t stream;
    char *window, *workspace;
    FaultRecord* record;
    bf16 *pool_routed, *pool_shared, *pool_prefix, *gamma;
    bf16 *routed, *shared, *prefix;            // of the current call
    std::vector<char*> packed;                 // a layer each
    std::vector<float*> scales;                // of all rows, a layer each: e4m3
    std::vector<bf16*> out;                    // a layer each
    std::map<int, std::vector<bf16*>> golden;  // by the plan's tokens: a layer each, [pool, H]
    unsigned* step;
    unsigned long long* wrong;
    long long* stamps;
};

struct Problem {
    FusedTailShape shape;
    bool norm, loopback;
    int layers;
    int per_device;  ///< ranks on the fullest GPU
    int most_ctas;   ///< of a kernel
    bool dependent;  ///< calls start before their predecessor has ended
    std::uint64_t timeout_ns = 4'000'000'000;
    std::vector<Rank> ranks;
    std::map<int, FusedTailPlan> plans;  ///< by tokens

    Problem(std::int64_t hidden, std::int64_t latent, int world, bool rms, int layers_, bool loop = false)
        : norm(rms), loopback(loop), layers(layers_) {
        shape = {hidden, latent, world, pool};
        const int local = loop ? 1 : world, used = std::min(devices, local);
        per_device = (local + used - 1) / used;
        most_ctas = per_device == 1 ? knobs.most_ctas : 112 / per_device;
        dependent = per_device == 1;  // early CTAs of one rank could keep out those that another waits for
        const PackedLayout layout{hidden / world, latent};
        for (int r = 0; r < local; ++r) {
            Rank k{};
            k.device = r * used / local;
            CUDA(cudaSetDevice(k.device));
            CUDA(cudaStreamCreateWithFlags(&k.stream, cudaStreamNonBlocking));
            k.window = allocate<char>(control_bytes + fused_tail_region_bytes(shape));
            k.workspace = allocate<char>(fused_tail_workspace_bytes(shape));
            CUDA(cudaHostAlloc(reinterpret_cast<void**>(&k.record), sizeof(FaultRecord),
                               cudaHostAllocMapped | cudaHostAllocPortable));
            k.pool_routed = random(pool * latent, 11 + r, 1, 0), k.pool_shared = random(pool * hidden, 211 + r, 1, 0);
            k.pool_prefix = random(pool * hidden, 411, 1, 0), k.gamma = random(latent, 5, 0.3F, 1);
            k.routed = allocate<bf16>(pool * latent), k.shared = allocate<bf16>(pool * hidden);
            k.prefix = allocate<bf16>(pool * hidden);
            for (int l = 0; l < layers; ++l) {
                const std::int64_t first = r * (hidden / world);
                if (float8) {
                    const PackedFloat8Layout of_float8{hidden / world, latent};
                    k.packed.push_back(allocate<char>(of_float8.bytes()));
                    fill_packed_float8<<<528, 256>>>(reinterpret_cast<std::uint32_t*>(k.packed[l]), of_float8, first,
                                                     1000 + l);
                    k.scales.push_back(allocate<float>(hidden));
                    fill_scales<<<32, 256>>>(k.scales[l], hidden, 1000 + l);
                } else {
                    k.packed.push_back(allocate<char>(layout.bytes()));
                    fill_packed<<<528, 256>>>(k.packed[l], layout, first, 1000 + l);
                }
                k.out.push_back(allocate<bf16>(pool * hidden));
            }
            k.step = allocate<unsigned>(1), k.wrong = allocate<unsigned long long>(1);
            CUDA(cudaMemset(k.step, 0, 4));
            CUDA(cudaMemset(k.wrong, 0, 8));
            CUDA(cudaDeviceSynchronize());
            ranks.push_back(k);
        }
        reset();
    }
    ~Problem() {
        each([&](int r) {
            Rank& k = ranks[r];
            CUDA(cudaStreamSynchronize(k.stream));
            for (void* p : {static_cast<void*>(k.window), static_cast<void*>(k.workspace), static_cast<void*>(k.pool_routed),
                            static_cast<void*>(k.pool_shared), static_cast<void*>(k.pool_prefix),
                            static_cast<void*>(k.gamma), static_cast<void*>(k.routed), static_cast<void*>(k.shared),
                            static_cast<void*>(k.prefix), static_cast<void*>(k.step), static_cast<void*>(k.wrong)})
                cudaFree(p);
            for (char* p : k.packed) cudaFree(p);
            for (float* p : k.scales) cudaFree(p);
            for (bf16* p : k.out) cudaFree(p);
            for (auto& [tokens, all] : k.golden)
                for (bf16* p : all) cudaFree(p);
            cudaFreeHost(k.record);
            cudaStreamDestroy(k.stream);
        });
    }
    static bf16* random(std::int64_t n, unsigned seed, float scale, float bias) {
        bf16* p = allocate<bf16>(n);
        fill<<<128, 256>>>(p, n, seed, scale, bias);
        return p;
    }
    std::int64_t hidden() const { return shape.hidden; }
    int world() const { return shape.world; }

    template <class F>
    void each(F body) {
        for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
            CUDA(cudaSetDevice(ranks[r].device));
            body(r);
        }
    }
    void sync() {
        each([&](int r) { CUDA(cudaStreamSynchronize(ranks[r].stream)); });
    }
    void reset() {
        sync();
        each([&](int r) {
            Rank& k = ranks[r];
            std::memset(static_cast<void*>(k.record), 0, sizeof(FaultRecord));
            CUDA(cudaMemsetAsync(k.window, 0, control_bytes, k.stream));
            CUDA(reset_fused_tail(k.window + control_bytes, k.workspace, shape, k.stream));
        });
        sync();
    }
    const FusedTailPlan& plan(std::int64_t tokens) {
        int width = 8;
        while (width < tokens && width < 128) width *= 2;
        auto [at, fresh] = plans.try_emplace(width);
        if (fresh) {
            CUDA(cudaSetDevice(0));
            at->second.float8 = float8;
            const cudaError_t e = plan_fused_tail(shape, width, most_ctas, &at->second);
            FusedTailPlan& p = at->second;
            if (e != cudaSuccess) {
                std::printf("FATAL no plan for %ld x %ld, R=%d, M=%d: %s\n", static_cast<long>(shape.hidden),
                            static_cast<long>(shape.latent), world(), width, cudaGetErrorString(e));
                std::exit(2);
            }
            if (knobs.early > 0) p.in_flight_early = knobs.early;
            if (knobs.late > 0) p.in_flight_late = knobs.late;
            if (knobs.ring > 0) p.token_ring = knobs.ring;
            if (knobs.prefetch >= 0) p.prefetch_blocks = knobs.prefetch;
            if (knobs.at_once >= 0) p.prefetch_at_once = knobs.at_once;
            if (knobs.pace >= 0) p.prefetch_clocks = knobs.pace;
            if (knobs.digest >= 0) p.digest = knobs.digest != 0;
            if (knobs.rows > 0) p.rows = knobs.rows, p.split = knobs.split, p.clusters = knobs.clusters, p.receivers = 0;
            if (knobs.receivers >= 0) p.receivers = p.tokens <= 16 ? knobs.receivers : 0;
            CUDA(fused_tail_fits(shape, p));
            std::printf("plan %sH=%ld L=%ld R=%d M<=%d: tile %d x %d, split %d, %d clusters, grid %d\n",
                        float8 ? "e4m3 " : "", static_cast<long>(shape.hidden), static_cast<long>(shape.latent), world(),
                        width, p.rows, p.tokens, p.split, p.clusters, fused_tail_grid(p));
        }
        return at->second;
    }
    FusedTail call(int r, int layer, std::int64_t tokens) {
        Rank& k = ranks[r];
        FusedTail op;
        op.exchange.window.rank = r, op.exchange.window.world = world();
        for (int q = 0; q < world(); ++q) op.exchange.window.base[q] = ranks[loopback ? 0 : q].window;
        op.exchange.timeout_ns = timeout_ns, op.exchange.layer = layer, op.exchange.tail = 5;
        CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&op.exchange.record), k.record, 0));
        op.region_offset = control_bytes;
        op.shape = shape, op.plan = plan(tokens);
        op.workspace = k.workspace;
        op.routed = k.routed, op.shared = k.shared, op.out = k.out[layer];
        if (float8) op.column_scales = k.scales[layer] + r * (shape.hidden / world());
        op.packed = k.packed[layer], op.rms_norm = norm, op.gamma = k.gamma;
        op.tokens = tokens;
        return op;
    }
    bool healthy(const char* what) {
        bool ok = true;
        each([&](int r) {
            const FaultRecord& f = *ranks[r].record;
            ok &= expect(f.code == 0,
                         "%s R=%d: rank %d has fault code %u rank %d phase %u layer %d call %llu expected %llu found %llu",
                         what, world(), r, f.code, f.rank, f.phase, f.layer, static_cast<unsigned long long>(f.call),
                         static_cast<unsigned long long>(f.expected), static_cast<unsigned long long>(f.found));
        });
        return ok;
    }

    /// Relative L2 error of `rows` rows of rank 0's `out` against float64; inputs are rows of the given tensors.
    struct Inputs {
        std::vector<const bf16*> routed, shared;
        const bf16* prefix = nullptr;
        const float* column_scales = nullptr;
        double scale = 1;
    };
    double error(const Inputs& in, int layer, std::int64_t rows, const bf16* got, std::int64_t stride) {
        CUDA(cudaSetDevice(0));
        Pointers routed{}, shared{};
        for (std::size_t r = 0; r < in.routed.size(); ++r) routed.at[r] = in.routed[r];
        for (std::size_t r = 0; r < in.shared.size(); ++r) shared.at[r] = in.shared[r];
        auto* x = allocate<double>(rows * shape.latent);
        auto* w = allocate<bf16>(shape.hidden * shape.latent);
        auto* result = allocate<double>(2);
        CUDA(cudaMemset(result, 0, 16));
        if (float8) {
            fill_float8_values<<<528, 256>>>(w, shape.hidden * shape.latent, 1000 + layer);
        } else {
            fill<<<528, 256>>>(w, shape.hidden * shape.latent, 1000 + layer, 0.03F, 0);
        }
        const float* scales = in.column_scales || !float8 ? in.column_scales : ranks[0].scales[layer];
        reference_rows<<<static_cast<unsigned>(rows), 256>>>(routed, world(), ranks[0].gamma, norm, shape.latent, 1e-5, x);
        reference_columns<<<static_cast<unsigned>((shape.hidden + 7) / 8), 256>>>(
            x, w, shared, static_cast<int>(in.shared.size()), in.prefix, scales, in.scale, rows, shape.hidden, shape.latent,
            stride, got, result);
        double both[2];
        CUDA(cudaMemcpy(both, result, 16, cudaMemcpyDefault));
        cudaFree(x), cudaFree(w), cudaFree(result);
        return both[1] > 0 ? std::sqrt(both[0] / both[1]) : (both[0] == 0 ? 0 : INFINITY);
    }
    std::vector<const bf16*> all(bf16* Rank::*member) const {
        std::vector<const bf16*> v;
        for (const Rank& k : ranks) v.push_back(k.*member);
        return v;
    }

    /// Runs the pool through the plan for `tokens`, checks float64 on `checked` layers and that ranks agree. Returns the
    /// error.
    double make_golden(std::int64_t tokens, int checked = 1) {
        const int width = plan(tokens).tokens;
        each([&](int r) {
            for (int l = 0; l < layers; ++l) ranks[r].golden[width].push_back(allocate<bf16>(pool * hidden()));
        });
        double worst = 0;
        for (int l = 0; l < layers; ++l) {
            for (int first = 0; first < pool; first += width) {
                each([&](int r) {
                    FusedTail op = call(r, l, std::min(width, pool - first));
                    op.plan = plan(tokens);
                    op.routed = ranks[r].pool_routed + first * shape.latent,
                    op.shared = ranks[r].pool_shared + first * hidden();
                    op.out = ranks[r].golden[width][l] + first * hidden();
                    CUDA(launch_fused_tail(op, ranks[r].stream));
                });
            }
            sync();
            if (!healthy("golden")) return INFINITY;
            const bf16* first = ranks[0].golden[width][l];
            if (l < checked)
                worst = std::max(worst, error({all(&Rank::pool_routed), all(&Rank::pool_shared)}, l, pool, first, hidden()));
            std::vector<char> a(pool * hidden() * 2), b(a.size());
            CUDA(cudaMemcpy(a.data(), first, a.size(), cudaMemcpyDefault));
            for (std::size_t r = 1; r < ranks.size(); ++r) {
                CUDA(cudaMemcpy(b.data(), ranks[r].golden[width][l], b.size(), cudaMemcpyDefault));
                expect(std::memcmp(a.data(), b.data(), a.size()) == 0,
                       "golden H=%ld L=%ld R=%d M=%d: rank %zu differs from rank 0", static_cast<long>(hidden()),
                       static_cast<long>(shape.latent), world(), width, r);
            }
        }
        expect(worst < 4e-3, "golden H=%ld L=%ld R=%d M=%d: relative error %.2e", static_cast<long>(hidden()),
               static_cast<long>(shape.latent), world(), width, worst);
        return worst;
    }

    /// One checked call on each rank: inputs made, tail, compared, all enqueued.
    void enqueue(int r, int layer, std::int64_t tokens, int most_late, bool early) {
        Rank& k = ranks[r];
        const int lu = static_cast<int>(shape.latent / 8), hu = static_cast<int>(hidden() / 8);
        const int rows = static_cast<int>(std::min<std::int64_t>(pool, tokens + 2));  // two more must stay as they are
        produce<<<32, 256, 0, k.stream>>>(k.step, layer, r, pool, static_cast<int>(tokens), rows,
                                          reinterpret_cast<uint4*>(k.pool_routed), reinterpret_cast<uint4*>(k.pool_shared),
                                          reinterpret_cast<uint4*>(k.routed), reinterpret_cast<uint4*>(k.shared),
                                          reinterpret_cast<uint4*>(k.out[layer]), lu, hu, most_late, early);
        CUDA(cudaGetLastError());
        FusedTail op = call(r, layer, tokens);
        op.starts_early = op.releases_early = dependent;
        CUDA(launch_fused_tail(op, k.stream));
        const int width = op.plan.tokens;
        compare<<<32, 256, 0, k.stream>>>(k.step, layer, pool, static_cast<int>(tokens), rows,
                                          reinterpret_cast<uint4*>(tokens ? k.golden.at(width)[layer] : k.out[layer]),
                                          reinterpret_cast<uint4*>(k.out[layer]), hu, k.wrong);
        CUDA(cudaGetLastError());
    }
    unsigned long long wrong() {
        unsigned long long total = 0;
        each([&](int r) {
            unsigned long long n = 0;
            CUDA(cudaMemcpy(&n, ranks[r].wrong, 8, cudaMemcpyDefault));
            CUDA(cudaMemset(ranks[r].wrong, 0, 8));
            total += n;
        });
        return total;
    }
};

// ---- checks

/// One shape: every size up to 16, larger ones, growing, shrinking, alternating; eager, ranks late at random.
void check_shape(std::int64_t hidden, std::int64_t latent, int world, bool norm, int most, bool brief = false) {
    Problem p(hidden, latent, world, norm, 2);
    const double began = seconds();
    double worst = 0;
    for (int width = 8; width <= most; width *= 2) worst = std::max(worst, p.make_golden(width));
    std::vector<int> sizes;
    for (int m = 0; m <= std::min(most, 16); ++m) sizes.push_back(m);
    for (const int m : {17, 31, 32, 1, 33, 64, 2, 63, 0, 64, 1, 16, 3, 16, 65, 127, 128, 5, 128, 0, 1, 16, 8, 9, 7}) {
        if (m <= most) sizes.push_back(m);
    }
    if (brief) sizes = {0, 1, 3, std::min(16, most), 2, std::min(16, most), 0, 5};
    int calls = 0;
    for (const int m : sizes) {
        for (int layer = 0; layer < 2; ++layer) {
            p.each([&](int r) { p.enqueue(r, layer, m, 20'000, (calls & 1) != 0); });
            ++calls;
        }
        p.each([&](int r) { advance<<<1, 1, 0, p.ranks[r].stream>>>(p.ranks[r].step); });
        if (calls % 8 == 0) p.sync();
    }
    p.sync();
    const unsigned long long wrong = p.wrong();
    const bool ok = p.healthy("shape") && expect(wrong == 0, "shape H=%ld L=%ld R=%d: %llu wrong units",
                                                 static_cast<long>(hidden), static_cast<long>(latent), world, wrong);
    std::printf("%s shape H=%ld L=%ld R=%d %s: error %.2e, %d calls of M<=%d on %d rank(s) a GPU, %llu wrong, %.1f s\n",
                ok ? "ok  " : "BAD ", static_cast<long>(hidden), static_cast<long>(latent), world, norm ? "rms" : "no norm",
                worst, calls, most, p.per_device, wrong, seconds() - began);
}

/// Prefix, strides, in place, shared absent or summed, scales; against float64, and the prefix bit for bit.
void check_variants(std::int64_t hidden, std::int64_t latent, int world, bool norm) {
    Problem p(hidden, latent, world, norm, 1);
    std::vector<float> scales(hidden);
    for (std::int64_t n = 0; n < hidden; ++n)
        scales[n] = 0.5F + static_cast<float>(hash(static_cast<unsigned>(n), 3) % 1024) / 1024.F;
    std::vector<float*> device_scales;
    p.each([&](int r) {
        device_scales.push_back(allocate<float>(hidden));
        CUDA(cudaMemcpy(device_scales[r], scales.data(), hidden * 4, cudaMemcpyDefault));
    });
    const std::int64_t wide = hidden + 24, wide_latent = latent + 8;
    std::vector<bf16*> spaced, spaced_latent;
    p.each([&](int) {
        spaced.push_back(allocate<bf16>(pool * wide)), spaced_latent.push_back(allocate<bf16>(pool * wide_latent));
    });
    for (const std::int64_t m : {1, 6, 16, 40}) {
        enum { plain, with_prefix, no_shared, summed, scaled, strided, into_shared, into_prefix, variants };
        std::vector<bf16> without(m * hidden), with(m * hidden), prefix(m * hidden);
        for (int v = 0; v < variants; ++v) {
            Problem::Inputs in{p.all(&Rank::pool_routed), p.all(&Rank::pool_shared)};
            std::int64_t stride = hidden;
            p.each([&](int r) {
                Rank& k = p.ranks[r];
                FusedTail op = p.call(r, 0, m);
                op.routed = k.pool_routed, op.shared = k.pool_shared;
                CUDA(cudaMemsetAsync(k.out[0], 0xff, pool * hidden * 2, k.stream));
                if (v == with_prefix || v == into_prefix) op.prefix = k.pool_prefix, in.prefix = p.ranks[0].pool_prefix;
                if (v == no_shared) op.shared = {}, in.shared = {};
                if (v == summed) op.shared = k.pool_prefix, op.shared_is_sum = true, in.shared = {p.ranks[0].pool_prefix};
                if (v == scaled) {
                    op.scale = 2.5F, op.column_scales = device_scales[r] + r * (hidden / world);
                    in.scale = 2.5, in.column_scales = device_scales[0];
                }
                if (v == strided) {
                    CUDA(cudaMemcpy2DAsync(spaced_latent[r], wide_latent * 2, k.pool_routed, latent * 2, latent * 2, m,
                                           cudaMemcpyDefault, k.stream));
                    CUDA(cudaMemsetAsync(spaced[r], 0xff, pool * wide * 2, k.stream));
                    op.routed = {spaced_latent[r], wide_latent}, op.out = {spaced[r], wide}, stride = wide;
                }
                if (v == into_shared) {
                    CUDA(cudaMemcpyAsync(k.out[0], k.pool_shared, m * hidden * 2, cudaMemcpyDefault, k.stream));
                    op.shared = k.out[0];
                }
                if (v == into_prefix) {
                    CUDA(cudaMemcpyAsync(k.out[0], k.pool_prefix, m * hidden * 2, cudaMemcpyDefault, k.stream));
                    op.prefix = k.out[0];
                }
                CUDA(launch_fused_tail(op, k.stream));
            });
            p.sync();
            if (!p.healthy("variant")) return;
            const double error = p.error(in, 0, m, v == strided ? spaced[0] : p.ranks[0].out[0], stride);
            expect(error < 5e-3, "variant %d H=%ld L=%ld R=%d M=%ld: error %.2e", v, static_cast<long>(hidden),
                   static_cast<long>(latent), world, static_cast<long>(m), error);
            std::vector<bf16> got(m * hidden), other(m * hidden);
            p.each([&](int r) {
                CUDA(cudaMemcpy2D(r == 0 ? got.data() : other.data(), hidden * 2,
                                  v == strided ? spaced[r] : p.ranks[r].out[0], stride * 2, hidden * 2, m,
                                  cudaMemcpyDefault));
                expect(r == 0 || std::memcmp(got.data(), other.data(), got.size() * 2) == 0, "variant %d: rank %d differs",
                       v, r);
            });
            if (v == plain) without = got;
            if (v == strided || v == into_shared)
                expect(std::memcmp(got.data(), without.data(), got.size() * 2) == 0, "variant %d M=%ld: not the plain bits",
                       v, static_cast<long>(m));
            if (v == with_prefix || v == into_prefix) {
                CUDA(cudaMemcpy(prefix.data(), p.ranks[0].pool_prefix, prefix.size() * 2, cudaMemcpyDefault));
                int bad = 0;
                for (std::size_t i = 0; i < got.size(); ++i) {
                    const float want =
                        __bfloat162float(__float2bfloat16(__bfloat162float(without[i]) + __bfloat162float(prefix[i])));
                    bad += __bfloat162float(got[i]) != want;
                }
                expect(bad == 0, "variant %d M=%ld: prefix not as added afterwards: %d", v, static_cast<long>(m), bad);
            }
        }
    }
    std::printf("done variants H=%ld L=%ld R=%d\n", static_cast<long>(hidden), static_cast<long>(latent), world);
}

/// Rows with NaN, Inf, and squares that overflow.
void check_extremes(bool norm) {
    const std::int64_t hidden = 7168, latent = 3584, m = 6;
    Problem p(hidden, latent, 2, norm, 1);
    const auto run = [&] {
        p.each([&](int r) {
            FusedTail op = p.call(r, 0, m);
            op.shared = p.ranks[r].pool_shared;
            CUDA(launch_fused_tail(op, p.ranks[r].stream));
        });
        p.sync();
        p.healthy("extremes");
        std::vector<bf16> out(m * hidden), other(m * hidden);
        CUDA(cudaMemcpy(out.data(), p.ranks[0].out[0], out.size() * 2, cudaMemcpyDefault));
        CUDA(cudaMemcpy(other.data(), p.ranks[1].out[0], out.size() * 2, cudaMemcpyDefault));
        expect(std::memcmp(out.data(), other.data(), out.size() * 2) == 0, "extremes: ranks differ");
        return out;
    };
    p.each([&](int r) { CUDA(cudaMemcpy(p.ranks[r].routed, p.ranks[r].pool_routed, m * latent * 2, cudaMemcpyDefault)); });
    const auto before = run();
    const auto put = [&](int rank, int row, int column, float v) {
        const bf16 b = __float2bfloat16(v);
        CUDA(cudaMemcpy(p.ranks[rank].routed + row * latent + column, &b, 2, cudaMemcpyDefault));
    };
    put(1, 1, 77, NAN), put(0, 2, 3000, INFINITY), put(0, 3, 5, 1e25F), put(1, 3, 1800, -3e38F);
    put(0, 4, 9, 3e38F), put(1, 4, 9, 3e38F);  // finite partials whose sum is not
    const auto after = run();
    std::vector<bf16> s0(m * hidden), s1(m * hidden);
    CUDA(cudaMemcpy(s0.data(), p.ranks[0].pool_shared, s0.size() * 2, cudaMemcpyDefault));
    CUDA(cudaMemcpy(s1.data(), p.ranks[1].pool_shared, s1.size() * 2, cudaMemcpyDefault));
    int bad[6] = {};
    for (std::int64_t i = 0; i < m * hidden; ++i) {
        const int row = static_cast<int>(i / hidden);
        const float v = __bfloat162float(after[i]);
        const float shared = __bfloat162float(__float2bfloat16(__bfloat162float(s0[i]) + __bfloat162float(s1[i])));
        if (row == 0 || row == 5) bad[row] += v != __bfloat162float(before[i]);
        if (row == 1) bad[row] += !std::isnan(v);
        if (row == 2 || row == 4) bad[row] += norm ? !std::isnan(v) : std::isfinite(v);
        if (row == 3) bad[row] += norm ? v != shared : std::isnan(v);
    }
    for (int row = 0; row < 6; ++row)
        expect(bad[row] == 0, "extremes, %s: row %d has %d wrong", norm ? "rms" : "no norm", row, bad[row]);
    std::printf("done extremes, %s\n", norm ? "rms" : "no norm");
}

void check_faults() {
    Problem p(7168, 3584, 2, true, 2);
    p.timeout_ns = 60'000'000;
    const auto describe = [&](const char* what) {
        for (int r = 0; r < 2; ++r) {
            const FaultRecord& f = *p.ranks[r].record;
            std::printf("  %s: rank %d: code %u rank %d phase %u layer %d call %llu expected %llu found %llu\n", what, r,
                        f.code, f.rank, f.phase, f.layer, static_cast<unsigned long long>(f.call),
                        static_cast<unsigned long long>(f.expected), static_cast<unsigned long long>(f.found));
        }
    };
    const auto go = [&](int r, int layer, int tokens) {
        CUDA(cudaSetDevice(p.ranks[r].device));
        FusedTail op = p.call(r, layer, tokens);
        op.starts_early = op.releases_early = true;
        CUDA(launch_fused_tail(op, p.ranks[r].stream));
    };
    const auto good = [&](const char* what) {
        for (const int m : {4, 0, 16, 1}) go(0, 0, m), go(1, 0, m);
        p.sync();
        p.healthy(what);
    };
    good("before faults");
    double began = seconds();
    for (int i = 0; i < 92; ++i) go(0, 0, i % 17);
    p.sync();
    double took = seconds() - began;
    const FaultRecord &a = *p.ranks[0].record, &b = *p.ranks[1].record;
    expect(a.code == 1 && a.rank == 1 && took < 1.0, "a rank that never calls: code %u rank %d after %.3f s", a.code, a.rank,
           took);
    describe("a rank that never calls");
    std::printf("  92 calls without a peer: %.3f s\n", took);
    p.reset();
    good("after a timeout");
    began = seconds();
    go(0, 0, 3), go(1, 0, 5);
    p.sync();
    expect(a.code == 2 && b.code == 2 && a.rank == 1 && b.rank == 0 && seconds() - began < 0.5, "different M");
    describe("different M");
    p.reset();
    go(0, 0, 0), go(1, 0, 16);
    p.sync();
    expect(a.code == 2 && b.code == 2 && a.rank == 1 && b.rank == 0, "M = 0 and 16");
    describe("M = 0 and 16");
    p.reset();
    go(0, 0, 4), go(1, 1, 4);
    p.sync();
    expect(a.code == 2 && b.code == 2 && a.rank == 1 && b.rank == 0, "different layers");
    describe("different layers");
    p.reset();
    good("after mismatches");
    // Silent divergence: rank 1's output is not rank 0's, because its prefix is not. The next call says so.
    p.each([&](int r) {
        FusedTail op = p.call(r, 0, 2);
        op.prefix = r == 0 ? p.ranks[r].pool_prefix : p.ranks[r].pool_shared, op.shared = {};
        CUDA(launch_fused_tail(op, p.ranks[r].stream));
    });
    p.sync();
    good("prefixes that differ are not a divergence: a column has one owner");
}

/// Graphs of random sizes, interleaved with one another and with eager calls; ranks late at random; every element compared.
void stress(std::int64_t hidden, std::int64_t latent, int world, int most, int replays, int layers,
            int most_calls = 1 << 30) {
    Problem p(hidden, latent, world, true, layers);
    for (int width = 8; width <= most; width *= 2) p.make_golden(width, 1);
    constexpr int graphs = 6;
    std::vector<std::vector<cudaGraphExec_t>> exec(graphs);
    unsigned x = 12345;
    const auto next = [&] { return x = hash(x, 9); };
    for (int g = 0; g < graphs; ++g) {
        std::vector<int> sizes(layers);
        for (int& m : sizes) m = static_cast<int>(next() % (g % 2 ? std::min(most, 16) + 1 : most + 1));
        p.each([&](int r) {
            cudaGraph_t graph;
            CUDA(cudaStreamBeginCapture(p.ranks[r].stream, cudaStreamCaptureModeThreadLocal));
            for (int l = 0; l < layers; ++l) p.enqueue(r, l, sizes[l], g < 2 ? 0 : 6'000, g % 3 != 0);
            advance<<<1, 1, 0, p.ranks[r].stream>>>(p.ranks[r].step);
            CUDA(cudaStreamEndCapture(p.ranks[r].stream, &graph));
            exec[g].emplace_back();
            CUDA(cudaGraphInstantiate(&exec[g].back(), graph, 0));
            CUDA(cudaGraphDestroy(graph));
        });
    }
    const double began = seconds();
    unsigned long long wrong = 0;
    int done = 0, calls = 0;
    while (done < replays && calls < most_calls && failures < 20) {
        const int batch = static_cast<int>(next() % 24) + 1;
        for (int i = 0; i < batch; ++i, ++done) {
            const unsigned g = next() % (graphs + 1), eager = next() % (most + 1), late = next() % 3 == 0 ? 400'000 : 3'000;
            calls += g == graphs ? 1 : layers;
            p.each([&](int r) {
                if (g < graphs) {
                    CUDA(cudaGraphLaunch(exec[g][r], p.ranks[r].stream));
                    return;
                }
                p.enqueue(r, 0, eager, static_cast<int>(late), true);
                advance<<<1, 1, 0, p.ranks[r].stream>>>(p.ranks[r].step);
            });
        }
        p.sync();
        if (done / 1000 != (done - batch) / 1000) {
            wrong += p.wrong();
            if (!p.healthy("stress")) break;
        }
    }
    wrong += p.wrong();
    const bool ok =
        p.healthy("stress") && expect(wrong == 0, "stress H=%ld R=%d: %llu wrong", static_cast<long>(hidden), world, wrong);
    std::printf("%s stress H=%ld L=%ld R=%d M<=%d: %d replays, %d calls, %llu wrong units, %.1f s\n", ok ? "ok  " : "BAD ",
                static_cast<long>(hidden), static_cast<long>(latent), world, most, done, calls, wrong, seconds() - began);
    p.each([&](int r) {
        for (auto& e : exec) CUDA(cudaGraphExecDestroy(e[r]));
    });
}

/// Ranks that replay rounds of calls, each with rows of its own, so that calls follow one another as closely as they can and
/// all their outputs are compared none the less. Several groups may do so side by side on the same GPUs: each a thread.
class Group {
public:
    struct Cut {
        std::int64_t hidden, latent;
        int layers, most_ctas;
        bool dependent;
    };
    Group(const Cut& cut, unsigned seed) : p_(cut.hidden, cut.latent, 2, true, cut.layers), random_(seed) {
        p_.most_ctas = cut.most_ctas, p_.dependent = cut.dependent;
        for (int width = 8; width <= pool; width *= 2) {
            if (!p_.ranks[0].golden.count(p_.plan(width).tokens)) p_.make_golden(width, 1);
            ctas_ = std::max(ctas_, fused_tail_grid(p_.plan(width)) * (cut.dependent ? 2 : 1) * p_.per_device);
        }
        p_.each([&](int) {
            rows_.emplace_back();
            for (OwnRows& c : rows_.back()) {
                c.routed = allocate<uint4>(pool * cut.latent / 8), c.shared = allocate<uint4>(pool * cut.hidden / 8);
                c.out = allocate<uint4>(pool * cut.hidden / 8);
            }
        });
    }
    ~Group() {
        p_.each([&](int r) {
            for (const Graph& g : graphs_) CUDA(cudaGraphExecDestroy(g.exec[static_cast<std::size_t>(r)]));
            for (const OwnRows& c : rows_[static_cast<std::size_t>(r)])
                cudaFree(c.routed), cudaFree(c.shared), cudaFree(c.out);
        });
    }
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    /// Graphs of about so many calls each, most of them of few tokens, one in six of up to all. `damaged`: in the replay of
    /// this number a bit of an output of rank 1 is turned over.
    void record(int graphs, int calls, unsigned damaged) {
        for (int g = 0; g < graphs; ++g) {
            Graph graph;
            const int most = std::array{8, 16, 8, 32, 16, 128}[static_cast<std::size_t>(g % 6)];
            std::vector<std::vector<std::array<int, 2>>> rounds;  // of calls: layer, tokens
            while (graph.calls < calls) {
                rounds.emplace_back(std::array{1, 2, 4, 8, 8, 8}[next() % 6]);
                for (auto& [layer, tokens] : rounds.back()) {
                    layer = static_cast<int>(next()) & 0xffff, layer %= p_.layers;
                    tokens = static_cast<int>(next() % (next() % static_cast<unsigned>(most + 1) + 1));  // few are likelier
                    graph.elements += tokens * p_.hidden();
                }
                graph.calls += static_cast<int>(rounds.back().size());
            }
            if (damaged) rounds[0][0][1] = std::max(1, rounds[0][0][1]);
            const int late = g % 2 ? 6'000 : 0;
            p_.each([&](int r) { graph.exec.push_back(capture(r, rounds, late, damaged)); });
            graphs_.push_back(graph);
        }
    }
    /// Until all groups together have made so many calls or a kernel has found a fault. In a thread of its own.
    void replay(std::atomic<std::int64_t>& made, std::int64_t calls) {
        while (made < calls && !faulty()) {
            for (int i = 0; i < 32; ++i) {
                const Graph& g = graphs_[next() % graphs_.size()];
                p_.each([&](int r) { CUDA(cudaGraphLaunch(g.exec[static_cast<std::size_t>(r)], p_.ranks[r].stream)); });
                made += g.calls, calls_ += g.calls, elements_ += g.elements, ++replays_;
            }
            p_.sync();
        }
    }
    bool healthy() { return p_.healthy("group"); }
    unsigned long long wrong() { return p_.wrong(); }
    std::int64_t calls() const { return calls_; }
    std::int64_t replays() const { return replays_; }
    std::int64_t elements() const { return elements_; }  ///< of outputs of one rank
    int ctas() const { return ctas_; }                   ///< that wait on one GPU, those of an early starter twice
    bool shares_a_gpu() const { return p_.per_device > 1; }

private:
    struct Graph {
        std::vector<cudaGraphExec_t> exec;  // a rank each
        int calls = 0;
        std::int64_t elements = 0;
    };
    unsigned next() { return random_ = hash(random_, 9); }
    bool faulty() const {
        return std::any_of(p_.ranks.begin(), p_.ranks.end(),
                           [](const Rank& k) { return *const_cast<const volatile std::uint32_t*>(&k.record->code) != 0; });
    }
    cudaGraphExec_t capture(int r, const std::vector<std::vector<std::array<int, 2>>>& rounds, int late, unsigned damaged) {
        const Rank& k = p_.ranks[static_cast<std::size_t>(r)];
        const auto units = [](const void* p) { return static_cast<const uint4*>(p); };
        Turn t{{},
               {},
               static_cast<unsigned>(r),
               units(k.pool_routed),
               units(k.pool_shared),
               static_cast<int>(p_.shape.latent / 8),
               static_cast<int>(p_.hidden() / 8),
               late,
               k.step,
               k.wrong};
        const auto take_turn = [&] { turn<<<dim3(8, most_in_round), 512, 0, k.stream>>>(t); };
        CUDA(cudaStreamBeginCapture(k.stream, cudaStreamCaptureModeThreadLocal));
        unsigned key = 0;
        bool first = true;
        for (const auto& round : rounds) {
            t.last = t.next, t.next.calls = static_cast<int>(round.size());
            for (std::size_t i = 0; i < round.size(); ++i) {
                const auto [layer, tokens] = round[i];
                OwnRows& c = t.next.call[i];
                c = rows_[static_cast<std::size_t>(r)][i];
                c.tokens = tokens, c.rows_of_out = std::min(pool, tokens + 2), c.key = key++;
                c.golden = units(k.golden.at(p_.plan(tokens).tokens)[static_cast<std::size_t>(layer)]);
            }
            take_turn();
            for (std::size_t i = 0; i < round.size(); ++i) {
                const auto [layer, tokens] = round[i];
                FusedTail op = p_.call(r, layer, tokens);
                op.routed = t.next.call[i].routed, op.shared = t.next.call[i].shared, op.out = t.next.call[i].out;
                op.starts_early = op.releases_early = p_.dependent;
                CUDA(launch_fused_tail(op, k.stream));
            }
            if (first && damaged && r == 1)
                flip<<<1, 1, 0, k.stream>>>(k.step, damaged, reinterpret_cast<unsigned short*>(t.next.call[0].out));
            first = false;
        }
        t.last = t.next, t.next.calls = 0;
        take_turn();
        advance<<<1, 1, 0, k.stream>>>(k.step);
        CUDA(cudaGetLastError());
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA(cudaStreamEndCapture(k.stream, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        CUDA(cudaGraphUpload(exec, k.stream));
        CUDA(cudaStreamSynchronize(k.stream));
        CUDA(cudaGraphDestroy(graph));
        return exec;
    }

    Problem p_;
    unsigned random_;
    int ctas_ = 0;
    std::vector<std::array<OwnRows, most_in_round>> rows_;  // a rank each
    std::vector<Graph> graphs_;
    std::int64_t calls_ = 0, replays_ = 0, elements_ = 0;
};

/// So many checked calls, by groups side by side. With `damaged`, exactly one wrong unit a group is expected, not none.
void check_groups(const char* name, const std::vector<Group::Cut>& cuts, std::int64_t calls, unsigned damaged = 0) {
    const double set_up = seconds();
    std::vector<std::unique_ptr<Group>> groups;
    int ctas = 0;
    for (const Group::Cut& cut : cuts) {
        groups.push_back(std::make_unique<Group>(cut, 777 + static_cast<unsigned>(groups.size())));
        ctas += groups.back()->ctas();
    }
    // All must be resident at once, with room for what lies between calls. Calls of one rank alone get their places in
    // order.
    const bool in_order = groups.size() == 1 && !groups[0]->shares_a_gpu();
    if (!expect(in_order || ctas <= 112, "%s: %d CTAs that wait on a GPU, expected at most 112", name, ctas)) return;
    for (auto& g : groups) g->record(12, 96, damaged);
    const double began = seconds();
    std::printf("%s: %zu groups of 2 ranks, %d CTAs that wait at most, set up in %.1f s\n", name, groups.size(), ctas,
                began - set_up);
    constexpr int parts = 10;
    std::atomic<std::int64_t> made = 0;
    unsigned long long wrong = 0;
    for (int part = 1; part <= parts; ++part) {
        std::vector<std::thread> threads;
        for (auto& g : groups) threads.emplace_back([&] { g->replay(made, calls * part / parts); });
        for (std::thread& each : threads) each.join();
        bool ok = true;
        std::int64_t replays = 0, elements = 0, fewest = calls;
        for (auto& g : groups) {
            ok &= g->healthy(), wrong += g->wrong();
            replays += g->replays(), elements += g->elements(), fewest = std::min(fewest, g->calls());
        }
        const double took = seconds() - began;
        if (part == parts || part % 2 == 0 || !ok)
            std::printf(
                "%s: %lld calls (%lld or more in each group) in %lld replays, %.3g elements compared on each rank, %llu "
                "wrong units, %.1f s, %.0f calls/s\n",
                name, static_cast<long long>(made.load()), static_cast<long long>(fewest), static_cast<long long>(replays),
                static_cast<double>(elements), wrong, took, static_cast<double>(made.load()) / took);
        if (!ok || (wrong != 0 && !damaged)) break;
    }
    const unsigned long long wanted = damaged ? groups.size() : 0;
    expect(wrong == wanted, "%s: %llu wrong units, expected %llu", name, wrong, wanted);
}

/// Groups of several shapes; every other one starts its calls early.
std::vector<Group::Cut> side_by_side(int groups, int ctas) {
    const std::array<std::array<std::int64_t, 2>, 6> shapes = {
        {{1024, 512}, {2048, 1024}, {1072, 328}, {512, 256}, {2224, 1000}, {1008, 1536}}};
    std::vector<Group::Cut> cuts;
    for (std::size_t i = 0; i < static_cast<std::size_t>(groups); ++i)
        cuts.push_back({shapes[i % shapes.size()][0], shapes[i % shapes.size()][1], 2, ctas, i % 2 == 0});
    return cuts;
}

/// The kernels that are compiled for two ranks and a part of K, which two ranks that share a GPU have no room for at a
/// model's width: with as many columns as they have room for, and a model's K.
void check_pairs() {
    const Knobs before = knobs;
    for (const auto& [rows, split, clusters] : {std::array{128, 4, 8}, std::array{128, 2, 8}, std::array{64, 2, 16}}) {
        knobs.rows = rows, knobs.split = split, knobs.clusters = clusters;
        for (const int receivers : {0, 1}) {
            knobs.receivers = receivers;
            check_shape(2048, 3584, 2, true, 128);
            check_variants(2048, 3584, 2, true);
        }
    }
    knobs = before;
}

/// A rank that talks to itself, for tools that serialise kernels: both halves of the output are then the same.
void check_loopback() {
    for (const auto& [hidden, latent] : {std::pair{2048L, 1024L}, std::pair{1072L, 328L}}) {
        Problem p(hidden, latent, 2, true, 1, true);
        for (const int m : {1, 8, 0, 16, 3, 40, 128}) {
            p.each([&](int r) {
                FusedTail op = p.call(r, 0, m);
                op.routed = p.ranks[r].pool_routed;  // rows of shared are absent: their halves would differ
                op.shared = {};
                CUDA(launch_fused_tail(op, p.ranks[r].stream));
            });
            p.sync();
            if (!p.healthy("loopback")) return;
            std::vector<bf16> out(m * hidden);
            CUDA(cudaMemcpy(out.data(), p.ranks[0].out[0], out.size() * 2, cudaMemcpyDefault));
            int bad = 0;
            for (int row = 0; row < m; ++row)
                bad += std::memcmp(&out[row * hidden], &out[row * hidden + hidden / 2], hidden) != 0;
            expect(bad == 0, "loopback M=%d: %d rows", m, bad);
        }
    }
    std::printf("done loopback\n");
}

// ---- times

double time_graphs(Problem& p, const std::vector<cudaGraphExec_t>& exec, int per_graph) {
    cudaEvent_t from, to;
    CUDA(cudaSetDevice(p.ranks[0].device));
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
    std::vector<float> times;
    constexpr int launches = 10;
    for (int rep = 0; rep < 9; ++rep) {
        for (int k = 0; k < launches; ++k) {
            if (k == 2) {
                CUDA(cudaSetDevice(p.ranks[0].device));
                CUDA(cudaEventRecord(from, p.ranks[0].stream));
            }
            p.each([&](int r) { CUDA(cudaGraphLaunch(exec[r], p.ranks[r].stream)); });
        }
        CUDA(cudaSetDevice(p.ranks[0].device));
        CUDA(cudaEventRecord(to, p.ranks[0].stream));
        p.sync();
        float ms = 0;
        CUDA(cudaEventElapsedTime(&ms, from, to));
        times.push_back(ms * 1000 / (launches - 2) / static_cast<float>(per_graph));
    }
    std::sort(times.begin(), times.end());
    CUDA(cudaEventDestroy(from));
    CUDA(cudaEventDestroy(to));
    return times[times.size() / 2];
}

struct Producer {
    int cycles;
    bool early;
};
std::vector<cudaGraphExec_t> capture(Problem& p, bool tail, int tokens, const Producer* producer, int reps,
                                     bool stamps = false, bool dependent = true) {
    std::vector<cudaGraphExec_t> exec(p.ranks.size());
    p.each([&](int r) {
        Rank& k = p.ranks[r];
        cudaGraph_t graph;
        CUDA(cudaStreamBeginCapture(k.stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < reps * p.layers; ++i) {
            const int layer = i % p.layers;
            if (producer) {
                bench_producer<<<132, 128, 0, k.stream>>>(
                    reinterpret_cast<uint4*>(k.pool_routed), reinterpret_cast<uint4*>(k.pool_shared),
                    reinterpret_cast<uint4*>(k.routed), reinterpret_cast<uint4*>(k.shared),
                    static_cast<int>(tokens * p.shape.latent / 8), static_cast<int>(tokens * p.hidden() / 8),
                    producer->cycles, producer->early);
                CUDA(cudaGetLastError());
            }
            if (!tail) continue;
            FusedTail op = p.call(r, layer, tokens);
            op.starts_early = op.releases_early = dependent && p.dependent;
            if (stamps) op.stamps = k.stamps + std::size_t{256} * fused::stamps_per_cta * layer;
            CUDA(launch_fused_tail(op, k.stream));
        }
        CUDA(cudaStreamEndCapture(k.stream, &graph));
        CUDA(cudaGraphInstantiate(&exec[r], graph, 0));
        CUDA(cudaGraphDestroy(graph));
    });
    return exec;
}
double timed(Problem& p, bool tail, int tokens, const Producer* producer, bool dependent = true) {
    auto exec = capture(p, tail, tokens, producer, 4, false, dependent);
    const double us = time_graphs(p, exec, 4 * p.layers);
    for (auto e : exec) CUDA(cudaGraphExecDestroy(e));
    return us;
}

int bench_layers = 12;  ///< with distinct weights; more than fit in L2 together
bool alone = false;     ///< one rank that talks to itself: all but the link, where there is one GPU

void bench(std::int64_t hidden, std::int64_t latent, int world, bool norm, const std::vector<int>& sizes, bool brief) {
    Problem p(hidden, latent, world, norm, bench_layers, alone);
    p.each([&](int r) {  // inputs as they come from an engine: not zeros
        CUDA(cudaMemcpy(p.ranks[r].routed, p.ranks[r].pool_routed, pool * latent * 2, cudaMemcpyDefault));
        CUDA(cudaMemcpy(p.ranks[r].shared, p.ranks[r].pool_shared, pool * hidden * 2, cudaMemcpyDefault));
    });
    const Producer early{4000, true}, late{4000, false}, late_long{12000, true};
    for (const int m : sizes) {
        const double raw = timed(p, true, m, nullptr);
        if (brief) {
            std::printf("time %s H=%ld L=%ld R=%d M=%-3d raw %.2f\n", float8 ? "e4m3" : "bf16", static_cast<long>(hidden),
                        static_cast<long>(latent), world, m, raw);
            continue;
        }
        const double plain = timed(p, true, m, nullptr, false);
        double fresh[3];
        const Producer* producers[] = {&early, &late, &late_long};
        for (int i = 0; i < 3; ++i) {
            // The last one with the tail's own carve-out, so that both kernels can be resident on an SM.
            p.each([&](int) {
                CUDA(
                    cudaFuncSetAttribute(bench_producer, cudaFuncAttributePreferredSharedMemoryCarveout, i == 2 ? 100 : -1));
            });
            fresh[i] = timed(p, true, m, producers[i]) - timed(p, false, m, producers[i]);
        }
        std::printf(
            "time %s H=%ld L=%ld R=%d M=%-3d raw %.2f | fresh, early trigger %.2f, late %.2f, early with 6 us and the same "
            "carve-out %.2f | no "
            "dependent launch %.2f\n",
            float8 ? "e4m3" : "bf16", static_cast<long>(hidden), static_cast<long>(latent), world, m, raw, fresh[0],
            fresh[1], fresh[2], plain);
    }
    p.healthy("bench");
}

void stages(const long (&shape)[3], int tokens) {
    Problem p(shape[0], shape[1], static_cast<int>(shape[2]), true, 12, alone);
    const std::size_t words = std::size_t{256} * fused::stamps_per_cta * p.layers;
    p.each([&](int r) {
        p.ranks[r].stamps = allocate<long long>(words);
        CUDA(cudaMemset(p.ranks[r].stamps, 0, words * 8));
    });
    auto exec = capture(p, true, tokens, nullptr, 1, true);
    for (int i = 0; i < 4; ++i) p.each([&](int r) { CUDA(cudaGraphLaunch(exec[r], p.ranks[r].stream)); });
    p.sync();
    static const char* names[fused::stage_count] = {
        "began",        "predecessor over", "published",    "weights begun", "weights asked", "latents came", "latents",
        "last latents", "shared",           "last weights", "multiplied",    "parts",         "sent",         "came"};
    const int grid = fused_tail_grid(p.plan(tokens));
    p.each([&](int r) {
        std::vector<long long> all(words);
        CUDA(cudaMemcpy(all.data(), p.ranks[r].stamps, words * 8, cudaMemcpyDefault));
        std::printf("stages M=%d rank %d, us from the predecessor's end, mean / latest CTA:", tokens, r);
        for (int s = 1; s < fused::stage_count; ++s) {
            double mean = 0, latest = 0;
            int stamped = 0;  // not every CTA passes every stage
            for (int l = 2; l < p.layers; ++l) {
                double most = -1e9;
                for (int b = 0; b < grid; ++b) {
                    const long long* t = &all[(std::size_t{256} * l + b) * fused::stamps_per_cta];
                    const int from = s == fused::predecessor_over ? 0 : static_cast<int>(fused::predecessor_over);
                    const double us = static_cast<double>(t[s] - t[from]) / 1980;
                    if (t[s] == 0) continue;
                    mean += us, ++stamped, most = std::max(most, us);
                }
                latest += most / (p.layers - 2);
            }
            std::printf(" %s %.2f/%.2f", names[s], mean / std::max(stamped, 1), latest);
        }
        std::printf("\n");
        cudaFree(p.ranks[r].stamps);
    });
    for (auto e : exec) CUDA(cudaGraphExecDestroy(e));
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);       // loading a kernel beside one that waits may wait for it
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // a queue a rank, or ranks that share a GPU wait for one another
    const double began = seconds();
    CUDA(cudaGetDeviceCount(&devices));
    devices = std::min(devices, 2);
    for (int d = 0; d < devices; ++d) {
        CUDA(cudaSetDevice(d));
        CUDA(prepare_fused_tail());
        for (int e = 0; e < devices; ++e)
            if (e != d) CUDA(cudaDeviceEnablePeerAccess(e, 0));
    }
    std::printf("%d devices, ready after %.1f s\n", devices, seconds() - began);
    int replays = 400, groups = 24, ctas = 3;
    long calls = 1'000'000;
    long shape[3] = {7168, 3584, 2};
    std::vector<int> sizes{1, 2, 4, 8, 16, 32, 64, 128};
    for (int i = 1; i < argc; ++i) {
        const std::string a = argv[i];
        const auto number = [&](const char* name, int& to) {
            if (a.rfind(name, 0) == 0) to = std::atoi(a.c_str() + std::strlen(name));
        };
        number("replays=", replays), number("layers=", bench_layers), number("early=", knobs.early),
            number("late=", knobs.late);
        number("ring=", knobs.ring), number("prefetch=", knobs.prefetch), number("at-once=", knobs.at_once),
            number("pace=", knobs.pace), number("digest=", knobs.digest), number("receivers=", knobs.receivers),
            number("most-ctas=", knobs.most_ctas);
        number("groups=", groups), number("ctas=", ctas);
        if (a.rfind("calls=", 0) == 0) calls = std::atol(a.c_str() + 6);
        if (a.rfind("plan=", 0) == 0) std::sscanf(a.c_str(), "plan=%d,%d,%d", &knobs.rows, &knobs.split, &knobs.clusters);
        if (a.rfind("shape=", 0) == 0) std::sscanf(a.c_str(), "shape=%ld,%ld,%ld", &shape[0], &shape[1], &shape[2]);
        if (a.rfind("tokens=", 0) == 0) {
            sizes.clear();
            for (const char* s = a.c_str() + 6; s; s = std::strchr(s, ',')) sizes.push_back(std::atoi(++s));
        }
        if (a == "weights=bf16") float8 = false;
        if (a == "weights=e4m3") {
            float8 = true;
            auto* wrong = allocate<unsigned>(1);
            CUDA(cudaMemset(wrong, 0, 4));
            widen_codes<<<256, 256>>>(wrong);
            unsigned n = 0;
            CUDA(cudaMemcpy(&n, wrong, 4, cudaMemcpyDefault));
            CUDA(cudaFree(wrong));
            expect(n == 0, "e4m3: %u codes widened wrongly", n);
        }
        if (a == "first") {
            check_shape(7168, 3584, 2, true, 16);
            check_shape(7168, 3584, 2, true, 128);
        }
        if (a == "shapes") {
            check_shape(4096, 1024, 2, false, 128);  // Nemotron-3 Super
            check_shape(8192, 2048, 2, false, 128);  // and Ultra
            check_shape(5120, 1536, 2, true, 128);
            check_shape(2224, 1000, 2, true, 64);  // nothing is a multiple of a tile
            check_shape(1024, 512, 1, true, 128);  // nobody to talk to
            check_shape(7168, 3584, 1, true, 16, true);
            check_shape(3072, 1024, 3, true, 64);
            check_shape(7168, 3584, 4, true, 32);
            check_shape(5120, 1536, 5, true, 16);
            check_shape(1008, 328, 7, false, 16);
            check_shape(7168, 3584, 8, true, 64);
            check_shape(4096, 1024, 16, true, 16, true);
            check_shape(16, 8, 2, true, 16, true);
        }
        if (a == "variants")
            check_variants(7168, 3584, 2, true), check_variants(3072, 1000, 3, true), check_variants(1024, 512, 1, false);
        if (a == "pairs") check_pairs();
        if (a == "extremes") check_extremes(true), check_extremes(false);
        if (a == "faults") check_faults();
        if (a == "loopback") check_loopback();
        if (a == "alone") alone = true;
        if (a == "stress") stress(7168, 3584, 2, 16, replays, 12);
        if (a == "million") stress(7168, 3584, 2, 128, 1 << 30, 12, 1'000'000);
        if (a == "hundred-thousand") stress(7168, 3584, 8, 16, 1 << 30, 4, 100'000);
        const std::vector<Group::Cut> kimi{{7168, 3584, 12, 132, true}};
        if (a == "groups") check_groups("groups", side_by_side(groups, ctas), calls);
        if (a == "kimi") check_groups("kimi", kimi, calls);
        if (a == "damage")
            check_groups("damage", side_by_side(groups, ctas), calls, 20), check_groups("damage", kimi, 100'000, 20);
        if (a == "fifty-million") {
            check_groups("kimi", kimi, 1'000'000);
            check_groups("groups", side_by_side(groups, ctas), 49'000'000);
        }
        if (a == "stress128") stress(7168, 3584, 2, 128, replays, 6);
        if (a == "stress8") stress(7168, 3584, 8, 16, replays, 4);
        if (a == "stress3") stress(3072, 1024, 3, 64, replays, 4);
        if (a == "bench") bench(shape[0], shape[1], static_cast<int>(shape[2]), true, sizes, false);
        if (a == "quick") bench(shape[0], shape[1], static_cast<int>(shape[2]), true, sizes, true);
        if (a == "quick-no-norm") bench(shape[0], shape[1], static_cast<int>(shape[2]), false, sizes, true);
        if (a == "stages") {
            for (const int m : sizes) stages(shape, m);
        }
    }
    std::printf("%s: %d failures, %.1f s\n", failures ? "FAILED" : "passed", failures, seconds() - began);
    return failures != 0;
}
