// Checks and times the kernels for many tokens: the tile product, and the token-parallel tail in one kernel, with ranks that
// are streams of this process and share its one GPU.
//
//     nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -cudart static --expt-relaxed-constexpr -Isrc -Iinclude
//          src/gpu/kernels/{tile_projection,token_parallel_tail,pack_weights,elementwise,all_reduce,all_reduce_rms_norm}.cu
//          tests/gpu/prefill_check.cu -o prefill_check -ldl (one line)
//     ./prefill_check [product] [check] [sizes] [long] [huge] [replay] [late] [faults] [time-product] [time] [time-ranks]
//     [alone] [ranks=R,R,…] [ways=CARRIERS:POSTING:SETTLE,…]      (0, -1, 0: as the plan says)
//
// `alone`, before `time-ranks ranks=2`: one rank that talks to itself, so all but the link.
//
// Exit status 0: everything that was asked for passed. cuBLASLt is compared with if libcublasLt.so.13 is in the library
// path.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <cuda_bf16.h>

#include "cublas_lt.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/kernels/tile_projection.h"
#include "gpu/kernels/token_parallel_tail.h"

using namespace latent_moe;
using namespace latent_moe::gpu;

namespace {

#define CUDA(call)                                                                                      \
    do {                                                                                                \
        if (const cudaError_t error_ = (call); error_ != cudaSuccess) {                                 \
            std::printf("FATAL %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            std::exit(2);                                                                               \
        }                                                                                               \
    } while (0)

int failures = 0, devices = 1;

/// How carriers send, where it is not as the plan says; `time-ranks` takes every way in turn.
struct Sending {
    int carriers = 0, posting = -1, settle = 0;
} sending;
std::vector<Sending> ways{{}};

TokenParallelPlan plan_of(const TokenParallelShape& shape, std::int64_t tokens, int ctas) {
    TokenParallelPlan plan = plan_token_parallel_tail(shape, tokens, ctas, sending.carriers);
    if (sending.posting >= 0) plan.posting = sending.posting;
    if (sending.settle > 0) plan.settle = sending.settle;
    return plan;
}

__attribute__((format(printf, 2, 3))) void expect(bool ok, const char* format, ...) {
    if (ok) return;
    ++failures;
    std::va_list args;
    va_start(args, format);
    std::printf("FAIL ");
    std::vprintf(format, args);
    std::printf("\n");
    va_end(args);
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- data

__host__ __device__ inline unsigned mixed(unsigned x) {
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return x;
}

__global__ void fill_random(__nv_bfloat16* to, std::size_t n, unsigned seed, float scale, float bias) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
         i += std::size_t{gridDim.x} * blockDim.x) {
        const unsigned x =
            mixed(static_cast<unsigned>(i) * 2654435761u ^ static_cast<unsigned>(i >> 32) ^ seed * 0x9e3779b9u);
        float v = (static_cast<float>(x >> 8) * (1.F / 8388608.F) - 1.F) * scale + bias;
        if (x % 61 == 0) v = -0.F;
        to[i] = __float2bfloat16(v);
    }
}

struct Buffer {
    __nv_bfloat16* data = nullptr;
    std::size_t bytes = 0;
    Buffer() = default;
    explicit Buffer(std::int64_t elements) : bytes(static_cast<std::size_t>(elements) * 2) {
        CUDA(cudaMalloc(reinterpret_cast<void**>(&data), std::max<std::size_t>(bytes, 256)));
    }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data, other.data), std::swap(bytes, other.bytes);
        return *this;
    }
    ~Buffer() { cudaFree(data); }
    void randomise(unsigned seed, float scale = 1, float bias = 0) const {
        fill_random<<<1056, 256>>>(data, bytes / 2, seed, scale, bias);
        CUDA(cudaGetLastError());
    }
    void poison(cudaStream_t stream = nullptr) const { CUDA(cudaMemsetAsync(data, 0xff, bytes, stream)); }
};

// ---- reference: some columns of every row, dots in float64

constexpr int most_world = 16;
struct Reference {
    const __nv_bfloat16* a;  ///< normalised latents, if given; else made from `routed`
    const __nv_bfloat16 *routed[most_world], *shared[most_world], *prefix, *w, *gamma;
    std::int64_t a_stride, hidden, latent, prefix_stride, out_stride, rows;
    int world, samples;
    bool no_shared;
    float scale;
    const __nv_bfloat16* out;
    unsigned seed;
};

__device__ float plain(__nv_bfloat16 v) {
    return __bfloat162float(v);
}
__device__ float round_once(float v) {
    return __bfloat162float(__float2bfloat16(v));
}

struct Verdict {
    unsigned long long wrong, checked;
    long long row, column;
    double got, want, error_squares, squares;
};

/// A CTA of 256 threads a row.
__global__ void judge(const Reference r, Verdict* verdict) {
    extern __shared__ float latent[];
    __shared__ double parts[8];
    const auto sum = [&](double v) {
        for (int k = 16; k; k /= 2) v += __shfl_xor_sync(0xffffffffu, v, k);
        __syncthreads();
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
        __syncthreads();
        double all = 0;
        for (const double part : parts) all += part;
        return all;
    };
    for (std::int64_t row = blockIdx.x; row < r.rows; row += gridDim.x) {
        double squares = 0;
        for (std::int64_t k = threadIdx.x; k < r.latent; k += blockDim.x) {
            float v = 0;
            if (r.a) {
                v = plain(r.a[row * r.a_stride + k]);
            } else {
                for (int s = 0; s < r.world; ++s) v += plain(r.routed[s][row * r.latent + k]);
                v = round_once(v);
            }
            latent[k] = v;
            squares += static_cast<double>(v) * v;
        }
        squares = sum(squares);
        if (r.gamma) {
            const double factor = 1 / sqrt(squares / static_cast<double>(r.latent) + 1e-5);
            for (std::int64_t k = threadIdx.x; k < r.latent; k += blockDim.x)
                latent[k] = round_once(static_cast<float>(latent[k] * factor * plain(r.gamma[k])));
        }
        __syncthreads();
        for (int i = 0; i < r.samples; ++i) {
            const std::int64_t n = mixed(static_cast<unsigned>(row * 977 + i) ^ r.seed) % r.hidden;
            double dot = 0;
            for (std::int64_t k = threadIdx.x; k < r.latent; k += blockDim.x)
                dot += static_cast<double>(latent[k]) * plain(r.w[n * r.latent + k]);
            dot = sum(dot);
            if (threadIdx.x == 0) {
                float shared = 0;
                if (!r.no_shared) {
                    for (int s = 0; s < r.world; ++s) shared += plain(r.shared[s][row * r.hidden + n]);
                    shared = round_once(shared);
                }
                double want = shared + r.scale * dot;
                if (r.prefix) want = round_once(static_cast<float>(want)) + plain(r.prefix[row * r.prefix_stride + n]);
                const double got = plain(r.out[row * r.out_stride + n]);
                atomicAdd(&verdict->checked, 1ULL);
                atomicAdd(&verdict->error_squares, isfinite(got) ? (got - want) * (got - want) : 1e30);
                atomicAdd(&verdict->squares, want * want);
                if (!(fabs(got - want) <= 0.02 + 0.01 * fabs(want)) && atomicAdd(&verdict->wrong, 1ULL) == 0)
                    verdict->row = row, verdict->column = n, verdict->got = got, verdict->want = want;
            }
        }
        __syncthreads();
    }
}

void check_against(const Reference& r, const char* what) {
    Verdict* device;
    CUDA(cudaMalloc(&device, sizeof *device));
    CUDA(cudaMemset(device, 0, sizeof *device));
    const int shared = static_cast<int>(r.latent * 4);
    CUDA(cudaFuncSetAttribute(judge, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    judge<<<1056, 256, shared>>>(r, device);
    CUDA(cudaGetLastError());
    Verdict verdict;
    CUDA(cudaMemcpy(&verdict, device, sizeof verdict, cudaMemcpyDefault));
    expect(verdict.wrong == 0, "%s: %llu of %llu wrong, first at row %lld column %lld: got %g expected %g", what,
           verdict.wrong, verdict.checked, verdict.row, verdict.column, verdict.got, verdict.want);
    expect(static_cast<long long>(verdict.checked) == r.rows * r.samples, "%s: checked %llu", what, verdict.checked);
    const double error = std::sqrt(verdict.error_squares / std::max(verdict.squares, 1e-30));
    expect(error < 4e-3, "%s: relative error %.2e", what, error);
    cudaFree(device);
}

__global__ void count_differences(const uint4* a, const uint4* b, std::size_t units, unsigned long long* count) {
    unsigned long long found = 0;
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < units;
         i += std::size_t{gridDim.x} * blockDim.x) {
        const uint4 x = a[i], y = b[i];
        found += x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w;
    }
    if (found) atomicAdd(count, found);
}
unsigned long long differences(const void* a, const void* b, std::size_t bytes) {
    unsigned long long *count, result = 0;
    CUDA(cudaMalloc(&count, 8));
    CUDA(cudaMemset(count, 0, 8));
    count_differences<<<1056, 256>>>(static_cast<const uint4*>(a), static_cast<const uint4*>(b), bytes / 16, count);
    CUDA(cudaMemcpy(&result, count, 8, cudaMemcpyDefault));
    cudaFree(count);
    return result;
}

Buffer packed(const Buffer& w, std::int64_t rows, std::int64_t latent) {
    Buffer p(PackedLayout{rows, latent}.bytes() / 2);
    CUDA(pack_weights({.w = {w.data}, .rows = rows, .latent = latent, .packed = p.data}, nullptr));
    return p;
}

// ---- the product

void check_product() {
    for (const auto& [m, n, k] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{512, 3584, 3584},
                                  {1000, 7168, 3584},
                                  {1, 8, 8},
                                  {257, 136, 72},
                                  {300, 264, 512},
                                  {2914, 1032, 1024},
                                  {130, 7168, 64}}) {
        Buffer a(m * k), w(n * k), addend(m * n), prefix(m * n), c(m * n);
        a.randomise(1), w.randomise(2, 1.7F / std::sqrt(static_cast<float>(k))), addend.randomise(3), prefix.randomise(4);
        const Buffer p = packed(w, n, k);
        for (const int columns : {128, 256}) {
            for (const int form : {0, 1, 2}) {  // alone; with addend; with addend and prefix, one of them in place
                c.poison();
                if (form == 2)
                    CUDA(cudaMemcpy(c.data, columns == 128 ? prefix.data : addend.data, c.bytes, cudaMemcpyDefault));
                const __nv_bfloat16* add = form == 2 && columns == 256 ? c.data : addend.data;
                const __nv_bfloat16* pre = form == 2 && columns == 128 ? c.data : prefix.data;
                CUDA(tile_projection({.a = {a.data},
                                      .packed = p.data,
                                      .addend = form > 0 ? ConstRows{add} : ConstRows{},
                                      .prefix = form > 1 ? ConstRows{pre} : ConstRows{},
                                      .c = {c.data},
                                      .scale = 0.75F,
                                      .tokens = m,
                                      .rows = n,
                                      .latent = k,
                                      .tile_columns = columns},
                                     nullptr));
                CUDA(cudaDeviceSynchronize());
                char what[100];
                std::snprintf(what, sizeof what, "product %ld x %ld x %ld, tiles of %d, form %d", static_cast<long>(m),
                              static_cast<long>(n), static_cast<long>(k), columns, form);
                check_against({.a = a.data,
                               .routed = {},
                               .shared = {addend.data},
                               .prefix = form > 1 ? prefix.data : nullptr,
                               .w = w.data,
                               .gamma = nullptr,
                               .a_stride = k,
                               .hidden = n,
                               .latent = k,
                               .prefix_stride = n,
                               .out_stride = n,
                               .rows = m,
                               .world = 1,
                               .samples = 24,
                               .no_shared = form == 0,
                               .scale = 0.75F,
                               .out = c.data,
                               .seed = 5},
                              what);
            }
        }
    }
    std::printf("product: checked, %d failures\n", failures);
}

/// Replays a graph of `body(0 … layers - 1)`; median µs a layer.
double time_layers(int layers, cudaStream_t s, const std::function<void(int)>& body, int repeats = 7) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int l = 0; l < layers; ++l) body(l);
    CUDA(cudaStreamEndCapture(s, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    std::vector<double> all;
    for (int i = 0; i < repeats + 2; ++i) {
        CUDA(cudaEventRecord(begin, s));
        CUDA(cudaGraphLaunch(exec, s));
        CUDA(cudaEventRecord(end, s));
        CUDA(cudaEventSynchronize(end));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) all.push_back(ms * 1000 / layers);
    }
    std::sort(all.begin(), all.end());
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaEventDestroy(begin), cudaEventDestroy(end);
    return all[all.size() / 2];
}

