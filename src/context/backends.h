// The backends that this build has, by name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "latent_moe/bootstrap.h"
#include "latent_moe/options.h"
#include "latent_moe/shape.h"
#include "tails/backend.h"
#include "tails/device.h"
#include "tails/external.h"
#include "tails/kernel_trace.h"

namespace latent_moe {

struct BackendEntry {
    std::string name;
    /// Why this machine cannot run it now; empty if it can.
    std::string (*unavailable)();
    /// `bootstrap.transport` is set. Throws `unavailable` naming what is missing.
    std::unique_ptr<Backend> (*make)(const Shape& shape, const Bootstrap& bootstrap, const Options& options);
    /// Lines for `latent-moe info`: devices, links, libraries.
    std::vector<std::string> (*describe)();
    /// The device of one rank, as `make` chooses it; for callers that need memory and streams of the backend's own.
    std::unique_ptr<Device> (*make_device)(const Bootstrap& bootstrap, const Options& options) = nullptr;
    /// Collective: outside peers of the tails, whose memory comes from `device`; null where there are none.
    std::unique_ptr<ExternalTails> (*make_external_tails)(const Shape& shape, const Bootstrap& bootstrap,
                                                          const Options& options, Device& device) = nullptr;
    /// Why kernels cannot be traced here; empty if they can.
    std::string (*why_no_trace)() = nullptr;
    /// Begins to trace this process's kernels. Throws `unavailable` naming what is missing.
    std::unique_ptr<KernelTrace> (*trace_kernels)() = nullptr;
    /// For a process that is all our own, before anything else of the backend: sets the environment that ranks who share a
    /// device need, where it is not set. A library leaves its caller's environment alone.
    void (*prepare_own_process)() = nullptr;
};

/// In order of preference: "auto" takes the first that is available.
const std::vector<BackendEntry>& backends();

/// Resolves a name, "auto" included. Throws `unavailable` naming what was asked for and what there is.
const BackendEntry& find_backend(const std::string& name);

}  // namespace latent_moe
