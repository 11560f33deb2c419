// Checks and times every kernel of src/gpu/kernels against host references, with ranks that are streams of this process: two
// GPUs, or more ranks than GPUs, or (`loopback`) one rank that talks to itself, in which compute-sanitizer can run
// everything.
//
//     nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -cudart static --expt-relaxed-constexpr -Isrc -Iinclude
//          src/gpu/kernels/{all_reduce,all_reduce_rms_norm,elementwise,skinny_projection}.cu tests/gpu/kernel_check.cu
//          -o kernel_check -ldl                                                                            (one line)
//     ./kernel_check [check] [faults] [time] [time-exchange] [time-chain] [time-projection] [loopback] [local] [ranks=R,R,…]
//     default: check faults time. cuBLASLt is compared with if libcublasLt.so.13 is in the library path.
//
// Exit status 0: everything that was asked for passed. The last lines are a short table.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cublas_lt.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/packed_layout.h"
#include "gpu/primitives/copy.h"
#include "gpu/primitives/launch.h"

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

int failures = 0;
std::vector<std::string> table;

__attribute__((format(printf, 2, 3))) void expect(bool ok, const char* format, ...) {
    if (ok) return;
    ++failures;
    if (failures > 40) return;
    std::va_list args;
    va_start(args, format);
    std::printf("FAIL ");
    std::vprintf(format, args);
    std::printf("\n");
    va_end(args);
}

__attribute__((format(printf, 1, 2))) void row(const char* format, ...) {
    char line[512];
    std::va_list args;
    va_start(args, format);
    std::vsnprintf(line, sizeof line, format, args);
    va_end(args);
    table.emplace_back(line);
    std::printf("%s\n", line);
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- elements on the host

float to_float(Dtype dtype, const void* data, std::size_t i) {
    switch (dtype) {
        case Dtype::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
        case Dtype::f16: return __half2float(static_cast<const __half*>(data)[i]);
        default: return static_cast<const float*>(data)[i];
    }
}
float rounded(Dtype dtype, float v) {
    switch (dtype) {
        case Dtype::bf16: return __bfloat162float(__float2bfloat16_rn(v));
        case Dtype::f16: return __half2float(__float2half_rn(v));
        default: return v;
    }
}
const char* dtype_name(Dtype dtype) {
    return dtype == Dtype::bf16 ? "bf16" : dtype == Dtype::f16 ? "f16" : "f32";
}
double tolerance(Dtype dtype) {
    return dtype == Dtype::bf16 ? 4e-3 : dtype == Dtype::f16 ? 6e-4 : 2e-6;
}

// ---- device helpers of the test

__global__ void fill_random(void* to, std::size_t n, int kind, unsigned seed, float scale, float bias) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
         i += std::size_t{gridDim.x} * blockDim.x) {
        unsigned x = static_cast<unsigned>(i) * 2654435761u ^ seed * 0x9e3779b9u;
        x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
        float v = (static_cast<float>(x >> 8) * (1.F / 8388608.F) - 1.F) * scale + bias;
        if (x % 61 == 0) v = -0.F;  // ordinary input, whatever the mailbox uses it for
        if (kind == 0) static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16(v);
        if (kind == 1) static_cast<__half*>(to)[i] = __float2half(v);
        if (kind == 2) static_cast<float*>(to)[i] = v;
    }
}

__global__ void busy(long long nanoseconds) {
    std::uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < static_cast<std::uint64_t>(nanoseconds));
}

/// Stands for the kernel before: the whole GPU writes the inputs anew.
__global__ void __launch_bounds__(256) produce(const uint4* from, uint4* to, std::size_t units, int cycles, bool early) {
    if (early) release_dependents();
    const long long start = clock64();
    dependency_wait();
    while (clock64() - start < cycles) {}
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < units;
         i += std::size_t{gridDim.x} * blockDim.x) {
        to[i] = from[i];
    }
}

/// Reads with plain 16-byte loads and keeps nothing: a cold read as a plain kernel does it.
__global__ void __launch_bounds__(1024) read_plain(const uint4* from, std::size_t units, uint4* never) {
    uint4 sum{};
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < units;
         i += std::size_t{gridDim.x} * blockDim.x) {
        const uint4 v = __ldcs(from + i);
        sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345u) *never = sum;
}

/// Reads with bulk copies of `chunk` bytes into shared memory: the best stream of weights that we know. Starts early, as
/// ours does.
__global__ void __launch_bounds__(32) read_stream(const char* from, std::size_t bytes, int chunk, int ring) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ std::uint64_t bars[26];
    if (threadIdx.x != 0) return;
    const std::size_t chunks = bytes / chunk, first = chunks * blockIdx.x / gridDim.x,
                      last = chunks * (blockIdx.x + 1) / gridDim.x;
    const auto bar = [&](std::size_t i) { return shared_address(&bars[i]); };
    for (int i = 0; i < ring; ++i) mbarrier::init(bar(i), 1);
    mbarrier::publish_init();
    const int n = static_cast<int>(last - first);
    release_dependents();
    for (int i = 0; i < n; ++i) {
        if (i >= ring) mbarrier::wait(bar(i % ring), (i / ring - 1) & 1);
        mbarrier::expect(bar(i % ring), chunk);
        bulk_copy(shared_address(shared) + i % ring * chunk, from + (first + i) * chunk, chunk, bar(i % ring), evict_first);
    }
    for (int i = std::max(0, n - ring); i < n; ++i) mbarrier::wait(bar(i % ring), i / ring & 1);
    dependency_wait();
#endif
}

std::size_t bytes_for(Dtype dtype, std::int64_t elements) {
    return static_cast<std::size_t>(elements) * bytes_of(dtype);
}

struct Buffer {
    void* data = nullptr;
    std::size_t bytes = 0;
    explicit Buffer(std::size_t n) : bytes(n) { CUDA(cudaMalloc(&data, std::max<std::size_t>(n, 16))); }
    Buffer(Buffer&& other) noexcept : data(std::exchange(other.data, nullptr)), bytes(other.bytes) {}
    ~Buffer() { cudaFree(data); }
    std::vector<char> host() const {
        std::vector<char> copy(bytes);
        CUDA(cudaMemcpy(copy.data(), data, bytes, cudaMemcpyDefault));
        return copy;
    }
};

void randomise(const Buffer& b, Dtype dtype, unsigned seed, float scale = 1, float bias = 0, cudaStream_t stream = nullptr) {
    fill_random<<<128, 256, 0, stream>>>(b.data, b.bytes / bytes_of(dtype), static_cast<int>(dtype), seed, scale, bias);
    CUDA(cudaGetLastError());
}

// ---- ranks

int devices = 0;

struct Group {
    int world;
    bool loopback;
    Dtype dtype;
    std::int64_t slot_bytes;
    std::vector<int> device;
    std::vector<cudaStream_t> stream;
    std::vector<void*> window;
    std::vector<FaultRecord*> board;
    std::uint64_t timeout_ns = 4'000'000'000;

