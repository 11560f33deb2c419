// The fused decode tail: the kernel's roles, and the host's side. What each role does is in fused_tail_<role>.cuh.
//
// Rank a owns the columns a · H / R … of the output. In time, at rank a (and at every peer b the same):
//
// clang-format off
//             before predecessor's end │ after
//   weight    W ─▶ shared memory ──────┼──────────────────────────────────────────────────────────▶ all of it
//   math                               │ routed_a ─▶ every b    ┌▶ multiply ─▶ parts of K to the CTA that finishes them
//                                      │ shared_a ─▶ each b     │    Σ parts · factor + Σ shared, + prefix ─┬▶ every b
//   gather                             │ routed_b ─▶ Σ · γ ─────┘                           ▲              └▶ out
//                                      │             Σ squares ─▶ the cluster ──────────────┤
//                                      │ shared_b ─▶ Σ shared ──────────────────────────────┘
//                                      │ re-arm the slot of the call before          columns_b, as they come ─▶ out
//   tokens (17 and more)               │ Σ · γ by way of a pool (fused_tail_pool.cuh) ─▶ shared memory, block by block, from 33
//                                      │ on by a warp of its own; shared_a is then sent by the gathering warps, after latents
//   receivers (a cluster more)         │                                             columns_b, as they come ─▶ out, so that
//                                      │                                             the other CTAs leave, and the next call's
//                                      │                                             weights come, once theirs are sent
//   protocol                           │ epoch; CTA 0: header_a ─▶ every b, header_b ─▶ checked
// clang-format on
//
// Two hops across the link: partials, columns. Clusters of `split` CTAs share a tile of W's rows, each with a part of K; a
// cluster takes the tiles c, c + clusters, …. Inside a cluster data travels by st.async onto an mbarrier, so no barrier of
// the CTA or the cluster lies on the path, only two named barriers between roles. RMSNorm's factor is a row's, so it is
// applied after the product.
//
// Sums are in a fixed order: ranks in rank order; a row's squares by thread, block, part of K; the product by the steps of
// wgmma, its chains, then the parts of K. They depend on the plan, never on timing: the same bits on every run, and on every
// rank, because a column has one owner.
#include "gpu/kernels/fused_tail.h"

#include <algorithm>
#include <utility>

#include "gpu/kernels/fused_tail_gather.cuh"
#include "gpu/kernels/fused_tail_mailboxes.cuh"
#include "gpu/kernels/fused_tail_math.cuh"
#include "gpu/kernels/fused_tail_params.cuh"
#include "gpu/kernels/fused_tail_pool.cuh"
#include "gpu/kernels/fused_tail_stamps.cuh"
#include "gpu/kernels/fused_tail_weights.cuh"
#include "gpu/primitives/launch.h"

