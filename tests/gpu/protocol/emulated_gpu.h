// Ranks as grids of threads of this machine: what a GPU's launch, stream and barriers give a kernel, for kernels' bodies
// that were compiled for the host (primitives/target_host.h).
//
// A thread of this machine plays a wave, its lanes one after the other: each lane has a stack of its own and runs until it
// waits for somebody. Every lane of every rank's largest grid goes through the same calls. A rank's stream is in order: a
// kernel's threads may start while the kernel before still runs (as with dependent launch), and `dependency_wait` holds them
// until it has ended.
//
// TIME is counted, not measured: a tick is over when every thread that could do anything has looked in vain at what it waits
// for. However slow a machine, a rank that is there is never late; and a wait of many ticks for one that is not there ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "gpu/primitives/mailbox.h"
#include "gpu/primitives/window.h"

namespace latent_moe::gpu::emulated {

struct Grid {
    unsigned ctas;
    unsigned threads;  ///< of a CTA: a multiple of wave_size
};

/// One rank's end of the exchange: its window, and where faults are told.
class RankMemory {
public:
    RankMemory(std::int64_t bytes, std::uint32_t sentinel);

    void* base() { return words_.get(); }
    FaultRecord& record() { return record_; }

private:
    struct Free {
        void operator()(std::byte* p) const;
    };
    std::unique_ptr<std::byte[], Free> words_;
    FaultRecord record_{};
};

/// All ranks' memory, as the kernels' parameters show it.
class Windows {
public:
    /// Empties control words; everything behind them holds `sentinel`.
    Windows(int world, std::int64_t slot_bytes, std::int64_t bytes, std::uint32_t sentinel);

    [[nodiscard]] Exchange exchange(int rank, std::uint64_t timeout_ns) const;
    FaultRecord& record(int rank) { return ranks_[static_cast<std::size_t>(rank)]->record(); }
    void* base(int rank) { return ranks_[static_cast<std::size_t>(rank)]->base(); }

private:
    std::vector<std::unique_ptr<RankMemory>> ranks_;
    std::int64_t slot_bytes_;
};

/// What one thread's program launches on its rank's stream.
class Stream {
public:
    virtual ~Stream() = default;
    /// By every thread of the rank, with the same arguments in the same order: those that the grid has run `kernel`. Of a
    /// grid of more CTAs than there are, each takes several, one after the other.
    virtual void launch(Grid grid, const std::function<void()>& kernel) = 0;
    /// A kernel that starts when the one before has ended.
    void launch_in_order(Grid grid, const std::function<void()>& kernel) {
        launch(grid, [&] { gpu::dependency_wait(), kernel(); });
    }
};

inline constexpr std::uint64_t tick_ns = 1 << 14;

/// A barrier for some of an emulated GPU's threads, always as many.
class Barrier {
public:
    void arrive(unsigned threads);
    void sync(unsigned threads);
    void reset();

private:
    std::atomic<unsigned> arrived_{0}, completed_{0};
};

/// Plays a kernel whose threads do not wait for one another, in the calling thread.
void run_one_by_one(Grid grid, const std::function<void()>& kernel);

/// Runs `program(rank, stream)` on every thread of `largest`, for every rank; returns when all have ended.
void run(int world, Grid largest, const std::function<void(int rank, Stream& stream)>& program);

}  // namespace latent_moe::gpu::emulated
