#include "cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "latent_moe/status.h"

namespace latent_moe::cli {

Table::Table(std::vector<std::string> headers) {
    for (std::string& header : headers) {
        left_.push_back(header.starts_with('<'));
        if (left_.back()) header.erase(0, 1);
    }
    rows_.push_back(std::move(headers));
}

void Table::row(std::vector<std::string> cells) {
    rows_.push_back(std::move(cells));
}

std::string Table::text() const {
    std::vector<std::size_t> widths(left_.size());
    for (const std::vector<std::string>& row : rows_) {
        for (std::size_t column = 0; column < row.size(); ++column)
            widths[column] = std::max(widths[column], row[column].size());
    }
    std::string text;
    for (const std::vector<std::string>& row : rows_) {
        std::string line;
        for (std::size_t column = 0; column < row.size(); ++column) {
            line += left_[column] ? fmt::format("{:<{}}  ", row[column], widths[column])
                                  : fmt::format("{:>{}}  ", row[column], widths[column]);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        text += line + '\n';
    }
    return text;
}

namespace {

namespace fs = std::filesystem;

/// Whether both paths lead to one file, or will.
bool same_file(const fs::path& one, const fs::path& other) {
    std::error_code error;
    if (fs::exists(one, error) && !fs::is_regular_file(one, error)) return false;  // what goes to a device is not lost
    if (fs::equivalent(one, other, error)) return true;
    const fs::path left = fs::weakly_canonical(one, error);
    return !error && left == fs::weakly_canonical(other, error) && !error;
}

/// Whether `path` is among the files of a checkpoint.
bool is_of_weights(const fs::path& path, const fs::path& weights) {
    std::error_code error;
    if (same_file(path, weights)) return true;
    if (!fs::exists(path, error) || weights.extension() == ".safetensors") return false;
    if (path.extension() != ".safetensors" && !path.filename().string().ends_with(".index.json")) return false;
    const fs::path folder = fs::is_directory(weights, error) ? weights : weights.parent_path();
    return fs::equivalent(path.has_parent_path() ? path.parent_path() : ".", folder.empty() ? "." : folder, error);
}

}  // namespace

void require_file_of_its_own(const Arguments& arguments, const std::string& option, const std::string& path) {
    const auto refuse_if = [&](bool same, const std::string& what) {
        if (!same) return;
        throw Error(StatusCode::invalid_argument,
                    fmt::format("{} is {}, which {}, expected another file", option, path, what));
    };
    const bool has_table = arguments.tune_table != "auto" && arguments.tune_table != "none";
    if (arguments.weights) refuse_if(is_of_weights(path, *arguments.weights), "the weights are read from");
    if (!arguments.path.empty()) refuse_if(is_of_weights(path, arguments.path), "the weights are read from");
    if (arguments.inputs) refuse_if(same_file(path, *arguments.inputs), "the inputs are read from");
    if (has_table) refuse_if(same_file(path, arguments.tune_table), "the table is read from");
    if (arguments.machine) refuse_if(same_file(path, *arguments.machine), "the machine is read from");
    using Written = std::pair<const char*, const std::optional<std::string>*>;
    for (const auto& [other, file] : {Written{"--out", &arguments.out}, Written{"--trace", &arguments.trace},
                                      Written{"--inputs-out", &arguments.inputs_out}}) {
        if (option != other && *file) refuse_if(same_file(path, **file), fmt::format("{} names too", other));
    }
}

Output::Output(const Arguments& arguments, bool speaks) : prints_(speaks && !arguments.quiet) {
    if (!speaks || !arguments.json) return;
    json_to_stdout_ = *arguments.json == "-";
    if (json_to_stdout_) {
        prints_ = false;
    } else {
        require_file_of_its_own(arguments, "--json", *arguments.json);
        json_file_.emplace(*arguments.json);
    }
}

void Output::json(const Json& value) {
    if (!json_to_stdout_ && !json_file_) return;
    // Names in a file may hold any bytes: what is not UTF-8 is replaced.
    const std::string text = value.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
    if (json_to_stdout_) return write(text);
    json_file_->write(std::as_bytes(std::span(text)));
    json_file_->commit();
}

void Output::write(std::string_view text) {
    errno = 0;
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
    if (written || errno == EPIPE) return;
    const int problem = errno;
    std::clearerr(stdout);
    throw Error(StatusCode::io, fmt::format("standard output: cannot write: {}", std::strerror(problem)));
}

Progress::Progress(const Arguments& arguments, bool speaks)
    : shown_(speaks && (arguments.progress || (!arguments.quiet && ::isatty(STDERR_FILENO) != 0))),
      as_lines_(arguments.progress) {}

Progress::~Progress() {
    if (shown_) show(as_lines_ ? "done" : "");
}

void Progress::show(const std::string& text) const {
    if (as_lines_) {
        const std::chrono::duration<double> since = std::chrono::steady_clock::now() - begin_;
        std::fprintf(stderr, "[%6.1f s] %s\n", since.count(), text.c_str());
    } else {
        std::fprintf(stderr, "\r\x1b[K%s", text.c_str());
    }
    std::fflush(stderr);
}

std::string bytes_text(double bytes) {
    if (bytes < 1e3) return fmt::format("{:.0f} B", bytes);
    if (bytes < 1e6) return fmt::format("{:.1f} KB", bytes / 1e3);
    if (bytes < 1e9) return fmt::format("{:.1f} MB", bytes / 1e6);
    return fmt::format("{:.2f} GB", bytes / 1e9);
}

std::string us_text(double us) {
    if (us < 10) return fmt::format("{:.2f}", us);
    return us < 1000 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us);
}

std::string error_text(double error) {
    return error == 0 ? "0" : fmt::format("{:.2e}", error);
}

}  // namespace latent_moe::cli
