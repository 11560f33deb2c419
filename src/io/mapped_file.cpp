#include "io/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "io/report.h"

namespace latent_moe::io {
namespace {

class Descriptor {
public:
    explicit Descriptor(int number) noexcept : number_(number) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }

    int number() const noexcept { return number_; }

private:
    int number_;
};

std::size_t size_of_regular_file(const Descriptor& file, const std::filesystem::path& path) {
    struct stat found {};
    if (::fstat(file.number(), &found) != 0) {
        refuse_file(path.string(), fmt::format("cannot read the file's size: {}", system_message(errno)));
    }
    if (S_ISDIR(found.st_mode)) refuse_file(path.string(), "is a directory, expected a file");
    if (!S_ISREG(found.st_mode)) refuse_file(path.string(), "is a pipe or a device, expected a regular file");
    return static_cast<std::size_t>(found.st_size);
}

}  // namespace

MappedFile MappedFile::open(const std::filesystem::path& path) {
    // O_NONBLOCK: a named pipe without a writer would otherwise hold us here for ever.
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.number() < 0) refuse_file(path.string(), fmt::format("cannot open: {}", system_message(errno)));

    const std::size_t size = size_of_regular_file(file, path);
    if (size == 0) return MappedFile({});  // mmap refuses empty mappings

    void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number(), 0);
    if (address == MAP_FAILED) {
        refuse_file(path.string(), fmt::format("cannot map {} bytes: {}", size, system_message(errno)));
    }
    return MappedFile({static_cast<const std::byte*>(address), size});
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
}

MappedFile::~MappedFile() {
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace latent_moe::io