/// The fastest of its candidates.
struct Cublas : test::CublasLt {
    Buffer workspace{32 << 20};

    struct Product {
        cublasLtMatmulDesc_t op{};
        cublasLtMatrixLayout_t w{}, a{}, c{};
        cublasLtMatmulAlgo_t algorithm{};
        double us = 0;
    };
    void run(const Product& p, const void* w, const void* a, const void* add, void* c, cudaStream_t s) const {
        const float one = 1, beta = add ? 1.F : 0.F;
        matmul(handle, p.op, &one, w, p.w, a, p.a, &beta, add ? add : c, p.c, c, p.c, &p.algorithm, workspace.data,
               workspace.bytes, s);
    }
    Product best(std::int64_t m, std::int64_t n, std::int64_t k, int layers, cudaStream_t s,
                 const std::function<void(const Product&, int)>& body) const {
        Product found, p;
        desc(&p.op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        const cublasOperation_t transposed = CUBLAS_OP_T;
        set_desc(p.op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
        layout(&p.w, CUDA_R_16BF, k, n, k), layout(&p.a, CUDA_R_16BF, k, m, k), layout(&p.c, CUDA_R_16BF, n, m, n);
        cublasLtMatmulPreference_t wish;
        preference(&wish);
        set_preference(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace.bytes, sizeof workspace.bytes);
        cublasLtMatmulHeuristicResult_t results[8];
        int count = 0;
        heuristic(handle, p.op, p.w, p.a, p.c, p.c, wish, 8, results, &count);
        for (int i = 0; i < count; ++i) {
            p.algorithm = results[i].algo;
            p.us = time_layers(
                layers, s, [&](int l) { body(p, l); }, 3);
            if (found.us == 0 || p.us < found.us) found = p;
        }
        return found;
    }
};

cudaStream_t new_stream() {
    cudaStream_t s;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

void time_product() {
    const Cublas lt;
    const cudaStream_t s = new_stream();
    constexpr int layers = 8, sets = 3;
    constexpr std::int64_t k = 3584, most = 8192;
    std::printf("product C = addend + A W^T, us, K %ld, %d layers of distinct weights, %d rotating sets of rows\n",
                static_cast<long>(k), layers, sets);
    std::printf("%6s %6s | %8s %8s %8s | %8s | %6s | TFLOP/s\n", "M", "N", "chosen", "128", "256", "cuBLASLt", "ratio");
    Buffer a(sets * most * k), c(sets * most * 7168), add(sets * most * 7168), w(layers * 7168 * k);
    a.randomise(1), add.randomise(2), w.randomise(3, 0.03F);
    Buffer p(layers * 7168 * k);
    for (int l = 0; l < layers; ++l)
        CUDA(pack_weights({.w = {w.data + l * 7168 * k}, .rows = 7168, .latent = k, .packed = p.data + l * 7168 * k},
                          nullptr));
    CUDA(cudaDeviceSynchronize());
    for (const std::int64_t n : {7168, 3584}) {
        for (const std::int64_t m : {64, 128, 256, 512, 1024, 2048, 4096, 8192}) {
            const auto rows = [&](const Buffer& b, int l, std::int64_t width) { return b.data + l % sets * m * width; };
            const auto ours = [&](int columns) {
                return time_layers(layers, s, [&](int l) {
                    CUDA(tile_projection({.a = {rows(a, l, k)},
                                          .packed = p.data + l * 7168 * k,
                                          .addend = {rows(add, l, n)},
                                          .c = {rows(c, l, n)},
                                          .tokens = m,
                                          .rows = n,
                                          .latent = k,
                                          .tile_columns = columns},
                                         s));
                });
            };
            double library = 0;
            if (lt.library) {
                const auto body = [&](const Cublas::Product& q, int l) {
                    lt.run(q, w.data + l * 7168 * k, rows(a, l, k), rows(add, l, n), rows(c, l, n), s);
                };
                const Cublas::Product q = lt.best(m, n, k, layers, s, body);
                library = time_layers(layers, s, [&](int l) { body(q, l); });
            }
            const double chosen = ours(0);
            std::printf("%6ld %6ld | %8.2f %8.2f %8.2f | %8.2f | %6.3f | %.0f\n", static_cast<long>(m), static_cast<long>(n),
                        chosen, ours(128), ours(256), library, library / chosen, 2e-6 * m * n * k / chosen);
        }
    }
}

// ---- the tail

struct Case {
    std::int64_t tokens;
    bool prefix = false;
    bool in_place = false;  ///< out is shared (or, with `reduced`, not)
    bool prefix_in_out = false;
    int shared = 1;  ///< 0: none; 1: partials; 2: reduced
    bool stop = false;
    bool norm = true;
};

bool alone = false;  ///< one rank that talks to itself: times without a link

struct Ranks {
    int world;
    std::int64_t hidden, latent, most;
    TokenParallelShape shape;
    int ctas;
    std::vector<cudaStream_t> stream;
    std::vector<Buffer> window, workspace, routed, shared, prefix, out;
    std::vector<Buffer> weights, gammas;
    Buffer gamma, w, p;
    std::vector<FaultRecord*> board;
    std::uint64_t timeout_ns = 8'000'000'000;
    float scale = 0.75F;
    std::int64_t offset = control_bytes;
    int local;  ///< ranks that exist: one that talks to itself, if `alone`

    Ranks(int r, std::int64_t h, std::int64_t l, std::int64_t m, std::int64_t budget = std::int64_t{88} << 20)
        : world(r), hidden(h), latent(l), most(m), shape(shape_token_parallel_tail(h, l, r, budget)), local(alone ? 1 : r) {
        ctas = alone ? 132 : 132 / ((r + devices - 1) / devices) / 2 * 2;
        gamma = Buffer(l), w = Buffer(h * l);
        gamma.randomise(7, 0.3F, 1.F), w.randomise(8, 1.7F / std::sqrt(static_cast<float>(l)));
        p = packed(w, h, l);
        CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < local; ++i) {
            CUDA(cudaSetDevice(device(i)));
            weights.emplace_back(static_cast<std::int64_t>(p.bytes / 2));
            CUDA(cudaMemcpy(weights[i].data, p.data, p.bytes, cudaMemcpyDefault));
            gammas.emplace_back(l);
            CUDA(cudaMemcpy(gammas[i].data, gamma.data, gamma.bytes, cudaMemcpyDefault));
            prefix.emplace_back(m * h);
            prefix[i].randomise(300);
            stream.push_back(new_stream());
            window.emplace_back((offset + token_parallel_region_bytes(shape)) / 2);
            workspace.emplace_back(token_parallel_workspace_bytes(shape) / 2);
            routed.emplace_back(m * l), shared.emplace_back(m * h), out.emplace_back(m * h);
            board.emplace_back();
            CUDA(cudaHostAlloc(reinterpret_cast<void**>(&board.back()), sizeof(FaultRecord),
                               cudaHostAllocMapped | cudaHostAllocPortable));
            routed[i].randomise(100 + i), shared[i].randomise(200 + i);
        }
        CUDA(cudaSetDevice(0));
        reset();
    }
    ~Ranks() {
        for (const cudaStream_t s : stream) cudaStreamDestroy(s);
        for (FaultRecord* b : board) cudaFreeHost(b);
    }
    int device(int rank) const { return rank * std::min(devices, world) / world; }
    void reset() {
        for (int r = 0; r < local; ++r) {
            CUDA(cudaSetDevice(device(r)));
            std::memset(static_cast<void*>(board[r]), 0, sizeof(FaultRecord));
            CUDA(cudaMemset(window[r].data, 0, control_bytes));
            CUDA(reset_token_parallel_tail(reinterpret_cast<char*>(window[r].data) + offset, workspace[r].data, shape,
                                           nullptr));
            CUDA(cudaDeviceSynchronize());
        }
        CUDA(cudaSetDevice(0));
    }
    Exchange exchange(int rank) const {
        Exchange x{};
        x.window.rank = rank, x.window.world = world;
        for (int r = 0; r < world; ++r) x.window.base[r] = window[alone ? 0 : r].data;
        x.slot_bytes = 128, x.timeout_ns = timeout_ns, x.layer = 3, x.tail = 4;
        CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&x.record), board[rank], 0));
        return x;
    }
    OwnRows own(std::int64_t tokens) const {
        OwnRows o{};
        for (int r = 0; r < world; ++r) {
            o.count[r] = tokens / world + (r < tokens % world);
            o.first[r] = r == 0 ? 0 : o.first[r - 1] + o.count[r - 1];
        }
        return o;
    }
    cudaError_t call(int rank, const Case& c, int max_ctas = 0) const {
        const OwnRows o = own(c.tokens);
        const std::int64_t first = o.first[rank];
        Rows to{c.in_place ? shared[rank].data : out[rank].data};
        if (c.stop) to.data = out[rank].data;
        const auto mine = [&](const Buffer& b) { return ConstRows{b.data + first * hidden}; };
        CUDA(cudaSetDevice(device(rank)));
        const cudaError_t error = token_parallel_tail({.exchange = exchange(rank),
                                                       .region_offset = offset,
                                                       .shape = shape,
                                                       .plan = plan_of(shape, c.tokens, max_ctas ? max_ctas : ctas),
                                                       .workspace = workspace[rank].data,
                                                       .own = o,
                                                       .routed = {routed[rank].data},
                                                       .shared = c.shared == 1 ? ConstRows{shared[rank].data} : ConstRows{},
                                                       .addend = c.shared == 2 ? mine(shared[rank]) : ConstRows{},
                                                       .prefix = c.prefix_in_out ? mine(out[rank])
                                                                 : c.prefix      ? mine(prefix[rank])
                                                                                 : ConstRows{},
                                                       .out = to,
                                                       .packed = weights[rank].data,
                                                       .rms_norm = c.norm,
                                                       .gamma = gammas[rank].data,
                                                       .scale = scale,
                                                       .stop_before_gather = c.stop},
                                                      stream[rank]);
        CUDA(cudaSetDevice(0));
        return error;
    }
    void sync_devices() const {
        for (int d = 0; d < devices; ++d) {
            CUDA(cudaSetDevice(d));
            CUDA(cudaDeviceSynchronize());
        }
        CUDA(cudaSetDevice(0));
    }
    void sync() const {
        for (const cudaStream_t s : stream) CUDA(cudaStreamSynchronize(s));
    }
    std::string faults() const {
        std::string text;
        for (int r = 0; r < local; ++r) {
            if (board[r]->code == 0) continue;
            char line[160];
            std::snprintf(line, sizeof line, "[rank %d: code %u rank %d phase %u call %llu expected %llu found %llu]", r,
                          board[r]->code, board[r]->rank, board[r]->phase, static_cast<unsigned long long>(board[r]->call),
                          static_cast<unsigned long long>(board[r]->expected),
                          static_cast<unsigned long long>(board[r]->found));
            text += line;
        }
        return text;
    }

    void verify(const Case& c, const char* what, int samples = 8) const {
        const OwnRows o = own(c.tokens);
        for (int rank = 0; rank < world; ++rank) {
            const __nv_bfloat16* got = c.in_place ? shared[rank].data : out[rank].data;
            const std::int64_t first = c.stop ? o.first[rank] : 0, rows = c.stop ? o.count[rank] : c.tokens;
            if (rank > 0 && !c.stop) {
                const __nv_bfloat16* base = c.in_place ? shared[0].data : out[0].data;
                const auto different = differences(base, got, static_cast<std::size_t>(c.tokens * hidden * 2));
                expect(different == 0, "%s: ranks 0 and %d differ in %llu units", what, rank, different);
                continue;
            }
            Reference r{.a = nullptr,
                        .routed = {},
                        .shared = {},
                        .prefix = c.prefix || c.prefix_in_out ? prefix[0].data + first * hidden : nullptr,
                        .w = w.data,
                        .gamma = c.norm ? gamma.data : nullptr,
                        .a_stride = 0,
                        .hidden = hidden,
                        .latent = latent,
                        .prefix_stride = hidden,
                        .out_stride = hidden,
                        .rows = rows,
                        .world = world,
                        .samples = samples,
                        .no_shared = c.shared == 0,
                        .scale = scale,
                        .out = got,
                        .seed = 11};
            for (int s = 0; s < world; ++s) r.routed[s] = routed[s].data + first * latent;
            for (int s = 0; s < world; ++s) r.shared[s] = kept.empty() ? shared[s].data : kept[s].data;
            if (c.shared == 2) {  // one summand stands for the sum
                for (int s = 0; s < world; ++s) r.shared[s] = zeros.data;
                r.shared[0] = shared[0].data;
            }
            for (int s = 0; s < world; ++s) r.shared[s] += c.shared == 2 && s > 0 ? 0 : first * hidden;
            check_against(r, what);
        }
    }
    std::vector<Buffer> kept;  ///< copies of `shared`, where calls overwrite it
    Buffer zeros;

    void run(const Case& c, const char* label, int samples = 8) {
        char what[160];
        std::snprintf(what, sizeof what, "%s R %d H %ld L %ld block %d depth %d M %ld%s%s%s shared %d%s%s", label, world,
                      static_cast<long>(hidden), static_cast<long>(latent), shape.block_rows, shape.depth,
                      static_cast<long>(c.tokens), c.prefix ? " prefix" : "", c.in_place ? " in place" : "",
                      c.prefix_in_out ? " prefix in out" : "", c.shared, c.stop ? " stop" : "", c.norm ? "" : " no norm");
        if (c.in_place && kept.empty()) {
            for (int r = 0; r < world; ++r) {
                kept.emplace_back(most * hidden);
                CUDA(cudaMemcpy(kept[r].data, shared[r].data, shared[r].bytes, cudaMemcpyDefault));
            }
        }
        if (c.shared == 2 && zeros.bytes == 0) {
            zeros = Buffer(most * hidden);
            CUDA(cudaMemset(zeros.data, 0, zeros.bytes));
            for (int r = 1; r < world; ++r) CUDA(cudaMemcpy(shared[r].data, shared[0].data, zeros.bytes, cudaMemcpyDefault));
        }
        for (int r = 0; r < world; ++r) {
            CUDA(cudaSetDevice(device(r)));
            if (c.prefix_in_out)
                CUDA(cudaMemcpy(out[r].data, prefix[0].data, static_cast<std::size_t>(c.tokens * hidden * 2),
                                cudaMemcpyDefault));
            else
                out[r].poison();
        }
        sync_devices();
        for (int r = 0; r < world; ++r) CUDA(call(r, c));
        sync();
        const std::string found = faults();
        expect(found.empty(), "%s: %s", what, found.c_str());
        if (!found.empty()) return reset();
        verify(c, what, samples);
        if (c.in_place) {
            for (int r = 0; r < world; ++r)
                CUDA(cudaMemcpy(shared[r].data, kept[r].data, shared[r].bytes, cudaMemcpyDefault));
        }
        std::printf("%s: %s\n", what, failures ? "(failures so far)" : "right");
    }
};