    Group(int ranks, Dtype d, std::int64_t bytes, bool loop = false)
        : world(ranks), loopback(loop), dtype(d), slot_bytes(bytes) {
        for (int r = 0; r < local(); ++r) {
            device.push_back(r * std::min(devices, world) / world);
            CUDA(cudaSetDevice(device[r]));
            stream.emplace_back();
            CUDA(cudaStreamCreateWithFlags(&stream.back(), cudaStreamNonBlocking));
            window.emplace_back();
            CUDA(cudaMalloc(&window.back(), window_bytes(slot_bytes)));
            board.emplace_back();
            CUDA(cudaHostAlloc(reinterpret_cast<void**>(&board.back()), sizeof(FaultRecord),
                               cudaHostAllocMapped | cudaHostAllocPortable));
        }
        reset();
    }
    ~Group() {
        for (int r = 0; r < local(); ++r) {
            cudaSetDevice(device[r]);
            cudaStreamDestroy(stream[r]);
            cudaFree(window[r]);
            cudaFreeHost(board[r]);
        }
    }
    int local() const { return loopback ? 1 : world; }  ///< ranks that exist

    void reset() {
        for (int r = 0; r < local(); ++r) {
            std::memset(static_cast<void*>(board[r]), 0, sizeof(FaultRecord));
            CUDA(cudaSetDevice(device[r]));
            CUDA(reset_window(window[r], slot_bytes, dtype, stream[r]));
        }
        sync();
    }
    Exchange exchange(int rank, int layer = 0, unsigned tail = 1) const {
        Exchange x{};
        x.window.rank = rank, x.window.world = world;
        for (int r = 0; r < world; ++r) x.window.base[r] = window[loopback ? 0 : r];
        x.slot_bytes = slot_bytes, x.timeout_ns = timeout_ns, x.layer = layer, x.tail = tail;
        CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&x.record), board[rank], 0));
        return x;
    }
    void each(const std::function<void(int)>& body) const {
        for (int r = 0; r < local(); ++r) {
            CUDA(cudaSetDevice(device[r]));
            body(r);
        }
    }
    void sync() const {
        each([&](int r) { CUDA(cudaStreamSynchronize(stream[r])); });
    }
    std::string faults() const {
        std::string text;
        for (int r = 0; r < local(); ++r) {
            const FaultRecord& f = *board[r];
            if (f.code == 0) continue;
            char line[200];
            std::snprintf(line, sizeof line,
                          "[rank %d: code %u rank %d phase %u layer %d call %llu expected %llu found %llu]", r, f.code,
                          f.rank, f.phase, f.layer, static_cast<unsigned long long>(f.call),
                          static_cast<unsigned long long>(f.expected), static_cast<unsigned long long>(f.found));
            text += line;
        }
        return text;
    }
    /// Only where a GPU has one rank: early CTAs of one could keep out those that another waits for.
    bool may_start_early() const { return loopback || world <= devices; }
    /// CTAs of one rank, so that the spinning grids of all ranks on a GPU are resident together.
    int max_ctas() const {
        return loopback || world <= devices ? 132 : std::max(4, 128 / ((world + devices - 1) / devices));
    }
};

// ---- checks of the exchange

enum class Op { one_stage, two_stage, norm, no_norm };
const char* op_name(Op op) {
    return op == Op::one_stage   ? "all_reduce 1"
           : op == Op::two_stage ? "all_reduce 2"
           : op == Op::norm      ? "all_reduce_rms_norm"
                                 : "all_reduce, no norm";
}

/// One rank's buffers for calls of up to `rows` rows.
struct Tensors {
    Buffer x, y, prefix, gamma;
    std::int64_t width, stride;
    Tensors(std::int64_t rows, std::int64_t w, std::int64_t s, Dtype d)
        : x(bytes_for(d, rows * s)),
          y(bytes_for(d, rows * s)),
          prefix(bytes_for(d, rows * s)),
          gamma(bytes_for(d, w)),
          width(w),
          stride(s) {}
};

cudaError_t call(const Group& g, int rank, Op op, const Tensors& t, std::int64_t tokens, bool prefix, bool dependent,
                 int layer = 0, std::int64_t row = 0) {
    const std::int64_t offset = row * t.stride * static_cast<std::int64_t>(bytes_of(g.dtype));
    const auto at = [&](const Buffer& b) { return static_cast<char*>(b.data) + offset; };
    if (op == Op::one_stage || op == Op::two_stage) {
        return all_reduce({.exchange = g.exchange(rank, layer),
                           .x = {at(t.x), t.stride},
                           .y = {at(t.y), t.stride},
                           .prefix = prefix ? ConstRows{at(t.prefix), t.stride} : ConstRows{},
                           .tokens = tokens,
                           .width = t.width,
                           .dtype = g.dtype,
                           .stages = op == Op::two_stage ? 2 : 1,
                           .max_ctas = g.max_ctas(),
                           .dependent_launch = dependent},
                          g.stream[rank]);
    }
    return all_reduce_rms_norm({.exchange = g.exchange(rank, layer),
                                .x = {at(t.x), t.stride},
                                .gamma = op == Op::norm ? t.gamma.data : nullptr,
                                .y = {at(t.y), t.stride},
                                .tokens = tokens,
                                .width = t.width,
                                .dtype = g.dtype,
                                .max_ctas = g.max_ctas(),
                                .dependent_launch = dependent},
                               g.stream[rank]);
}