namespace latent_moe::gpu {
namespace fused {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/// A call, so that the others' code lies together: a CTA that receives has time.
template <class Tile>
LATENT_MOE_DEVICE_CALL void receive(const Params& p, int thread) {
    extern __shared__ __align__(1024) unsigned char memory[];
    receive_columns(Cta<Tile>(p, shared_address(memory)), thread, Tile::threads);
}
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1) tail(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char memory[];
    const int thread = threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(0xffffffff, thread / 32, 0);  // uniform: roles and operands' descriptors hang on it
    const Cta<Tile> cta(p, shared_address(memory));
    if constexpr (Tile::receives) {
        if (blockIdx.x >= gridDim.x - p.receivers) return receive<Tile>(p, thread);
    }
    // The compiler lays out the last branch first: the weight warp is the first to need its code.
    if (warp == Tile::weight_warp) {
        stamp<Tile>(p, began, lane == 0);
        stream_weights(cta, lane);
        stamp<Tile>(p, weights_asked, lane == 0);
    } else if (warp == Tile::protocol_warp) {
        cluster::arrive_relaxed();
        cluster::wait();  // the first weights have been asked for
        touch(p);
        dependency_wait();
        const auto epoch = load_relaxed<Scope::device>(&control(p.exchange).epoch[blockIdx.x]);
        const State state = load_state(p);
        store_shared(cta.bar(Barriers::epoch), epoch);
        __syncwarp();
        arrive_threads_of(epoch_there, Tile::gather_threads + 32);
        arrive_threads_of(state_loaded, 2 * 32);
        keep_protocol(p, epoch, state.rows & 1, lane);
    } else if (Tile::streamed && warp == Tile::token_warp) {
        cluster::arrive_relaxed();
        cluster::wait();  // barriers are there
        dependency_wait();
        const State state = load_state(p);
        stream_tokens(cta, state, lane);
    } else if (warp >= Tile::math_warps) {
        cluster::arrive_relaxed();
        Gather<Cta<Tile>>(cta, thread - Tile::math_threads).run([&](const Slot<Cta<Tile>>& slot) {
            if constexpr (Math<Cta<Tile>>::shared_out) {
                Math<Cta<Tile>>(cta, thread, warp).help_to_finish(slot);
            } else {
                arrive_threads_of(shared_ready, Tile::math_threads + cta.announcing_threads());
            }
        });
    } else {
        Math<Cta<Tile>> math(cta, thread, warp);
        if (warp == 0) math.make_barriers(lane);
        __syncwarp();
        cluster::arrive_relaxed();
        math.run();
    }
#else
    __trap();  // the host launches nothing where this was not built for sm_90a
#endif
}

/// A call of no rows.
__global__ void __launch_bounds__(256) idle(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static_cast<void>(take_part(Cta<Tile<8, 64>>(p, 0), threadIdx.x, 256));
#else
    __trap();
#endif
}

__global__ void __launch_bounds__(256)
    reset(char* region, std::int64_t bytes, char* pool, std::int64_t slot_bytes, std::int64_t latent_bytes) {
    const std::int64_t first = blockIdx.x * std::int64_t{256} + threadIdx.x, step = gridDim.x * std::int64_t{256};
    for (std::int64_t i = first; i < bytes / 16; i += step) {
        store_relaxed(reinterpret_cast<uint4*>(region) + i, i * 16 < state_bytes ? uint4{} : U::sentinel());
    }
    if (!pool) return;
    for (std::int64_t i = first; i < slots * slot_bytes / 16; i += step) {
        const bool latents = i * 16 % slot_bytes < latent_bytes;
        store_relaxed(reinterpret_cast<uint4*>(pool) + i,
                      latents ? U::sentinel() : make_uint4(no_square, no_square, no_square, no_square));
    }
}

// ------------------------------------------------------------------------------------------------------------------ host

using Kernel = void (*)(const Params);

/// A compiled tile, as the host sees it.
struct Compiled {
    int tokens, rows;
    Known known;
    Kernel kernel;
    int threads, gather_threads, gather_at_once;
    int weight_bytes, token_bytes, parts_bytes, max_ring;
    bool pooled, streamed;
    bool receives;
};

template <int tokens, int rows, Known known = Known{}>
constexpr Compiled compiled() {
    using T = Tile<tokens, rows, known>;
    return {tokens,          rows,           known,          tail<T>,     T::threads, T::gather_threads, T::gather_at_once,
            T::weight_bytes, T::token_bytes, T::parts_bytes, T::max_ring, T::pooled,  T::streamed,       T::receives};
}

constexpr Known pairs_of_four{.split = 4, .world = 2, .turns = 1};
constexpr Known pairs_of_two{.split = 2, .world = 2, .turns = 1};

/// The first that serves a plan is taken: what is known at compile time comes first.
constexpr Compiled tiles[] = {
#ifdef LATENT_MOE_FUSED_STAMPS
    compiled<8, 128, Known{4, 2, 1, true}>(),
    compiled<16, 128, Known{4, 2, 1, true}>(),
    compiled<32, 128, Known{4, 2, 1, true}>(),
    compiled<64, 128, Known{4, 2, 1, true}>(),
    compiled<128, 128, Known{4, 2, 1, true}>(),
    compiled<32, 64, Known{2, 2, 1, true}>(),
    compiled<64, 64, Known{2, 2, 1, true}>(),
    compiled<128, 64, Known{2, 2, 1, true}>(),
    // e4m3, which no tail of the library runs (docs/decisions/0012-float8-fused.md).
    compiled<8, 128, Known{4, 2, 1, true, true}>(),
    compiled<8, 128, Known{4, 2, 1, false, true}>(),
    compiled<16, 128, Known{4, 2, 1, false, true}>(),
    compiled<8, 128, Known{.float8 = true}>(),
    compiled<16, 128, Known{.float8 = true}>(),
    compiled<8, 64, Known{.float8 = true}>(),
    compiled<16, 64, Known{.float8 = true}>(),
#endif
    compiled<128, 128, pairs_of_four>(),
    compiled<8, 64, pairs_of_two>(),
    compiled<16, 64, pairs_of_two>(),
    compiled<8, 128, pairs_of_two>(),
    compiled<16, 128, pairs_of_two>(),
    compiled<32, 64, pairs_of_two>(),
    compiled<64, 64, pairs_of_two>(),
    compiled<128, 64, pairs_of_two>(),
    compiled<8, 128, pairs_of_four>(),
    compiled<16, 128, pairs_of_four>(),
    compiled<32, 128, pairs_of_four>(),
    compiled<64, 128, pairs_of_four>(),
    compiled<8, 128>(),
    compiled<16, 128>(),
    compiled<32, 128>(),
    compiled<64, 128>(),
    compiled<8, 64>(),
    compiled<16, 64>(),
    compiled<32, 64>(),
    compiled<64, 64>(),
    compiled<128, 64>(),
    compiled<128, 128>(),
};

const Compiled* find(const FusedTailShape& shape, const FusedTailPlan& plan, bool stamps = false) {
    if (plan.clusters < 1) return nullptr;
    const std::int64_t turns =
        (shape.hidden / shape.world + plan.rows * plan.clusters - 1) / std::max(1, plan.rows * plan.clusters);
    for (const Compiled& c : tiles) {
        const auto serves = [](int known, std::int64_t actual) { return known == 0 || known == actual; };
        if (c.tokens == plan.tokens && c.rows == plan.rows && c.known.float8 == plan.float8 && (stamps || !c.known.stamps) &&
            serves(c.known.split, plan.split) && serves(c.known.world, shape.world) && serves(c.known.turns, turns)) {
            return &c;
        }
    }
    return nullptr;
}

constexpr int log2_of(int n) {
    int log = 0;
    while (1 << log < n) ++log;
    return log;
}
constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) {
    return (n + to - 1) / to * to;
}

