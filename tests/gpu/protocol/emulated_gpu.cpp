#include "gpu/protocol/emulated_gpu.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#elif defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace latent_moe::gpu::emulated {

namespace {

constexpr std::align_val_t alignment{128};

/// Returns once `word`, which counts up, has reached `value`.
void wait_until(const std::atomic<unsigned>& word, unsigned value);

/// A barrier of a kernel's threads: those that have left the kernel are not waited for, as on a GPU.
class KernelBarrier {
public:
    explicit KernelBarrier(unsigned members) : members_(members) {}

    void sync() {
        unsigned over = 0;
        {
            const std::lock_guard lock(mutex_);
            ++arrived_;
            over = phase_.load(std::memory_order_relaxed) + 1;
            if (complete()) return;
        }
        wait_until(phase_, over);
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
        return true;
    }

    const unsigned members_;
    std::mutex mutex_;
    unsigned arrived_ = 0, left_ = 0;
    std::atomic<unsigned> phase_{0};
};

struct Wave {
    KernelBarrier all{wave_size};
    std::array<std::uint32_t, wave_size> values{};
    /// Whoever writes one has met, over the other, all who read it.
    std::array<std::array<uint4, wave_size>, 2> shared{};
};

struct Cta {
    explicit Cta(unsigned threads) : all(threads), waves((threads + wave_size - 1) / wave_size) {}
    KernelBarrier all;
    Barrier turn;  ///< of a grid that is larger than the emulated GPU
    std::array<Barrier, 16> some;
    std::vector<Wave> waves;
    alignas(16) std::array<std::byte, host::shared_bytes> shared_memory{};
};

struct Rank {
    explicit Rank(Grid grid) : largest(grid) {
        for (auto& kernel : ctas) {
            for (unsigned c = 0; c < largest.ctas; ++c) kernel.push_back(std::make_unique<Cta>(largest.threads));
        }
    }
    const Grid largest;
    std::atomic<unsigned> ends{0};  ///< threads that have come to the end of a kernel, of all kernels together
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

/// A lane's own stack, and where it stands there. Sanitizers are told of every change of stacks: to the thread sanitizer
/// lanes are threads of their own, which nothing orders but what they do.
class Lane {
public:
    /// Of the wave's thread itself.
    Lane() {
#ifdef __SANITIZE_THREAD__
        fiber_ = __tsan_get_current_fiber();
#endif
    }
    Lane(Lane& wave, std::function<void()> body) : wave_(&wave), body_(std::move(body)), stack_(new std::byte[stack_bytes]) {
#ifdef __SANITIZE_THREAD__
        fiber_ = __tsan_create_fiber(0);
#endif
        getcontext(&context_);
        context_.uc_stack.ss_sp = stack_.get(), context_.uc_stack.ss_size = stack_bytes;
        const auto self = reinterpret_cast<std::uintptr_t>(this);
        makecontext(&context_, reinterpret_cast<void (*)()>(&begin), 2, static_cast<unsigned>(self),
                    static_cast<unsigned>(self >> 32));
    }
    ~Lane() {
#ifdef __SANITIZE_THREAD__
        if (wave_ != nullptr) __tsan_destroy_fiber(fiber_);
#endif
    }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    /// Leaves `from`, whose stack runs, for this one.
    void take_over_from(Lane& from) {
#ifdef __SANITIZE_ADDRESS__
        void* left = nullptr;
        __sanitizer_start_switch_fiber(from.ended() ? nullptr : &left, bottom_, size_);
#elif defined(__SANITIZE_THREAD__)
        // A lane begins after it was made and ends before it is destroyed; in between this orders nothing.
        const bool begins = wave_ != nullptr && !started_.load(std::memory_order_relaxed);
        __tsan_switch_to_fiber(fiber_, begins || from.ended() ? 0 : __tsan_switch_to_fiber_no_sync);
#endif
        swapcontext(&from.context_, &context_);
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_finish_switch_fiber(left, nullptr, nullptr);
#endif
    }