/// Compares rows [row, row + tokens) of every rank with the reference, and ranks with one another. Sums must be exact.
void verify(const Group& g, Op op, const std::vector<Tensors>& t, std::int64_t row, std::int64_t tokens, bool prefix,
            const char* what, bool alone = true) {
    std::vector<std::vector<char>> x, y;
    for (int r = 0; r < g.local(); ++r) x.push_back(t[r].x.host()), y.push_back(t[r].y.host());
    const std::vector<char> p = t[0].prefix.host(), gamma = t[0].gamma.host();
    const std::int64_t width = t[0].width, stride = t[0].stride;
    const bool norm = op == Op::norm;
    std::int64_t wrong = 0;
    double error = 0, size = 0;
    bool same = true;
    std::vector<float> sum(width);
    for (std::int64_t m = row; m < row + tokens; ++m) {
        double squares = 0;
        for (std::int64_t c = 0; c < width; ++c) {
            float s = 0;
            for (int r = 0; r < g.world; ++r) s += to_float(g.dtype, x[g.loopback ? 0 : r].data(), m * stride + c);
            sum[c] = rounded(g.dtype, s);
            squares += static_cast<double>(sum[c]) * sum[c];
        }
        const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
        for (std::int64_t c = 0; c < width; ++c) {
            double want = sum[c];
            if (norm) want = sum[c] * factor * to_float(g.dtype, gamma.data(), c);
            if (prefix) want = rounded(g.dtype, sum[c] + to_float(g.dtype, p.data(), m * stride + c));
            const float got = to_float(g.dtype, y[0].data(), m * stride + c);
            if (!norm && got != static_cast<float>(want)) ++wrong;
            error += (got - want) * (got - want), size += want * want;
        }
        for (int r = 1; r < g.local(); ++r) {
            const std::size_t at = bytes_for(g.dtype, m * stride);
            same &= std::memcmp(y[0].data() + at, y[r].data() + at, bytes_for(g.dtype, width)) == 0;
        }
    }
    const double relative = size > 0 ? std::sqrt(error / size) : 0;
    expect(wrong == 0 && same && relative < tolerance(g.dtype),
           "%s %s R=%d dtype %s L=%ld M=%ld: %ld wrong, ranks %s, relative %.2e %s", what, op_name(op), g.world,
           dtype_name(g.dtype), static_cast<long>(width), static_cast<long>(tokens), static_cast<long>(wrong),
           same ? "same" : "DIFFER", relative, g.faults().c_str());
    for (int r = 0; r < g.local(); ++r) {  // nothing beyond the rows was touched
        const std::size_t from = bytes_for(g.dtype, (row + tokens) * stride);
        bool clean = true;
        if (alone)
            for (std::size_t i = from; i < y[r].size(); ++i) clean &= y[r][i] == static_cast<char>(0xff);
        expect(clean, "%s %s M=%ld: rows beyond were written", what, op_name(op), static_cast<long>(tokens));
    }
}

