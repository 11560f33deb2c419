// What a command prints: tables and lines for a person, JSON for a program.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/arguments.h"
#include "core/one_line.h"
#include "io/output_file.h"

namespace latent_moe::cli {

using Json = nlohmann::ordered_json;

/// Columns aligned: those whose header starts with '<' to the left, the others to the right.
class Table {
public:
    explicit Table(std::vector<std::string> headers);
    void row(std::vector<std::string> cells);
    std::string text() const;
    bool empty() const noexcept { return rows_.size() < 2; }

private:
    std::vector<bool> left_;
    std::vector<std::vector<std::string>> rows_;
};

/// Refuses a file to write, given by `option`, that is also read, or written by another option.
void require_file_of_its_own(const Arguments& arguments, const std::string& option, const std::string& path);

/// Standard output and the `--json` file. A reader that has closed its end is no error.
class Output {
public:
    /// Opens the JSON file at once, so that a bad path is told before the work. Nothing comes out unless `speaks`.
    Output(const Arguments& arguments, bool speaks);

    template <typename... Values>
    void line(fmt::format_string<Values...> format, Values&&... values) {
        if (prints_) write(one_line(fmt::format(format, std::forward<Values>(values)...)) + '\n');
    }
    void table(const Table& table) {
        if (prints_) write(table.text());
    }
    void json(const Json& value);

private:
    static void write(std::string_view text);

    bool prints_;
    bool json_to_stdout_ = false;
    std::optional<io::OutputFile> json_file_;
};

/// Says on standard error how far long work is: one line that changes, where that is a terminal, or with `--progress` a
/// line each with the seconds since the start.
class Progress {
public:
    Progress(const Arguments& arguments, bool speaks);
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    ~Progress();

    template <typename... Values>
    void say(fmt::format_string<Values...> format, Values&&... values) {
        if (shown_) show(fmt::format(format, std::forward<Values>(values)...));
    }

private:
    void show(const std::string& text) const;

    bool shown_;
    bool as_lines_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// "51.4 MB"
std::string bytes_text(double bytes);
/// Three significant digits or more: "7.31", "1234".
std::string us_text(double us);
/// "1.83e-03"
std::string error_text(double error);

}  // namespace latent_moe::cli
