// C[M, N] = addend + s · A[M, K] · Wᵀ for M up to 64: a stream of weights with a little arithmetic.
//
// Hopper: a cluster owns 128 (or 64) rows of W, its CTAs split K between them.
//
// clang-format off
//     weight warp   W blocks ── bulk copies, a few in flight ──▶ ring in shared memory        starts before the predecessor has ended
//     token warp    A, 64 columns of all tokens ── tensor copies ──▶ the same ring            after it has ended
//     math warps    wgmma, block by block as they land: W rows × tokens, float32
//     all CTAs      8-row pieces of the partial product ── st.async, data and signal in one ──▶ the CTA that finishes those rows,
//                   which adds the parts in the order of K, scales, adds the addend and the prefix ──▶ C
// clang-format on
//
// Everywhere else: a CTA owns 32 rows, its eight warps split K, operands go straight from global memory to mma.sync.
//
// No thread waits for another cluster, so any number of CTAs is right. The sums' order is fixed: no atomics, the same bits
// on every run. Hopper's depends on (N, K) and on the token class (up to 8, 16, 32, 64), by teams and chains; the other's on
// K alone. In neither does it depend on where among the tokens a row is (docs/decisions/0013).
#include <algorithm>
#include <atomic>

#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/projection.cuh"
#include "gpu/primitives/copy.h"
#include "gpu/primitives/launch.h"
#include "gpu/primitives/mma.h"
#include "gpu/primitives/tensor_map.h"

namespace latent_moe::gpu {
namespace {

struct Params : Projection {
    CUtensorMap a_map;  ///< Hopper: A, for the tensor copy engine
    int ring;           ///< Hopper: blocks of W and of A that shared memory holds
    int in_flight;      ///< Hopper: weight copies in flight
    bool release;
    int early_ctas;
};

// ---------------------------------------------------------------------------------------------------------------- Hopper

constexpr int max_ring = 24;
constexpr int barrier_bytes = (3 * max_ring + 1) * 8;
/// Of shared memory: leaves room for a neighbouring kernel's reserved kilobyte, so that both can be resident.
constexpr int hopper_shared_bytes = 231'424;

/// What a CTA of the Hopper kernel works on.
template <int tokens_, int rows_>
struct Tile {
    static constexpr int tokens = tokens_;  ///< token columns of the product: 8, 16, 32 or 64
    static constexpr int rows = rows_;      ///< rows of W: 64 or 128

    /// Of math warps. Two share the blocks of a small tile, each takes every other one; it pays where a block has some work.
    static constexpr int teams = rows == 64 && tokens > 8 ? 2 : 1;
    static constexpr int math_threads = rows * 2 * teams;
    static constexpr int threads = math_threads + 64;                     ///< and the two copying warps
    static constexpr int weight_bytes = rows * PackedLayout::row_bytes;   ///< of one block
    static constexpr int token_bytes = tokens * PackedLayout::row_bytes;  ///< of one block
    static constexpr int parts_bytes = teams * rows * tokens * 4;         ///< what a CTA receives, whatever the split

    /// A small tile leaves room on its multiprocessor for the next call's, whose weights then come while this call ends.
    static constexpr int ctas_of_sm = rows == 64 && tokens <= 32 ? 2 : 1;