void check_exchange(int world, Dtype dtype, std::int64_t width, bool loopback) {
    const std::int64_t rows = 128, stride = width + 16;
    Group g(world, dtype,
            all_reduce_slot_bytes(world, 2, rows, width, dtype) + all_reduce_slot_bytes(world, 1, rows, width, dtype),
            loopback);
    std::vector<Tensors> t;
    g.each([&](int) { t.emplace_back(rows, width, stride, dtype); });
    unsigned seed = 1;
    const auto fresh = [&] {
        g.each([&](int r) {
            randomise(t[r].x, dtype, ++seed, 1, 0, g.stream[r]);
            randomise(t[r].prefix, dtype, seed / 64 * 64 + 7, 1, 0, g.stream[r]);
            randomise(t[r].gamma, dtype, 5, 0.3F, 1, g.stream[r]);
            CUDA(cudaMemsetAsync(t[r].y.data, 0xff, t[r].y.bytes, g.stream[r]));
        });
        seed = (seed / 64 + 1) * 64;
        g.sync();
    };
    // Eager: sizes that grow, shrink and alternate; one rank late now and then.
    int n = 0;
    for (const std::int64_t tokens : {0, 1, 2, 3, 5, 7, 8, 16, 17, 33, 64, 65, 128, 1, 128, 3, 65, 0, 2, 17}) {
        for (const Op op : {Op::one_stage, Op::two_stage, Op::norm, Op::no_norm}) {
            if (loopback && n % 3 == 2 && tokens > 17) {
                ++n;
                continue;
            }
            const bool prefix = ++n % 2 == 0 && (op == Op::one_stage || op == Op::two_stage);
            fresh();
            g.each([&](int r) {
                if (n % 5 == 0 && r == g.local() - 1) busy<<<1, 1, 0, g.stream[r]>>>(300'000);
                CUDA(call(g, r, op, t[r], tokens, prefix, n % 4 < 2));
            });
            g.sync();
            if (!(loopback && op == Op::two_stage)) verify(g, op, t, 0, tokens, prefix, "eager");
        }
    }
    // Fused is the chain, bit for bit, rows with NaN and rows whose squares overflow among them; other rows do not notice.
    fresh();
    g.each([&](int r) {
        char* x = static_cast<char*>(t[r].x.data);
        CUDA(cudaMemsetAsync(x + bytes_for(dtype, 3 * stride + 8), 0xff, bytes_for(dtype, 1), g.stream[r]));
        fill_random<<<8, 256, 0, g.stream[r]>>>(x + bytes_for(dtype, 5 * stride), width, static_cast<int>(dtype), 3, 1e30F,
                                                0);
        CUDA(call(g, r, Op::norm, t[r], 33, false, true));
    });
    g.sync();
    const std::vector<char> fused = t[0].y.host();
    g.each([&](int r) {
        CUDA(call(g, r, loopback ? Op::one_stage : Op::two_stage, t[r], 33, false, false));
        const Rows y{t[r].y.data, stride};
        CUDA(
            rms_norm({.x = {y.data, stride}, .gamma = t[r].gamma.data, .y = y, .tokens = 33, .width = width, .dtype = dtype},
                     g.stream[r]));
    });
    g.sync();
    expect(fused == t[0].y.host(), "R=%d %s: fused norm is not the chain's bits", world, dtype_name(dtype));
    for (int r = 1; r < g.local(); ++r)
        expect(fused == t[r].y.host(), "R=%d %s: rank %d differs", world, dtype_name(dtype), r);
    for (std::int64_t m = 0; m < 33; ++m) {
        const bool finite = std::isfinite(to_float(dtype, fused.data(), m * stride + 2));
        expect(finite || m == 3 || m == 5, "R=%d %s: row %ld is not finite", world, dtype_name(dtype), static_cast<long>(m));
    }

    // Captured: many calls of all kinds and sizes in one graph, ranks skewed, inputs new for every replay.
    std::vector<cudaGraphExec_t> graph(g.local());
    struct Step {
        Op op;
        std::int64_t row, tokens;
        bool prefix;
    };
    std::vector<Step> steps;
    std::int64_t next = 0;
    for (const std::int64_t tokens : {1, 33, 2, 16, 5, 1, 17, 3, 8, 7, 1}) {
        steps.push_back({static_cast<Op>(steps.size() % 4), next, tokens, steps.size() % 8 == 0});
        next += tokens;
    }
    std::srand(world);
    g.each([&](int r) {
        CUDA(cudaStreamBeginCapture(g.stream[r], cudaStreamCaptureModeThreadLocal));
        for (const Step& s : steps) {
            if (std::rand() % 3 == 0) busy<<<1, 1, 0, g.stream[r]>>>(std::rand() % 20'000);
            CUDA(call(g, r, s.op, t[r], s.tokens, s.prefix, g.may_start_early() && s.row % 2 == 0, 3, s.row));
        }
        cudaGraph_t captured;
        CUDA(cudaStreamEndCapture(g.stream[r], &captured));
        CUDA(cudaGraphInstantiate(&graph[r], captured, 0));
        CUDA(cudaGraphDestroy(captured));
    });
    for (int replay = 0; replay < (loopback ? 2 : 6); ++replay) {
        fresh();
        std::vector<char> first;
        for (int repeat = 0; repeat < 30; ++repeat) {
            g.each([&](int r) { CUDA(cudaGraphLaunch(graph[r], g.stream[r])); });
            if (repeat % 10 != 0) continue;
            g.sync();
            const std::vector<char> now = t[0].y.host();
            if (first.empty()) first = now;
            expect(first == now, "R=%d %s: replay %d differs from the first", world, dtype_name(dtype), repeat);
        }
        g.sync();
        for (const Step& s : steps) {
            if (!(loopback && s.op == Op::two_stage)) verify(g, s.op, t, s.row, s.tokens, s.prefix, "replayed", false);
        }
    }
    for (auto& e : graph) CUDA(cudaGraphExecDestroy(e));
    expect(g.faults().empty(), "R=%d %s: %s", world, dtype_name(dtype), g.faults().c_str());
}

/// Volumes far past any slot: split into several kernels.
void check_large(int world) {
    const std::int64_t width = 896, rows = 5003;
    Group g(world, Dtype::bf16, all_reduce_slot_bytes(world, 2, 1000, width, Dtype::bf16));
    std::vector<Tensors> t;
    g.each([&](int r) {
        t.emplace_back(rows, width, width, Dtype::bf16);
        randomise(t[r].x, Dtype::bf16, 77 + r, 1, 0, g.stream[r]);
        randomise(t[r].prefix, Dtype::bf16, 7, 1, 0, g.stream[r]);
    });
    for (const Op op : {Op::one_stage, Op::two_stage}) {
        g.each([&](int r) { CUDA(cudaMemsetAsync(t[r].y.data, 0xff, t[r].y.bytes, g.stream[r])); });
        g.sync();
        g.each([&](int r) { CUDA(call(g, r, op, t[r], rows, true, false)); });
        g.sync();
        verify(g, op, t, 0, rows, true, "large");
    }
}

// ---- faults

void check_faults() {
    const std::int64_t width = 1024;
    Group g(2, Dtype::bf16, all_reduce_slot_bytes(2, 2, 64, width, Dtype::bf16));
    std::vector<Tensors> t;
    g.each([&](int r) {
        t.emplace_back(64, width, width, Dtype::bf16);
        randomise(t[r].x, Dtype::bf16, 9 + r, 1, 0, g.stream[r]);
        randomise(t[r].gamma, Dtype::bf16, 5, 0.3F, 1, g.stream[r]);
    });
    const auto record = [&](int r) { return *g.board[r]; };
    for (const Op op : {Op::one_stage, Op::two_stage, Op::norm}) {
        // A peer that never calls, under a captured step of 92 calls: one timeout, not 92.
        g.timeout_ns = 30'000'000;
        g.reset();
        CUDA(cudaSetDevice(g.device[0]));
        double start = seconds();
        for (int i = 0; i < 92; ++i) CUDA(call(g, 0, op, t[0], 8, false, false, i));
        CUDA(cudaStreamSynchronize(g.stream[0]));
        const double took = seconds() - start;
        expect(record(0).code == 1 && record(0).rank == 1 && record(0).layer == 0 && took < 0.2,
               "%s, peer never calls: %.3f s %s", op_name(op), took, g.faults().c_str());
        // The late peer finds the fault and leaves.
        CUDA(cudaSetDevice(g.device[1]));
        CUDA(call(g, 1, op, t[1], 8, false, false));
        CUDA(cudaStreamSynchronize(g.stream[1]));
        expect(record(1).code == 1 && record(1).rank == 1, "%s, late peer learns: %s", op_name(op), g.faults().c_str());

        // Ranks that disagree: about tokens, about the layer.
        for (int what = 0; what < 2; ++what) {
            g.timeout_ns = 2'000'000'000;
            g.reset();
            start = seconds();
            g.each([&](int r) { CUDA(call(g, r, op, t[r], what == 0 ? 8 + 8 * r : 8, false, false, what == 1 ? r : 0)); });
            g.sync();
            const double mismatch = seconds() - start;
            expect(
                record(0).code == 2 && record(0).rank == 1 && record(1).code == 2 && record(1).rank == 0 && mismatch < 0.2,
                "%s, mismatch %d: %.3f s %s", op_name(op), what, mismatch, g.faults().c_str());
        }
        // Ranks whose previous outputs differed.
        g.reset();
        g.each([&](int r) { CUDA(call(g, r, op, t[r], 8, false, false)); });
        g.sync();
        std::uint32_t digest = 0, epoch = 0;
        auto* control = static_cast<Control*>(g.window[0]);
        CUDA(cudaMemcpy(&digest, &control->digest[0], 4, cudaMemcpyDefault));
        CUDA(cudaMemcpy(&epoch, &control->epoch[max_grid - 1], 4, cudaMemcpyDefault));
        expect(digest != 0 && epoch == 1, "%s: digest %u epoch %u", op_name(op), digest, epoch);
        CUDA(cudaMemset(&control->digest[0], 0x55, 4));
        CUDA(cudaDeviceSynchronize());
        g.each([&](int r) { CUDA(call(g, r, op, t[r], 8, false, false)); });
        g.sync();
        expect(record(0).code == 2 && record(1).code == 2 && record(0).call == 1, "%s, digest: %s", op_name(op),
               g.faults().c_str());
        // The host aborts a rank that waits.
        g.reset();
        CUDA(cudaSetDevice(g.device[0]));
        CUDA(call(g, 0, op, t[0], 8, false, false));
        start = seconds();
        const std::uint32_t word = abort_word(0);
        cudaStream_t aside;
        CUDA(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking));
        CUDA(cudaMemcpyAsync(&control->fault, &word, sizeof word, cudaMemcpyDefault, aside));
        CUDA(cudaStreamSynchronize(g.stream[0]));
        CUDA(cudaStreamDestroy(aside));
        expect(record(0).code == 3 && seconds() - start < 0.1, "%s, abort: %.3f s %s", op_name(op), seconds() - start,
               g.faults().c_str());
        // And after a reset everything works again.
        g.reset();
        g.each([&](int r) { CUDA(call(g, r, op, t[r], 64, false, false)); });
        g.sync();
        verify(g, op, t, 0, 64, false, "after reset");
    }
    expect(
        all_reduce_rms_norm({.exchange = g.exchange(0), .x = t[0].x.data, .y = t[0].y.data, .tokens = 4096, .width = width},
                            nullptr) == cudaErrorInvalidValue,
        "capacity is not checked");
}

// ---- the projection

struct Product {
    std::int64_t rows, latent;
    Dtype dtype;
};

void check_projection(const Product& shape, bool portable, std::initializer_list<int> sizes) {
    const auto [N, K, dtype] = shape;
    const std::int64_t a_stride = K + 8, c_stride = N + 24, most = 64;
    const PackedLayout layout{N, K};
    Buffer w(bytes_for(dtype, N * K)), packed(layout.bytes()), a(bytes_for(dtype, most * a_stride)),
        c(bytes_for(dtype, most * c_stride)), start(c.bytes), prefix(c.bytes), scales(N * 4);
    randomise(w, dtype, 3, 0.05F), randomise(start, dtype, 4), randomise(prefix, dtype, 6),
        randomise(scales, Dtype::f32, 8, 0.2F, 1);
    CUDA(cudaMemset(packed.data, 0xff, packed.bytes));
    CUDA(pack_weights({.w = w.data, .rows = N, .latent = K, .packed = packed.data}, nullptr));
    const std::vector<char> hw = w.host(), hp = packed.host(), h0 = start.host(), hx = prefix.host(), hs = scales.host();
    std::int64_t misplaced = 0;
    for (std::int64_t n = 0; n < layout.tiles() * 128; n += 1 + n / 7) {
        for (std::int64_t k = 0; k < layout.blocks() * 64; ++k) {
            const float want = n < N && k < K ? to_float(dtype, hw.data(), n * K + k) : 0;
            misplaced += to_float(dtype, hp.data(), layout.element(n, k) / 2) != want;
        }
    }
    expect(misplaced == 0, "pack N=%ld K=%ld: %ld misplaced", static_cast<long>(N), static_cast<long>(K),
           static_cast<long>(misplaced));

    std::printf("  projection %s %s N=%ld K=%ld\n", portable ? "portable" : "hopper", dtype_name(dtype),
                static_cast<long>(N), static_cast<long>(K));
    for (const int tokens : sizes) {
        randomise(a, dtype, 100 + tokens);
        // Poison the rows beyond: nothing may come of them.
        CUDA(cudaMemset(static_cast<char*>(a.data) + bytes_for(dtype, tokens * a_stride), 0xff,
                        bytes_for(dtype, (most - tokens) * a_stride)));
        const std::vector<char> ha = a.host();
        for (int variant = 0; variant < 3; ++variant) {  // accumulate in place; store with everything; plain product
            std::vector<char> first;
            for (int repeat = 0; repeat < 2; ++repeat) {
                if (variant == 0)
                    CUDA(cudaMemcpy(c.data, start.data, c.bytes, cudaMemcpyDefault));
                else
                    CUDA(cudaMemset(c.data, 0xff, c.bytes));
                const ConstRows addend = variant == 0   ? ConstRows{c.data, c_stride}
                                         : variant == 1 ? ConstRows{start.data, c_stride}
                                                        : ConstRows{};
                CUDA(cudaDeviceSynchronize());
                CUDA(skinny_projection({.a = {a.data, a_stride},
                                        .packed = packed.data,
                                        .addend = addend,
                                        .prefix = variant == 1 ? ConstRows{prefix.data, c_stride} : ConstRows{},
                                        .c = {c.data, c_stride},
                                        .scale = 1.25F,
                                        .column_scales = variant == 1 ? static_cast<const float*>(scales.data) : nullptr,
                                        .tokens = tokens,
                                        .rows = N,
                                        .latent = K,
                                        .dtype = dtype,
                                        .dependent_launch = repeat == 1,
                                        .portable = portable},
                                       nullptr));
                CUDA(cudaDeviceSynchronize());
                const std::vector<char> now = c.host();
                if (repeat == 0) first = now;
                expect(first == now, "projection N=%ld K=%ld M=%d: repeat differs", static_cast<long>(N),
                       static_cast<long>(K), tokens);
            }
            double error = 0, size = 0;
            const std::int64_t step = std::max<std::int64_t>(1, N * K * tokens / 6'000'000);
            for (int m = 0; m < tokens; ++m) {
                for (std::int64_t n = m % step; n < N; n += step) {
                    double sum = 0;
                    for (std::int64_t k = 0; k < K; ++k) {
                        sum += static_cast<double>(to_float(dtype, ha.data(), m * a_stride + k)) *
                               to_float(dtype, hw.data(), n * K + k);
                    }
                    sum *= 1.25;
                    if (variant == 1) sum *= to_float(Dtype::f32, hs.data(), n);
                    if (variant < 2) sum += to_float(dtype, h0.data(), m * c_stride + n);
                    if (variant == 1) sum += to_float(dtype, hx.data(), m * c_stride + n);
                    const double d = to_float(dtype, first.data(), m * c_stride + n) - sum;
                    error += d * d, size += sum * sum;
                }
            }
            bool clean = true;  // between the columns of C and beyond its rows
            const std::vector<char>& before = h0;
            for (std::int64_t i = 0; i < most * c_stride; ++i) {
                if (i / c_stride < tokens && i % c_stride < N) continue;
                const std::size_t at = bytes_for(dtype, i);
                for (std::size_t b = 0; b < bytes_of(dtype); ++b)
                    clean &= first[at + b] == (variant == 0 ? before[at + b] : static_cast<char>(0xff));
            }
            const double relative = std::sqrt(error / std::max(size, 1e-30));
            expect(relative < tolerance(dtype) && clean, "projection %s %s N=%ld K=%ld M=%d variant %d: relative %.2e%s",
                   portable ? "portable" : "hopper", dtype_name(dtype), static_cast<long>(N), static_cast<long>(K), tokens,
                   variant, relative, clean ? "" : ", wrote outside");
        }
    }
}

/// A row's bits in calls of 1 to 64 tokens, first and last row, against those of the same row among 64: all the same where
/// `invariant`. Returns how many rows were not.
int check_batches(const Product& shape, bool portable, bool invariant) {
    const auto [N, K, dtype] = shape;
    constexpr std::int64_t most = 64;
    Buffer w(bytes_for(dtype, N * K)), packed(PackedLayout{N, K}.bytes()), a(bytes_for(dtype, most * K)),
        c(bytes_for(dtype, most * N));
    randomise(w, dtype, 3, 0.05F), randomise(a, dtype, 5);
    CUDA(pack_weights({.w = w.data, .rows = N, .latent = K, .packed = packed.data}, nullptr));
    const auto product = [&](std::int64_t first, std::int64_t tokens) {
        CUDA(cudaMemset(c.data, 0xff, c.bytes));
        CUDA(skinny_projection({.a = static_cast<const char*>(a.data) + bytes_for(dtype, first * K),
                                .packed = packed.data,
                                .c = c.data,
                                .tokens = tokens,
                                .rows = N,
                                .latent = K,
                                .dtype = dtype,
                                .portable = portable,
                                .batch_invariant = invariant},
                               nullptr));
        return c.host();
    };
    const std::vector<char> whole = product(0, most);
    const std::size_t row = bytes_for(dtype, N);
    int differ = 0;
    for (std::int64_t tokens = 1; tokens < most; ++tokens) {
        for (const std::int64_t first : {std::int64_t{0}, most - tokens}) {
            const std::vector<char> some = product(first, tokens);
            for (std::int64_t m = 0; m < tokens; ++m)
                differ += std::memcmp(some.data() + m * row, whole.data() + (first + m) * row, row) != 0;
        }
    }
    std::printf("  batches of %s %s N=%ld K=%ld%s: %d rows with other bits than among 64\n",
                portable ? "portable" : "hopper", dtype_name(dtype), static_cast<long>(N), static_cast<long>(K),
                invariant ? ", invariant" : "", differ);
    // The portable kernel's order never depends on the number of tokens.
    if (invariant || portable)
        expect(differ == 0, "projection in batches, N=%ld K=%ld: %d rows", static_cast<long>(N), static_cast<long>(K),
               differ);
    return differ;
}

void check_elementwise(Dtype dtype) {
    for (const std::int64_t width : {8, 264, 3584, 16384}) {
        const std::int64_t rows = 37, stride = width + 8;
        Buffer a(bytes_for(dtype, rows * stride)), b(a.bytes), p(a.bytes), y(a.bytes), gamma(bytes_for(dtype, width));
        randomise(a, dtype, 1), randomise(b, dtype, 2), randomise(p, dtype, 3), randomise(gamma, dtype, 4, 0.3F, 1);
        CUDA(cudaMemset(y.data, 0xff, y.bytes));
        const auto view = [&](const Buffer& t) { return ConstRows{t.data, stride}; };
        const Rows out{y.data, stride};
        const std::vector<char> ha = a.host(), hb = b.host(), hp = p.host(), hg = gamma.host();
        CUDA(add({.a = view(a), .b = view(b), .prefix = view(p), .y = out, .tokens = rows, .width = width, .dtype = dtype},
                 nullptr));
        std::vector<char> hy = y.host();
        std::int64_t wrong = 0;
        for (std::int64_t m = 0; m < rows; ++m) {
            for (std::int64_t c = 0; c < stride; ++c) {
                const std::size_t i = m * stride + c;
                const float want =
                    rounded(dtype, rounded(dtype, to_float(dtype, ha.data(), i) + to_float(dtype, hb.data(), i)) +
                                       to_float(dtype, hp.data(), i));
                if (c < width)
                    wrong += to_float(dtype, hy.data(), i) != want;
                else
                    wrong += hy[bytes_for(dtype, i)] != static_cast<char>(0xff);
            }
        }
        CUDA(copy_rows(view(a), out, rows, width, dtype, nullptr));
        hy = y.host();
        for (std::int64_t m = 0; m < rows; ++m)
            wrong += std::memcmp(hy.data() + bytes_for(dtype, m * stride), ha.data() + bytes_for(dtype, m * stride),
                                 bytes_for(dtype, width)) != 0;
        CUDA(zero_rows(out, rows - 1, width, dtype, nullptr));
        hy = y.host();
        for (std::int64_t m = 0; m < rows - 1; ++m) {
            for (std::int64_t c = 0; c < width; ++c) wrong += to_float(dtype, hy.data(), m * stride + c) != 0;
        }
        CUDA(rms_norm({.x = view(a), .gamma = gamma.data, .y = out, .tokens = rows, .width = width, .dtype = dtype},
                      nullptr));
        hy = y.host();
        double error = 0, size = 0;
        for (std::int64_t m = 0; m < rows; ++m) {
            double squares = 0;
            for (std::int64_t c = 0; c < width; ++c) squares += std::pow(to_float(dtype, ha.data(), m * stride + c), 2.0);
            const double f = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
            for (std::int64_t c = 0; c < width; ++c) {
                const double want = to_float(dtype, ha.data(), m * stride + c) * f * to_float(dtype, hg.data(), c);
                error += std::pow(to_float(dtype, hy.data(), m * stride + c) - want, 2.0), size += want * want;
            }
        }
        expect(wrong == 0 && std::sqrt(error / size) < tolerance(dtype), "elementwise %s width %ld: %ld wrong, norm %.2e",
               dtype_name(dtype), static_cast<long>(width), static_cast<long>(wrong), std::sqrt(error / size));
    }
}

// ---- timing

/// Microseconds of one of `calls` calls that `enqueue(rank)` puts on each rank's stream: captured once, medians over
/// launches.
double time_graph(const Group& g, int calls, const std::function<void(int)>& enqueue) {
    std::vector<cudaGraphExec_t> graph(g.local());
    g.each([&](int r) {
        CUDA(cudaStreamBeginCapture(g.stream[r], cudaStreamCaptureModeThreadLocal));
        enqueue(r);
        cudaGraph_t captured;
        CUDA(cudaStreamEndCapture(g.stream[r], &captured));
        CUDA(cudaGraphInstantiate(&graph[r], captured, 0));
        CUDA(cudaGraphDestroy(captured));
    });
    CUDA(cudaSetDevice(g.device[0]));
    cudaEvent_t start, stop;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&stop));
    std::vector<double> samples;
    constexpr int warm = 2, launches = 6;
    for (int sample = 0; sample < 9; ++sample) {
        for (int i = 0; i < warm + launches; ++i) {
            if (i == warm) {
                CUDA(cudaSetDevice(g.device[0]));
                CUDA(cudaEventRecord(start, g.stream[0]));
            }
            g.each([&](int r) { CUDA(cudaGraphLaunch(graph[r], g.stream[r])); });
        }
        CUDA(cudaSetDevice(g.device[0]));
        CUDA(cudaEventRecord(stop, g.stream[0]));
        g.sync();
        float ms = 0;
        CUDA(cudaEventElapsedTime(&ms, start, stop));
        samples.push_back(ms * 1000 / launches / calls);
    }
    for (auto& e : graph) CUDA(cudaGraphExecDestroy(e));
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(stop));
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

