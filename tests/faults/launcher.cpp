#include "faults/launcher.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <thread>

#include "faults/sockets.h"

namespace latent_moe::faults {
namespace {

constexpr std::size_t message_room = 1000;

/// A report as it crosses the pipe.
struct Wire {
    int code;
    double seconds;
    double seconds_to_end;
    int files_left;
    int threads_left;
    char message[message_room];
};

struct Pipe {
    int read_end = -1;
    int write_end = -1;

    Pipe() {
        int ends[2];
        if (::pipe(ends) != 0) throw std::runtime_error("pipe failed");
        read_end = ends[0];
        write_end = ends[1];
    }
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;
    ~Pipe() {
        close_end(read_end);
        close_end(write_end);
    }
    static void close_end(int& end) {
        if (end >= 0) ::close(end);
        end = -1;
    }
};

int entries_of(const char* folder) {
    int count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
    return count;
}

/// Names in shared memory, without those of MPI jobs that others run: these ranks use none.
std::set<std::string> shared_memory_names() {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
        const std::string name = entry.path().filename().string();
        if (name.find("vader_segment") == std::string::npos && name.find("ompi") == std::string::npos) names.insert(name);
    }
    return names;
}

/// sockets[group][left][right]: the end that rank `left` uses to reach rank `right`.
using Mesh = std::vector<std::vector<std::vector<int>>>;

Mesh make_mesh(int groups, int world) {
    const auto ranks = static_cast<std::size_t>(world);
    Mesh mesh(static_cast<std::size_t>(groups), std::vector(ranks, std::vector<int>(ranks, -1)));
    for (auto& group : mesh) {
        for (std::size_t left = 0; left < ranks; ++left) {
            for (std::size_t right = left + 1; right < ranks; ++right) {
                int ends[2];
                if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("socketpair failed");
                group[left][right] = ends[0];
                group[right][left] = ends[1];
            }
        }
    }
    return mesh;
}

void close_others(const Mesh& mesh, std::size_t own) {
    for (const auto& group : mesh) {
        for (std::size_t rank = 0; rank < group.size(); ++rank) {
            if (rank == own) continue;
            for (const int descriptor : group[rank]) {
                if (descriptor >= 0) ::close(descriptor);
            }
        }
    }
}

void meet(const Launch& launch, Shared& shared) {
    const auto deadline = now_ns() + std::int64_t{launch.patience_ms} * 1'000'000;
    ++shared.prepared;
    while (shared.prepared < launch.world) {
        if (now_ns() > deadline) throw std::runtime_error("the others are not prepared");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

Report run_body(const Launch& launch, Rank& rank) {
    Report report;
    int files = entries_of("/proc/self/fd");
    int threads = entries_of("/proc/self/task");
    const auto failed = [&](StatusCode code, const char* message) {
        report.code = code;
        report.message = message;
        const std::int64_t fault = rank.shared.fault_ns;
        if (fault == 0) return;
        const std::int64_t end = now_ns();
        report.seconds = static_cast<double>((rank.error_ns != 0 ? rank.error_ns : end) - fault) / 1e9;
        report.seconds_to_end = static_cast<double>(end - fault) / 1e9;
    };
    try {
        if (launch.prepare) {
            launch.prepare(rank);
            meet(launch, rank.shared);
            files = entries_of("/proc/self/fd");
            threads = entries_of("/proc/self/task");
        }
        launch.body(rank);
    } catch (const Error& error) {
        failed(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        failed(StatusCode::out_of_memory, "out of memory");
    } catch (const std::exception& error) {
        failed(StatusCode::internal, error.what());
    }
    report.files_left = entries_of("/proc/self/fd") - files;
    report.threads_left = entries_of("/proc/self/task") - threads;
    return report;
}

[[noreturn]] void be_rank(const Launch& launch, const Mesh& mesh, int number, Shared& shared, int report_to,
                          int release_from) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a launcher that is killed leaves nobody behind, not even a stopped rank
    const auto own = static_cast<std::size_t>(number);
    close_others(mesh, own);
    {
        Rank rank{.rank = number, .groups = {}, .shared = shared};
        for (const auto& group : mesh) {
            const auto sockets = std::make_shared<Sockets>(number, group[own], launch.timeout_ms);
            rank.groups.push_back(
                {.rank = number,
                 .world = launch.world,
                 .all_gather_bytes = [sockets](const void* send, void* received,
                                               std::size_t bytes) { sockets->all_gather(send, received, bytes); },
                 .local_world = launch.world});
        }
        const Report report = run_body(launch, rank);
        Wire wire{static_cast<int>(report.code), report.seconds,
                  report.seconds_to_end,         report.files_left,
                  report.threads_left,           {}};
        report.message.copy(wire.message, message_room - 1);
        if (::write(report_to, &wire, sizeof wire) != sizeof wire) ::_exit(3);
        char released = 0;
        while (::read(release_from, &released, 1) < 0) {}
    }
    ::_exit(0);
}

std::optional<Report> read_report(int from) {
    Wire wire;
    if (::read(from, &wire, sizeof wire) != sizeof wire) return std::nullopt;
    return Report{static_cast<StatusCode>(wire.code),
                  wire.message,
                  wire.seconds,
                  wire.seconds_to_end,
                  wire.files_left,
                  wire.threads_left};
}

}  // namespace

std::int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch().count();
}

std::vector<std::optional<Report>> launch(const Launch& launch) {
    const int files = entries_of("/proc/self/fd");
    const std::set<std::string> shared_memory = shared_memory_names();
    const auto ranks = static_cast<std::size_t>(launch.world);
    std::vector<std::optional<Report>> reports(ranks);
    std::string trouble;
    {
        void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
        Shared& shared = *new (memory) Shared;
        const Mesh mesh = make_mesh(launch.groups, launch.world);
        std::vector<std::unique_ptr<Pipe>> report_pipes;
        Pipe release;
        std::vector<pid_t> children;
        for (int rank = 0; rank < launch.world; ++rank) {
            report_pipes.push_back(std::make_unique<Pipe>());
            const pid_t child = ::fork();
            if (child < 0) throw std::runtime_error("fork failed");
            if (child == 0) {
                Pipe::close_end(release.write_end);
                // The others' ends too, or their death would not close them.
                for (const auto& pipe : report_pipes) Pipe::close_end(pipe->read_end);
                be_rank(launch, mesh, rank, shared, report_pipes.back()->write_end, release.read_end);
            }
            Pipe::close_end(report_pipes.back()->write_end);
            children.push_back(child);
        }
        close_others(mesh, ranks);

        // A stopped process says nothing and does not die: it is ended once all others have spoken.
        std::vector<bool> heard(ranks);
        const auto deadline = now_ns() + std::int64_t{launch.patience_ms} * 1'000'000;
        for (std::size_t left = ranks; left > 0;) {
            std::vector<pollfd> waits;
            std::vector<std::size_t> of;
            for (std::size_t rank = 0; rank < ranks; ++rank) {
                if (heard[rank]) continue;
                waits.push_back({report_pipes[rank]->read_end, POLLIN, 0});
                of.push_back(rank);
            }
            ::poll(waits.data(), waits.size(), 100);
            for (std::size_t i = 0; i < waits.size(); ++i) {
                if (waits[i].revents == 0) continue;
                reports[of[i]] = read_report(waits[i].fd);
                heard[of[i]] = true;
                --left;
            }
            if (left > 0) {
                siginfo_t state{};
                bool only_stopped = true;
                for (std::size_t rank = 0; rank < ranks; ++rank) {
                    if (heard[rank]) continue;
                    state = {};
                    ::waitid(P_PID, static_cast<id_t>(children[rank]), &state, WSTOPPED | WNOHANG | WNOWAIT);
                    only_stopped = only_stopped && state.si_pid == children[rank];
                }
                if (only_stopped) break;
            }
            if (now_ns() > deadline) {
                trouble = fmt::format("{} ranks are not done after {} s", left, launch.patience_ms / 1000);
                break;
            }
        }
        Pipe::close_end(release.write_end);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            if (!heard[rank]) ::kill(children[rank], SIGKILL);  // a child of our own, still unreaped
        }
        for (const pid_t child : children) ::waitpid(child, nullptr, 0);
        ::munmap(memory, sizeof(Shared));
    }
    if (!trouble.empty()) throw std::runtime_error(trouble);
    if (entries_of("/proc/self/fd") != files) throw std::runtime_error("the launcher has open files left");
    for (const std::string& name : shared_memory_names()) {
        if (!shared_memory.contains(name))
            throw std::runtime_error(fmt::format("/dev/shm holds {}, which was not there before", name));
    }
    if (::waitpid(-1, nullptr, WNOHANG) != -1) throw std::runtime_error("a process is left");
    return reports;
}

}  // namespace latent_moe::faults