bool valid(const FusedTailShape& s) {
    return s.world >= 1 && s.world <= max_ranks && s.hidden > 0 && s.hidden % (8 * s.world) == 0 && s.latent > 0 &&
           s.latent % 8 == 0 && s.hidden <= 1 << 20 && s.latent <= 1 << 20 && s.capacity >= 1 && s.capacity <= 1 << 16;
}

struct RegionLayout {
    std::int64_t latent_box, column_box, slot_bytes, bytes;
    explicit RegionLayout(const FusedTailShape& s) {
        latent_box = round_up(s.capacity * s.latent * 2, 128);
        column_box = round_up(s.capacity * (s.hidden / s.world) * 2, 128);
        slot_bytes = (s.world - 1) * (latent_box + 2 * column_box);
        bytes = state_bytes + slots * slot_bytes;
    }
};

/// The workspace: for each slot the latents of one kernel, and their squares.
struct PoolLayout {
    std::int64_t squares_row, slot_bytes, bytes;
    explicit PoolLayout(const FusedTailShape& s) {
        const std::int64_t blocks = PackedLayout{s.hidden / s.world, s.latent}.blocks();
        // At most, of a row: every part of K ends with an item that is not full.
        squares_row = round_up((blocks * 8 + pool_item_units - 1) / pool_item_units + 2 * max_split, 4);
        slot_bytes = blocks * pool_block_bytes + squares_row * most_pooled_rows * std::int64_t{sizeof(float)};
        bytes = slots * slot_bytes;
    }
};

