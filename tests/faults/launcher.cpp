#include "faults/launcher.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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

int entries_of(const char* folder) {
    int count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
    return count;
}

std::set<std::string> shared_memory_names() {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
        const std::string name = entry.path().filename().string();
        if (name.find("vader_segment") == std::string::npos && name.find("ompi") == std::string::npos) names.insert(name);
    }
    return names;
}

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

void nap() {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// Runs `body` with what it throws in the report.
template <typename Body>
Report report_of(const Rank& rank, Body body) {
    Report report;
    const int files = entries_of("/proc/self/fd");
    const int threads = entries_of("/proc/self/task");
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
        body();
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

std::unique_ptr<Rank> make_rank(const Launch& launch, const Mesh& mesh, int number, int round, Shared& shared) {
    auto rank = std::make_unique<Rank>(Rank{.rank = number, .round = round, .groups = {}, .shared = shared});
    for (const auto& group : mesh) {
        const auto sockets = std::make_shared<Sockets>(number, group[static_cast<std::size_t>(number)], launch.timeout_ms);
        rank->groups.push_back(
            {.rank = number,
             .world = launch.world,
             .all_gather_bytes = [sockets](const void* send, void* received,
                                           std::size_t bytes) { sockets->all_gather(send, received, bytes); },
             .local_world = launch.world});
    }
    return rank;
}

[[noreturn]] void be_rank(const Launch& launch, const std::vector<Mesh>& meshes, int number, std::optional<int> only_round,
                          Shared& shared, int report_to) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a launcher that is killed leaves nobody behind, not even a stopped rank
    for (int round = 0; round < launch.rounds; ++round) {  // all of the rounds of others, who would not be seen to die
        const bool plays = launch.plays(number, only_round, round);
        close_others(meshes[static_cast<std::size_t>(round)], static_cast<std::size_t>(plays ? number : launch.world));
    }
    std::exception_ptr unprepared;
    try {
        if (launch.prepare) launch.prepare(number);
    } catch (...) {
        unprepared = std::current_exception();
    }
    ++shared.prepared;
    std::unique_ptr<Rank> rank;  // of the last round: its sockets stay open until all have reported
    for (int round = 0; round < launch.rounds; ++round) {
        if (!launch.plays(number, only_round, round)) continue;
        while (shared.round < round && !shared.over) nap();
        if (shared.over) break;
        rank = make_rank(launch, meshes[static_cast<std::size_t>(round)], number, round, shared);
        const Report report = report_of(*rank, [&] {
            if (unprepared) std::rethrow_exception(unprepared);
            launch.body(*rank);
        });
        Wire wire{static_cast<int>(report.code), report.seconds,
                  report.seconds_to_end,         report.files_left,
                  report.threads_left,           {}};
        report.message.copy(wire.message, message_room - 1);
        if (::write(report_to, &wire, sizeof wire) != sizeof wire) ::_exit(3);
    }
    while (!shared.over) nap();
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

RankProcesses::RankProcesses(Launch launch) : launch_(std::move(launch)) {
    void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
    shared_ = new (memory) Shared;
    std::vector<Mesh> meshes;
    for (int round = 0; round < launch_.rounds; ++round) meshes.push_back(make_mesh(launch_.groups, launch_.world));
    for (int rank = 0; rank < launch_.world; ++rank) {
        start(rank, std::nullopt, meshes);
        for (int round = 0; round < launch_.rounds; ++round) {
            if (!launch_.plays(rank, std::nullopt, round)) start(rank, round, meshes);
        }
    }
    for (const Mesh& mesh : meshes) close_others(mesh, static_cast<std::size_t>(launch_.world));
}

void RankProcesses::start(int rank, std::optional<int> only_round, const std::vector<Mesh>& meshes) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe failed");
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child == 0) {
        ::close(ends[0]);
        be_rank(launch_, meshes, rank, only_round, *shared_, ends[1]);
    }
    ::close(ends[1]);  // in front of the next fork, or this rank's death would not close it
    processes_.push_back({rank, only_round, child, ends[0]});
}

RankProcesses::~RankProcesses() {
    shared_->over = true;
    const std::int64_t deadline = now_ns() + 1'000'000'000;
    for (const Process& process : processes_) {  // children of our own, unreaped
        while (::waitpid(process.id, nullptr, WNOHANG) == 0) {
            if (now_ns() > deadline) ::kill(process.id, SIGKILL);
            nap();
        }
        ::close(process.reports_from);
    }
    ::munmap(shared_, sizeof(Shared));
}

void RankProcesses::wait_for_prepared() const {
    const std::int64_t deadline = now_ns() + 60'000'000'000;
    while (shared_->prepared < static_cast<int>(processes_.size())) {
        if (now_ns() > deadline) throw std::runtime_error("ranks are not prepared after 60 s");
        nap();
    }
}

std::vector<std::optional<Report>> RankProcesses::play() {
    if (shared_->round < 0) wait_for_prepared();
    std::vector<std::optional<Report>> reports(static_cast<std::size_t>(launch_.world));
    shared_->fault_ns = 0;
    const int round = ++shared_->round;
    std::vector<const Process*> unheard;
    for (const Process& process : processes_) {
        if (launch_.plays(process.rank, process.only_round, round)) unheard.push_back(&process);
    }
    const std::int64_t deadline = now_ns() + std::int64_t{launch_.patience_ms} * 1'000'000;
    while (!unheard.empty()) {
        std::vector<pollfd> waits;
        for (const Process* process : unheard) waits.push_back({process->reports_from, POLLIN, 0});
        ::poll(waits.data(), waits.size(), 20);
        for (std::size_t i = waits.size(); i-- > 0;) {
            if (waits[i].revents == 0) continue;
            reports[static_cast<std::size_t>(unheard[i]->rank)] = read_report(waits[i].fd);
            unheard.erase(unheard.begin() + static_cast<std::ptrdiff_t>(i));
        }
        // A stopped process says nothing and does not die: it is ended once all others have spoken.
        const bool only_stopped = std::ranges::all_of(unheard, [](const Process* process) {
            siginfo_t state{};
            ::waitid(P_PID, static_cast<id_t>(process->id), &state, WSTOPPED | WNOHANG | WNOWAIT);
            return state.si_pid == process->id;
        });
        if (only_stopped) break;
        if (now_ns() > deadline) {
            throw std::runtime_error(
                fmt::format("{} ranks are not done after {} s", unheard.size(), launch_.patience_ms / 1000));
        }
    }
    for (const Process* process : unheard) ::kill(process->id, SIGKILL);
    return reports;
}

Belongings::Belongings() : files_(entries_of("/proc/self/fd")), shared_memory_(shared_memory_names()) {}

std::string Belongings::left_over() const {
    if (entries_of("/proc/self/fd") != files_) return "the launcher has open files left";
    for (const std::string& name : shared_memory_names()) {
        if (!shared_memory_.contains(name)) return fmt::format("/dev/shm holds {}, which was not there before", name);
    }
    return ::waitpid(-1, nullptr, WNOHANG) == -1 ? "" : "a process is left";
}

}  // namespace latent_moe::faults