void time_exchange() {
    const std::int64_t rows = 1024;
    constexpr int layers = 12, repeats = 4;
    Group g(2, Dtype::bf16, all_reduce_slot_bytes(2, 2, rows, 7168, Dtype::bf16));
    row("all-reduce (+ norm), us a call, 2 ranks, bf16, graph of 48 calls over 12 inputs; dep: dependent launch; fresh: "
        "(producer + op) - producer, early trigger");
    row("%5s %6s | %9s %9s %9s | %9s %9s | %9s %9s", "M", "width", "norm dep", "norm", "norm fresh", "1-st dep", "1-st",
        "2-st dep", "2-st");
    for (const std::int64_t width : {3584, 7168}) {
        std::vector<std::vector<Tensors>> t(g.local());
        std::vector<Buffer> source;
        g.each([&](int r) {
            for (int l = 0; l < layers; ++l) {
                t[r].emplace_back(rows, width, width, Dtype::bf16);
                randomise(t[r][l].x, Dtype::bf16, l * 2 + r + 1, 1, 0, g.stream[r]);
                randomise(t[r][l].gamma, Dtype::bf16, 5, 0.3F, 1, g.stream[r]);
            }
            source.emplace_back(bytes_for(Dtype::bf16, rows * width));
            randomise(source[r], Dtype::bf16, 99 + r, 1, 0, g.stream[r]);
        });
        g.sync();
        for (const std::int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024}) {
            const auto measure = [&](Op op, bool dependent, int producer) {  // producer: 0 none, 1 with the call, 2 alone
                return time_graph(g, layers * repeats, [&](int r) {
                    for (int i = 0; i < layers * repeats; ++i) {
                        const Tensors& in = t[r][i % layers];
                        if (producer != 0) {
                            CUDA(launch({.grid = 132, .block = 256, .dependent = true, .stream = g.stream[r]}, produce,
                                        static_cast<const uint4*>(source[r].data), static_cast<uint4*>(in.x.data),
                                        bytes_for(Dtype::bf16, tokens * width) / 16, 4000, true));
                        }
                        if (producer != 2) CUDA(call(g, r, op, in, tokens, false, dependent, i % layers));
                    }
                });
            };
            const bool norm = tokens <= 1024;
            const double fresh = measure(Op::norm, true, 1) - measure(Op::norm, true, 2);
            row("%5ld %6ld | %9.2f %9.2f %9.2f | %9.2f %9.2f | %9.2f %9.2f", static_cast<long>(tokens),
                static_cast<long>(width), norm ? measure(Op::norm, true, 0) : 0, norm ? measure(Op::norm, false, 0) : 0,
                fresh, measure(Op::one_stage, true, 0), measure(Op::one_stage, false, 0), measure(Op::two_stage, true, 0),
                measure(Op::two_stage, false, 0));
        }
    }
    expect(g.faults().empty(), "timing: %s", g.faults().c_str());
}

