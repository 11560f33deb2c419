#include "gpu/protocol/emulated_gpu.h"

#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace latent_moe::gpu::emulated {

namespace {

constexpr std::align_val_t alignment{128};

/// A barrier of a kernel's threads: those that have left the kernel are not waited for, as on a GPU.
class Barrier {
public:
    explicit Barrier(unsigned members) : members_(members) {}

    void sync() {
        std::unique_lock lock(mutex_);
        ++arrived_;
        if (complete()) return;
        const unsigned phase = phase_;
        lock.unlock();
        phase_.wait(phase);
    }
    /// By every member, once a kernel. The last one makes the barrier ready for another kernel.
    void leave() {
        const std::lock_guard lock(mutex_);
        ++left_;
        if (left_ == members_) {
            left_ = 0;
        } else if (arrived_ > 0) {
            complete();
        }
    }

private:
    bool complete() {
        if (arrived_ + left_ < members_) return false;
        arrived_ = 0;
        ++phase_;
        phase_.notify_all();
        return true;
    }

    const unsigned members_;
    std::mutex mutex_;
    unsigned arrived_ = 0, left_ = 0;
    std::atomic<unsigned> phase_{0};
};

struct Wave {
    Barrier all{wave_size};
    std::array<std::uint32_t, wave_size> values{};
    /// Whoever writes one has met, over the other, all who read it.
    std::array<std::array<uint4, wave_size>, 2> shared{};
};

/// A barrier of those threads of a CTA that come to it.
class NamedBarrier {
public:
    void reset() { arrived_ = completed_ = 0; }
    void sync(unsigned threads) {
        const unsigned before = arrived_.fetch_add(1);
        const unsigned over = (before / threads + 1) * threads;
        if (before + 1 == over) {
            completed_ = over;
            completed_.notify_all();
            return;
        }
        for (unsigned at = completed_; at < over; at = completed_) completed_.wait(at);
    }

private:
    std::atomic<unsigned> arrived_{0}, completed_{0};
};

struct Cta {
    explicit Cta(unsigned threads) : all(threads), turn(static_cast<std::ptrdiff_t>(threads)), waves((threads + wave_size - 1) / wave_size) {}
    Barrier all;
    std::barrier<> turn;  ///< of a grid that is larger than the emulated GPU
    std::array<NamedBarrier, 16> some;
    std::vector<Wave> waves;
    alignas(16) std::array<std::byte, host::shared_bytes> shared_memory{};
};

struct Rank {
    explicit Rank(Grid largest) : most_ctas(largest.ctas), most_threads(largest.threads), kernel_ends(static_cast<std::ptrdiff_t>(largest.ctas * largest.threads)) {
        for (auto& kernel : ctas) {
            for (unsigned c = 0; c < largest.ctas; ++c) kernel.push_back(std::make_unique<Cta>(largest.threads));
        }
    }
    const unsigned most_ctas, most_threads;
    std::barrier<> kernel_ends;
    /// A kernel and its successor may both be running.
    std::array<std::vector<std::unique_ptr<Cta>>, 2> ctas;
};

/// See TIME.
class Clock {
public:
    /// Where a thread stands: the tick in which it last looked.
    using Looked = std::atomic<std::uint64_t>;
    static constexpr std::uint64_t never_looks = ~std::uint64_t{0};  ///< blocked, or gone

    explicit Clock(std::size_t threads) : looked_(threads) {}
    Looked& looked(std::size_t thread) { return looked_[thread]; }

    std::uint64_t tick() const { return tick_; }
    /// The tick, which goes on if all have looked in it.
    std::uint64_t look_around() {
        std::uint64_t now = tick_;
        for (const Looked& l : looked_) {
            if (l.load(std::memory_order_relaxed) < now) return now;
        }
        tick_.compare_exchange_strong(now, now + 1);
        return now;
    }

private:
    std::atomic<std::uint64_t> tick_{1};
    std::vector<Looked> looked_;
};

/// A thread of the emulated grid, and its view of the rank's stream.
class Thread final : public Neighbours, public Stream {
public:
    Thread(Rank& rank, unsigned cta, unsigned thread, Clock& clock, Clock::Looked& looked)
        : rank_(rank), cta_index_(cta), thread_(thread), clock_(clock), looked_(looked) {
        neighbours = this;
    }
    ~Thread() override { looked_ = Clock::never_looks; }

