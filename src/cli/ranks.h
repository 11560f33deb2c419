// Where the ranks of a command live: threads of this process, or MPI processes of which this is one.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "latent_moe/bootstrap.h"
#include "latent_moe/status.h"

namespace latent_moe::cli {

/// How a command ended in one process.
struct Outcome {
    int status = 0;  ///< the program's exit status
    Status failure;  ///< what the user is told, if it failed
};

/// Runs `work`; what it throws becomes an outcome.
Outcome attempt(const std::function<int()>& work);

class Ranks {
public:
    virtual ~Ranks() = default;

    /// Lets all processes begin alike, each with the outcome of reading its command line: none goes on if one has failed, or
    /// was started with other arguments.
    virtual Outcome begin(Outcome own, const std::string& arguments) = 0;
    /// Settles how many there are: as asked, else `fallback`, else as mpirun says. Throws if that cannot be.
    virtual void set_world(std::optional<int> asked, int fallback) = 0;
    virtual int world() const noexcept = 0;
    /// Whether `rank` lives in this process.
    virtual bool is_here(int rank) const noexcept = 0;
    /// Whether this process prints, checks and writes files. Rank 0 lives in it.
    virtual bool speaks() const noexcept = 0;

    /// Runs `body` on every rank.
    virtual void run(const std::function<void(const Bootstrap&)>& body) = 0;
    /// Long work of the process that speaks; the others wait without a deadline, and fail if it fails.
    virtual void once(const std::function<void()>& work) = 0;
    /// Lets all processes end alike: with the first failure that is not the echo of another's, or the highest status.
    virtual Outcome settle(Outcome own) = 0;
};

/// All ranks are threads of this process.
std::unique_ptr<Ranks> make_thread_ranks(int timeout_ms);
/// Initialises MPI; finalises it when destroyed. Throws `unavailable` if this build has none.
std::unique_ptr<Ranks> make_process_ranks(int timeout_ms);

/// Runs a rank's local step and lets all ranks know how it went: either all continue or all throw.
void agreed(const Bootstrap& bootstrap, const char* what, const std::function<void()>& step);

/// One value from every rank, in rank order.
template <typename Value>
std::vector<Value> gathered(const Bootstrap& bootstrap, const Value& value) {
    std::vector<Value> all(static_cast<std::size_t>(bootstrap.world));
    bootstrap.all_gather_bytes(&value, all.data(), sizeof value);
    return all;
}

/// Throws what a call on the hot path returned, if it failed.
inline void require(const Status& status) {
    if (!status.ok()) throw Error(status.code(), status.message());
}

}  // namespace latent_moe::cli