/// The plan's part of the parameters: how the work and the shared memory are cut. False: it cannot be.
bool cut(const FusedTailShape& shape, const FusedTailPlan& plan, const Compiled& tile, Params& p) {
    const std::int64_t columns = shape.hidden / shape.world;
    const PackedLayout layout{columns, shape.latent};
    p.blocks = static_cast<int>(layout.blocks());
    p.tiles = static_cast<int>((columns + tile.rows - 1) / tile.rows);
    p.clusters = plan.clusters;
    p.receivers = plan.receivers * plan.split;
    p.split_log2 = log2_of(plan.split);
    p.latent_units = static_cast<int>(shape.latent / 8);
    p.column_units = static_cast<int>(columns / 8);
    if (plan.split < 1 || plan.split > max_split || plan.split != 1 << p.split_log2 || plan.split > p.blocks ||
        plan.split * fragment_rows > tile.rows || plan.clusters < 1 || plan.clusters > p.tiles ||
        fused_tail_grid(plan) > max_grid || plan.receivers < 0 || (plan.receivers > 0 && !tile.receives)) {
        return false;
    }
    const int tiles_of_cluster = (p.tiles + plan.clusters - 1) / plan.clusters;
    p.block_stride = (p.blocks + plan.split - 1) / plan.split;
    // So many columns at once that a thread has at most as many rows as it polls together; but no more passes than barriers.
    const int units = p.block_stride * 8, fewest = (p.block_stride + max_passes - 1) / max_passes * 8;
    p.gather_columns = std::min(
        {units, tile.gather_threads, std::max(fewest, tile.gather_threads * tile.gather_at_once / tile.tokens / 8 * 8)});
    if (tile.pooled) {
        // Even passes, as few as there can be of at most `most_blocks_of_pass`.
        const int most = std::max(fewest, most_blocks_of_pass * 8), passes = (units + most - 1) / most;
        p.gather_columns = tile.streamed ? units : (p.block_stride + passes - 1) / passes * 8;
    }
    if (p.gather_columns < fewest) return false;
    p.gather_rows = std::max(1, tile.gather_threads / p.gather_columns);
    p.pool_items = (units + pool_item_units - 1) / pool_item_units;
    p.items_of_count = (p.pool_items + pool_counts - 1) / pool_counts;

    const std::int64_t shared_sums = std::int64_t{4} * tiles_of_cluster * tile.tokens * tile.rows / plan.split;
    const std::int64_t block_squares = tile.pooled ? 0 : round_up(std::int64_t{4} * tile.tokens * p.block_stride, 16);
    const int all_blocks = tiles_of_cluster * p.block_stride;
    const int most_places = std::min(max_token_ring, std::max(2, all_blocks));
    p.token_ring = tile.streamed ? std::clamp(plan.token_ring, 2, most_places) : p.block_stride;
    const std::int64_t others = std::int64_t{p.token_ring} * tile.token_bytes + tile.parts_bytes + shared_sums +
                                round_up(std::int64_t{4} * plan.split * tile.tokens, 16) + block_squares + at_ring;
    const std::int64_t fits = (max_shared_bytes - others) / tile.weight_bytes;
    if (others > max_shared_bytes || fits < 2) return false;
    p.ring = static_cast<int>(std::min<std::int64_t>({fits, tile.max_ring, std::max(2, tiles_of_cluster * p.block_stride)}));
    p.in_flight_early = std::clamp(plan.in_flight_early, 1, p.ring);
    p.in_flight_late = std::clamp(plan.in_flight_late, p.in_flight_early, p.ring);
    p.prefetch_blocks = std::max(plan.prefetch_blocks, 0), p.prefetch_clocks = plan.prefetch_clocks;
    p.prefetch_at_once = plan.prefetch_at_once;

    p.at.tokens = at_ring + p.ring * tile.weight_bytes;
    p.at.parts = p.at.tokens + p.token_ring * tile.token_bytes;
    p.at.shared_sums = p.at.parts + tile.parts_bytes;
    p.at.squares = p.at.shared_sums + static_cast<int>(shared_sums);
    p.at.block_squares = p.at.squares + static_cast<int>(round_up(4 * plan.split * tile.tokens, 16));
    p.at.bytes = p.at.block_squares + static_cast<int>(block_squares);
    return true;
}