    /// Places of the ring: what a CTA's `blocks` need, or as many as fit.
    static int ring(std::int64_t blocks) {
        constexpr int fit = (hopper_shared_bytes - 1024 - parts_bytes - barrier_bytes) / (weight_bytes + token_bytes);
        return static_cast<int>(std::clamp<std::int64_t>(blocks, 2, std::min(max_ring, fit)));
    }
    static int shared_bytes(int ring) { return 1024 + ring * (weight_bytes + token_bytes) + parts_bytes + barrier_bytes; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
template <Dtype dtype, class Tile>
struct Hopper {
    static constexpr int warps = Tile::math_threads / 32;
    static constexpr int team_warps = warps / Tile::teams;
    static constexpr int chains = Tile::tokens == 64 ? 2 : 4;  ///< of wgmma, added at the end
    static constexpr int groups = Tile::rows / 8;              ///< pieces of 8 rows: what is sent and finished as one

    const Params& p;
    // Shared memory: | ring of W blocks | ring of A blocks | parts | barriers |, the rings aligned to 1 KB
    std::uint32_t weights, tokens, parts;
    std::uint32_t weights_full, tokens_full, empty, received;  ///< barriers: the first three one a place of the ring
    int part, split, first, blocks;                            ///< this CTA's share of K
    std::int64_t weight_tile;

    LATENT_MOE_DEVICE Hopper(const Params& params, std::uint32_t shared) : p(params) {
        weights = (shared + 1023) & ~1023u;
        tokens = weights + p.ring * Tile::weight_bytes;
        parts = tokens + p.ring * Tile::token_bytes;
        weights_full = parts + Tile::parts_bytes;
        tokens_full = weights_full + 8 * max_ring;
        empty = tokens_full + 8 * max_ring;
        received = empty + 8 * max_ring;
        asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(split));
        part = static_cast<int>(cluster::rank());
        weight_tile = blockIdx.x / split;
        const int all = static_cast<int>(p.layout.blocks());
        first = all * part / split;
        blocks = all * (part + 1) / split - first;
    }

    /// Block after block round the ring: `body(block, place, turn)`.
    template <class Body>
    LATENT_MOE_DEVICE void round_the_ring(int begin, Body body) const {
#pragma unroll 1
        for (int block = begin, place = begin % p.ring, turn = begin / p.ring; block < blocks; ++block) {
            body(block, place, turn);
            if (++place == p.ring) place = 0, ++turn;
        }
    }
    LATENT_MOE_DEVICE bool reuses_places() const {
        return blocks > p.ring;
    }

    /// Unrolled, with constant addresses: an init in a rolled loop takes ten times as long.
    LATENT_MOE_DEVICE void init_barriers(std::uint32_t first_barrier, int begin, int arrivals) const {
#pragma unroll
        for (int i = begin; i < max_ring; ++i) {
            if (i < p.ring) mbarrier::init(first_barrier + 8 * i, arrivals);
        }
        mbarrier::publish_init();
    }

    LATENT_MOE_DEVICE void copy_weights(int lane) const {
        constexpr int halves = PackedLayout::tile_rows / Tile::rows, early = 2;
        const char* from =
            p.packed + p.layout.block(weight_tile / halves, first) + weight_tile % halves * Tile::weight_bytes;
        const auto issue = [&](int block, int place) {
            mbarrier::expect(weights_full + 8 * place, Tile::weight_bytes);
            bulk_copy(weights + place * Tile::weight_bytes, from + std::int64_t{block} * PackedLayout::block_bytes,
                      Tile::weight_bytes, weights_full + 8 * place, evict_first);
        };
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < early; ++i) {  // the first copies leave before the other barriers are ready
                mbarrier::init(weights_full + 8 * i, 1);
                mbarrier::publish_init();
                if (i < blocks) issue(i, i);
            }
            init_barriers(weights_full, early, 1);
        }
        __syncwarp();
        cluster::arrive_relaxed();
        cluster::wait();
        if (lane != 0) return;
        round_the_ring(early, [&](int block, int place, int turn) {
            if (block == p.ring) {  // some of what does not fit goes to L2 already
                for (int i = block; i < min(blocks, block + 4); ++i) {
                    bulk_prefetch(from + std::int64_t{i} * PackedLayout::block_bytes, Tile::weight_bytes);
                }
            }
            if (turn > 0) mbarrier::wait(empty + 8 * place, (turn - 1) & 1);
            if (const int oldest = block - p.in_flight; oldest >= 0) {
                mbarrier::wait(weights_full + 8 * (oldest % p.ring), oldest / p.ring & 1);
            }
            issue(block, place);
        });
    }

