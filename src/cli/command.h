// What a subcommand is. Each lives in a file of its own and is listed in main.cpp.
#pragma once

#include <CLI/CLI.hpp>

#include "cli/arguments.h"
#include "cli/ranks.h"

namespace latent_moe::cli {

/// Exit statuses of the program.
inline constexpr int done = 0;
inline constexpr int check_failed = 1;
inline constexpr int bad_input = 2;
inline constexpr int machine_cannot = 3;

struct Command {
    const char* name;
    const char* summary;
    const char* examples;  ///< a command line each, for `--help`
    void (*add_options)(CLI::App& app, Arguments& arguments);
    /// Returns an exit status; throws `Error` for what the user should read as one line.
    int (*execute)(const Arguments& arguments, Ranks& ranks);
};

Command run_command();
Command verify_command();
Command bench_command();
Command explain_command();
Command tune_command();
Command inspect_command();
Command op_command();
Command info_command();
Command soak_command();
Command synthesize_command();

}  // namespace latent_moe::cli