    bool ended() const {
        return ended_.load(std::memory_order_relaxed);
    }
    bool could_run() const {
        const std::atomic<unsigned>* word = awaited_.load(std::memory_order_relaxed);
        return word == nullptr ||
               reached(word->load(std::memory_order_relaxed), awaited_value_.load(std::memory_order_relaxed));
    }
    bool looks_around() const {
        return started_.load(std::memory_order_relaxed) && awaited_.load(std::memory_order_relaxed) == nullptr;
    }
    static bool reached(unsigned at, unsigned value) {
        return static_cast<int>(at - value) >= 0;
    }

    /// Lets the other lanes of the wave run, until `word` has reached `value` (null: as soon as they have had their turn).
    void pause(const std::atomic<unsigned>* word, unsigned value) {
        awaited_value_.store(value, std::memory_order_relaxed);
        awaited_.store(word, std::memory_order_relaxed);
        const unsigned block = blockIdx.x, grid = gridDim.x, thread = threadIdx.x, threads = blockDim.x;
        Neighbours* const mine = neighbours;
        wave_->take_over_from(*this);
        blockIdx.x = block, gridDim.x = grid, threadIdx.x = thread, blockDim.x = threads, neighbours = mine;
    }

private:
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    static constexpr std::size_t stack_bytes = 256 << 10;
#else
    static constexpr std::size_t stack_bytes = 64 << 10;
#endif

    static void begin(unsigned low, unsigned high) {
        Lane& lane = *reinterpret_cast<Lane*>(low | static_cast<std::uintptr_t>(high) << 32);
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_finish_switch_fiber(nullptr, &lane.wave_->bottom_, &lane.wave_->size_);
        lane.bottom_ = lane.stack_.get(), lane.size_ = stack_bytes;
#endif
        lane.started_.store(true, std::memory_order_relaxed);
        lane.body_();
        lane.ended_.store(true, std::memory_order_relaxed);
        lane.wave_->take_over_from(lane);
    }

    Lane* wave_ = nullptr;
    std::function<void()> body_;
    std::unique_ptr<std::byte[]> stack_;
    ucontext_t context_{};
    // Of one thread of this machine, but of two for the thread sanitizer.
    std::atomic<bool> started_{false}, ended_{false};
    std::atomic<const std::atomic<unsigned>*> awaited_{nullptr};
    std::atomic<unsigned> awaited_value_{0};
#ifdef __SANITIZE_ADDRESS__
    const void* bottom_ = stack_.get();
    std::size_t size_ = stack_bytes;
#elif defined(__SANITIZE_THREAD__)
    void* fiber_ = nullptr;
#endif
};

/// A thread of the emulated grid, and its view of the rank's stream.
class Thread final : public Neighbours, public Stream {
public:
    Thread(Rank& rank, unsigned cta, unsigned thread, Clock& clock, Clock::Looked& looked, Lane& lane)
        : rank_(rank), cta_index_(cta), thread_(thread), clock_(clock), looked_(looked), lane_(lane) {
        neighbours = this;
    }
    ~Thread() override { looked_ = Clock::never_looks; }

    void launch(Grid grid, const std::function<void()>& kernel) override {
        if (grid.threads > rank_.largest.threads) throw std::logic_error("a CTA is larger than the emulated GPU's");
        ++launches_;
        for (unsigned index = cta_index_; index == cta_index_ || index < grid.ctas; index += rank_.largest.ctas) {
            if (index != cta_index_) cta().turn.sync(rank_.largest.threads);
            shared_before_ = 0;
            if (index < grid.ctas && thread_ < grid.threads) {
                blockIdx.x = index, gridDim.x = grid.ctas, threadIdx.x = thread_, blockDim.x = grid.threads;
                kernel();
            }
            wave().values[thread_ % wave_size] = 0;  // of a thread that has left, sums take nothing
            wave().all.leave(), cta().all.leave();
        }
        wait_for_kernels(launches_ - 1);  // nobody runs ahead of the kernel before
        ++rank_.ends;
    }

    void sync_cta() override { cta().all.sync(); }
    void sync_wave() override { wave().all.sync(); }
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
        lane_.pause(nullptr, 0);
    }
    std::uint64_t clock_ns() override { return clock_.look_around() * tick_ns; }
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
        cta().some[static_cast<std::size_t>(barrier)].sync(static_cast<unsigned>(threads));
    }
    void dependency_wait() override { wait_for_kernels(launches_ - 1); }