    void launch(Grid grid, const std::function<void()>& kernel) override {
        if (grid.threads > rank_.most_threads) throw std::logic_error("a CTA is larger than the emulated GPU's");
        ++launches_;
        for (unsigned index = cta_index_; index == cta_index_ || index < grid.ctas; index += rank_.most_ctas) {
            if (index != cta_index_) {
                const Blocked blocked;
                cta().turn.arrive_and_wait();
            }
            if (index < grid.ctas && thread_ < grid.threads) {
                shared_before_ = 0;
                blockIdx.x = index, gridDim.x = grid.ctas, threadIdx.x = thread_, blockDim.x = grid.threads;
                kernel();
            }
            wave().values[thread_ % wave_size] = 0;  // of a thread that has left, sums take nothing
            wave().all.leave(), cta().all.leave();
        }
        dependency_wait();  // nobody runs ahead of the kernel before
        ended_.emplace(rank_.kernel_ends.arrive());
    }

    void sync_cta() override {
        const Blocked blocked;
        cta().all.sync();
    }
    void sync_wave() override {
        const Blocked blocked;
        wave().all.sync();
    }
    std::uint32_t sum_over_wave(std::uint32_t value) override {
        wave().values[thread_ % wave_size] = value;
        sync_wave();
        std::uint32_t sum = 0;
        for (const std::uint32_t v : wave().values) sum += v;
        sync_wave();  // before anybody writes again
        return sum;
    }
    void let_others_run() override {
        looked_.store(clock_.tick(), std::memory_order_relaxed);
        std::this_thread::yield();
    }
    std::uint64_t clock_ns() override { return clock_.look_around() * tick_ns; }
    void block() { looked_ = Clock::never_looks; }
    void unblock() { looked_ = 0; }
    std::byte* shared_memory() override { return cta().shared_memory.data(); }
    const uint4* share_in_wave(uint4 value) override {
        auto& shared = wave().shared[shared_before_++ % 2];
        shared[thread_ % wave_size] = value;
        sync_wave();
        return shared.data();
    }
    void prepare_thread_barriers() override {
        if (threadIdx.x < cta().some.size()) cta().some[threadIdx.x].reset();
    }
    void sync_threads_of(int barrier, int threads) override {
        const Blocked blocked;
        cta().some[static_cast<std::size_t>(barrier)].sync(static_cast<unsigned>(threads));
    }
    void dependency_wait() override {
        if (!ended_) return;
        const Blocked blocked;
        rank_.kernel_ends.wait(std::move(*ended_));
        ended_.reset();
    }

private:
    Cta& cta() { return *rank_.ctas[launches_ % 2][cta_index_]; }
    Wave& wave() { return cta().waves[thread_ / wave_size]; }

    Rank& rank_;
    unsigned cta_index_, thread_;
    Clock& clock_;
    Clock::Looked& looked_;
    unsigned launches_ = 0;
    unsigned shared_before_ = 0;
    std::optional<std::barrier<>::arrival_token> ended_;  ///< of the kernel before, while nobody has waited for its end
};

}  // namespace

Blocked::Blocked() {
    static_cast<Thread*>(neighbours)->block();
}
Blocked::~Blocked() {
    static_cast<Thread*>(neighbours)->unblock();
}

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

namespace {

/// Of a thread that has none.
class NoNeighbours final : public Neighbours {
public:
    void sync_cta() override { refuse(); }
    void sync_wave() override { refuse(); }
    std::uint32_t sum_over_wave(std::uint32_t) override { refuse(); }
    const uint4* share_in_wave(uint4) override { refuse(); }
    void prepare_thread_barriers() override { refuse(); }
    void sync_threads_of(int, int) override { refuse(); }
    void dependency_wait() override {}
    std::byte* shared_memory() override { refuse(); }
    void let_others_run() override {}
    std::uint64_t clock_ns() override { return 0; }

private:
    [[noreturn]] static void refuse() { throw std::logic_error("a kernel whose threads meet needs a stream"); }
};

}  // namespace

void run_one_by_one(Grid grid, const std::function<void()>& kernel) {
    NoNeighbours nobody;
    Neighbours* const before = std::exchange(neighbours, &nobody);
    gridDim.x = grid.ctas, blockDim.x = grid.threads;
    for (blockIdx.x = 0; blockIdx.x < grid.ctas; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < grid.threads; ++threadIdx.x) kernel();
    }
    neighbours = before;
}

void run(int world, Grid largest, const std::function<void(int rank, Stream& stream)>& program) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < world; ++r) ranks.push_back(std::make_unique<Rank>(largest));
    const std::size_t of_rank = largest.ctas * largest.threads;
    Clock clock(static_cast<std::size_t>(world) * of_rank);
    std::vector<std::jthread> threads;
    for (int r = 0; r < world; ++r) {
        for (unsigned i = 0; i < of_rank; ++i) {
            threads.emplace_back([&, r, i] {
                const auto rank = static_cast<std::size_t>(r);
                Thread thread(*ranks[rank], i / largest.threads, i % largest.threads, clock,
                              clock.looked(rank * of_rank + i));
                program(r, thread);
            });
        }
    }
}

}  // namespace latent_moe::gpu::emulated
