// Ranks that are MPI processes. Every process parses the same command line; rank 0 alone prints.
//
// However a process ends, it comes to `settle`: all processes tell each other their outcomes, and those that wait sleep, so
// that they take no core from the one that works. A rank that fails on its own goes there at once; its peers miss it in
// their next exchange, give up after the timeout and come too. Where a peer never comes, the first rank whose patience ends
// says so and stops the job. Only rank 0 is waited for without a deadline: it does the long work.
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
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

/// What a process is about to do when it settles. Processes of different programs, or with other files, may differ here.
enum class Stage : int { begin, run_ranks, work_once, end };

const char* name(Stage stage) noexcept {
    switch (stage) {
        case Stage::begin: return "begins";
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
    int stage = 0;                  ///< Stage: where the process is
    std::size_t arguments = 0;      ///< hash of the command line, at the beginning
    std::array<char, 1024> text{};  ///< the failure's message; without a failure the command line, at the beginning

    bool failed() const noexcept { return code != static_cast<int>(StatusCode::ok); }
    /// How likely another rank's failure is the cause of this one: ranks that wait for one that failed end in a timeout, and
    /// those that wait for them are told that they gave up.
    int echo() const noexcept {
        if (code == static_cast<int>(StatusCode::aborted)) return 2;
        return code == static_cast<int>(StatusCode::timeout) ? 1 : 0;
    }
};

Record record_of(const Outcome& outcome, Stage stage, const std::string& arguments) {
    Record record{.status = outcome.status,
                  .code = static_cast<int>(outcome.failure.code()),
                  .stage = static_cast<int>(stage),
                  .arguments = std::hash<std::string>{}(arguments)};
    const std::string& text = record.failed() ? outcome.failure.message() : arguments;
    text.copy(record.text.data(), record.text.size() - 1);
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

    Outcome begin(Outcome own, const std::string& arguments) override {
        return settle_at(Stage::begin, std::move(own), arguments);
    }
    Outcome settle(Outcome own) override { return settle_at(Stage::end, std::move(own)); }

private:
    Outcome settle_at(Stage stage, Outcome own, const std::string& arguments = {}) {
        if (settled_) return *settled_;
        const std::vector<Record> all = exchanged(record_of(own, stage, arguments), own);
        settled_ = failure_of(all);
        if (settled_) return *settled_;
        for (const Record& record : all) own.status = std::max(own.status, record.status);
        return own;
    }

    /// What rank 0 meets, all usually do: it needs no number.
    static std::string said_by(int rank, const std::string& message) {
        return rank == 0 ? message : fmt::format("rank {}: {}", rank, message);
    }

    /// What all processes are told, if anything is wrong.
    static std::optional<Outcome> failure_of(const std::vector<Record>& all) {
        const Record* cause = nullptr;
        for (const Record& record : all) {
            if (record.failed() && (cause == nullptr || record.echo() < cause->echo())) cause = &record;
        }
        if (cause != nullptr) {
            return Outcome{cause->status, Status(static_cast<StatusCode>(cause->code),
                                                 said_by(static_cast<int>(cause - all.data()), cause->text.data()))};
        }
        const auto differ = [](const std::string& message) {
            return Outcome{bad_input,
                           Status(StatusCode::invalid_argument, message + "; expected the same arguments for all")};
        };
        for (std::size_t rank = 1; rank < all.size(); ++rank) {
            if (all[rank].stage != all[0].stage) {
                return differ(fmt::format("processes do different things: rank 0 {}, rank {} {}",
                                          name(static_cast<Stage>(all[0].stage)), rank,
                                          name(static_cast<Stage>(all[rank].stage))));
            }
            if (all[rank].arguments != all[0].arguments) {
                return differ(fmt::format("rank {} was started with '{}', rank 0 with '{}'", rank, all[rank].text.data(),
                                          all[0].text.data()));
            }
        }
        return std::nullopt;
    }

    void continue_together(const Outcome& own, Stage stage) {
        const Outcome outcome = settle_at(stage, own);
        if (!outcome.failure.ok()) throw Error(outcome.failure.code(), outcome.failure.message());
    }

    /// Every process's record, in rank order. `own` is this one's outcome.
    std::vector<Record> exchanged(const Record& mine, const Outcome& own) const {
        std::vector<Record> all(static_cast<std::size_t>(world_));
        std::vector<MPI_Request> receives(all.size(), MPI_REQUEST_NULL);
        std::vector<MPI_Request> sends(all.size(), MPI_REQUEST_NULL);
        for (std::size_t peer = 0; peer < all.size(); ++peer) {
            const int rank = static_cast<int>(peer);
            MPI_Irecv(&all[peer], sizeof mine, MPI_BYTE, rank, 0, MPI_COMM_WORLD, &receives[peer]);
            MPI_Isend(&mine, sizeof mine, MPI_BYTE, rank, 0, MPI_COMM_WORLD, &sends[peer]);
        }
        wait(receives, own);
        wait(sends, own);
        return all;
    }

    void wait(std::vector<MPI_Request>& requests, const Outcome& own) const {
        using Clock = std::chrono::steady_clock;
        // Ranks lose patience one after another, so that one of them tells the story.
        const auto patience = std::chrono::milliseconds(timeout_ms_ + 5'000 + 500 * rank_);
        const auto deadline = Clock::now() + patience;
        const bool loses_patience = speaks() || !own.failure.ok();
        for (int finished = 0;;) {
            MPI_Testall(world_, requests.data(), &finished, MPI_STATUSES_IGNORE);
            if (finished != 0) return;
            if (loses_patience && Clock::now() > deadline) give_up(requests, own, patience);
            std::this_thread::sleep_for(std::chrono::microseconds(500));
        }
    }

    [[noreturn]] void give_up(std::vector<MPI_Request>& requests, const Outcome& own,
                              std::chrono::milliseconds patience) const {
        std::vector<int> missing;
        for (std::size_t peer = 0; peer < requests.size(); ++peer) {
            int finished = 0;
            MPI_Test(&requests[peer], &finished, MPI_STATUS_IGNORE);
            if (finished == 0) missing.push_back(static_cast<int>(peer));
        }
        const std::string silent =
            fmt::format("{} {} did not come to where all ranks meet within {} ms", missing.size() == 1 ? "rank" : "ranks",
                        fmt::join(missing, ", "), patience.count());
        fmt::print(stderr, "latent-moe: error: {}\n", own.failure.ok() ? silent : said_by(rank_, own.failure.message()));
        std::fflush(stderr);
        MPI_Abort(MPI_COMM_WORLD, own.failure.ok() ? check_failed : own.status);
        std::abort();  // MPI_Abort does not return
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
