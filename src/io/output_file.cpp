#include "io/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

#include "io/report.h"

namespace latent_moe::io {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{1} << 20;
constexpr std::size_t largest_write = std::size_t{1} << 30;  // Linux writes less than 2 GiB at a time

/// A rename would replace a symbolic link by the file; what the link points to is meant.
std::filesystem::path behind_links(const std::filesystem::path& path) {
    std::error_code error;
    std::filesystem::path resolved = std::filesystem::canonical(path, error);
    return error ? path : resolved;
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& target) : target_(behind_links(target)) {
    if (target_.empty()) refuse_file("", "is no name, expected that of a file to write");
    std::error_code ignored;
    const auto status = std::filesystem::status(target_, ignored);
    if (std::filesystem::is_directory(status)) refuse_file(target_.string(), "is a directory, expected a file to write");
    buffer_.reserve(buffer_bytes);
    if (!std::filesystem::exists(status) || std::filesystem::is_regular_file(status)) {
        beside_ = true;
        open_beside_target();
    } else {
        descriptor_ = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC);
        if (descriptor_ < 0) refuse("open", errno);
    }
}

OutputFile::~OutputFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::open_beside_target() {
    const std::filesystem::path folder = target_.has_parent_path() ? target_.parent_path() : ".";
    descriptor_ = ::open(folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
    if (descriptor_ >= 0 && ::access(own_name().c_str(), F_OK) == 0) return;
    if (descriptor_ >= 0) ::close(descriptor_);
    // Not every file system has files without a name, nor every process a view of its own.
    give_name([&] {
        descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        return descriptor_ >= 0;
    });
    if (descriptor_ < 0) refuse("create", errno);
}

std::string OutputFile::own_name() const {
    return fmt::format("/proc/self/fd/{}", descriptor_);
}

template <typename Create>
bool OutputFile::give_name(Create create) {
    static std::atomic<unsigned> counter{0};
    bool created = false;
    do {
        temporary_ = target_.parent_path() / fmt::format(".latent-moe-{}-{}.partial", ::getpid(), counter++);
        created = create();
    } while (!created && errno == EEXIST);  // left behind by a process that was killed
    if (!created) temporary_.clear();
    return created;
}

void OutputFile::write(std::span<const std::byte> bytes) {
    if (buffer_.size() + bytes.size() > buffer_bytes) flush();
    if (bytes.size() >= buffer_bytes) {
        write_through(bytes);
    } else {
        buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    }
}

void OutputFile::commit() {
    flush();
    if (beside_ && temporary_.empty()) {
        const bool named = give_name(
            [&] { return ::linkat(AT_FDCWD, own_name().c_str(), AT_FDCWD, temporary_.c_str(), AT_SYMLINK_FOLLOW) == 0; });
        if (!named) refuse("put the finished file in place", errno);
    }
    const int closed = ::close(descriptor_);  // network file systems report a full disk only here
    descriptor_ = -1;
    if (closed != 0) refuse("finish writing", errno);
    if (temporary_.empty()) return;
    if (std::rename(temporary_.c_str(), target_.c_str()) != 0) refuse("put the finished file in place", errno);
    temporary_.clear();
}

void OutputFile::flush() {
    write_through(buffer_);
    buffer_.clear();
}

void OutputFile::write_through(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), largest_write));
        if (written >= 0) {
            bytes = bytes.subspan(static_cast<std::size_t>(written));
        } else if (errno != EINTR) {
            refuse("write", errno);
        }
    }
}

void OutputFile::refuse(const char* action, int code) const {
    refuse_file(target_.string(), fmt::format("cannot {}: {}", action, system_message(code)));
}

}  // namespace latent_moe::io
