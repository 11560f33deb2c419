#include "gpu/gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>

#include "gpu/collective_setup.h"
#include "gpu/kernels/convert.h"
#include "gpu/refused_algorithms.h"

namespace latent_moe::gpu {
namespace {

constexpr std::size_t gemm_workspace_bytes = std::size_t{32} << 20;
constexpr int suggestions_to_measure = 8;
constexpr int timed_runs = 7;
/// Measured with weights that are in no cache, as a step of many layers finds them.
constexpr std::size_t cold_bytes = std::size_t{160} << 20;

int bucket_of(std::int64_t m) noexcept {
    return m <= 64 ? 0 : static_cast<int>(std::bit_width(static_cast<std::uint64_t>(m - 1))) - 6;
}
std::int64_t bucket_top(int bucket) noexcept {
    return std::int64_t{64} << bucket;
}
std::int64_t bucket_bottom(int bucket) noexcept {
    return bucket == 0 ? 1 : bucket_top(bucket - 1) + 1;
}

cudaDataType_t type_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16: return CUDA_R_16BF;
        case Dtype::f16: return CUDA_R_16F;
        case Dtype::f32: return CUDA_R_32F;
        case Dtype::e4m3: break;
    }
    throw Error(StatusCode::internal, "cuBLASLt products take bf16, f16 or f32");
}

/// 16, or the largest smaller power of two that address and stride allow.
std::uint32_t alignment_of(const void* data, std::int64_t stride, Dtype dtype) {
    const std::uint64_t bits =
        reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uint64_t>(stride) * bytes_of(dtype) | 16;
    return 1U << std::countr_zero(bits);
}

}  // namespace

/// The library's view of a product. It counts columns first, so ours is transposed: Dᵀ[n, m] = W · Xᵀ.
struct Gemm::Description {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w, x, c, d;
    std::uint32_t w_alignment, x_alignment, c_alignment, d_alignment;
    std::int64_t m;

    Description(const Operands& o, std::int64_t k) : m(o.m) {
        const CublasLt& api = cublas_lt();
        check(api.MatmulDescInit_internal(&product, sizeof product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescInit");
        const cublasOperation_t transpose = CUBLAS_OP_T;
        check(api.MatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose),
              "cublasLtMatmulDescSetAttribute");
        const auto layout = [&](cublasLtMatrixLayoutOpaque_t& to, Dtype dtype, std::int64_t rows, std::int64_t columns,
                                std::int64_t stride) {
            check(api.MatrixLayoutInit_internal(&to, sizeof to, type_of(dtype), static_cast<std::uint64_t>(rows),
                                                static_cast<std::uint64_t>(columns), stride),
                  "cublasLtMatrixLayoutInit");
        };
        layout(w, o.in, k, o.n, k);
        layout(x, o.in, k, o.m, o.x_stride);
        layout(c, o.out, o.n, o.m, o.c != nullptr ? o.c_stride : o.d_stride);
        layout(d, o.out, o.n, o.m, o.d_stride);
        w_alignment = alignment_of(o.w, k, o.in);
        x_alignment = alignment_of(o.x, o.x_stride, o.in);
        c_alignment = o.c != nullptr ? alignment_of(o.c, o.c_stride, o.out) : 16;
        d_alignment = alignment_of(o.d, o.d_stride, o.out);
    }

    bool aligned() const noexcept {
        return w_alignment == 16 && x_alignment == 16 && c_alignment == 16 && d_alignment == 16;
    }
};

Gemm::Gemm(std::int64_t k) : k_(k) {
    check(cublas_lt().Create(&handle_), "cublasLtCreate");
    acquire_workspace();
}

Gemm::~Gemm() {
    static_cast<void>(cublas_lt().Destroy(handle_));
}

void Gemm::acquire_workspace() {
    if (!workspace_.get()) workspace_ = DeviceMemory(gemm_workspace_bytes, "cuBLASLt workspace");
}

std::vector<cublasLtMatmulHeuristicResult_t> Gemm::suggestions(const Description& description, int most) const {
    const CublasLt& api = cublas_lt();
    cublasLtMatmulPreferenceOpaque_t preference;
    check(api.MatmulPreferenceInit_internal(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        check(api.MatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
              "cublasLtMatmulPreferenceSetAttribute");
    };
    const std::uint64_t bytes = gemm_workspace_bytes;
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes);
    // Parts of k are added in float32, in the workspace: never rounded in between, always in the same order.
    const std::uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, description.w_alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, description.x_alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, description.c_alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, description.d_alignment);

    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<std::size_t>(most));
    int count = 0;
    auto& d = const_cast<Description&>(description);
    const cublasStatus_t status =
        api.MatmulAlgoGetHeuristic(handle_, &d.product, &d.w, &d.x, &d.c, &d.d, &preference, most, found.data(), &count);
    found.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<std::size_t>(count) : 0);
    std::erase_if(found, [&](const cublasLtMatmulHeuristicResult_t& result) {
        int id = -1;
        std::size_t written = 0;
        static_cast<void>(api.MatmulAlgoConfigGetAttribute(&result.algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written));
        return result.state != CUBLAS_STATUS_SUCCESS || is_refused(id, d.m);
    });
    return found;
}