/// Clusters of this size that the device can hold at once.
cudaError_t resident_clusters(const Compiled& tile, int split, int shared_bytes, int& count) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(split));
    config.blockDim = dim3(static_cast<unsigned>(tile.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(split);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(&count, tile.kernel, &config);
}

/// A cluster more takes the peers' columns, where there is room for it, and where a call waits for weights (measured: with
/// fewer it gains nothing) that can come only once CTAs of the call before have left: its own do not fit beside those.
cudaError_t add_receivers(const FusedTailShape& shape, std::int64_t weights_of_cta, int max_ctas, int shared_bytes,
                          FusedTailPlan& plan) {
    constexpr std::int64_t pays_from_bytes = 160 << 10;
    FusedTailPlan wider = plan;
    wider.receivers = 1;
    const Compiled* tile = find(shape, wider);
    if (!tile || weights_of_cta < pays_from_bytes || !tile->receives ||
        fused_tail_grid(wider) > std::min(max_ctas, max_grid))
        return cudaSuccess;
    int resident = 0;
    if (const cudaError_t e = resident_clusters(*tile, plan.split, shared_bytes, resident); e != cudaSuccess) return e;
    if (resident > plan.clusters && resident < 2 * plan.clusters) plan = wider;
    return cudaSuccess;
}

/// What hangs on shape and plan alone: with its divisions it is most of what a launch costs this library on the host.
struct Prepared {
    FusedTailShape shape;
    FusedTailPlan plan;
    bool stamps = false;
    const Compiled* tile = nullptr;  ///< null: that cannot run
    Params p{};

    Prepared() = default;
    Prepared(const FusedTailShape& shape_, const FusedTailPlan& plan_, bool stamps_)
        : shape(shape_), plan(plan_), stamps(stamps_) {
        const Compiled* found = valid(shape) ? find(shape, plan, stamps) : nullptr;
        if (!found || !cut(shape, plan, *found, p)) return;
        tile = found;
        const RegionLayout region(shape);
        p.slot_bytes = region.slot_bytes, p.latent_box = region.latent_box, p.column_box = region.column_box;
        const PoolLayout pool(shape);
        p.pool_slot_bytes = pool.slot_bytes, p.pool_squares_row = static_cast<int>(pool.squares_row);
        p.inverse_latent = 1.0F / static_cast<float>(shape.latent);
        p.digest = plan.digest;
    }
};

/// A thread's calls are mostly of one shape and one plan after the other. The launch fills in the rest of `p` in place.
Prepared& prepared(const FusedTailShape& shape, const FusedTailPlan& plan, bool stamps) {
    thread_local Prepared last;
    if (!last.tile || last.shape != shape || last.plan != plan || last.stamps != stamps)
        last = Prepared(shape, plan, stamps);
    return last;
}

/// Of a shape that was prepared.
bool valid(const FusedTail& op) {
    const FusedTailShape& s = op.shape;
    const PeerWindow& w = op.exchange.window;
    if (w.world != s.world || w.rank < 0 || w.rank >= w.world || op.exchange.tail > 255 || !op.exchange.record) {
        return false;
    }
    for (int r = 0; r < w.world; ++r) {
        if (!w.base[r]) return false;
    }
    return op.region_offset % 128 == 0 && op.region_offset >= control_bytes && op.tokens >= 0 && op.tokens <= s.capacity;
}

}  // namespace
}  // namespace fused

int fused_tail_grid(const FusedTailPlan& plan) {
    return (plan.clusters + plan.receivers) * plan.split;
}

cudaError_t prepare_fused_tail() {
    int device = 0, major = 0;
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
    if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device); e != cudaSuccess)
        return e;
    if (major != 9) return cudaErrorNotSupported;
    for (const fused::Compiled& tile : fused::tiles) {
        cudaFuncAttributes attributes{};
        if (const cudaError_t e = cudaFuncGetAttributes(&attributes, tile.kernel); e != cudaSuccess) return e;
        if (attributes.ptxVersion != 90) return cudaErrorNotSupported;
        if (const cudaError_t e =
                cudaFuncSetAttribute(tile.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, fused::max_shared_bytes);
            e != cudaSuccess) {
            return e;
        }
    }
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, fused::idle);
}