    LATENT_MOE_DEVICE void copy_tokens(int lane) const {
        if (lane == 0) {
            prefetch_tensor_map(&p.a_map);
            init_barriers(tokens_full, 0, 1);
        }
        __syncwarp();
        cluster::arrive_relaxed();
        cluster::wait();
        if (lane != 0) return;
        dependency_wait();
        round_the_ring(0, [&](int block, int place, int turn) {
            if (turn > 0) mbarrier::wait(empty + 8 * place, (turn - 1) & 1);
            mbarrier::expect(tokens_full + 8 * place, Tile::token_bytes);
            tensor_copy(tokens + place * Tile::token_bytes, &p.a_map, (first + block) * PackedLayout::block_columns, 0,
                        tokens_full + 8 * place);
        });
    }

    /// The partial product of this warp's 16 rows, over its team's blocks.
    LATENT_MOE_DEVICE void multiply(float (&sum)[Tile::tokens / 2], int warp, int lane) const {
        float acc[chains][Tile::tokens / 2] = {};
        const int team = warp / team_warps;
        const std::uint64_t w0 = swizzled_operand(weights + warp % team_warps / 4 * 64 * PackedLayout::row_bytes);
        const std::uint64_t t0 = swizzled_operand(tokens);
        int last_place = -1;
        round_the_ring(0, [&](int block, int place, int turn) {
            if (block % Tile::teams != team) return;
            mbarrier::wait(tokens_full + 8 * place, turn & 1);
            mbarrier::wait(weights_full + 8 * place, turn & 1);
            const std::uint64_t w = w0 + static_cast<std::uint32_t>(place * Tile::weight_bytes >> 4);
            const std::uint64_t t = t0 + static_cast<std::uint32_t>(place * Tile::token_bytes >> 4);
            wgmma_begin();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                Wgmma<Tile::tokens>::template multiply<dtype>(acc[step % chains], w + 2 * step, t + 2 * step);
            }
            wgmma_commit();
            wgmma_wait<1>();  // the block before this one has been read
            if (reuses_places() && last_place >= 0 && lane == 0) mbarrier::arrive(empty + 8 * last_place);
            last_place = place;
        });
        wgmma_wait();
#pragma unroll
        for (int i = 0; i < Tile::tokens / 2; ++i) {
            sum[i] = acc[0][i];
#pragma unroll
            for (int chain = 1; chain < chains; ++chain) sum[i] += acc[chain][i];
        }
    }

    // A piece of 8 rows in `parts`, as the lanes of a warp hold it: of row g = lane / 4 the token pairs 8j + 2t, t = lane %
    // 4; two of them (j and j + 1) are one 16-byte store:      | source | piece | j / 2 | lane | j % 2, i |
    static constexpr int vector = Tile::tokens == 8 ? 2 : 4;  ///< floats of a store
    static constexpr int piece_floats = 8 * Tile::tokens;
    LATENT_MOE_DEVICE static int part_offset(int source_and_piece, int j, int lane) {
        return source_and_piece * piece_floats + j * 2 / vector * 32 * vector + lane * vector + j * 2 % vector;
    }

