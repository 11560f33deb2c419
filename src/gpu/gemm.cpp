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

namespace latent_moe::gpu {
namespace {

constexpr std::size_t gemm_workspace_bytes = std::size_t{32} << 20;
constexpr int suggestions_to_measure = 8;
constexpr int timed_runs = 7;

int bucket_of(std::int64_t m) noexcept {
    return m <= 64 ? 0 : static_cast<int>(std::bit_width(static_cast<std::uint64_t>(m - 1))) - 6;
}
std::int64_t bucket_top(int bucket) noexcept {
    return std::int64_t{64} << bucket;
}
std::int64_t bucket_bottom(int bucket) noexcept {
    return bucket == 0 ? 1 : bucket_top(bucket - 1) + 1;
}

}  // namespace

Gemm::Gemm(std::int64_t k) : k_(k) {
    acquire_workspace();
}

void Gemm::acquire_workspace() {
    if (!workspace_.get()) workspace_ = DeviceMemory(gemm_workspace_bytes, "workspace of products");
}

std::vector<MatmulAlgorithm> Gemm::suggestions(const Operands& operands, int most) const {
    return library_.suggestions(operands, k_, gemm_workspace_bytes, most);
}

bool Gemm::launch(const Operands& operands, const MatmulAlgorithm& algorithm, cudaStream_t stream) const {
    return library_.launch(operands, k_, algorithm, workspace_.get(), workspace_.bytes(), stream);
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
    const Event begin = make_event(true);
    const Event end = make_event(true);
    float best = 0;
    std::size_t turn = 0;
    for (const MatmulAlgorithm& suggestion : suggestions(operands, suggestions_to_measure)) {
        std::array<float, timed_runs> times{};
        bool works = true;
        for (int run = -1; run < timed_runs && works; ++run) {  // the first one only loads the kernel
            operands.w = w.get() + turn++ % copies * weight_bytes;
            check(cudaEventRecord(begin.get(), stream.get()), "cudaEventRecord");
            works = launch(operands, suggestion, stream.get());
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
        choice.algorithm = suggestion;
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
        const auto found = suggestions(operands, 1);
        if (found.empty()) continue;
        choice.found = true;
        choice.algorithm = found.front();
        choices_.push_back(choice);
        load(choice, std::min(bucket_top(bucket), most));
    }
}

// One algorithm may mean several kernels: an odd product's among them, and one for an addend that is not the output (seen
// with cuBLASLt 13.0). A kernel that is first wanted while a peer waits for this rank would be loaded then, and loading
// waits for the device where the modules are loaded eagerly or the ranks share it: for ever.
void Gemm::load(const Choice& choice, std::int64_t most) {
    const auto bytes = [&](std::int64_t rows, std::int64_t columns, Dtype dtype) {
        return static_cast<std::size_t>(rows * columns) * bytes_of(dtype);
    };
    const DeviceMemory x(bytes(most, k_, choice.in), "loading of products");
    const DeviceMemory w(bytes(choice.n, k_, choice.in), "loading of products");
    const DeviceMemory d(bytes(most, choice.n, choice.out), "loading of products");
    const DeviceMemory other(choice.accumulate ? d.bytes() : 0, "loading of products");
    const Stream stream = make_stream();
    const std::int64_t bottom = bucket_bottom(choice.bucket);
    std::vector<const std::byte*> addends{nullptr};
    if (choice.accumulate) addends = {d.get(), other.get()};
    for (const std::int64_t m : {bottom, bottom + 1, bottom + 3, bottom + 7, most}) {
        if (m < bottom || m > most) continue;
        for (const std::byte* const addend : addends) {
            run({.x = x.get(),
                 .x_stride = k_,
                 .w = w.get(),
                 .c = addend,
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
    const bool aligned = is_aligned(operands, k_);
    Choice* choice = aligned ? find(operands) : nullptr;
    if (choice != nullptr && choice->found && launch(operands, choice->algorithm, stream)) return;
    // What is suggested for the bucket's largest product serves the whole bucket: the choice depends on no earlier call.
    Operands largest = operands;
    largest.m = bucket_top(bucket_of(operands.m));
    for (const Operands& asked : {largest, operands}) {
        for (const MatmulAlgorithm& suggestion : suggestions(asked, suggestions_to_measure)) {
            if (!launch(operands, suggestion, stream)) continue;
            if (choice == nullptr && aligned) {
                choices_.push_back({.n = operands.n,
                                    .bucket = bucket_of(operands.m),
                                    .in = operands.in,
                                    .out = operands.out,
                                    .accumulate = operands.c != nullptr,
                                    .found = true,
                                    .algorithm = suggestion});
            }
            return;
        }
    }
    throw Error(StatusCode::unsupported, fmt::format("{} has no product of {} x {} x {} {} values to {}", Matmul::library(),
                                                     operands.m, operands.n, k_, name(operands.in), name(operands.out)));
}

}  // namespace latent_moe::gpu
