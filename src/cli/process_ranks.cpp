// Ranks that are MPI processes. Every process parses the same command line; rank 0 alone prints.
//
// However a process ends, it comes to `settle`: an all-gather of outcomes in which waiting processes sleep, so that they
// take no core from the one that works. A rank that fails on its own goes there at once; its peers miss it in their next
// exchange, give up after the timeout and come too. Where a peer never comes, the first rank whose patience ends says so and
// stops the job.
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cli/command.h"
#include "cli/ranks.h"
#include "comm/transport.h"
#include "latent_moe/mpi.h"
#include "latent_moe/shape.h"

namespace latent_moe::cli {
namespace {

/// What a process is about to do when it settles. Processes that were started with different arguments may differ here.
enum class Stage : int { run_ranks, work_once, end };

const char* name(Stage stage) noexcept {
    switch (stage) {
        case Stage::run_ranks: return "is about to run its rank";
        case Stage::work_once: return "prepares what all ranks need";
        case Stage::end: return "is at its end";
    }
    return "is elsewhere";
}

/// An outcome as it travels.
struct Record {
    int status = 0;
    int code = 0;
    int stage = 0;  ///< Stage: where the process is
    std::array<char, 1024> message{};
};

Record record_of(const Outcome& outcome, Stage stage) {
    Record record{
        .status = outcome.status, .code = static_cast<int>(outcome.failure.code()), .stage = static_cast<int>(stage)};
    outcome.failure.message().copy(record.message.data(), record.message.size() - 1);
    return record;
}

class ProcessRanks final : public Ranks {
public:
    explicit ProcessRanks(int timeout_ms) : timeout_ms_(timeout_ms) {
        int level = MPI_THREAD_SINGLE;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        MPI_Comm_size(MPI_COMM_WORLD, &world_);
    }
    ProcessRanks(const ProcessRanks&) = delete;
    ProcessRanks& operator=(const ProcessRanks&) = delete;
    ~ProcessRanks() override { MPI_Finalize(); }

    void set_world(std::optional<int> asked, int) override {
        if (world_ > max_world) {
            throw Error(StatusCode::invalid_argument,
                        fmt::format("mpirun started {} processes, expected 1 to {}", world_, max_world));
        }
        if (!asked || *asked == world_) return;
        if (world_ == 1) {
            throw Error(StatusCode::invalid_argument,
                        fmt::format("--tp is {}, but this is one process: launch {} of them, as in "
                                    "`mpirun -n {} latent-moe verify --ranks processes …`",
                                    *asked, *asked, *asked));
        }
        throw Error(StatusCode::invalid_argument,
                    fmt::format("--tp is {}, but mpirun started {} processes", *asked, world_));
    }
    int world() const noexcept override { return world_; }
    bool is_here(int rank) const noexcept override { return rank == rank_; }
    bool speaks() const noexcept override { return rank_ == 0; }

    void run(const std::function<void(const Bootstrap&)>& body) override {
        continue_together({}, Stage::run_ranks);  // nobody waits in MPI for a rank that has failed already
        const Bootstrap bootstrap = mpi_ranks(MPI_COMM_WORLD, timeout_ms_);
        try {
            body(bootstrap);
        } catch (...) {
            bootstrap.transport->abort(
                "the command failed");  // its communicator may have messages under way: leave it alone
            throw;
        }
    }

    void once(const std::function<void()>& work) override {
        continue_together(!speaks() ? Outcome{} : attempt([&] {
            work();
            return done;
        }),
                          Stage::work_once);
    }

    Outcome settle(Outcome own) override { return settle_at(Stage::end, std::move(own)); }

private:
    Outcome settle_at(Stage stage, Outcome own) {
        if (settled_) return *settled_;
        const Record mine = record_of(own, stage);
        std::vector<Record> all(static_cast<std::size_t>(world_));
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE, MPI_COMM_WORLD, &request);
        wait(request, own);

        const auto is_failure = [](const Record& record) { return record.code != static_cast<int>(StatusCode::ok); };
        const auto is_cause = [&](const Record& record) {
            return is_failure(record) && record.code != static_cast<int>(StatusCode::aborted);
        };
        auto told = std::find_if(all.begin(), all.end(), is_cause);
        if (told == all.end()) told = std::find_if(all.begin(), all.end(), is_failure);
        if (told != all.end()) {
            settled_ = Outcome{told->status, Status(static_cast<StatusCode>(told->code), told->message.data())};
            return *settled_;
        }
        for (std::size_t rank = 1; rank < all.size(); ++rank) {
            if (all[rank].stage == all[0].stage) continue;
            settled_ = Outcome{bad_input,
                               Status(StatusCode::invalid_argument,
                                      fmt::format("processes do different things: rank 0 {}, rank {} {}; expected the same "
                                                  "arguments for all",
                                                  name(static_cast<Stage>(all[0].stage)), rank,
                                                  name(static_cast<Stage>(all[rank].stage))))};
            return *settled_;
        }
        for (const Record& record : all) own.status = std::max(own.status, record.status);
        return own;
    }

    void continue_together(const Outcome& own, Stage stage) {
        const Outcome outcome = settle_at(stage, own);
        if (!outcome.failure.ok()) throw Error(outcome.failure.code(), outcome.failure.message());
    }

    void wait(MPI_Request& request, const Outcome& own) const {
        using Clock = std::chrono::steady_clock;
        // Ranks lose patience one after another, so that one of them tells the story.
        const auto patience = std::chrono::milliseconds(timeout_ms_ + 5'000 + 500 * rank_);
        const auto deadline = Clock::now() + patience;
        for (int finished = 0;;) {
            MPI_Test(&request, &finished, MPI_STATUS_IGNORE);
            if (finished != 0) return;
            if (!own.failure.ok() && Clock::now() > deadline) {
                fmt::print(stderr, "latent-moe: error: {}\n", own.failure.message());
                std::fflush(stderr);
                MPI_Abort(MPI_COMM_WORLD, own.status);
            }
            std::this_thread::sleep_for(std::chrono::microseconds(500));
        }
    }

    const int timeout_ms_;
    int rank_ = 0;
    int world_ = 1;
    std::optional<Outcome> settled_;  // set once a failure has been told to all
};

}  // namespace

std::unique_ptr<Ranks> make_process_ranks(int timeout_ms) {
    return std::make_unique<ProcessRanks>(timeout_ms);
}

}  // namespace latent_moe::cli
