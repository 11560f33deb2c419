// Ranks that are processes, forked and watched. mpirun ends the survivors of a death; here they live on and are asked what
// they saw.
//
//     launcher ── fork ──▶ rank 0 ◀─ socket ─▶ rank 1 ◀─ … ─▶ rank N-1      every pair has a socket for each group
//        ▲                   │ report (pipe)
//        └───────────────────┘
//
// A round has a fault, or none. A rank that has failed stays until all have reported, so that nobody mistakes its end for
// the fault; those that live can have another round. The launcher itself touches no GPU: what is forked from a process that
// has cannot.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "latent_moe/bootstrap.h"
#include "latent_moe/status.h"

namespace latent_moe::faults {

/// What the processes share.
struct Shared {
    std::atomic<std::int64_t> fault_ns{0};  ///< when the round's fault happened, on the steady clock; 0 before
    std::atomic<int> prepared{0};           ///< ranks that are
    std::atomic<int> round{-1};             ///< that is being played
    std::atomic<bool> over{false};
};

std::int64_t now_ns();

/// How a round ended for one rank.
struct Report {
    StatusCode code = StatusCode::ok;
    std::string message;
    double seconds = 0;         ///< from the fault to the error
    double seconds_to_end = 0;  ///< and to the end of all that the rank had
    int files_left = 0;         ///< open files and threads more than before the body
    int threads_left = 0;
};

/// One rank's view: a bootstrap for each group, and what is shared.
struct Rank {
    int rank;
    int round;
    std::vector<Bootstrap> groups;  ///< of this round
    Shared& shared;
    std::int64_t error_ns = 0;  ///< when this rank learnt of it; 0: not marked

    /// Marks the moment of the fault.
    void fault_now() const { shared.fault_ns = now_ns(); }
    void error_now() { error_ns = now_ns(); }
};

struct Launch {
    int world = 3;
    int groups = 1;
    int rounds = 1;
    int mortal = -1;                          ///< the rank that is a process of its own in the rounds
    std::function<bool(int round)> dies{};    ///< in which it ends
    int timeout_ms = 700;                     ///< of the sockets: a peer that is silent for so long is reported
    int patience_ms = 60'000;                 ///< with a rank that is not done
    std::function<void(int rank)> prepare{};  ///< what takes long once a process
    std::function<void(Rank&)> body;

    /// Whether a process of `rank` plays this round: one for all rounds but those in which the rank dies, or for one alone.
    bool plays(int rank, std::optional<int> only_round, int round) const {
        return only_round ? *only_round == round : !(rank == mortal && dies && dies(round));
    }
};

/// sockets[group][left][right]: the end that rank `left` uses to reach rank `right`; of one round.
using Mesh = std::vector<std::vector<std::vector<int>>>;

class RankProcesses {
public:
    /// They prepare at once.
    explicit RankProcesses(Launch launch);
    /// Ends those that are there yet.
    ~RankProcesses();
    RankProcesses(const RankProcesses&) = delete;
    RankProcesses& operator=(const RankProcesses&) = delete;

    /// The next round: a report for each rank, or nothing where it ended or was stopped without one. Throws if a rank is not
    /// done in time; then there can be no further round, nor if one ended that was to live.
    std::vector<std::optional<Report>> play();

private:
    struct Process {
        int rank;
        std::optional<int> only_round;
        pid_t id;
        int reports_from;
    };
    void start(int rank, std::optional<int> only_round, const std::vector<Mesh>& meshes);
    void wait_for_prepared() const;

    const Launch launch_;
    Shared* shared_;
    std::vector<Process> processes_;
};

/// What this process and its machine have now: open files, and names in shared memory without those of MPI jobs that others
/// run.
class Belongings {
public:
    Belongings();
    /// What there is more, or a process that is left; empty if nothing.
    std::string left_over() const;

private:
    int files_;
    std::set<std::string> shared_memory_;
};

}  // namespace latent_moe::faults