void check_tail(int world) {
    {
        Ranks g(world, 1032, 520, 1500);
        for (const std::int64_t m : {1, 0, 7, 300, 64, 1500, 513}) g.run({.tokens = m, .prefix = m % 2 == 1}, "check");
        g.run({.tokens = 700, .shared = 0}, "check");
        g.run({.tokens = 700, .prefix = true, .shared = 2}, "check");
        g.run({.tokens = 701, .prefix = true, .in_place = true}, "check");
        g.run({.tokens = 702, .prefix_in_out = true}, "check");
        g.run({.tokens = 703, .prefix = true, .stop = false, .norm = false}, "check");
    }
    {  // many rounds through few and small places
        Ranks g(world, 520, 264, 3000, std::int64_t{3} << 20);
        for (const std::int64_t m : {3000, 1, 2999, 700}) g.run({.tokens = m, .prefix = m > 1}, "rounds");
    }
    {
        Ranks g(world, 7168, 3584, 2048);
        g.run({.tokens = 2048}, "K3");
        g.run({.tokens = 1000, .prefix = true, .in_place = true}, "K3");
    }
}

void check_replays(int world) {
    Ranks g(world, 1032, 520, 1500);
    const std::vector<Case> cases{{.tokens = 1500, .prefix = true}, {.tokens = 3}, {.tokens = 900}, {.tokens = 0}};
    std::vector<Buffer> first;
    for (const Case& c : cases) {
        g.run(c, "before replays");
        first.emplace_back(c.tokens * g.hidden);
        CUDA(cudaMemcpy(first.back().data, g.out[0].data, first.back().bytes, cudaMemcpyDefault));
    }
    std::vector<cudaGraphExec_t> graphs(static_cast<std::size_t>(world));
    std::vector<std::vector<Buffer>> results(static_cast<std::size_t>(world));
    for (int r = 0; r < world; ++r) {
        cudaGraph_t graph;
        CUDA(cudaSetDevice(g.device(r)));
        for (const Case& c : cases) results[r].emplace_back(c.tokens * g.hidden);
        CUDA(cudaStreamBeginCapture(g.stream[r], cudaStreamCaptureModeThreadLocal));
        for (std::size_t at = 0; at < cases.size(); ++at) {
            CUDA(g.call(r, cases[at]));
            CUDA(cudaSetDevice(g.device(r)));
            const Buffer& to = results[r][at];
            if (to.bytes > 0) CUDA(cudaMemcpyAsync(to.data, g.out[r].data, to.bytes, cudaMemcpyDefault, g.stream[r]));
            CUDA(cudaMemsetAsync(g.out[r].data, 0xff, g.out[r].bytes, g.stream[r]));
        }
        CUDA(cudaStreamEndCapture(g.stream[r], &graph));
        CUDA(cudaGraphInstantiate(&graphs[r], graph, 0));
    }
    constexpr int replays = 30;
    for (int i = 0; i < replays; ++i) {
        for (int k = 0; k < world; ++k) {
            const int r = (i + k) % world;
            if (i % 7 == 3 && k == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
            CUDA(cudaSetDevice(g.device(r)));
            CUDA(cudaGraphLaunch(graphs[r], g.stream[r]));
            if (i % 5 == 2) std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        g.sync();
        CUDA(cudaSetDevice(0));
        for (int r = 0; r < world; ++r) {
            for (std::size_t at = 0; at < cases.size(); ++at) {
                const auto different = differences(first[at].data, results[r][at].data, first[at].bytes);
                expect(different == 0, "replay %d rank %d M %ld: %llu units differ from the first run", i, r,
                       static_cast<long>(cases[at].tokens), different);
            }
        }
    }
    expect(g.faults().empty(), "replays: %s", g.faults().c_str());
    std::printf("replays R %d: %d replays of %zu calls compared bit by bit, %d failures so far\n", world, replays,
                cases.size(), failures);
}

void check_late(int world) {
    Ranks g(world, 1032, 520, 1500);
    g.run({.tokens = 1500}, "late");
    for (int late = 0; late < world; ++late) {
        for (int r = 0; r < world; ++r) g.out[r].poison();
        g.sync_devices();
        for (int r = 0; r < world; ++r) {
            if (r != late) CUDA(g.call(r, {.tokens = 1500}));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        CUDA(g.call(late, {.tokens = 1500}));
        g.sync();
        expect(g.faults().empty(), "rank %d late: %s", late, g.faults().c_str());
        g.verify({.tokens = 1500}, "a late rank");
    }
    std::printf("late R %d: %d failures so far\n", world, failures);
}

void check_faults(int world) {
    Ranks g(world, 1032, 520, 3000);
    g.timeout_ns = 200'000'000;
    const double begin = seconds();
    for (int r = 0; r + 1 < world; ++r) CUDA(g.call(r, {.tokens = 3000}));
    g.sync();
    std::printf("faults R %d: the last rank never calls: %.2f s, %s\n", world, seconds() - begin, g.faults().c_str());
    for (int r = 0; r + 1 < world; ++r)
        expect(g.board[r]->code == 1 && g.board[r]->rank == world - 1, "rank %d does not name the absent one", r);
    for (int r = 0; r < world; ++r) CUDA(g.call(r, {.tokens = 100}));  // leaves on entry
    g.sync();
    g.reset();
    g.run({.tokens = 900}, "after a fault");
    for (int r = 0; r < world; ++r) CUDA(g.call(r, {.tokens = r == 0 ? 900 : 1800}));
    g.sync();
    std::printf("faults R %d: different tokens: %s\n", world, g.faults().c_str());
    for (int r = 0; r < world; ++r) expect(g.board[r]->code != 0, "rank %d did not see that tokens differ", r);
    g.reset();
    g.run({.tokens = 3000}, "after a fault");
}

/// One rank: the whole kernel beside cuBLASLt and a norm.
void time_tail() {
    const Cublas lt;
    constexpr int layers = 6;
    constexpr std::int64_t hidden = 7168, latent = 3584, most = 8192;
    Ranks g(1, hidden, latent, most);
    std::vector<Buffer> w, p;
    for (int l = 0; l < layers; ++l) {
        w.emplace_back(hidden * latent);
        w[l].randomise(40 + l, 0.03F);
        p.push_back(packed(w[l], hidden, latent));
    }
    Buffer a(most * latent);
    CUDA(cudaDeviceSynchronize());
    const cudaStream_t s = g.stream[0];
    std::printf("one rank, K3, us: our kernel with all CTAs and with the %d that 14 carriers leave; rms_norm + cuBLASLt\n",
                118);
    std::printf("%6s | %8s %8s | %8s | %8s\n", "rows", "132", "118", "norm+Lt", "Lt");
    for (const std::int64_t m : {256, 512, 1024, 2048, 4096, 8192}) {
        const auto ours = [&](int ctas) {
            return time_layers(layers, s, [&](int l) {
                std::swap(g.weights[0].data, p[l].data);
                CUDA(g.call(0, {.tokens = m}, ctas));
                std::swap(g.weights[0].data, p[l].data);
            });
        };
        double both = 0, alone = 0;
        if (lt.library) {
            const auto product = [&](const Cublas::Product& q, int l) {
                lt.run(q, w[l].data, a.data, g.shared[0].data, g.out[0].data, s);
            };
            const Cublas::Product q = lt.best(m, hidden, latent, layers, s, product);
            alone = time_layers(layers, s, [&](int l) { product(q, l); });
            both = time_layers(layers, s, [&](int l) {
                CUDA(rms_norm({.x = {g.routed[0].data}, .gamma = g.gamma.data, .y = {a.data}, .tokens = m, .width = latent},
                              s));
                product(q, l);
            });
        }
        const double few = ours(118), many = ours(132);
        std::printf("%6ld | %8.2f %8.2f | %8.2f | %8.2f\n", static_cast<long>(m), many, few, both, alone);
    }
    expect(g.faults().empty(), "%s", g.faults().c_str());
}

/// Several ranks, K3: graphs of some calls behind a gate that the host opens; the slower rank's events. On GPUs of their own
/// these are times of the tail; on one GPU only of their work together.
__global__ void gate(const volatile int* open, int turn) {
    const long long start = clock64();
    while (*open < turn && clock64() - start < 4'000'000'000LL) {}
}
void time_ranks(int world) {
    constexpr int calls = 6;
    Ranks g(world, 7168, 3584, 8192);
    static int turn = 0;
    static int* open = nullptr;
    if (!open) {
        CUDA(cudaHostAlloc(reinterpret_cast<void**>(&open), 64, cudaHostAllocMapped | cudaHostAllocPortable));
        *open = 0;
    }
    std::vector<cudaEvent_t> begin(static_cast<std::size_t>(world)), end(static_cast<std::size_t>(world));
    for (int r = 0; r < g.local; ++r) {
        CUDA(cudaSetDevice(g.device(r)));
        CUDA(cudaEventCreate(&begin[r]));
        CUDA(cudaEventCreate(&end[r]));
    }
    for (const std::int64_t m : {256, 512, 1024, 2048, 4096, 8192})
        for (const Sending& way : ways) {
            sending = way;
            std::vector<cudaGraphExec_t> graphs(static_cast<std::size_t>(world));
            for (int r = 0; r < g.local; ++r) {
                CUDA(cudaSetDevice(g.device(r)));
                cudaGraph_t graph;
                CUDA(cudaStreamBeginCapture(g.stream[r], cudaStreamCaptureModeThreadLocal));
                for (int i = 0; i < calls; ++i) CUDA(g.call(r, {.tokens = m}));
                CUDA(cudaSetDevice(g.device(r)));
                CUDA(cudaStreamEndCapture(g.stream[r], &graph));
                CUDA(cudaGraphInstantiate(&graphs[r], graph, 0));
            }
            std::vector<double> all;
            for (int i = 0; i < 9; ++i) {
                ++turn;
                for (int r = 0; r < g.local; ++r) {
                    CUDA(cudaSetDevice(g.device(r)));
                    if (devices > 1) gate<<<1, 1, 0, g.stream[r]>>>(open, turn);
                    CUDA(cudaEventRecord(begin[r], g.stream[r]));
                    CUDA(cudaGraphLaunch(graphs[r], g.stream[r]));
                    CUDA(cudaEventRecord(end[r], g.stream[r]));
                }
                *static_cast<volatile int*>(open) = turn;
                double slowest = 0;
                for (int r = 0; r < g.local; ++r) {
                    CUDA(cudaSetDevice(g.device(r)));
                    CUDA(cudaEventSynchronize(end[r]));
                    float ms;
                    CUDA(cudaEventElapsedTime(&ms, begin[r], end[r]));
                    slowest = std::max(slowest, static_cast<double>(ms) * 1000 / calls);
                }
                if (i >= 2) all.push_back(slowest);
            }
            CUDA(cudaSetDevice(0));
            std::sort(all.begin(), all.end());
            const TokenParallelPlan plan = plan_of(g.shape, m, g.ctas);
            std::printf(
                "%d ranks on %d GPUs, K3, M %5ld: %8.2f us a call (least %.2f; grid %d, carriers %d x %d, told %d later, "
                "tiles of %d, ahead %d)\n",
                world, std::min(devices, world), static_cast<long>(m), all[all.size() / 2], all[0], plan.grid, plan.carriers,
                plan.posting, plan.settle, plan.tile_columns, plan.ahead);
        }
    expect(g.faults().empty(), "%s", g.faults().c_str());
    if (!alone) g.run({.tokens = 8192}, "after timing");
    for (int r = 0; r < g.local; ++r) cudaEventDestroy(begin[r]), cudaEventDestroy(end[r]);
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);       // loading a kernel beside one that waits may wait for it
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // a queue a rank, or ranks that share a GPU wait for one another
    CUDA(cudaGetDeviceCount(&devices));
    for (int d = 0; d < devices; ++d) {
        CUDA(cudaSetDevice(d));
        for (int other = 0; other < devices; ++other) {
            if (other != d) CUDA(cudaDeviceEnablePeerAccess(other, 0));
        }
        CUDA(prepare_token_parallel_tail());
    }
    CUDA(cudaSetDevice(0));
    std::vector<int> worlds{1, 2, 3, 4, 8};
    std::vector<std::string> modes;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word.rfind("ranks=", 0) == 0) {
            worlds.clear();
            for (const char* at = argv[i] + 6; *at; at = *at ? at + (std::strchr(at, ',') ? 1 : 0) : at) {
                char* end;
                worlds.push_back(static_cast<int>(std::strtol(at, &end, 10)));
                at = end;
                if (*at == 0) break;
            }
        } else if (word.rfind("ways=", 0) == 0) {
            ways.clear();
            for (const char* at = argv[i] + 5; *at;) {
                Sending way;
                int read = 0;
                if (std::sscanf(at, "%d:%d:%d%n", &way.carriers, &way.posting, &way.settle, &read) != 3) break;
                ways.push_back(way), at += read + (at[read] == ',');
            }
            sending = ways.empty() ? Sending{} : ways[0];
        } else {
            modes.push_back(word);
        }
    }
    const auto each_world = [&](auto body) {
        for (const int world : worlds) {
            if (failures < 20) body(world);
        }
    };
    for (const std::string& mode : modes) {
        const double begin = seconds();
        if (mode == "product") check_product();
        if (mode == "check") each_world(check_tail);
        if (mode == "replay") each_world(check_replays);
        if (mode == "late") each_world([](int world) { world > 1 ? check_late(world) : void(); });
        if (mode == "faults") each_world([](int world) { world > 1 ? check_faults(world) : void(); });
        if (mode == "sizes") {
            Ranks g(2, 7168, 3584, 23405);
            for (std::int64_t m = 2914; m <= 2925; ++m) g.run({.tokens = m, .prefix = m % 2 == 0}, "sizes", 2);
            for (std::int64_t m = 23393; m <= 23405; m += 3) g.run({.tokens = m}, "sizes", 1);
        }
        if (mode == "long") Ranks(2, 7168, 3584, 65536).run({.tokens = 65536}, "long", 1);
        if (mode == "huge") Ranks(2, 32768, 1024, 65544).run({.tokens = 65544, .prefix = true}, "huge", 2);
        if (mode == "time-product") time_product();
        if (mode == "time") time_tail();
        if (mode == "alone") alone = true;
        if (mode == "time-ranks") each_world([](int world) { world > 1 ? time_ranks(world) : void(); });
        std::printf("-- %s: %.1f s, %d failures\n", mode.c_str(), seconds() - begin, failures);
    }
    std::printf(failures == 0 ? "ALL RIGHT\n" : "%d FAILURES\n", failures);
    return failures == 0 ? 0 : 1;
}
