#include "cli/ranks.h"

#include <exception>
#include <new>
#include <system_error>

#include "cli/command.h"
#include "core/agreement.h"

namespace latent_moe::cli {
namespace {

int status_of(StatusCode code) noexcept {
    switch (code) {
        case StatusCode::ok: return done;
        case StatusCode::invalid_argument:
        case StatusCode::unsupported:
        case StatusCode::io: return bad_input;
        case StatusCode::unavailable:
        case StatusCode::out_of_memory: return machine_cannot;
        case StatusCode::mismatch:
        case StatusCode::timeout:
        case StatusCode::aborted:
        case StatusCode::internal: return check_failed;
    }
    return check_failed;
}

Outcome failed(StatusCode code, const std::string& message) {
    return {status_of(code), Status(code, message)};
}

class ThreadRanks final : public Ranks {
public:
    explicit ThreadRanks(int timeout_ms) : timeout_ms_(timeout_ms) {}

    Outcome begin(Outcome own, const std::string&) override { return own; }
    void set_world(std::optional<int> asked, int fallback) override { world_ = asked.value_or(fallback); }
    int world() const noexcept override { return world_; }
    bool is_here(int) const noexcept override { return true; }
    bool speaks() const noexcept override { return true; }
    void run(const std::function<void(const Bootstrap&)>& body) override { run_thread_ranks(world_, body, timeout_ms_); }
    void once(const std::function<void()>& work) override { work(); }
    Outcome settle(Outcome own) override { return own; }

private:
    const int timeout_ms_;
    int world_ = 1;
};

}  // namespace

Outcome attempt(const std::function<int()>& work) {
    try {
        return {work(), {}};
    } catch (const Error& error) {
        return failed(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        return failed(StatusCode::out_of_memory, "out of memory");
    } catch (const std::system_error& error) {  // no more threads, most likely
        return failed(StatusCode::unavailable,
                      std::string("the system refuses what is needed, a thread most likely: ") + error.what());
    } catch (const std::exception& error) {
        return failed(StatusCode::internal, error.what());
    }
}

std::unique_ptr<Ranks> make_thread_ranks(int timeout_ms) {
    return std::make_unique<ThreadRanks>(timeout_ms);
}

#ifndef LATENT_MOE_HAS_MPI
std::unique_ptr<Ranks> make_process_ranks(int) {
    throw Error(StatusCode::unavailable,
                "--ranks is processes, but this build has no MPI: install it (libopenmpi-dev) and build again");
}
#endif

void agreed(const Bootstrap& bootstrap, const char* what, const std::function<void()>& step) {
    std::exception_ptr failure;
    const Outcome outcome = attempt([&] {
        try {
            step();
        } catch (...) {
            failure = std::current_exception();
            throw;
        }
        return done;
    });
    try {
        Agreement(what).confirm(bootstrap, outcome.failure.message());
    } catch (const Error&) {
        if (failure) std::rethrow_exception(failure);  // in its own words, with its own code
        throw;
    }
}

}  // namespace latent_moe::cli
