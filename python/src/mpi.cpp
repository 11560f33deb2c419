// MPI ranks for Python: the communicator comes from mpi4py, as the address of its MPI_Comm.
#include <mpi.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <string>

#include "latent_moe/mpi.h"

namespace nb = nanobind;

NB_MODULE(_mpi, module) {
    module.doc() =
        "Ranks that are MPI processes. `latent_moe._core`, which knows what a Bootstrap is, must be imported first.";
    module.def("library_version", [] {
        std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
        int length = 0;
        MPI_Get_library_version(text.data(), &length);
        return std::string(text.data(), static_cast<std::size_t>(length));
    });
    module.def(
        "mpi_ranks",
        [](std::uintptr_t communicator, int timeout_ms) {
            const nb::gil_scoped_release free;
            return latent_moe::mpi_ranks(*reinterpret_cast<MPI_Comm*>(communicator), timeout_ms);
        },
        nb::arg("communicator"), nb::arg("timeout_ms"));
}