    LATENT_MOE_DEVICE void send(const float (&sum)[Tile::tokens / 2], int warp, int lane) const {
        const int pieces = groups / split, source = part * Tile::teams + warp / team_warps;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int group = warp % team_warps * 2 + half, owner = group / pieces, piece = group % pieces;
            const std::uint32_t to = cluster::address_at(parts + part_offset(source * pieces + piece, 0, lane) * 4, owner);
            const std::uint32_t signal = cluster::address_at(received, owner);
#pragma unroll
            for (int j = 0; j < Tile::tokens / 8; j += vector / 2) {
                const float* from = sum + 4 * j + 2 * half;
                if constexpr (vector == 2) {
                    cluster::store_async(to, make_float2(from[0], from[1]), signal);
                } else {
                    cluster::store_async(to + j * 256, make_float4(from[0], from[1], from[4], from[5]), signal);
                }
            }
        }
    }

    /// A warp finishes 8 rows × 8 tokens at a time: adds the parts, turns the square so that a lane holds two neighbouring
    /// columns of C.
    LATENT_MOE_DEVICE void finish_rows(const float* shared_parts, int warp, int lane) const {
        constexpr int columns = Tile::tokens / 8, at_once = 4;
        const int pieces = groups / split, squares = pieces * columns;
        const std::int64_t n0 = weight_tile * Tile::rows + part * pieces * 8 + lane % 4 * 2;
        const auto token_of = [&](int square) { return square % columns * 8 + lane / 4; };
        const auto column_of = [&](int square) { return n0 + square / columns * 8; };
        const auto wanted = [&](int square) {
            return square < squares && token_of(square) < p.tokens && column_of(square) < p.layout.rows;
        };
        for (int first_square = warp; first_square < squares; first_square += warps * at_once) {
            std::uint32_t addend[at_once] = {};
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int square = first_square + i * warps;
                if (wanted(square)) addend[i] = addend_at<dtype>(p, token_of(square), column_of(square));
            }
            mbarrier::wait(received, 0);  // the addends are on their way while the parts are
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int square = first_square + i * warps;
                if (square >= squares) break;
                float sum[2] = {};
#pragma unroll 4
                for (int source = 0; source < split * Tile::teams; ++source) {
                    const int offset = part_offset(source * pieces + square / columns, square % columns, lane);
                    const float2 term = *reinterpret_cast<const float2*>(shared_parts + offset);
                    sum[0] += term.x, sum[1] += term.y;
                }
                transpose_8x8(sum);
                if (wanted(square)) finish<dtype>(p, token_of(square), column_of(square), sum, addend[i]);
            }
        }
    }
};
#endif

template <Dtype dtype, class Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::ctas_of_sm) project_hopper(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char shared[];
    const int thread = threadIdx.x,
              warp = __shfl_sync(0xffffffff, thread / 32, 0);  // uniform: roles and descriptors hang on it
    using H = Hopper<dtype, Tile>;
    const H cta(p, shared_address(shared));
    if (warp == H::warps) return cta.copy_weights(thread % 32);
    if (warp == H::warps + 1) return cta.copy_tokens(thread % 32);

    if (thread == 0) {
        mbarrier::init(cta.received, 1);
        if (cta.reuses_places()) cta.init_barriers(cta.empty, 0, H::team_warps);
        mbarrier::publish_init();
        mbarrier::expect(cta.received, Tile::parts_bytes);
    }
    __syncwarp();
    cluster::arrive_relaxed();
    dependency_wait();
    if (p.release) release_dependents();
    cluster::wait();
    float sum[Tile::tokens / 2];
    cta.multiply(sum, warp, thread % 32);
    cta.send(sum, warp, thread % 32);
    cta.finish_rows(reinterpret_cast<const float*>(shared + (cta.parts - shared_address(shared))), warp, thread % 32);
#else
    __trap();  // the host picks the portable kernel where this one was not built
#endif
}

// -------------------------------------------------------------------------------------------------------------- portable

constexpr int portable_rows = 32;
constexpr int portable_warps = 8;