    /// Time does not wait for a thread that waits for others of its GPU.
    void wait_until(const std::atomic<unsigned>& word, unsigned value) {
        while (!Lane::reached(word, value)) {
            looked_ = Clock::never_looks;
            lane_.pause(&word, value);
            looked_ = 0;
        }
    }

private:
    void wait_for_kernels(unsigned count) { wait_until(rank_.ends, count * rank_.largest.ctas * rank_.largest.threads); }

    Cta& cta() { return *rank_.ctas[launches_ % 2][cta_index_]; }
    Wave& wave() { return cta().waves[thread_ / wave_size]; }

    Rank& rank_;
    unsigned cta_index_, thread_;
    Clock& clock_;
    Clock::Looked& looked_;
    Lane& lane_;
    unsigned launches_ = 0;
    unsigned shared_before_ = 0;  ///< in this kernel
};

void wait_until(const std::atomic<unsigned>& word, unsigned value) {
    static_cast<Thread*>(static_cast<Neighbours*>(neighbours))->wait_until(word, value);
}

}  // namespace

void Barrier::arrive(unsigned threads) {
    const unsigned before = arrived_.fetch_add(1), over = (before / threads + 1) * threads;
    if (before + 1 == over) completed_ = over;
}
void Barrier::sync(unsigned threads) {
    const unsigned before = arrived_.fetch_add(1), over = (before / threads + 1) * threads;
    if (before + 1 == over) {
        completed_ = over;
    } else {
        wait_until(completed_, over);
    }
}
void Barrier::reset() {
    arrived_ = completed_ = 0;
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
    Neighbours* const before = neighbours;
    neighbours = &nobody;
    gridDim.x = grid.ctas, blockDim.x = grid.threads;
    for (unsigned cta = 0; cta < grid.ctas; ++cta) {
        for (unsigned thread = 0; thread < grid.threads; ++thread) blockIdx.x = cta, threadIdx.x = thread, kernel();
    }
    neighbours = before;
}

namespace {

/// Until all lanes have ended. A wave of which none can run leaves the machine to the others, soon for longer.
void play(Lane& wave, const std::vector<std::unique_ptr<Lane>>& lanes) {
    int idle_rounds = 0;
    for (std::size_t left = lanes.size(); left > 0;) {
        ++idle_rounds;
        for (const auto& lane : lanes) {
            if (lane->ended() || !lane->could_run()) continue;
            if (!lane->looks_around()) idle_rounds = 0;
            lane->take_over_from(wave);
            if (lane->ended()) --left;
        }
        if (idle_rounds > 20) {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        } else if (idle_rounds > 0) {
            std::this_thread::yield();
        }
    }
}

}  // namespace

void run(int world, Grid largest, const std::function<void(int rank, Stream& stream)>& program) {
    if (largest.threads % wave_size != 0) throw std::logic_error("the emulated GPU's CTAs have waves that are not whole");
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < world; ++r) ranks.push_back(std::make_unique<Rank>(largest));
    const std::size_t of_rank = largest.ctas * largest.threads;
    Clock clock(static_cast<std::size_t>(world) * of_rank);
    std::vector<std::jthread> waves;
    const unsigned waves_of_cta = (largest.threads + wave_size - 1) / wave_size;
    for (int r = 0; r < world; ++r) {
        for (unsigned w = 0; w < largest.ctas * waves_of_cta; ++w) {
            waves.emplace_back([&, r, w] {
                const auto rank = static_cast<std::size_t>(r);
                const unsigned cta = w / waves_of_cta, first = w % waves_of_cta * wave_size;
                Lane wave;
                std::vector<std::unique_ptr<Lane>> lanes;
                for (unsigned thread = first; thread < std::min(largest.threads, first + wave_size); ++thread) {
                    lanes.push_back(std::make_unique<Lane>(wave, [&, thread, lane = lanes.size()] {
                        Clock::Looked& looked = clock.looked(rank * of_rank + cta * largest.threads + thread);
                        Thread self(*ranks[rank], cta, thread, clock, looked, *lanes[lane]);
                        program(r, self);
                    }));
                }
                play(wave, lanes);
            });
        }
    }
}

}  // namespace latent_moe::gpu::emulated
