// The program `latent-moe`: finds the subcommand, runs it, and turns however it ended into an exit status and one line.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "cli/command.h"
#include "context/backends.h"
#include "latent_moe/version.h"

namespace latent_moe::cli {
namespace {

/// How many processes a launcher started as one job; 1 without one.
int launched_processes() {
    for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
        if (const char* size = std::getenv(variable)) return std::atoi(size);
    }
    return 1;
}

/// This process's number under a launcher, before MPI is up; 0 without one.
bool is_first_of_launch() {
    for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
        if (const char* rank = std::getenv(variable)) return std::string(rank) == "0";
    }
    return true;
}

/// Processes that a launcher started as one job would each run all ranks as threads, and write the same files.
void require_one_job(const Arguments& arguments) {
    const int processes = launched_processes();
    if (arguments.processes || processes <= 1) return;
    throw Error(
        StatusCode::invalid_argument,
        fmt::format("--ranks is threads in one of {} processes that mpirun started, expected --ranks processes", processes));
}

std::string command_line(int count, char** texts) {
    std::string line;
    for (int i = 1; i < count; ++i) line += (i > 1 ? " " : "") + std::string(texts[i]);
    return line;
}

/// What CLI11 says, which may end or break in line ends, as one sentence.
std::string usage_problem(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
}

struct Program {
    CLI::App app{
        "The tail of latent mixture-of-experts layers under tensor parallelism: run it, verify it, time it, explain it.\n",
        "latent-moe"};
    std::array<Command, 10> commands = {run_command(),  verify_command(),    bench_command(), explain_command(),
                                        tune_command(), inspect_command(),   op_command(),    soak_command(),
                                        info_command(), synthesize_command()};
    std::array<Arguments, 10> arguments;  // one a subcommand, whose defaults differ
    std::array<CLI::App*, 10> subcommands{};

    Program() {
        app.set_version_flag("--version", fmt::format("latent-moe {}", library_version()));
        app.require_subcommand(1);
        app.footer(
            "Exit status: 0 done and every check passed; 1 a check failed; 2 bad usage or bad input; 3 the machine cannot "
            "do it.\n"
            "`latent-moe SUBCOMMAND --help` shows the options of each, with examples.");
        for (std::size_t i = 0; i < commands.size(); ++i) {
            subcommands[i] = app.add_subcommand(commands[i].name, commands[i].summary);
            subcommands[i]->footer(fmt::format("Examples:\n{}", commands[i].examples));
            commands[i].add_options(*subcommands[i], arguments[i]);
        }
    }

    /// CLI11 would only say that a subcommand is missing.
    void require_known(int count, char** texts) const {
        const std::string first = count > 1 ? texts[1] : "-";
        const auto is_it = [&](const Command& command) { return first == command.name; };
        if (first.starts_with('-') || std::any_of(commands.begin(), commands.end(), is_it)) return;
        std::vector<std::string> names;
        for (const Command& command : commands) names.emplace_back(command.name);
        throw Error(StatusCode::invalid_argument,
                    fmt::format("subcommand is '{}', expected one of {}", first, fmt::join(names, ", ")));
    }

    std::size_t chosen() const {
        return static_cast<std::size_t>(
            std::find_if(subcommands.begin(), subcommands.end(), [](const CLI::App* each) { return each->parsed(); }) -
            subcommands.begin());
    }
};

int run_program(int count, char** texts) {
    Program program;
    bool helped = false;
    Outcome outcome = attempt([&] {
        program.require_known(count, texts);
        try {
            program.app.parse(count, texts);
        } catch (const CLI::Success& help) {  // --help or --version
            helped = true;
            if (is_first_of_launch()) program.app.exit(help);
            if (!std::cout.flush()) throw Error(StatusCode::io, "standard output: cannot write the help");
            return done;
        } catch (const CLI::ParseError& error) {
            throw Error(StatusCode::invalid_argument, usage_problem(error.what()));
        }
        require_one_job(program.arguments[program.chosen()]);
        return done;
    });
    const bool parsed = outcome.failure.ok() && !helped;
    const Arguments none;
    const Arguments& arguments = parsed ? program.arguments[program.chosen()] : none;

    // Of the processes of one job each tells the others, whatever it has met: none may wait for one that has ended.
    const bool processes = parsed ? arguments.processes : launched_processes() > 1;
    std::unique_ptr<Ranks> ranks;
    const Outcome made = attempt([&] {
        ranks = processes ? make_process_ranks(arguments.timeout_ms) : make_thread_ranks(arguments.timeout_ms);
        return done;
    });
    if (outcome.failure.ok()) outcome = made;
    if (ranks) outcome = ranks->begin(outcome, command_line(count, texts));
    if (ranks && parsed && outcome.failure.ok())
        outcome = ranks->settle(attempt([&] { return program.commands[program.chosen()].execute(arguments, *ranks); }));
    if (!outcome.failure.ok() && (ranks ? ranks->speaks() : is_first_of_launch()))
        std::fprintf(stderr, "latent-moe: error: %s\n", outcome.failure.message().c_str());
    return outcome.status;
}

}  // namespace
}  // namespace latent_moe::cli

int main(int count, char** texts) {
    // A standard stream that is closed must not become the next file that is opened; what is written to a closed output
    // must not be lost unsaid, so nothing can be.
    for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        const int way = descriptor == STDOUT_FILENO ? O_RDONLY : O_RDWR;
        if (::fcntl(descriptor, F_GETFD) < 0 && ::open("/dev/null", way) < 0) return latent_moe::cli::machine_cannot;
    }
    // The program says itself what went wrong, in one line; the library may add to it where it is asked to.
    ::setenv("LATENT_MOE_LOG", "off", 0);
    for (const latent_moe::BackendEntry& backend : latent_moe::backends()) {
        if (backend.prepare_own_process != nullptr) backend.prepare_own_process();
    }
    // A closed pipe or a full file is an error of the write that meets it, not the end of the program.
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
    return latent_moe::cli::run_program(count, texts);
}