cudaError_t fused_tail_fits(const FusedTailShape& shape, const FusedTailPlan& plan) {
    fused::Params p{};
    const fused::Compiled* tile = fused::valid(shape) ? fused::find(shape, plan) : nullptr;
    if (!tile || !fused::cut(shape, plan, *tile, p)) return cudaErrorInvalidValue;
    int resident = 0;
    if (const cudaError_t e = fused::resident_clusters(*tile, plan.split, p.at.bytes, resident); e != cudaSuccess) return e;
    return resident >= plan.clusters + plan.receivers ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

cudaError_t fused_tail_plans(const FusedTailShape& shape, std::int64_t tokens, int max_ctas, bool float8,
                             std::vector<FusedTailPlan>* plans) {
    if (!fused::valid(shape) || tokens < 0 || max_ctas < 1 || !plans) return cudaErrorInvalidValue;
    // The narrowest tile that holds all tokens, else the widest there is; if it does not fit, narrower ones.
    int width = 8;
    while (width < tokens && width < 128) width *= 2;
    for (; width >= 8; width /= 2) {
        std::vector<std::pair<std::int64_t, FusedTailPlan>> found;  // with their costs
        for (const fused::Compiled& tile : fused::tiles) {
            // The same tile, more known, takes the same plans.
            if (tile.tokens != width || tile.known.split != 0 || tile.known.float8 != float8) continue;
            for (int split = 1; split <= fused::max_split; split *= 2) {
                FusedTailPlan candidate;
                candidate.float8 = tile.known.float8;
                if (candidate.float8) candidate.in_flight_early = 12, candidate.in_flight_late = 24;  // half as large
                // Measured, K3 as one of two ranks.
                if (tile.tokens == 32) candidate.in_flight_early = 2;
                if (tile.tokens == 64) candidate.in_flight_early = 1;
                if (tile.tokens == 128) candidate.token_ring = 4;
                candidate.tokens = tile.tokens, candidate.rows = tile.rows, candidate.split = split;
                const int all = static_cast<int>((shape.hidden / shape.world + tile.rows - 1) / tile.rows);
                int most = std::min({all, max_ctas / split, max_grid / split});
                fused::Params p{};
                for (candidate.clusters = most; candidate.clusters >= 1; --candidate.clusters) {
                    if (!fused::cut(shape, candidate, tile, p)) break;  // fewer clusters need more shared memory, not less
                    int resident = 0;
                    if (const cudaError_t e = fused::resident_clusters(tile, split, p.at.bytes, resident); e != cudaSuccess)
                        return e;
                    if (resident >= candidate.clusters) break;
                    candidate.clusters = std::min(candidate.clusters, resident + 1);
                }
                if (candidate.clusters < 1) continue;
                const int turns = (all + candidate.clusters - 1) / candidate.clusters;
                candidate.clusters = (all + turns - 1) / turns;  // no more than the same number of turns needs
                if (!fused::cut(shape, candidate, tile, p)) continue;
                // What a CTA must take in: its weights, the latents, of every rank or summed; and a round of the cluster for
                // every further tile.
                const std::int64_t weights = std::int64_t{turns} * p.block_stride * tile.weight_bytes;
                const std::int64_t latents =
                    std::int64_t{p.block_stride} * tile.token_bytes * (tile.pooled ? 1 : shape.world);
                const std::int64_t cost = weights + latents + (turns - 1) * 150'000 - tile.rows;
                const cudaError_t e = fused::add_receivers(shape, weights, max_ctas, p.at.bytes, candidate);
                if (e != cudaSuccess) return e;
                found.emplace_back(cost, candidate);
            }
        }
        if (found.empty()) continue;
        std::ranges::stable_sort(found, {}, [](const auto& each) { return each.first; });
        plans->clear();
        for (const auto& each : found) plans->push_back(each.second);
        return cudaSuccess;
    }
    return cudaErrorLaunchOutOfResources;
}

std::int64_t fused_tail_region_bytes(const FusedTailShape& shape) {
    return fused::RegionLayout(shape).bytes;
}

std::int64_t fused_tail_workspace_bytes(const FusedTailShape& shape) {
    return fused::PoolLayout(shape).bytes;
}

cudaError_t reset_fused_tail(void* region, void* workspace, const FusedTailShape& shape, cudaStream_t stream) {
    if (!region || !fused::valid(shape)) return cudaErrorInvalidValue;
    const fused::PoolLayout pool(shape);
    const std::int64_t latents = PackedLayout{shape.hidden / shape.world, shape.latent}.blocks() * fused::pool_block_bytes;
    return launch({.grid = 132, .block = 256, .stream = stream}, fused::reset, static_cast<char*>(region),
                  fused::RegionLayout(shape).bytes, static_cast<char*>(workspace), pool.slot_bytes, latents);
}

cudaError_t launch_fused_tail(const FusedTail& op, cudaStream_t stream) {
    fused::Prepared& prepared = fused::prepared(op.shape, op.plan, op.stamps != nullptr);
    const fused::Compiled* tile = prepared.tile;
    if (!tile || !fused::valid(op)) return cudaErrorInvalidValue;
    fused::Params& p = prepared.p;  // all that is the call's own is set here, whatever the call before left
    p.exchange = op.exchange;
    p.routed = unit_rows(op.routed, op.shape.latent, Dtype::bf16);
    p.shared = unit_rows(op.shared, op.shape.hidden, Dtype::bf16);
    p.prefix = unit_rows(op.prefix, op.shape.hidden, Dtype::bf16);
    p.out = unit_rows(op.out, op.shape.hidden, Dtype::bf16);
    p.weights = static_cast<const char*>(op.packed);
    p.gamma = op.rms_norm ? static_cast<const char*>(op.gamma) : nullptr;
    p.column_scales = op.column_scales;
    const PeerWindow& window = op.exchange.window;
    p.rank = window.rank, p.region = op.region_offset;
    p.own_region = static_cast<char*>(window.base[window.rank]) + op.region_offset;
    p.peer_region = window.world == 2 ? static_cast<char*>(window.base[1 - window.rank]) + op.region_offset : nullptr;
    p.pool = static_cast<char*>(op.workspace);
    p.scale = op.scale, p.epsilon = op.epsilon;
    p.rms_norm = op.rms_norm;
    p.exchange_shared = p.shared && !op.shared_is_sum && op.shape.world > 1;
    p.release = op.releases_early;
    p.timeout_ticks =
        static_cast<std::uint32_t>(std::min<std::uint64_t>((op.exchange.timeout_ns >> fused::tick_log2_ns) + 1, 1u << 30));
    p.stamps = op.stamps;
    if (op.tokens > 0 && tile->pooled && !op.workspace) return cudaErrorInvalidValue;
    if (op.tokens > 0 &&
        (!p.routed || !p.out || !p.weights || !aligned(p.routed) || !aligned(p.shared) || !aligned(p.prefix) ||
         !aligned(p.out) || (op.plan.float8 && !p.column_scales) || reinterpret_cast<std::uintptr_t>(p.gamma) % 16 != 0)) {
        return cudaErrorInvalidValue;
    }
    if (op.tokens == 0) {
        p.tokens = 0;
        return launch({.grid = 32, .block = 256, .dependent = op.starts_early, .stream = stream}, fused::idle, p);
    }
    for (std::int64_t first = 0; first < op.tokens; first += op.plan.tokens) {
        p.tokens = static_cast<int>(std::min<std::int64_t>(op.plan.tokens, op.tokens - first));
        const cudaError_t e = launch({.grid = fused_tail_grid(op.plan),
                                      .block = tile->threads,
                                      .cluster = op.plan.split,
                                      .shared_bytes = p.at.bytes,
                                      .dependent = op.starts_early,
                                      .stream = stream},
                                     tile->kernel, p);
        if (e != cudaSuccess) return e;
        for (UnitRows* rows : {&p.routed, &p.shared, &p.prefix, &p.out}) {
            if (*rows) rows->data += op.plan.tokens * rows->stride;
        }
    }
    return cudaSuccess;
}

}  // namespace latent_moe::gpu