template <Dtype dtype, int max_tokens>
__global__ void __launch_bounds__(portable_warps * 32) project_portable(const __grid_constant__ Params p) {
    extern __shared__ float part_sums[];  // [warp][token][row]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const std::int64_t n0 = std::int64_t{blockIdx.x} * portable_rows;
    const int row0 = static_cast<int>(n0 % PackedLayout::tile_rows);
    const int blocks = static_cast<int>(p.layout.blocks());
    dependency_wait();
    if (p.release) release_dependents();

    // The order of k inside a dot product is free as long as both operands agree: lane t takes whole units t and t + 4 of a
    // block's row, and their words s are the k pairs t and t + 4 of step s.
    float sum[2][max_tokens / 8][4] = {};
#pragma unroll 2
    for (int block = warp; block < blocks; block += portable_warps) {
        const char* weights = p.packed + p.layout.block(n0 / PackedLayout::tile_rows, block);
        uint4 w[2][2][2], x[max_tokens / 8][2];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                w[i / 2][i % 2][u] = load16_once(weights + PackedLayout::unit_in_block(row0 + i * 8 + g, t + 4 * u));
            }
            const int column = block * PackedLayout::block_columns + (t + 4 * u) * 8;
#pragma unroll
            for (int j = 0; j < max_tokens / 8; ++j) {
                const int token = j * 8 + g;
                x[j][u] = token < p.tokens && column < p.layout.latent ? load16(p.a.data + token * p.a.stride + column * 2)
                                                                       : uint4{};
            }
        }
        const auto word = [](const uint4& v, int s) { return s == 0 ? v.x : s == 1 ? v.y : s == 2 ? v.z : v.w; };
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < max_tokens / 8; ++j) {
                    mma_16x8x16<dtype>(sum[i][j], word(w[i][0][0], s), word(w[i][1][0], s), word(w[i][0][1], s),
                                       word(w[i][1][1], s), word(x[j][0], s), word(x[j][1], s));
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < max_tokens / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = i * 16 + g + e / 2 * 8, token = j * 8 + 2 * t + e % 2;
                part_sums[(warp * max_tokens + token) * portable_rows + row] = sum[i][j][e];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.tokens * portable_rows / 2; i += portable_warps * 32) {
        const int token = i / (portable_rows / 2), row = i % (portable_rows / 2) * 2;
        if (n0 + row >= p.layout.rows) continue;
        float total[2] = {};
        for (int part = 0; part < portable_warps; ++part) {
            total[0] += part_sums[(part * max_tokens + token) * portable_rows + row];
            total[1] += part_sums[(part * max_tokens + token) * portable_rows + row + 1];
        }
        finish<dtype>(p, token, n0 + row, total, addend_at<dtype>(p, token, n0 + row));
    }
}

// ------------------------------------------------------------------------------------------------------------------ host

/// How the Hopper kernel cuts a product; depends on N and K alone.
struct Cut {
    int rows;   ///< of W a cluster owns
    int split;  ///< CTAs of a cluster, each a part of K
};

Cut cut_for(const PackedLayout& layout) {
    Cut best{};
    std::int64_t best_cost = INT64_MAX;
    for (const int rows : {128, 64}) {
        for (const int split : {1, 2, 4, 8}) {
            if (split > layout.blocks()) continue;
            const std::int64_t ctas = (layout.rows + rows - 1) / rows * split;
            const std::int64_t resident =
                split <= 2 ? 132 : 120;  // clusters of 4 and 8 do not fill every corner of the chip
            const std::int64_t per_cta = (layout.blocks() + split - 1) / split * rows;
            const std::int64_t cost =
                (ctas + resident - 1) / resident * (2500 + per_cta * 33 / 10);  // ns: a wave's start and end, its stream
            if (cost < best_cost) best_cost = cost, best = {rows, split};
        }
    }
    return best;
}

/// Devices for which something is known, so that calls need not ask the runtime again. Any thread; the first 64 devices.
class Devices {
public:
    bool has(int device) const { return device < 64 && (bits_.load(std::memory_order_acquire) >> device & 1) != 0; }
    void add(int device) {
        if (device < 64) bits_.fetch_or(std::uint64_t{1} << device, std::memory_order_release);
    }

private:
    std::atomic<std::uint64_t> bits_ = 0;
};

/// `allowed` is the kernel's own.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int bytes, int device, Devices& allowed) {
    if (allowed.has(device)) return cudaSuccess;
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (e == cudaSuccess) allowed.add(device);
    return e;
}