cublasStatus_t Gemm::launch(const Operands& o, const Description& description, const cublasLtMatmulAlgo_t& algorithm,
                            cudaStream_t stream) const {
    const float alpha = o.alpha;
    const float beta = o.c != nullptr ? 1.0F : 0.0F;
    auto& d = const_cast<Description&>(description);
    return cublas_lt().Matmul(handle_, &d.product, &alpha, o.w, &d.w, o.x, &d.x, &beta, o.c != nullptr ? o.c : o.d, &d.c,
                              o.d, &d.d, &algorithm, workspace_.get(), workspace_.bytes(), stream);
}

void Gemm::measure(Choice& choice, std::int64_t m) const {
    // Contexts of one process share what was measured.
    using Key = std::tuple<int, std::int64_t, std::int64_t, std::int64_t, Dtype, Dtype, bool>;
    static std::mutex mutex;
    static std::map<Key, Choice> measured;
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const Key key{device, k_, choice.n, m, choice.in, choice.out, choice.accumulate};
    const std::lock_guard lock(mutex);
    if (const auto known = measured.find(key); known != measured.end()) {
        choice = known->second;
        return;
    }

    const Stream stream = make_stream();
    const auto elements = [&](std::int64_t rows) { return static_cast<std::size_t>(rows) * static_cast<std::size_t>(k_); };
    const std::size_t element = bytes_of(choice.in);
    const std::size_t weight_bytes = elements(choice.n) * element;
    const std::size_t copies = std::max<std::size_t>(1, cold_bytes / weight_bytes);
    const DeviceMemory w(copies * weight_bytes, "products to measure");
    const DeviceMemory x(elements(m) * element, "products to measure");
    const DeviceMemory d(static_cast<std::size_t>(m * choice.n) * bytes_of(choice.out), "products to measure");
    check(fill_noise(w.get(), choice.in, static_cast<std::int64_t>(w.bytes() / element), stream.get()), "noise kernel");
    check(fill_noise(x.get(), choice.in, static_cast<std::int64_t>(x.bytes() / element), stream.get()), "noise kernel");
    check(fill_noise(d.get(), choice.out, static_cast<std::int64_t>(d.bytes() / bytes_of(choice.out)), stream.get()),
          "noise kernel");
    Operands operands{.x = x.get(),
                      .x_stride = k_,
                      .w = w.get(),
                      .c = choice.accumulate ? d.get() : nullptr,
                      .c_stride = choice.n,
                      .d = d.get(),
                      .d_stride = choice.n,
                      .m = m,
                      .n = choice.n,
                      .in = choice.in,
                      .out = choice.out,
                      .alpha = 0.01F};
    const Description description(operands, k_);
    const Event begin = make_event(true);
    const Event end = make_event(true);
    float best = 0;
    std::size_t turn = 0;
    for (const cublasLtMatmulHeuristicResult_t& suggestion : suggestions(description, suggestions_to_measure)) {
        std::array<float, timed_runs> times{};
        bool works = true;
        for (int run = -1; run < timed_runs && works; ++run) {  // the first one only loads the kernel
            operands.w = w.get() + turn++ % copies * weight_bytes;
            check(cudaEventRecord(begin.get(), stream.get()), "cudaEventRecord");
            works = launch(operands, description, suggestion.algo, stream.get()) == CUBLAS_STATUS_SUCCESS;
            check(cudaEventRecord(end.get(), stream.get()), "cudaEventRecord");
            check(cudaEventSynchronize(end.get()), "a product to measure");
            if (works && run >= 0) {
                check(cudaEventElapsedTime(&times[static_cast<std::size_t>(run)], begin.get(), end.get()),
                      "cudaEventElapsedTime");
            }
        }
        if (!works) continue;
        std::ranges::nth_element(times, times.begin() + timed_runs / 2);
        if (choice.found && times[timed_runs / 2] >= best) continue;
        best = times[timed_runs / 2];
        choice.found = true;
        choice.algorithm = suggestion.algo;
    }
    measured.emplace(key, choice);
}

void Gemm::choose(const Bootstrap& bootstrap, const std::vector<std::int64_t>& widths, std::int64_t least, std::int64_t most,
                  Dtype dtype) {
    choices_.clear();
    for (const std::int64_t n : widths) {
        for (int bucket = bucket_of(least); least <= most && bucket <= bucket_of(most); ++bucket) {
            for (const bool accumulate : {false, true}) {
                choices_.push_back({.n = n, .bucket = bucket, .in = dtype, .out = dtype, .accumulate = accumulate});
            }
        }
    }
    together(bootstrap, "choice of products", [&] {
        if (bootstrap.rank != 0) return;
        for (Choice& choice : choices_) measure(choice, std::min(bucket_top(choice.bucket), most));
    });
    for (Choice& choice : choices_) {
        const int bucket = choice.bucket;
        choice = gather(bootstrap, choice).front();
        choice.bucket = bucket;
    }
    choices_.reserve(choices_.size() + 64);  // for what `run` may add
    together(bootstrap, "loading of products", [&] {
        for (const Choice& choice : choices_) load(choice, std::min(bucket_top(choice.bucket), most));
    });
}