/// All-reduce + norm, projection into the rank's column slice, all-reduce: the column-parallel tail made of these kernels.
void time_chain() {
    constexpr int layers = 12;
    constexpr std::int64_t H = 7168, L = 3584, N = H / 2, most = 64;
    const PackedLayout layout{N, L};
    Group g(2, Dtype::bf16, all_reduce_slot_bytes(2, 2, most, H, Dtype::bf16));
    std::vector<Tensors> latent, shared;
    std::vector<Buffer> weights;
    g.each([&](int r) {
        latent.emplace_back(most * layers, L, L, Dtype::bf16), shared.emplace_back(most * layers, H, H, Dtype::bf16);
        weights.emplace_back(layout.bytes() * layers);
        randomise(latent[r].x, Dtype::bf16, r + 1, 1, 0, g.stream[r]),
            randomise(shared[r].x, Dtype::bf16, r + 5, 1, 0, g.stream[r]);
        randomise(latent[r].gamma, Dtype::bf16, 5, 0.3F, 1, g.stream[r]),
            randomise(weights[r], Dtype::bf16, 8, 0.03F, 0, g.stream[r]);
    });
    g.sync();
    row("chain: all-reduce + norm -> projection N 3584 K 3584 into the slice -> all-reduce 7168, us a layer, 12 cold "
        "layers");
    row("%5s | %9s %9s", "M", "dependent", "plain");
    for (const std::int64_t tokens : {1, 8, 16, 32, 64}) {
        double t[2];
        for (const bool dependent : {true, false}) {
            t[!dependent] = time_graph(g, layers, [&](int r) {
                for (int l = 0; l < layers; ++l) {
                    CUDA(call(g, r, Op::norm, latent[r], tokens, false, dependent, l, l * most));
                    char* slice = static_cast<char*>(shared[r].x.data) + bytes_for(Dtype::bf16, l * most * H + r * N);
                    CUDA(skinny_projection({.a = static_cast<char*>(latent[r].y.data) + bytes_for(Dtype::bf16, l * most * L),
                                            .packed = static_cast<char*>(weights[r].data) + l * layout.bytes(),
                                            .addend = {slice, H},
                                            .c = {slice, H},
                                            .scale = 1e-3F,
                                            .tokens = tokens,
                                            .rows = N,
                                            .latent = L,
                                            .dependent_launch = dependent},
                                           g.stream[r]));
                    CUDA(call(g, r, tokens <= 16 ? Op::one_stage : Op::two_stage, shared[r], tokens, false, dependent, l,
                              l * most));
                }
            });
        }
        row("%5ld | %9.2f %9.2f", static_cast<long>(tokens), t[0], t[1]);
    }
    expect(g.faults().empty(), "chain: %s", g.faults().c_str());
}