template <Dtype dtype, class Tile>
cudaError_t launch_hopper(Params p, int split, int device, bool dependent, cudaStream_t stream) {
    const int tiles = static_cast<int>((p.layout.rows + Tile::rows - 1) / Tile::rows);
    dependent = dependent && tiles * split <= p.early_ctas;
    p.ring = Tile::ring((p.layout.blocks() + split - 1) / split);
    // Enough copies in flight to keep the memory busy, and no more: they delay whatever queues behind them, A above all.
    p.in_flight = Tile::rows == 64 ? 8 : dependent && Tile::tokens > 8 ? 3 : 4;
    if (const cudaError_t e = describe_rows(p.a_map, p.a.data, p.tokens, p.layout.latent, p.a.stride, Tile::tokens);
        e != cudaSuccess) {
        return e;
    }
    const auto kernel = project_hopper<dtype, Tile>;
    static Devices allowed;
    if (const cudaError_t e = allow_shared_memory(kernel, hopper_shared_bytes, device, allowed); e != cudaSuccess) return e;
    return launch({.grid = tiles * split,
                   .block = Tile::threads,
                   .cluster = split,
                   .shared_bytes = Tile::shared_bytes(p.ring),
                   .dependent = dependent,
                   .stream = stream},
                  kernel, p);
}

template <Dtype dtype, int tokens>
cudaError_t launch_tokens(const Params& p, int device, bool hopper, bool dependent, cudaStream_t stream) {
    if (hopper) {
        const Cut cut = cut_for(p.layout);
        return cut.rows == 128 ? launch_hopper<dtype, Tile<tokens, 128>>(p, cut.split, device, dependent, stream)
                               : launch_hopper<dtype, Tile<tokens, 64>>(p, cut.split, device, dependent, stream);
    }
    const auto kernel = project_portable<dtype, tokens>;
    constexpr int shared = portable_warps * tokens * portable_rows * 4;
    static Devices allowed;
    if (const cudaError_t e = allow_shared_memory(kernel, shared, device, allowed); e != cudaSuccess) return e;
    return launch({.grid = static_cast<int>((p.layout.rows + portable_rows - 1) / portable_rows),
                   .block = portable_warps * 32,
                   .shared_bytes = shared,
                   .dependent = dependent && (p.layout.rows + portable_rows - 1) / portable_rows <= p.early_ctas,
                   .stream = stream},
                  kernel, p);
}

template <Dtype dtype>
cudaError_t launch_dtype(const Params& p, int device, bool hopper, bool one_class, bool dependent, cudaStream_t stream) {
    const int tokens = hopper && one_class ? 64 : p.tokens;
    if (tokens <= 8) return launch_tokens<dtype, 8>(p, device, hopper, dependent, stream);
    if (tokens <= 16) return launch_tokens<dtype, 16>(p, device, hopper, dependent, stream);
    if (tokens <= 32) return launch_tokens<dtype, 32>(p, device, hopper, dependent, stream);
    return launch_tokens<dtype, 64>(p, device, hopper, dependent, stream);
}

/// Whether this device runs sm_90a code and this binary has it.
cudaError_t has_hopper_kernel(int device, bool& answer) {
    static Devices with, without;
    answer = with.has(device);
    if (answer || without.has(device)) return cudaSuccess;
    int major = 0;
    cudaFuncAttributes attributes{};
    if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device); e != cudaSuccess)
        return e;
    if (const cudaError_t e = cudaFuncGetAttributes(&attributes, project_hopper<Dtype::bf16, Tile<8, 128>>);
        e != cudaSuccess)
        return e;
    answer = major == 9 && attributes.ptxVersion == 90;
    (answer ? with : without).add(device);
    return cudaSuccess;
}

}  // namespace

cudaError_t skinny_projection(const SkinnyProjection& op, cudaStream_t stream) {
    Params p{};
    if (!describe(op, p)) return cudaErrorInvalidValue;
    p.release = op.dependent_launch;
    p.early_ctas = op.early_ctas;
    if (op.tokens == 0) return cudaSuccess;
    int device = 0;
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
    bool hopper = false;
    if (!op.portable) {
        if (const cudaError_t e = has_hopper_kernel(device, hopper); e != cudaSuccess) return e;
    }
    switch (op.dtype) {
        case Dtype::bf16:
            return launch_dtype<Dtype::bf16>(p, device, hopper, op.batch_invariant, op.dependent_launch, stream);
        case Dtype::f16: return launch_dtype<Dtype::f16>(p, device, hopper, op.batch_invariant, op.dependent_launch, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace latent_moe::gpu