void Gemm::prepare(std::int64_t n, std::int64_t least, std::int64_t most, Dtype in, Dtype out) {
    for (int bucket = bucket_of(least); bucket <= bucket_of(most); ++bucket) {
        Choice choice{.n = n, .bucket = bucket, .in = in, .out = out};
        const bool known = std::ranges::any_of(choices_, [&](const Choice& other) {
            return other.n == n && other.bucket == bucket && other.in == in && other.out == out && !other.accumulate;
        });
        if (known) continue;
        std::byte* const anywhere = workspace_.get();  // aligned, which is all that a suggestion asks of an address
        const Operands operands{.x = anywhere,
                                .x_stride = k_,
                                .w = anywhere,
                                .c = nullptr,
                                .c_stride = 0,
                                .d = anywhere,
                                .d_stride = n,
                                .m = bucket_top(bucket),
                                .n = n,
                                .in = in,
                                .out = out,
                                .alpha = 1.0F};
        const auto found = suggestions(Description(operands, k_), 1);
        if (found.empty()) continue;
        choice.found = true;
        choice.algorithm = found.front().algo;
        choices_.push_back(choice);
        load(choice, std::min(bucket_top(bucket), most));
    }
}

// One algorithm may mean several kernels, an odd product's among them. A kernel that is first wanted while a peer waits for
// this rank would be loaded then, and where everything is loaded eagerly that waits for the peer's device: for ever.
void Gemm::load(const Choice& choice, std::int64_t most) {
    const auto bytes = [&](std::int64_t rows, std::int64_t columns, Dtype dtype) {
        return static_cast<std::size_t>(rows * columns) * bytes_of(dtype);
    };
    const DeviceMemory x(bytes(most, k_, choice.in), "loading of products");
    const DeviceMemory w(bytes(choice.n, k_, choice.in), "loading of products");
    const DeviceMemory d(bytes(most, choice.n, choice.out), "loading of products");
    const Stream stream = make_stream();
    const std::int64_t bottom = bucket_bottom(choice.bucket);
    for (const std::int64_t m : {bottom, bottom + 1, bottom + 3, bottom + 7, most}) {
        if (m < bottom || m > most) continue;
        run({.x = x.get(),
             .x_stride = k_,
             .w = w.get(),
             .c = choice.accumulate ? d.get() : nullptr,
             .c_stride = choice.n,
             .d = d.get(),
             .d_stride = choice.n,
             .m = m,
             .n = choice.n,
             .in = choice.in,
             .out = choice.out,
             .alpha = 1.0F},
            stream.get());
    }
    check(cudaStreamSynchronize(stream.get()), "loading of products");
}

Gemm::Choice* Gemm::find(const Operands& o) noexcept {
    const int bucket = bucket_of(o.m);
    for (Choice& choice : choices_) {
        if (choice.n == o.n && choice.bucket == bucket && choice.in == o.in && choice.out == o.out &&
            choice.accumulate == (o.c != nullptr)) {
            return &choice;
        }
    }
    return nullptr;
}

void Gemm::run(const Operands& operands, cudaStream_t stream) {
    const Description description(operands, k_);
    Choice* choice = description.aligned() ? find(operands) : nullptr;
    if (choice != nullptr && choice->found &&
        launch(operands, description, choice->algorithm, stream) == CUBLAS_STATUS_SUCCESS)
        return;
    // What is suggested for the bucket's largest product serves the whole bucket: the choice depends on no earlier call.
    Operands largest = operands;
    largest.m = bucket_top(bucket_of(operands.m));
    for (const Operands& asked : {largest, operands}) {
        for (const cublasLtMatmulHeuristicResult_t& suggestion :
             suggestions(Description(asked, k_), suggestions_to_measure)) {
            if (launch(operands, description, suggestion.algo, stream) != CUBLAS_STATUS_SUCCESS) continue;
            if (choice == nullptr && description.aligned()) {
                choices_.push_back({.n = operands.n,
                                    .bucket = bucket_of(operands.m),
                                    .in = operands.in,
                                    .out = operands.out,
                                    .accumulate = operands.c != nullptr,
                                    .found = true,
                                    .algorithm = suggestion.algo});
            }
            return;
        }
    }
    throw Error(StatusCode::unsupported, fmt::format("cuBLASLt has no product of {} x {} x {} {} values to {}", operands.m,
                                                     operands.n, k_, name(operands.in), name(operands.out)));
}

}  // namespace latent_moe::gpu