void time_projection() {
    Group g(1, Dtype::bf16, 128);
    CUDA(cudaSetDevice(0));
    const test::CublasLt lt;  // the fastest of its candidates, measured cold like everything else
    row("projection C += A W^T, us a call, bf16, 12 or more cold weight sets in one graph; dep: dependent launch; stream: "
        "bulk-copy read of the same bytes (best chunk)");
    row("%5s %5s %5s | %8s %8s %9s | %8s %8s %8s | %8s %8s | %7s %7s", "M", "N", "K", "ours dep", "ours", "portable",
        "strm dep", "stream", "plain rd", "Lt first", "Lt best", "/stream", "vs Lt");
    for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{3584, 3584}, {896, 3584}, {2048, 1024}, {4096, 2048}}) {
        const PackedLayout layout{N, K};
        const int layers = static_cast<int>(std::max<std::int64_t>(12, 200'000'000 / layout.bytes()));
        Buffer weights(layout.bytes() * layers), a(bytes_for(Dtype::bf16, 64 * K)), c(bytes_for(Dtype::bf16, 64 * 7168)),
            workspace(64 << 20), sink(64);
        randomise(weights, Dtype::bf16, 1, 0.03F), randomise(a, Dtype::bf16, 2), randomise(c, Dtype::bf16, 3);
        CUDA(cudaDeviceSynchronize());
        const auto w = [&](int l) { return static_cast<char*>(weights.data) + l * layout.bytes(); };
        const auto each_layer = [&](auto body) {
            return time_graph(g, layers, [&](int) {
                for (int l = 0; l < layers; ++l) body(l);
            });
        };
        const cudaStream_t s = g.stream[0];
        double stream_dep = 1e9, stream = 1e9;
        for (const auto& [chunk, ring] : {std::pair{16384, 4}, {16384, 13}, {8192, 8}, {8192, 26}}) {
            CUDA(cudaFuncSetAttribute(read_stream, cudaFuncAttributeMaxDynamicSharedMemorySize, 220'000));
            for (const bool dep : {true, false}) {
                const double t = each_layer([&](int l) {
                    CUDA(launch({.grid = 132, .block = 32, .shared_bytes = 220'000, .dependent = dep, .stream = s},
                                read_stream, static_cast<const char*>(w(l)), static_cast<std::size_t>(layout.bytes()), chunk,
                                ring));
                });
                (dep ? stream_dep : stream) = std::min(dep ? stream_dep : stream, t);
            }
        }
        const double plain = each_layer([&](int l) {
            read_plain<<<264, 1024, 0, s>>>(reinterpret_cast<const uint4*>(w(l)), layout.bytes() / 16,
                                            static_cast<uint4*>(sink.data));
        });
        for (const int tokens : {1, 8, 16, 32, 64}) {
            const auto ours = [&](bool dep, bool portable) {
                return each_layer([&](int l) {
                    CUDA(skinny_projection({.a = a.data,
                                            .packed = w(l),
                                            .addend = {c.data, 7168},
                                            .c = {c.data, 7168},
                                            .tokens = tokens,
                                            .rows = N,
                                            .latent = K,
                                            .dependent_launch = dep,
                                            .portable = portable},
                                           s));
                });
            };
            double best = 0, offered = 0;
            if (lt.library) {
                cublasLtMatmulDesc_t op;
                lt.desc(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
                const cublasOperation_t transposed = CUBLAS_OP_T;
                lt.set_desc(op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
                cublasLtMatrixLayout_t lw, la, lc;
                lt.layout(&lw, CUDA_R_16BF, K, N, K), lt.layout(&la, CUDA_R_16BF, K, tokens, K),
                    lt.layout(&lc, CUDA_R_16BF, N, tokens, 7168);
                cublasLtMatmulPreference_t preference;
                lt.preference(&preference);
                const std::size_t bytes = workspace.bytes;
                lt.set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
                cublasLtMatmulHeuristicResult_t found[8];
                int count = 0;
                lt.heuristic(lt.handle, op, lw, la, lc, lc, preference, 8, found, &count);
                const float one = 1;
                for (int i = 0; i < count; ++i) {
                    const auto run = [&](int l) {
                        return lt.matmul(lt.handle, op, &one, w(l), lw, a.data, la, &one, c.data, lc, c.data, lc,
                                         &found[i].algo, workspace.data, bytes, s);
                    };
                    if (run(0) != CUBLAS_STATUS_SUCCESS) continue;
                    CUDA(cudaStreamSynchronize(s));
                    const double t = each_layer([&](int l) { run(l); });
                    if (offered == 0) offered = t;
                    best = best == 0 ? t : std::min(best, t);
                }
            }
            const double dep = ours(true, false), alone = ours(false, false);
            row("%5d %5ld %5ld | %8.2f %8.2f %9.2f | %8.2f %8.2f %8.2f | %8.2f %8.2f | %4.2f/%.2f %4.2f/%.2f", tokens,
                static_cast<long>(N), static_cast<long>(K), dep, alone, ours(false, true), stream_dep, stream, plain,
                offered, best, dep / stream_dep, alone / stream, best / dep, best / alone);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);       // loading a kernel beside one that waits may wait for it
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // a queue a rank, or ranks that share a GPU wait for one another
    bool check = argc == 1, faults = argc == 1, exchange_times = argc == 1, chain_times = argc == 1,
         product_times = argc == 1, loopback = false, local = false;
    std::vector<int> worlds{2, 3, 4, 8};
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        check |= arg == "check", faults |= arg == "faults", exchange_times |= arg == "time" || arg == "time-exchange";
        chain_times |= arg == "time" || arg == "time-chain";
        product_times |= arg == "time" || arg == "time-projection", loopback |= arg == "loopback", local |= arg == "local";
        if (arg.rfind("ranks=", 0) == 0) {
            worlds.clear();
            for (const char* p = arg.c_str() + 6; *p; p += std::strcspn(p, ",") + (p[std::strcspn(p, ",")] == ','))
                worlds.push_back(std::atoi(p));
        }
    }
    CUDA(cudaGetDeviceCount(&devices));
    for (int d = 0; d < devices; ++d) {
        cudaDeviceProp properties;
        CUDA(cudaGetDeviceProperties(&properties, d));
        std::printf("device %d: %s, %d SMs\n", d, properties.name, properties.multiProcessorCount);
        CUDA(cudaSetDevice(d));
        for (int peer = 0; peer < devices; ++peer) {
            if (peer != d) CUDA(cudaDeviceEnablePeerAccess(peer, 0));
        }
    }
    const double start = seconds();
    const auto done = [&](const char* what) {
        std::printf("%-40s %6.1f s, %d failures so far\n", what, seconds() - start, failures);
    };
    if (loopback) {
        // An even number of units: two stages then add this rank's two halves, which nobody verifies.
        check_exchange(2, Dtype::bf16, 256, true);
        check_exchange(2, Dtype::f32, 136, true);
        done("loopback");
    }
    if (loopback || local) {
        CUDA(cudaSetDevice(0));
        for (const bool portable : {false, true}) {
            check_projection({200, 264, Dtype::bf16}, portable, {3, 17});
            check_projection({896, 1032, Dtype::f16}, portable, {8, 33});
        }
        check_elementwise(Dtype::bf16);
        done("local kernels, small");
    }
    if (check) {
        CUDA(cudaSetDevice(0));
        for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) check_elementwise(dtype);
        done("elementwise");
        for (const bool portable : {false, true}) {
            check_projection({3584, 3584, Dtype::bf16}, portable, {1, 8, 16, 64});
            check_projection({896, 3584, Dtype::bf16}, portable, {1, 2, 3, 5, 7, 8, 16, 17, 33, 64});
            check_projection({2048, 1024, Dtype::f16}, portable, {5, 16, 17, 64});
            check_projection({8, 8, Dtype::bf16}, portable, {1, 64});
            check_projection({200, 72, Dtype::f16}, portable, {0, 7, 33});
            check_projection({136, 4104, Dtype::bf16}, portable, {3, 16, 63});
            check_projection({264, 16384, Dtype::bf16}, portable, {2, 64});
        }
        done("projection");
        int without = 0;
        for (const bool portable : {false, true}) {
            for (const Product& shape :
                 {Product{3584, 3584, Dtype::bf16}, {7168, 3584, Dtype::bf16}, {2048, 1024, Dtype::f16}}) {
                check_batches(shape, portable, true);
                without += check_batches(shape, portable, false);
            }
        }
        int major = 0;
        CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
        // If rows never differed, the above would say nothing. Elsewhere the portable kernel runs in both places.
        if (major == 9) expect(without > 0, "projection in batches: no other order shows without the mode");
        done("projection in batches");
        for (const int world : worlds) {
            for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
                check_exchange(world, dtype, dtype == Dtype::bf16 ? 3584 : 1032, false);
            }
            std::printf("R=%d ", world);
            done("exchange");
        }
        check_exchange(1, Dtype::bf16, 1032, false);
        check_exchange(2, Dtype::bf16, 16384, false);
        check_large(2), check_large(3);
        done("exchange, wide and large");
    }
    if (faults) {
        check_faults();
        done("faults");
    }
    if (exchange_times || chain_times || product_times) {
        if (exchange_times && devices >= 2) time_exchange();
        if (chain_times && devices >= 2) time_chain();
        if (product_times) time_projection();
        done("timing");
        std::printf("\n");
        for (const std::string& line : table) std::printf("%s\n", line.c_str());
    }
    std::printf("%s: %d failures\n", failures == 0 ? "PASSED" : "FAILED", failures);
    return failures == 0 ? 0 : 1;
}
