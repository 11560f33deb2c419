#include "gpu/protocol/emulated_gpu.h"

#include <array>
#include <cstring>
#include <new>
#include <thread>

namespace latent_moe::gpu::emulated {

namespace {

constexpr std::align_val_t alignment{128};

struct Wave {
    std::barrier<> all{static_cast<std::ptrdiff_t>(wave_size)};
    std::array<std::uint32_t, wave_size> values{};
};

struct Cta {
    explicit Cta(unsigned threads) : all(static_cast<std::ptrdiff_t>(threads)), waves(threads / wave_size) {}
    std::barrier<> all;
    std::vector<Wave> waves;
};

struct Rank {
    explicit Rank(Grid largest) : kernel_ends(static_cast<std::ptrdiff_t>(largest.ctas * largest.threads)) {
        for (unsigned c = 0; c < largest.ctas; ++c) ctas.push_back(std::make_unique<Cta>(largest.threads));
    }
    std::barrier<> kernel_ends;
    std::vector<std::unique_ptr<Cta>> ctas;
};

/// A thread of the emulated grid, and its view of the rank's stream.
class Thread final : public Neighbours, public Stream {
public:
    Thread(Rank& rank, unsigned cta, unsigned thread)
        : rank_(rank), cta_(*rank.ctas[cta]), wave_(cta_.waves[thread / wave_size]), cta_index_(cta), thread_(thread) {}

    void launch(Grid grid, const std::function<void()>& kernel) override {
        if (cta_index_ < grid.ctas && thread_ < grid.threads) {
            blockIdx.x = cta_index_, gridDim.x = grid.ctas, threadIdx.x = thread_, blockDim.x = grid.threads;
            neighbours = this;
            kernel();
        }
        dependency_wait();  // an idle thread must not run ahead of its rank either
        ended_.emplace(rank_.kernel_ends.arrive());
    }

    void sync_cta() override { cta_.all.arrive_and_wait(); }
    void sync_wave() override { wave_.all.arrive_and_wait(); }
    std::uint32_t sum_over_wave(std::uint32_t value) override {
        wave_.values[thread_ % wave_size] = value;
        sync_wave();
        std::uint32_t sum = 0;
        for (const std::uint32_t v : wave_.values) sum += v;
        sync_wave();  // before anybody writes again
        return sum;
    }
    void dependency_wait() override {
        if (!ended_) return;
        rank_.kernel_ends.wait(std::move(*ended_));
        ended_.reset();
    }

private:
    Rank& rank_;
    Cta& cta_;
    Wave& wave_;
    unsigned cta_index_, thread_;
    std::optional<std::barrier<>::arrival_token> ended_;  ///< of the kernel before, while nobody has waited for its end
};

}  // namespace

void RankMemory::Free::operator()(std::byte* p) const {
    ::operator delete[](p, alignment);
}

RankMemory::RankMemory(std::int64_t bytes, std::uint32_t sentinel)
    : words_(new (alignment) std::byte[static_cast<std::size_t>(bytes)]) {
    std::memset(words_.get(), 0, control_bytes);
    for (std::int64_t at = control_bytes; at + 4 <= bytes; at += 4) std::memcpy(words_.get() + at, &sentinel, 4);
}

Windows::Windows(int world, std::int64_t slot_bytes, std::int64_t bytes, std::uint32_t sentinel) : slot_bytes_(slot_bytes) {
    for (int r = 0; r < world; ++r) ranks_.push_back(std::make_unique<RankMemory>(bytes, sentinel));
}

Exchange Windows::exchange(int rank, std::uint64_t timeout_ns) const {
    Exchange x{};
    x.window.rank = rank, x.window.world = static_cast<int>(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) x.window.base[r] = ranks_[r]->base();
    x.slot_bytes = slot_bytes_;
    x.record = &ranks_[static_cast<std::size_t>(rank)]->record();
    x.timeout_ns = timeout_ns;
    return x;
}

void run(int world, Grid largest, const std::function<void(int rank, Stream& stream)>& program) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < world; ++r) ranks.push_back(std::make_unique<Rank>(largest));
    std::vector<std::jthread> threads;
    for (int r = 0; r < world; ++r) {
        for (unsigned i = 0; i < largest.ctas * largest.threads; ++i) {
            threads.emplace_back([&, r, i] {
                Thread thread(*ranks[static_cast<std::size_t>(r)], i / largest.threads, i % largest.threads);
                program(r, thread);
            });
        }
    }
}

}  // namespace latent_moe::gpu::emulated
